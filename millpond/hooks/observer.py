"""Shows requests to plugins, and takes what they answer. Knows observers' events and runners; no plugin's code.

Made only where there are plugins. The event loop waits for none of them but in `admit`, and there at most the budget.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from millpond.engine.messages import StepFrame
from millpond.engine_client.observer import NullObserver
from millpond.engine_client.token_log import TokenLog
from millpond.errors import CallerError
from millpond.hooks.loading import Plugin
from millpond.hooks.runner import PluginRunner
from millpond.hooks.spec import (
    MID_GENERATION_EVERY,
    REPETITION_WINDOW,
    Change,
    Ending,
    FirstToken,
    IncomingRequest,
    Progress,
    Refusal,
    SeenToken,
    Stop,
    repetition,
)
from millpond.outputs import TokenEvent, TokenLogprobs
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId, TokenId

REFUSED = "refused_by_plugin"
CLOSE_SECONDS = 2.0


class HookObserver(NullObserver):
    """`budget`: seconds of one call. `clock`: monotonic seconds."""

    def __init__(self, plugins: Sequence[Plugin], *, budget: float, clock: Callable[[], float]) -> None:
        self.runners = [PluginRunner(p.name, p.functions, budget=budget, clock=clock) for p in plugins]
        self._alive: dict[SequenceId, TokenLog] = {}
        self._end: Callable[[SequenceId, FinishReason], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, end: Callable[[SequenceId, FinishReason], None]) -> None:
        """`end` ends a sequence; it is called on the loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._end = end

    def counts(self) -> Mapping[str, float]:
        """For the metrics, summed over the plugins."""
        return {
            "millpond_plugin_calls": sum(runner.counts.calls for runner in self.runners),
            "millpond_plugin_failures": sum(runner.counts.failures for runner in self.runners),
            "millpond_plugin_overruns": sum(runner.counts.overruns for runner in self.runners),
            "millpond_plugin_dropped": sum(runner.counts.dropped for runner in self.runners),
            "millpond_plugins_disabled": sum(runner.is_disabled for runner in self.runners),
        }

    def close(self) -> None:
        for runner in self.runners:
            runner.close(CLOSE_SECONDS)

    # -- on_request ------------------------------------------------------------------------------------------------

    async def admit(
        self, request_id: RequestId, prompt_ids: tuple[TokenId, ...], params: SamplingParams, priority: int
    ) -> tuple[SamplingParams, int]:
        """Parameters and priority as the plugins want them. Raises CallerError for a refusal."""
        for runner in self.runners:
            if not runner.has("on_request"):
                continue
            answer = await self._ask(runner, IncomingRequest(request_id, prompt_ids, params, priority))
            if isinstance(answer, Refusal):
                raise CallerError(answer.message, code=REFUSED)
            if isinstance(answer, Change):
                params = params if answer.params is None else answer.params
                priority = priority if answer.priority is None else answer.priority
        return params, priority

    async def _ask(self, runner: PluginRunner, request: IncomingRequest) -> Any:
        answer = runner.call("on_request", request)
        if answer is None:
            return None
        waiting = asyncio.wrap_future(answer)
        done, _ = await asyncio.wait([waiting], timeout=runner.budget)
        if done:
            return waiting.result()
        runner.counts.overruns += 1
        runner.strike()
        return None

    # -- events ----------------------------------------------------------------------------------------------------

    def on_accepted(self, log: TokenLog) -> None:
        self._alive[log.sequence_id] = log

    def on_frame(self, frame: StepFrame, now: float) -> None:
        if not frame.tokens:
            return
        for runner in self.runners:
            if runner.has("on_token"):
                runner.call("on_token", self._seen(frame.tokens))
        for token in frame.tokens:
            if token.output_index % MID_GENERATION_EVERY == 0 and token.sequence_id in self._alive:
                self._show_milestone(self._alive[token.sequence_id], token)

    def on_finished(self, log: TokenLog, now: float) -> None:
        self._alive.pop(log.sequence_id, None)
        finish = log.finish
        if finish is None:
            return
        for runner in self.runners:
            if runner.has("on_finish"):
                ending = Ending(log.request.request_id, log.sequence_id, tuple(log.ids), finish.reason, finish.usage)
                runner.call("on_finish", ending)

    def _seen(self, tokens: Sequence[TokenEvent]) -> list[SeenToken]:
        alive = self._alive
        return [
            SeenToken(
                alive[token.sequence_id].request.request_id, token.sequence_id, token.output_index, token.token_id
            )
            for token in tokens
            if token.sequence_id in alive
        ]

    def _show_milestone(self, log: TokenLog, token: TokenEvent) -> None:
        """A first token, or a number of tokens at which mid_generation looks."""
        if token.output_index == 0:
            first = _first_token(log, token)
            for runner in self.runners:
                if runner.has("after_prefill"):
                    runner.call("after_prefill", first)
            return
        watching = [runner for runner in self.runners if runner.has("mid_generation")]
        if not watching:
            return
        length = token.output_index + 1  # the frame may have brought more
        window = slice(max(0, length - REPETITION_WINDOW), length)
        recent = tuple(log.ids[window])
        entropies = [_entropy(found) for found in log.logprobs[window] if found.top]
        progress = Progress(
            log.request.request_id,
            log.sequence_id,
            length,
            recent,
            repetition(recent),
            sum(entropies) / len(entropies) if entropies else None,
        )
        for runner in watching:
            answer = runner.call("mid_generation", progress)
            if answer is not None:
                answer.add_done_callback(partial(self._take_answer, log.sequence_id))

    def _take_answer(self, sequence_id: SequenceId, answer: Future[Any]) -> None:
        """On the plugin's thread."""
        loop, end = self._loop, self._end
        if isinstance(answer.result(), Stop) and loop is not None and end is not None and not loop.is_closed():
            loop.call_soon_threadsafe(end, sequence_id, FinishReason.STOP)


def _first_token(log: TokenLog, token: TokenEvent) -> FirstToken:
    margin, entropy = None, None
    if token.logprobs is not None and token.logprobs.top:
        margin, entropy = _margin(token.logprobs), _entropy(token.logprobs)
    prompt_tokens = len(log.request.prompt_ids)
    return FirstToken(log.request.request_id, log.sequence_id, prompt_tokens, token.token_id, margin, entropy)


def _margin(logprobs: TokenLogprobs) -> float | None:
    return logprobs.top[0][1] - logprobs.top[1][1] if len(logprobs.top) > 1 else None


def _entropy(logprobs: TokenLogprobs) -> float:
    known = [math.exp(value) for _, value in logprobs.top]
    rest = 1.0 - sum(known)
    shares = [*known, rest] if rest > 0.0 else known
    return -sum(share * math.log(share) for share in shares if share > 0.0)

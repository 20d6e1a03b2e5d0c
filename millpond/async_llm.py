"""Text in, deltas out: the face of the whole stack for HTTP and scripts. Knows no HTTP and no llama.cpp."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from millpond.engine_client.client import EngineClient
from millpond.engine_client.token_log import TokenLog
from millpond.engine_client.window import EngineView, EngineWindow, RequestView
from millpond.errors import EngineFailed, InvalidParameter, MillpondError, NotReady
from millpond.outputs import EngineInfo, SequenceUsage, StepStats, TokenLogprobs
from millpond.request import Request, output_limit
from millpond.sampling_params import GrammarSpec, SamplingParams, ThinkingBudget
from millpond.text.channels import ToolCallDelta
from millpond.text.constraints import output_grammar, thinking_budget
from millpond.text.input_processor import InputProcessor, PreparedPrompt
from millpond.text.inputs import ChatInput, PromptInput, TextInput, TokenInput
from millpond.text.output_processor import HiddenTokens, OutputProcessor, TextDelta
from millpond.text.stop import StopStrings
from millpond.types import FinishReason, RequestId, TokenId

__all__ = [
    "AsyncLLM",
    "ChatInput",
    "EngineStatus",
    "EngineView",
    "EngineWindow",
    "Finish",
    "OutputDelta",
    "OutputStream",
    "PromptEcho",
    "PromptInput",
    "RequestOptions",
    "RequestStream",
    "RequestView",
    "TextEngine",
    "TextInput",
    "TokenInput",
    "ToolCallDelta",
]


_Result = TypeVar("_Result")
MAX_PROMPT_LOGPROBS = 500_000
"""Values of one request, 16 bytes each on their way."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    request_id: RequestId
    n: int = 1
    stop: Sequence[str] = ()
    priority: int = 0
    namespace: str = ""
    timeout: float | None = None
    """Seconds from acceptance; None: the server's default."""
    echo: bool = False
    """The first delta of every output tells of the prompt."""
    thinking_budget: int | None = None
    """Tokens that an output may think; without meaning where the model's template has no reasoning tags."""


@dataclass(frozen=True, slots=True)
class PromptEcho:
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of every token but the first, where asked for."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one or more new tokens of one output brought. The last delta of an output has `finish`."""

    index: int
    """Which of the n outputs."""
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None
    reasoning: str = ""
    """Of the reasoning channel; `text` is the answer alone."""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    prompt: PromptEcho | None = None
    """With the first delta of an output, if the request asked for it."""


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    usage: SequenceUsage
    completion_tokens: int
    message: str = ""
    stop_string: str | None = None
    reasoning_tokens: int = 0
    """Of the completion tokens, those on the reasoning channel."""
    waits_for_results: bool = False
    """It ended with tool calls, all of them whole."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """`state`: loading, ready, restarting, stalled, draining or failed. `detail` is fit for an operator."""

    state: str
    detail: str
    restarts: int
    info: EngineInfo | None
    stats: StepStats | None


class TextEngine(Protocol):
    """What the HTTP server needs; AsyncLLM is it, tests bring a fake.

    Raises CallerError, CapacityError or InternalError before the first delta; after it, failures are a `finish`
    whose reason is not STOP or LENGTH.
    """

    @property
    def status(self) -> EngineStatus: ...

    async def submit(self, prompt: PromptInput, params: SamplingParams, options: RequestOptions) -> OutputStream:
        """Renders, tokenizes and queues. Returns when the request is accepted (queued), not when it runs."""
        ...

    async def tokenize(self, prompt: PromptInput, *, add_special: bool = True) -> list[TokenId]: ...

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str: ...

    def piece(self, token_id: TokenId) -> bytes:
        """Bytes of one token, for logprobs."""
        ...


class OutputStream(Protocol):
    """One accepted request (all of its n outputs)."""

    @property
    def prompt_tokens(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        """Yields deltas as they come, all n outputs interleaved; ends after every output's finish."""
        ...

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends what still runs. Safe to call at any time, more than once."""
        ...


@dataclass(frozen=True, slots=True)
class TextTools:
    """What of the model's vocabulary and template the server process needs."""

    make_input_processor: Callable[[int], InputProcessor]
    """From max_model_len, known once an engine is ready. Called once, on the worker thread."""
    piece: Callable[[TokenId], bytes]
    eog_ids: frozenset[TokenId]
    compile_grammar: Callable[[GrammarSpec], Future[Any]] | None = None
    """The future has InvalidParameter where a grammar does not compile, QueueFull where too many are waiting. None:
    constrained requests are refused."""


class RequestGate(Protocol):
    """Who is asked before a request is accepted: plugins."""

    async def admit(
        self, request_id: RequestId, prompt_ids: tuple[TokenId, ...], params: SamplingParams, priority: int
    ) -> tuple[SamplingParams, int]:
        """Parameters and priority to run it with. Raises CallerError to refuse it."""
        ...


class _OpenGate:
    async def admit(
        self, request_id: RequestId, prompt_ids: tuple[TokenId, ...], params: SamplingParams, priority: int
    ) -> tuple[SamplingParams, int]:
        return params, priority


class AsyncLLM:
    """One served model. `start` needs a running loop; `close` ends everything, whatever state it is in."""

    def __init__(
        self,
        client: EngineClient,
        text: TextTools,
        *,
        clock: Callable[[], float],
        draw_seed: Callable[[], int],
        request_timeout: float,
        gate: RequestGate | None = None,
    ) -> None:
        """`clock`: monotonic seconds. `draw_seed`: for requests without one. `request_timeout`: seconds, 0: never."""
        self._client = client
        self._text = text
        self._clock = clock
        self._draw_seed = draw_seed
        self._timeout = request_timeout or None
        self._gate = gate or _OpenGate()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="millpond-text")
        self._input: InputProcessor | None = None
        self._warm_up: asyncio.Task[None] | None = None

    @property
    def status(self) -> EngineStatus:
        state, detail = self._client.state
        return EngineStatus(state, detail, self._client.restarts, self._client.info, self._client.last_stats)

    @property
    def client(self) -> EngineClient:
        return self._client

    def start(self) -> None:
        """Starts the engine; requests may come at once."""
        self._client.start()
        self._warm_up = asyncio.get_running_loop().create_task(self._prepare_text())

    async def drain(self, timeout: float) -> None:
        """Refuses new requests, waits for the accepted ones; those left after `timeout` seconds end with SHUTDOWN."""
        await self._client.drain(timeout)

    async def close(self, flush_seconds: float = 0.0) -> None:
        """`flush_seconds`: what the engine may take to write prefixes to its disk tier."""
        await self._client.stop(flush_seconds)
        if self._warm_up is not None:
            await asyncio.wait([self._warm_up])
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def submit(self, prompt: PromptInput, params: SamplingParams, options: RequestOptions) -> RequestStream:
        """Renders, tokenizes and queues. Returns when all n outputs are accepted, not when they run.

        Raises CallerError, CapacityError or InternalError; then nothing was accepted.
        """
        try:
            return await self._accepted(prompt, params, options)
        except MillpondError as error:
            self._client.note_refused(error)
            raise

    async def _accepted(self, prompt: PromptInput, params: SamplingParams, options: RequestOptions) -> RequestStream:
        timeout = self._timeout if options.timeout is None else options.timeout
        info = await self._client.wait_info(timeout)
        self._client.check_room(options.n)
        params.check_vocabulary(info.model.n_vocab)
        stops = StopStrings(options.stop)
        prepared = await self._on_worker(lambda: self._input_processor(info).prepare_prompt(prompt))
        ids, channels = prepared.token_ids, prepared.channels
        _check_prompt_logprobs(params, len(ids))
        grammar = output_grammar(params.grammar, prepared)
        if grammar is not None:
            params = replace(params, grammar=grammar)
            await self._compile(grammar)
        params = await self._with_thinking(params, options, prepared, info)
        params, options = await self._through_gate(ids, params, options, info)
        logs = self._client.submit(self._requests(ids, params, options, info, timeout))
        hidden = HiddenTokens(self._text.eog_ids, frozenset(params.stop_token_ids), params.min_tokens)
        readers: list[_OutputReader] = []
        for index, log in enumerate(logs):
            machine = None if channels is None else channels.machine(options.request_id, index)
            processor = OutputProcessor(self._text.piece, stops, hidden, machine)
            readers.append(_OutputReader(index, log, processor, self._client, echo=options.echo))
        return RequestStream(len(ids), readers, self._client)

    async def _with_thinking(
        self, params: SamplingParams, options: RequestOptions, prepared: PreparedPrompt, info: EngineInfo
    ) -> SamplingParams:
        budget = options.thinking_budget
        if budget is None:
            return params
        limit = output_limit(params, len(prepared.token_ids), info.max_model_len)

        def resolve() -> ThinkingBudget | None:
            return thinking_budget(budget, prepared, self._input_processor(info).tokenizer.encode, limit)

        return replace(params, thinking=await self._on_worker(resolve))

    async def _through_gate(
        self, ids: tuple[TokenId, ...], params: SamplingParams, options: RequestOptions, info: EngineInfo
    ) -> tuple[SamplingParams, RequestOptions]:
        admitted, priority = await self._gate.admit(options.request_id, ids, params, options.priority)
        if admitted is not params:
            admitted.check_vocabulary(info.model.n_vocab)
        return admitted, options if priority == options.priority else replace(options, priority=priority)

    async def tokenize(self, prompt: PromptInput, *, add_special: bool = True) -> list[TokenId]:
        info = await self._client.wait_info(self._timeout)
        return await self._on_worker(lambda: self._input_processor(info).tokenize(prompt, add_special=add_special))

    async def detokenize(self, token_ids: Sequence[TokenId]) -> str:
        """Raises InvalidParameter for ids outside the vocabulary."""
        info = await self._client.wait_info(self._timeout)

        def decode() -> str:
            tokenizer = self._input_processor(info).tokenizer
            tokenizer.check_ids(token_ids, "tokens")
            return tokenizer.decode(token_ids)

        return await self._on_worker(decode)

    def piece(self, token_id: TokenId) -> bytes:
        return self._text.piece(token_id)

    def _requests(
        self,
        ids: tuple[TokenId, ...],
        params: SamplingParams,
        options: RequestOptions,
        info: EngineInfo,
        timeout: float | None,
    ) -> list[Request]:
        limit = output_limit(params, len(ids), info.max_model_len)
        seed = self._draw_seed() if params.seed is None else params.seed
        now = self._clock()
        return [
            Request(
                request_id=options.request_id,
                prompt_ids=ids,
                params=params,
                max_tokens=limit,
                seed=output_seed(seed, index),
                arrival=now,
                deadline=None if timeout is None else now + timeout,
                priority=options.priority,
                namespace=options.namespace,
            )
            for index in range(options.n)
        ]

    async def _prepare_text(self) -> None:
        """So that the first request does not pay for it."""
        try:
            info = await self._client.wait_ready()
        except (EngineFailed, NotReady):
            return
        await self._on_worker(lambda: self._input_processor(info))

    def _input_processor(self, info: EngineInfo) -> InputProcessor:
        """Worker thread only."""
        if self._input is None:
            self._input = self._text.make_input_processor(info.max_model_len)
        return self._input

    async def _compile(self, grammar: GrammarSpec) -> None:
        """Before anything is accepted, so that what does not compile is a 400."""
        if self._text.compile_grammar is None:
            raise InvalidParameter(grammar.param, "constrained output is not available here")
        await asyncio.wrap_future(self._text.compile_grammar(grammar))

    async def _on_worker(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


class RequestStream:
    """One accepted request. Iterate once; `__anext__` may be cancelled and called again, nothing is lost.

    Tokens that came since the last delta are in the next one: a slow reader gets fewer, larger deltas. A stream that is
    dropped unfinished cancels its request.
    """

    def __init__(self, prompt_tokens: int, readers: list[_OutputReader], client: EngineClient) -> None:
        self._prompt_tokens = prompt_tokens
        self._readers = readers
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._ready: deque[OutputDelta] = deque()
        self._failure: Exception | None = None
        self._news = _News(self._loop)
        for reader in readers:
            reader.log.add_listener(self._news.tell)

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        ready = self._ready
        while not ready:
            if self._failure is not None:
                raise self._failure
            if not self._readers:
                raise StopAsyncIteration
            self._news.clear()
            self._collect()
            if not ready:
                await self._news.wait()
        return ready.popleft()

    def divert(self, on_news: Callable[[], None] | None) -> None:
        """While the iterator waits, `on_news` is called on the loop in place of waking it, once for all that came.

        It may `collect`, and either leaves nothing or calls `wake` or `fail`. It must not raise. Divert to None before
        the stream is dropped: one that is held is not cancelled by being forgotten.
        """
        self._news.reader = on_news

    def collect(self) -> deque[OutputDelta]:
        """The deltas that are there now; the caller takes from the left. Raises what `__anext__` would."""
        self._collect()
        return self._ready

    def wake(self) -> None:
        """Lets the iterator go on."""
        self._news.wake()

    def fail(self, error: Exception) -> None:
        """The iterator raises `error` once the deltas that are left are taken."""
        self._failure = error
        self._news.wake()

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        for reader in self._readers:
            self._client.end(reader.log.sequence_id, reason)

    def __del__(self) -> None:
        if self._readers and not self._loop.is_closed():
            left = [(reader.log, reader.tokens_read) for reader in self._readers]
            self._loop.call_soon_threadsafe(_give_up, self._client, left)

    def _collect(self) -> None:
        ended = False
        for reader in self._readers:
            delta = reader.take()
            if delta is not None:
                self._ready.append(delta)
                ended = ended or delta.finish is not None
        if ended:
            for reader in self._readers:
                if reader.is_done:
                    reader.log.remove_listener(self._news.tell)
            self._readers = [reader for reader in self._readers if not reader.is_done]


class _News:
    """Wakes the iterator of a stream or, while that waits, calls who reads in its place.

    A log holds this and not the stream, so that a stream may be dropped.
    """

    __slots__ = ("_event", "_is_due", "_is_waiting", "_loop", "clear", "reader", "wake")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._event = asyncio.Event()
        self._is_waiting = False
        self._is_due = False
        self.reader: Callable[[], None] | None = None
        self.wake = self._event.set
        self.clear = self._event.clear

    def tell(self) -> None:
        """There is something new. Called within a read from the engine, so the reader comes after it, and once."""
        if self.reader is None or not self._is_waiting:
            self._event.set()
        elif not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._call)

    async def wait(self) -> None:
        self._is_waiting = True
        try:
            await self._event.wait()
        finally:
            self._is_waiting = False

    def _call(self) -> None:
        self._is_due = False
        if self.reader is None or not self._is_waiting:
            self._event.set()
        elif not self._event.is_set():
            self.reader()


class _OutputReader:
    """Turns one log into deltas and ends it at a stop string."""

    __slots__ = ("_client", "_echo", "_index", "_processor", "_read", "is_done", "log")

    def __init__(
        self, index: int, log: TokenLog, processor: OutputProcessor, client: EngineClient, *, echo: bool = False
    ) -> None:
        self._index = index
        self._processor = processor
        self._client = client
        self._read = 0
        self._echo = echo
        self.log = log
        self.is_done = False

    @property
    def tokens_read(self) -> int:
        """Output tokens that were handed out."""
        return self._read

    def take(self) -> OutputDelta | None:
        """What is new since the last call."""
        log, read = self.log, self._read
        delta = _NOTHING
        token_ids: tuple[TokenId, ...] = ()
        if len(log.ids) > read and self._processor.stop is None:
            new = log.ids[read:]
            delta = self._processor.feed(new, read)
            token_ids = tuple(new if delta.stop is None else new[: delta.token_count])
            self._read = read + len(token_ids)
            if delta.stop is not None:
                self._client.end(log.sequence_id, FinishReason.STOP, delta.stop.output_length)
        logprobs = tuple(log.logprobs[read : self._read]) if log.logprobs else ()
        if log.finish is None:
            return self._delta(delta, token_ids, logprobs) if token_ids else None
        if self.is_done:
            return None
        self.is_done = True
        rest = self._processor.finish(was_cut=log.finish.reason is not FinishReason.STOP)
        whole = replace(
            delta,
            text=delta.text + rest.text,
            reasoning=delta.reasoning + rest.reasoning,
            tool_calls=delta.tool_calls + rest.tool_calls,
        )
        return self._delta(whole, token_ids, logprobs, self._finish())

    def _delta(
        self,
        delta: TextDelta,
        token_ids: tuple[TokenId, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: Finish | None = None,
    ) -> OutputDelta:
        prompt = PromptEcho(self.log.request.prompt_ids, self.log.prompt_logprobs) if self._echo else None
        self._echo = False
        return OutputDelta(
            self._index, delta.text, token_ids, logprobs, finish, delta.reasoning, delta.tool_calls, prompt
        )

    def _finish(self) -> Finish:
        event = self.log.finish
        assert event is not None
        processor = self._processor
        stop = processor.stop
        reason = event.reason if stop is None else FinishReason.STOP
        tokens = event.output_length if stop is None else stop.output_length
        self._client.note_delivered(self.log, tokens, reason)
        return Finish(
            reason,
            event.usage,
            tokens,
            event.message if stop is None else "",
            stop_string=None if stop is None else stop.stop,
            reasoning_tokens=processor.reasoning_tokens,
            waits_for_results=processor.waits_for_results,
        )


_NOTHING = TextDelta("", 0)


def _check_prompt_logprobs(params: SamplingParams, n_tokens: int) -> None:
    """They come in one frame of the channel and stay with the request. Raises InvalidParameter."""
    wanted = 0 if params.prompt_logprobs is None else n_tokens * (params.prompt_logprobs + 1)
    if wanted > MAX_PROMPT_LOGPROBS:
        raise InvalidParameter(
            "logprobs", f"of {n_tokens} prompt tokens would be {wanted} values, at most {MAX_PROMPT_LOGPROBS}"
        )


def output_seed(seed: int, index: int) -> int:
    """Seed of output `index` of a request: the first has the request's own, the others are unlike any neighbour's."""
    if index == 0:
        return seed
    digest = blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _give_up(client: EngineClient, left: Sequence[tuple[TokenLog, int]]) -> None:
    for log, tokens_read in left:
        client.end(log.sequence_id, FinishReason.CANCELLED)
        client.note_delivered(log, tokens_read, None)

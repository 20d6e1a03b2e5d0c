"""A TextEngine that follows a script, one byte a token: what the HTTP server is tested against without a model.

Knows the protocol of millpond.async_llm only. Every submission and cancellation is recorded for the tests to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from millpond.async_llm import ChatInput, EngineStatus, Finish, OutputDelta, PromptInput, RequestOptions, TextInput
from millpond.errors import InvalidParameter, MillpondError
from millpond.outputs import EngineInfo, ModelInfo, SequenceUsage, TokenLogprobs
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, MemoryKind

N_VOCAB = 257
"""256 bytes and an end token."""

INFO = EngineInfo(
    model=ModelInfo(
        name="fake",
        architecture="fake",
        description="bytes",
        digest="0" * 64,
        n_vocab=N_VOCAB,
        n_ctx_train=8192,
        n_layer=1,
        n_params=42,
        size_bytes=4242,
        memory_kind=MemoryKind.ATTENTION,
        n_swa=0,
        kv_bytes_per_token=8,
        library="fake-1",
    ),
    n_cells=8192,
    n_slots=8,
    max_running=8,
    max_model_len=4096,
    unified=True,
)


@dataclass(frozen=True)
class Script:
    """What one submission does. Deltas are `pieces`, then the finish; `endless` repeats the pieces for ever."""

    pieces: Sequence[str] = ("Hello", ",", " wor", "ld", "!")
    delay: float = 0.0
    """Seconds before each delta."""
    endless: bool = False
    reason: FinishReason = FinishReason.STOP
    message: str = ""
    submit_error: MillpondError | Exception | None = None
    stream_error: Exception | None = None
    """Raised by the stream after the pieces."""
    submit_gate: asyncio.Event | None = None
    start_gate: asyncio.Event | None = None
    """The first delta waits for it (queueing, prefilling, parked)."""
    deaf: bool = False
    """cancel() has no effect: a broken engine."""


@dataclass
class FakeTextEngine:
    script: Script = field(default_factory=Script)
    choose: Callable[[PromptInput, RequestOptions], Script] | None = None
    state: str = "ready"
    info: EngineInfo | None = INFO
    submitted: list[tuple[PromptInput, SamplingParams, RequestOptions]] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)

    @property
    def status(self) -> EngineStatus:
        return EngineStatus(self.state, f"the engine is {self.state}", 0, self.info, None)

    async def submit(self, prompt: PromptInput, params: SamplingParams, options: RequestOptions) -> FakeStream:
        self.submitted.append((prompt, params, options))
        script = self.choose(prompt, options) if self.choose else self.script
        if script.submit_gate is not None:
            await script.submit_gate.wait()
        if script.submit_error is not None:
            raise script.submit_error
        params.check_vocabulary(N_VOCAB)
        stream = FakeStream(script, params, options, len(_prompt_bytes(prompt)))
        self.streams.append(stream)
        return stream

    async def tokenize(self, prompt: PromptInput, *, add_special: bool = True) -> list[int]:
        return ([256] if add_special else []) + list(_prompt_bytes(prompt))

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.piece(token_id) for token_id in token_ids).decode(errors="replace")

    def piece(self, token_id: int) -> bytes:
        if not 0 <= token_id < N_VOCAB:
            raise IndexError(token_id)
        return bytes([token_id]) if token_id < 256 else b""


def _prompt_bytes(prompt: PromptInput) -> bytes:
    if isinstance(prompt, TextInput):
        return prompt.text.encode()
    if isinstance(prompt, ChatInput):
        if prompt.messages and prompt.messages[-1]["role"] not in ("user", "system", "assistant", "tool", "developer"):
            raise InvalidParameter("messages", "unknown role")
        return b"\n".join(_content(message).encode() for message in prompt.messages)
    return bytes(token_id % 256 for token_id in prompt.token_ids)


def _content(message: dict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


class FakeStream:
    def __init__(self, script: Script, params: SamplingParams, options: RequestOptions, prompt_tokens: int) -> None:
        self._script = script
        self._params = params
        self._options = options
        self.prompt_tokens = prompt_tokens
        self.cancelled = asyncio.Event()
        self.cancel_reason: FinishReason | None = None
        self.produced = 0
        """Deltas handed out: a server that does not wait for its client would let this grow."""
        self.finished = False

    def cancel(self, reason: FinishReason = FinishReason.CANCELLED) -> None:
        if not self.finished and not self.cancelled.is_set():
            self.cancel_reason = reason
            self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        if self._script.start_gate is not None:
            await self._wait(self._script.start_gate)
        outputs = [self._output(index) for index in range(self._options.n)]
        while outputs:
            for output in list(outputs):
                delta = await anext(output, None)
                if delta is None:
                    outputs.remove(output)
                else:
                    self.produced += 1
                    yield delta
        self.finished = True

    async def _output(self, index: int) -> AsyncIterator[OutputDelta]:
        count = 0
        limit = self._params.max_tokens
        for piece in self._pieces(index):
            await asyncio.sleep(self._script.delay)
            if self.cancelled.is_set() and not self._script.deaf:
                yield self._end(index, count, self.cancel_reason or FinishReason.CANCELLED)
                return
            ids = tuple(piece.encode())[: None if limit is None else limit - count]
            count += len(ids)
            yield OutputDelta(index, bytes(ids).decode(errors="replace"), ids, self._logprobs(ids))
            if limit is not None and count >= limit:
                yield self._end(index, count, FinishReason.LENGTH)
                return
        if self._script.stream_error is not None:
            raise self._script.stream_error
        yield self._end(index, count, self._script.reason)

    def _pieces(self, index: int):
        first = True
        while first or self._script.endless:
            first = False
            yield from ((f"[{index}]",) if index else ()) + tuple(self._script.pieces)

    def _logprobs(self, ids: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        wanted = self._params.logprobs
        if wanted is None:
            return ()
        alternatives = [((token_id + k) % 256, -0.5 - k) for token_id in ids[:1] for k in range(wanted)]
        return tuple(TokenLogprobs(-0.5, tuple(alternatives)) for _ in ids)

    def _end(self, index: int, count: int, reason: FinishReason) -> OutputDelta:
        cached = 1 if index == 0 else self.prompt_tokens - 1
        usage = SequenceUsage(self.prompt_tokens, cached, self.prompt_tokens - cached, 1.5, 2.5, 3.5)
        return replace(OutputDelta(index, "", ()), finish=Finish(reason, usage, count, self._script.message))

    async def _wait(self, gate: asyncio.Event) -> None:
        waits = [asyncio.ensure_future(gate.wait()), asyncio.ensure_future(self.cancelled.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

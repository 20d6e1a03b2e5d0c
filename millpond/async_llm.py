"""Text in, deltas out: the face of the whole stack for HTTP and scripts. Knows no HTTP and no llama.cpp."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millpond.outputs import EngineInfo, SequenceUsage, StepStats, TokenLogprobs
from millpond.sampling_params import SamplingParams
from millpond.text.inputs import ChatInput, PromptInput, TextInput, TokenInput
from millpond.types import FinishReason, RequestId, TokenId

__all__ = [
    "ChatInput",
    "EngineStatus",
    "Finish",
    "OutputDelta",
    "OutputStream",
    "PromptInput",
    "RequestOptions",
    "TextEngine",
    "TextInput",
    "TokenInput",
]


@dataclass(frozen=True, slots=True)
class RequestOptions:
    request_id: RequestId
    n: int = 1
    stop: Sequence[str] = ()
    priority: int = 0
    namespace: str = ""
    timeout: float | None = None
    """Seconds from acceptance; None: the server's default."""


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one or more new tokens of one output brought. The last delta of an output has `finish`."""

    index: int
    """Which of the n outputs."""
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    usage: SequenceUsage
    completion_tokens: int
    message: str = ""
    stop_string: str | None = None


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

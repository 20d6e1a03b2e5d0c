"""What both dialects put around their answers, and the contract between a dialect and the response writer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millpond.async_llm import Finish, OutputDelta, PromptEcho
from millpond.outputs import TokenLogprobs
from millpond.server.adapters.tools import CollectedCalls
from millpond.server.adapters.usage import PromptFinishes
from millpond.types import TokenId


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The same in every chunk of an answer."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(slots=True)
class CollectedOutput:
    """One output of a non-streamed answer, gathered from its deltas."""

    text: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: CollectedCalls = field(default_factory=CollectedCalls)
    token_ids: list[TokenId] = field(default_factory=list[TokenId])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    finish: Finish | None = None
    prompt: PromptEcho | None = None

    def take(self, delta: OutputDelta) -> None:
        self.text.append(delta.text)
        self.reasoning.append(delta.reasoning)
        self.calls.take(delta.tool_calls)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish = delta.finish
        self.prompt = self.prompt or delta.prompt


class ChunkEncoder(Protocol):
    """One streamed answer of a dialect; every method returns whole SSE events."""

    def opening(self, index: int) -> bytes: ...
    def delta(self, delta: OutputDelta) -> bytes:
        """b"" when the delta holds nothing to show (its finish is another event)."""
        ...

    def finish(self, index: int, finish: Finish) -> bytes: ...
    def usage(self, prompts: Sequence[PromptFinishes]) -> bytes: ...


class Dialect(Protocol):
    """How one route writes its answers."""

    def chunk_encoder(self, head: ReplyHead) -> ChunkEncoder: ...
    def full(
        self, head: ReplyHead, outputs: Sequence[CollectedOutput], prompts: Sequence[PromptFinishes]
    ) -> dict[str, Any]: ...

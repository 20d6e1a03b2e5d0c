"""One running output and its only progress counters. PURE. Changed only by the scheduler.

token_ids   [prompt ............][output ....... last]
computed    [=================>                        catches up with num_tokens: by rows, Copy or Restore
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from millpond.kvcache.manager import CacheHandle, PrefixMatch
from millpond.outputs import SequenceUsage
from millpond.request import Request
from millpond.types import FinishReason, SequenceId, SequenceStatus, TokenId


class Shortage(Enum):
    """Why a sequence cannot start or go on now."""

    SLOTS = "slots"
    CELLS = "cells"


@dataclass(slots=True, eq=False)
class Sequence:
    id: SequenceId
    request: Request
    handle: CacheHandle
    order: int
    """Arrival order; an earlier one is never behind a later one of its class for ever."""
    checkpoints: tuple[int, ...] = ()
    """Ascending lengths at which its state is to be saved while its prompt is computed."""
    quarantine: bool = False
    """Runs alone: it is suspected of breaking the engine or a batch."""
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    output_ids: list[TokenId] = field(default_factory=list[TokenId])
    high_water: int = 0
    """Most tokens that were ever computed: below it, catching up is resuming and counts for nobody's usage."""
    bypassed: int = 0
    """Times a later arrival of its class started first."""
    immune_until: int = 0
    """Not parked for cells before it has this many output tokens."""
    turn_ends: int | None = None
    """With a quantum: output tokens after which it gives its slot to a waiting one."""
    failures: int = 0
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None
    parked_since: float | None = None
    parked_for: Shortage | None = None
    """Of the last time it was parked."""
    parked_length: int = 0
    """Tokens its cells held then."""
    parked_seconds: float = 0.0
    parked_before_first_token: float = 0.0
    matched: tuple[int, PrefixMatch] | None = None
    """Last prefix match and the pool version it was made at."""
    yielded: bool = False
    """Parked to share a slot, not for cells: it queues behind those who wait."""

    @property
    def num_tokens(self) -> int:
        return len(self.handle.history)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_ids)

    @property
    def wants_prompt_rows(self) -> bool:
        """Logits of every prompt row are asked for, and not reported yet."""
        return self.request.params.prompt_logprobs is not None and not self.output_ids

    @property
    def reusable_limit(self) -> int:
        """Most tokens that may come from a cache: logits are needed of the last one, or of all that had no row yet."""
        return min(self.num_tokens - 1, self.high_water) if self.wants_prompt_rows else self.num_tokens - 1

    @property
    def behind(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_tokens - self.num_computed_tokens

    def until_checkpoint(self, rows: int) -> int:
        """`rows`, cut so that the next checkpoint is not run over."""
        ahead = [length - self.num_computed_tokens for length in self.checkpoints]
        return min([rows, *(distance for distance in ahead if distance > 0)])

    def become(self, status: SequenceStatus, now: float) -> None:
        """The only place where a status changes."""
        assert self.status.can_become(status), f"{self.status} cannot become {status}"
        if status is SequenceStatus.PREEMPTED:
            self.parked_since = now
            self.preemptions += 1
        elif self.parked_since is not None:
            parked = now - self.parked_since
            self.parked_seconds += parked
            self.parked_before_first_token += parked if self.first_token is None else 0.0
            self.parked_since = None
        if status is SequenceStatus.RUNNING and self.started is None:
            self.started = now
        self.status = status

    def advance(self, tokens: int, *, cached: bool) -> None:
        """The slot holds `tokens` more. Prompt tokens above the high-water mark count as cached if they came so."""
        self.num_computed_tokens += tokens
        reached = min(self.num_computed_tokens, self.num_prompt_tokens)
        if cached:
            self.num_cached_tokens += max(0, reached - self.high_water)
        self.high_water = max(self.high_water, self.num_computed_tokens)

    def advance_cached(self, tokens: int) -> int:
        """As `advance`; returns the prompt tokens that count as cached by it."""
        before = self.num_cached_tokens
        self.advance(tokens, cached=True)
        return self.num_cached_tokens - before

    def append(self, token_id: TokenId, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        self.output_ids.append(token_id)
        self.handle.history.append(token_id)

    def usage(self, now: float) -> SequenceUsage:
        arrival = self.request.arrival
        started = self.started if self.started is not None else now
        first = self.first_token if self.first_token is not None else now
        cached = min(self.num_cached_tokens, self.num_prompt_tokens)
        return SequenceUsage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=cached,
            computed_prompt_tokens=self.num_prompt_tokens - cached,
            queue_ms=max(0.0, started - arrival) * 1e3,
            prefill_ms=max(0.0, first - started - self.parked_before_first_token) * 1e3,
            decode_ms=max(0.0, now - first - (self.parked_seconds - self.parked_before_first_token)) * 1e3,
            parked_ms=self.parked_seconds * 1e3,
            preemptions=self.preemptions,
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ends, decided outside the model's own output."""

    reason: FinishReason
    message: str = ""

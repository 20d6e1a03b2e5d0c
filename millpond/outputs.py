"""What the engine reports, as frozen values. Knows ids and counts; no text and no wire format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from millpond.types import FinishReason, MemoryKind, SequenceId, SequenceStatus, SlotId, TokenId


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs, of the distribution before temperature and filters."""

    chosen: float
    top: tuple[tuple[TokenId, float], ...] = ()
    """Best first."""


class SampledToken(NamedTuple):
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    forced: tuple[TokenId, ...] = ()
    """Tokens that a grammar makes follow, whatever the model thinks of them."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first output token, where asked for: of every prompt token but the first."""


class TokenEvent(NamedTuple):
    """One per token: a tuple is the cheapest value to make, to send and to read."""

    sequence_id: SequenceId
    output_index: int
    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """See SampledToken; with index 0 only."""


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """cached_tokens + computed_prompt_tokens == prompt_tokens; a resume never changes either."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    """From the first output token to the end, parked time left out."""
    parked_ms: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class FinishEvent:
    sequence_id: SequenceId
    output_length: int
    reason: FinishReason
    usage: SequenceUsage
    message: str = ""
    """For ERROR: what to tell the client."""


@dataclass(frozen=True, slots=True)
class StatusEvent:
    """A sequence started, was parked or went on."""

    sequence_id: SequenceId
    status: SequenceStatus


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Sums since the engine process started: each one only grows, and starts at 0 again with the next engine."""

    steps: int = 0
    rows: int = 0
    prefill_rows: int = 0
    schedule_ms: float = 0.0
    move_ms: float = 0.0
    """All KV operations, saves and restores among them."""
    decode_ms: float = 0.0
    sample_ms: float = 0.0
    emit_ms: float = 0.0
    """From a step's results to the next plan: settling, sending, hearing commands, waiting for a server behind."""
    save_ms: float = 0.0
    restore_ms: float = 0.0
    saved_tokens: int = 0
    saved_bytes: int = 0
    saved_disk_bytes: int = 0
    """Of the saved ones, those that a durable tier took at once."""
    restored_tokens: int = 0
    disk_tokens: int = 0
    """Of the restored ones, those that came from the disk tier."""
    restored_bytes: int = 0
    restored_disk_bytes: int = 0
    failed_moves: int = 0
    """Copies and restores that failed: their sequences computed again."""
    failed_restores: int = 0
    """Restores among them: the state was damaged, gone or refused."""
    decode_failures: int = 0
    parked_to_grow: int = 0
    """Preemptions because a running stream needed a cell,"""
    parked_to_prefill: int = 0
    """because a prompt's chunk or a restore needed cells,"""
    parked_exhausted: int = 0
    """because the runtime found no cell where the ledger had one,"""
    parked_for_turn: int = 0
    """and because a waiting one had priority or its turn came."""
    resident_hit_tokens: int = 0
    """Prompt tokens shared from cells,"""
    stored_hit_tokens: int = 0
    """and brought back from saved state, when a sequence first ran;"""
    disk_hit_tokens: int = 0
    """of these, from the disk tier."""
    parks_kept: int = 0
    """Parks that are over, by what became of the state: all of it stayed in cells,"""
    parks_saved: int = 0
    """what left them is in a tier,"""
    parks_requeued: int = 0
    """or some of it has to be computed again."""
    resumes: int = 0
    recomputed_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def seconds(self) -> float:
        """Wall time of the steps."""
        return (self.schedule_ms + self.move_ms + self.decode_ms + self.sample_ms) / 1000.0


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Milliseconds, cells and sequences; taken after the step."""

    step: int = 0
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    cells_total: int = 0
    cells_used: int = 0
    """Live and cached together."""
    cells_cached: int = 0
    """Held by idle prefixes only."""
    cells_pinned: int = 0
    """Held by parked sequences only (and idle prefixes, which share some): kept for when they go on."""
    ram_bytes: int = 0
    """State that the RAM tier holds,"""
    disk_bytes: int = 0
    """and the disk tier, files of other models there included."""
    rows: int = 0
    prefill_rows: int = 0
    schedule_ms: float = 0.0
    move_ms: float = 0.0
    decode_ms: float = 0.0
    sample_ms: float = 0.0
    preemptions: int = 0
    resumes: int = 0
    saved_bytes: int = 0
    restored_bytes: int = 0
    recomputed_tokens: int = 0
    evicted_tokens: int = 0
    totals: StepTotals | None = None

    @property
    def seconds(self) -> float:
        """Wall time of the step."""
        return (self.schedule_ms + self.move_ms + self.decode_ms + self.sample_ms) / 1000.0


class PoolRun(NamedTuple):
    """KV cells that the same slots hold: tokens [start, start + cells) of each of them."""

    slots: list[SlotId]
    sequence_ids: list[SequenceId]
    """Owners, parked ones among them; empty: a finished prefix, kept for reuse."""
    start: int
    cells: int


class SequenceProgress(NamedTuple):
    """Where a live sequence stands in the engine."""

    sequence_id: SequenceId
    status: SequenceStatus
    computed_tokens: int
    """Tokens that its cells hold now; less than it has while it is parked or catches up."""
    cached_tokens: int
    """Of the prompt, those not computed for it."""
    parked_for: str | None
    """PREEMPTED: what was short, "cells" or "slots"."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the loaded model and context, read back after loading."""

    name: str
    architecture: str
    description: str
    digest: str
    """sha256 of the file, hex; "" where not computed."""
    n_vocab: int
    n_ctx_train: int
    n_layer: int
    n_params: int
    size_bytes: int
    memory_kind: MemoryKind
    n_swa: int
    """Sliding window in tokens; 0: none."""
    kv_bytes_per_token: int
    library: str
    """Build of libllama and its CPU features."""


@dataclass(frozen=True, slots=True)
class MemoryAbilities:
    """What the loaded model's memory was found to do; what is False is not relied on."""

    restores: bool = True
    """A saved state, put into another slot, goes on as the original does."""
    trims: bool = True
    """A sequence can be cut back to fewer tokens."""
    batches: bool = True
    """Two sequences decoded in one batch come out as alone."""
    tested: bool = False
    """Tried on this model at load; attention memory is not, its contract is the library's own."""
    findings: tuple[str, ...] = ()
    """What failed and what follows from it, for the operator."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a ready engine serves; "auto" settings resolved."""

    model: ModelInfo
    n_cells: int
    n_slots: int
    max_running: int
    max_model_len: int
    unified: bool
    """One shared pool of cells; False: one ordered region a slot (--exact)."""
    abilities: MemoryAbilities = MemoryAbilities()
    chat_template: str = ""
    """Jinja source from the model file; "" where it has none."""

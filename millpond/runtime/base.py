"""What the engine needs of a model runtime. Knows tokens, slots and cells; not requests, scheduling or text of clients.

Slots are llama.cpp sequence ids. Positions are consecutive from 0. One thread calls a runtime at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.outputs import ModelInfo
from millpond.types import SlotId, TokenId

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ContextParams:
    """How to create a context; the runtime reads every value back and refuses on a difference."""

    n_cells: int
    """Cells of the whole pool (unified), or of all slots together (streams: n_cells // n_slots each)."""
    n_slots: int
    """Sequence ids the scheduler may use; the runtime adds a scratch slot of its own where it needs one."""
    n_batch: int = 2048
    n_ubatch: int = 512
    threads: int = 0
    """0: the machine's physical cores."""
    unified: bool = True
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    swa_full: bool = True


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Read back from the context, so they may be larger than asked (1000 cells become 1024)."""

    n_cells: int
    n_slots: int
    n_batch: int
    n_ubatch: int
    cells_per_slot: int
    """Longest sequence a slot can hold: n_cells when unified."""
    unified: bool
    can_copy_ranges: bool
    """copy() shares cells by reference, for any range [0, end)."""
    can_trim: bool
    """trim() can cut a tail off; False for recurrent and hybrid memory."""


@dataclass(slots=True)
class Batch:
    """Rows of one decode, equal lengths. Rows of one slot are consecutive positions in order."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    slots: NDArray[np.int32]
    wants_logits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class CandidateFilter:
    """Which tokens may be drawn. Applied in the order top_k, top_p, min_p, temperature (llama.cpp's default order)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Candidates(Protocol):
    """Filters a row of logits, deterministically. It never draws: the draw is the sampler's, from (seed, index)."""

    def filter(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and their probabilities (sum 1), most probable first, ties to the lowest id. At least one."""
        ...


class Vocab(Protocol):
    """Text <-> tokens of one model. Loadable without weights."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def bos_id(self) -> TokenId | None: ...
    @property
    def eos_id(self) -> TokenId | None:
        """The model file's end token, which chat templates name eos_token; one of eog_ids."""
        ...

    @property
    def adds_bos(self) -> bool:
        """The model wants its BOS before a prompt."""
        ...

    @property
    def eog_ids(self) -> frozenset[TokenId]:
        """Every end-of-generation id."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Jinja source from the model file."""
        ...

    @property
    def max_piece_bytes(self) -> int:
        """Longest token in bytes: a text of more than limit * this can be refused unread."""
        ...

    def tokenize(self, text: str, *, parse_special: bool) -> list[TokenId]:
        """Never adds BOS or EOS. With parse_special False, control strings in `text` are plain text."""
        ...

    def piece(self, token_id: TokenId, *, special: bool = False) -> bytes:
        """Bytes of a token, possibly part of a character; control tokens are b"" unless `special`.

        Raises IndexError for an id outside the vocabulary."""
        ...

    def is_control(self, token_id: TokenId) -> bool: ...


class Runtime(Protocol):
    """A loaded model with one context. Errors: millpond.errors.RuntimeFailure and its children."""

    @property
    def model(self) -> ModelInfo: ...
    @property
    def limits(self) -> ContextLimits: ...
    @property
    def vocab(self) -> Vocab: ...
    @property
    def candidates(self) -> Candidates: ...

    def decode(self, batch: Batch) -> None:
        """Computes the rows; logits() then answers for rows that wanted them.

        Raises InvalidBatch before the library sees a bad batch; KVExhausted when no cell is free (nothing changed);
        DecodeFailed when some rows may be in (trim every slot of the batch to its counter, or drop it).
        """
        ...

    def logits(self, row: int) -> Logits:
        """View of float32[n_vocab], valid until the next decode. Raises InvalidBatch if the row did not want any."""
        ...

    def copy(self, source: SlotId, target: SlotId, end: int) -> None:
        """Cells [0, end) of source become shared with the empty slot target. Needs can_copy_ranges."""
        ...

    def merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        """target gives up its own cells [start, end) and shares source's, which hold the same tokens."""
        ...

    def trim(self, slot: SlotId, end: int) -> None:
        """The slot keeps positions [0, end). Raises RuntimeFailure where can_trim is False and end > 0."""
        ...

    def drop(self, slot: SlotId) -> None:
        """The slot becomes empty."""
        ...

    def span(self, slot: SlotId) -> tuple[int, int] | None:
        """(pos_min, pos_max) of the slot, None when empty. Exact when no deferred copy waits."""
        ...

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        """State of positions [start, end). Unless can_copy_ranges, only the whole sequence: start 0, end its length."""
        ...

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        """Puts saved positions [start, end) back; the slot must hold exactly [0, start).

        Raises KVExhausted if the cells do not fit and StateRejected if the bytes are not taken; the slot then
        still holds exactly [0, start). The caller verified the checksum: the library does not.
        """
        ...

    def close(self) -> None: ...

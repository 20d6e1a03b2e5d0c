"""One llama_context: created, read back, its memory moved by slot. Knows positions and slots; counts no tokens.

Slots here are sequence ids of the library, the scratch slot included.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path

from millpond.errors import ConfigError, LibraryMismatch, RuntimeFailure, SetupError
from millpond.runtime.base import ContextLimits, ContextParams
from millpond.runtime.llamacpp.bindings import (
    KV_TYPES,
    MAX_SEQUENCES,
    PINNED_DISTRIBUTION,
    PINNED_VERSION,
    LlamaBatch,
)
from millpond.runtime.llamacpp.errors import load_reason
from millpond.runtime.llamacpp.model import LoadedModel, memory_kind
from millpond.types import MemoryKind

_CELL_STEP = 256
"""llama.cpp rounds the cells of a pool, or of a stream, up to this."""


class LlamaContext:
    """Owns a llama_context. Raises RuntimeFailure when used after close()."""

    def __init__(self, model: LoadedModel, pointer: int, limits: ContextLimits, scratch: int | None) -> None:
        bindings = model.library.bindings
        self.model = model
        self.limits = limits
        self.scratch = scratch
        """Sequence id beyond the scheduler's, for moving ranges; None where ranges cannot move."""
        self._bindings = bindings
        self._pointer: int | None = pointer
        self._memory = bindings.llama_get_memory(pointer)
        self._free = weakref.finalize(self, bindings.llama_free, pointer)

    @property
    def pointer(self) -> int:
        if self._pointer is None:
            raise RuntimeFailure("the context is closed")
        return self._pointer

    def decode(self, batch: LlamaBatch) -> int:
        """The library's return code. The batch must have passed check_batch."""
        return self._bindings.llama_decode(self.pointer, batch)

    def synchronize(self) -> None:
        """Waits for an accelerator with the GIL released; reading logits would wait with it held."""
        self._bindings.llama_synchronize(self.pointer)

    def logits_address(self, row: int) -> int | None:
        return self._bindings.llama_get_logits_ith(self.pointer, row)

    def span(self, slot: int) -> tuple[int, int] | None:
        """(pos_min, pos_max), None when empty."""
        memory = self._alive_memory()
        last = self._bindings.llama_memory_seq_pos_max(memory, slot)
        return None if last < 0 else (self._bindings.llama_memory_seq_pos_min(memory, slot), last)

    def share(self, source: int, target: int, start: int, end: int) -> None:
        """target refers to source's cells [start, end) too. Unified pools only: across streams it is deferred."""
        self._bindings.llama_memory_seq_cp(self._alive_memory(), source, target, start, end)

    def remove(self, slot: int, start: int, end: int | None = None) -> bool:
        """Takes [start, end) from the slot; end None: all the rest. False: it cannot, and nothing changed."""
        return self._bindings.llama_memory_seq_rm(self._alive_memory(), slot, start, -1 if end is None else end)

    def drop(self, slot: int) -> None:
        self.remove(slot, 0)

    def clear(self) -> None:
        """Every slot becomes empty, contents included."""
        self._bindings.llama_memory_clear(self._alive_memory(), True)

    def state_size(self, slot: int) -> int:
        return self._bindings.llama_state_seq_get_size_ext(self.pointer, slot, 0)

    def read_state(self, slot: int, address: int, size: int) -> int:
        """Bytes written at `address`; 0 on failure."""
        return self._bindings.llama_state_seq_get_data_ext(self.pointer, address, size, slot, 0)

    def write_state(self, slot: int, data: bytes) -> int:
        """Bytes taken; 0 on failure, and the slot is empty then."""
        return self._bindings.llama_state_seq_set_data_ext(self.pointer, data, len(data), slot, 0)

    def close(self) -> None:
        self._pointer = None
        self._free()

    def _alive_memory(self) -> int:
        if self._pointer is None:
            raise RuntimeFailure("the context is closed")
        return self._memory


def create_context(model: LoadedModel, params: ContextParams) -> LlamaContext:
    """Raises ConfigError for an impossible setting, LibraryMismatch when a value reads back wrong, else SetupError."""
    bindings = model.library.bindings
    kind = memory_kind(model)
    can_copy_ranges = params.unified and kind is MemoryKind.ATTENTION
    n_sequences = params.n_slots + (1 if can_copy_ranges else 0)
    _check_params(params, n_sequences)
    library_params = bindings.llama_context_default_params()
    library_params.n_ctx = params.n_cells
    library_params.n_batch = params.n_batch
    library_params.n_ubatch = params.n_ubatch
    library_params.n_seq_max = n_sequences
    library_params.n_threads = library_params.n_threads_batch = params.threads or physical_cores()
    library_params.type_k = KV_TYPES[params.kv_type_k]
    library_params.type_v = KV_TYPES[params.kv_type_v]
    library_params.swa_full = params.swa_full
    library_params.kv_unified = params.unified
    with model.library.complaints() as complaints:
        pointer = bindings.llama_init_from_model(model.pointer, library_params)
    if pointer is None:
        raise SetupError(
            f"cannot create a context of {params.n_cells} cells; lower kv_cells: {load_reason(complaints)}"
        )
    limits = ContextLimits(
        n_cells=bindings.llama_n_ctx(pointer),
        n_slots=params.n_slots,
        n_batch=bindings.llama_n_batch(pointer),
        n_ubatch=bindings.llama_n_ubatch(pointer),
        cells_per_slot=bindings.llama_n_ctx_seq(pointer),
        unified=params.unified,
        can_copy_ranges=can_copy_ranges,
        can_trim=kind in (MemoryKind.ATTENTION, MemoryKind.SLIDING_WINDOW),
    )
    context = LlamaContext(model, pointer, limits, params.n_slots if can_copy_ranges else None)
    _check_read_back(params, limits, bindings.llama_n_seq_max(pointer), n_sequences)
    return context


def _check_params(params: ContextParams, n_sequences: int) -> None:
    for setting, value in (("kv_type_k", params.kv_type_k), ("kv_type_v", params.kv_type_v)):
        if value not in KV_TYPES:
            raise ConfigError(setting, f"must be one of {', '.join(KV_TYPES)}, got {value}")
    for setting in ("n_cells", "n_slots", "n_batch", "n_ubatch"):
        if getattr(params, setting) < 1:
            raise ConfigError(setting, "must be at least 1")
    if n_sequences > MAX_SEQUENCES:
        raise ConfigError("n_slots", f"llama.cpp holds at most {MAX_SEQUENCES} sequences, {n_sequences} asked")


def _check_read_back(params: ContextParams, limits: ContextLimits, n_seq_max: int, n_sequences: int) -> None:
    """Defaults do not show swapped fields: these values do."""
    if params.unified:
        cells = per_slot = _rounded(params.n_cells)
    else:
        per_slot = _rounded(_rounded(params.n_cells) // n_sequences)
        cells = per_slot * n_sequences
    n_batch = min(params.n_batch, params.n_cells)
    expected = {
        "n_ctx": (limits.n_cells, cells),
        "n_ctx_seq": (limits.cells_per_slot, per_slot),
        "n_batch": (limits.n_batch, n_batch),
        "n_ubatch": (limits.n_ubatch, min(params.n_ubatch, n_batch)),
        "n_seq_max": (n_seq_max, n_sequences),
    }
    wrong = [f"{name} is {found}, not {asked}" for name, (found, asked) in expected.items() if found != asked]
    if wrong:
        raise LibraryMismatch(
            f"the context has other values than asked: {'; '.join(wrong)}. "
            f"Millpond needs the llama.cpp build of {PINNED_DISTRIBUTION}=={PINNED_VERSION}"
        )


def _rounded(cells: int) -> int:
    return -(-cells // _CELL_STEP) * _CELL_STEP


def physical_cores(system: Path = Path("/sys")) -> int:
    """Cores this process may use: hyperthreads counted once, a container's CPU quota rounded up. At least 1."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings: set[str] = set()
    for cpu in allowed:
        file = system / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings.add(file.read_text().strip() if file.is_file() else str(cpu))
    return max(1, min(len(siblings), _quota(system / "fs" / "cgroup" / "cpu.max") or len(siblings)))


def _quota(file: Path) -> int | None:
    """Whole CPUs of a cgroup's "quota period" line; None where there is no limit."""
    fields = file.read_text().split() if file.is_file() else []
    if len(fields) != 2 or not all(field.isdecimal() for field in fields):
        return None
    return math.ceil(int(fields[0]) / int(fields[1]))

"""LlamaCppRuntime: a model file and one context behind millpond.runtime.base.Runtime. Knows no requests, no schedule.

It tracks the length of every slot itself, so that a batch is checked without asking the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from millpond.errors import InvalidBatch, RuntimeFailure, SetupError
from millpond.outputs import ModelInfo
from millpond.runtime.base import Batch, ContextLimits, ContextParams, Logits
from millpond.runtime.llamacpp.batch import BatchBounds, BatchBuffer, LogitsViews, check_batch
from millpond.runtime.llamacpp.candidates import LlamaCppCandidates
from millpond.runtime.llamacpp.context import LlamaContext, create_context
from millpond.runtime.llamacpp.errors import NO_CELL, decode_error
from millpond.runtime.llamacpp.library import load_library
from millpond.runtime.llamacpp.model import (
    LoadedModel,
    LoadParams,
    Progress,
    check_generates,
    load_model,
    read_model_info,
)
from millpond.runtime.llamacpp.state import StateMover
from millpond.runtime.llamacpp.vocab import LlamaCppVocab
from millpond.types import SlotId


class LlamaCppRuntime:
    """Implements millpond.runtime.base.Runtime; see there for what each method promises. One thread at a time."""

    def __init__(self, model: LoadedModel, context: LlamaContext, *, digest: str, offloaded: bool) -> None:
        limits = context.limits
        self._loaded = model
        self._context = context
        self._offloaded = offloaded
        self._vocab = LlamaCppVocab(model)
        self._candidates = LlamaCppCandidates(model.library, self._vocab.n_tokens)
        self._bounds = BatchBounds(limits.n_batch, limits.n_slots, self._vocab.n_tokens)
        self._buffer = BatchBuffer(limits.n_batch)
        self._views = LogitsViews(self._vocab.n_tokens)
        self._has_logits = False
        self._held = [0] * limits.n_slots
        """Tokens of each slot: the position its next row takes."""
        self._state = StateMover(context)
        kv_bytes_per_token = self._warm_up()
        self._info = read_model_info(
            model, digest=digest, n_vocab=self._vocab.n_tokens, kv_bytes_per_token=kv_bytes_per_token
        )

    @classmethod
    def load(
        cls,
        model_path: Path,
        params: ContextParams,
        *,
        digest: str,
        gpu_layers: int,
        use_extra_bufts: bool = True,
        progress: Progress | None,
        environ: Mapping[str, str],
    ) -> LlamaCppRuntime:
        """Loads the library, the model and a context, and runs two tokens to page the weights in.

        Raises ModelFileError, LibraryMismatch, ConfigError or SetupError.
        """
        library = load_library(environ)
        model = load_model(library, model_path, LoadParams(gpu_layers, use_extra_bufts), progress)
        check_generates(model)
        return cls(model, create_context(model, params), digest=digest, offloaded=gpu_layers != 0)

    @property
    def model(self) -> ModelInfo:
        return self._info

    @property
    def limits(self) -> ContextLimits:
        return self._context.limits

    @property
    def vocab(self) -> LlamaCppVocab:
        return self._vocab

    @property
    def candidates(self) -> LlamaCppCandidates:
        return self._candidates

    def decode(self, batch: Batch) -> None:
        lengths = check_batch(batch, self._bounds, self._held)
        self._has_logits = False
        code = self._context.decode(self._buffer.fill(batch))
        if code == 0:
            for slot, length in lengths.items():
                self._held[slot] = length
            self._has_logits = True
            if self._offloaded:
                self._context.synchronize()
            return
        if code != NO_CELL:
            for slot in lengths:
                self._held[slot] = self._read_length(slot)
        raise decode_error(code, len(batch))

    def logits(self, row: int) -> Logits:
        if not self._has_logits or not self._buffer.wanted_logits(row):
            raise InvalidBatch(f"row {row} of the last batch has no logits")
        address = self._context.logits_address(row)
        if address is None:
            raise RuntimeFailure(f"the library has no logits for row {row}")
        return self._views.at(address)

    def copy(self, source: SlotId, target: SlotId, end: int) -> None:
        self._need_ranges()
        self._check_range(source, 0, end)
        if self._length(target) != 0:
            raise RuntimeFailure(f"copy needs an empty slot: {target} holds {self._held[target]} tokens")
        self._context.share(source, target, 0, end)
        self._held[target] = end

    def merge(self, source: SlotId, target: SlotId, start: int, end: int) -> None:
        self._need_ranges()
        self._check_range(source, start, end)
        self._check_range(target, start, end)
        if source == target:
            raise RuntimeFailure(f"slot {source} cannot merge with itself")
        self._context.remove(target, start, end)
        self._context.share(source, target, start, end)

    def trim(self, slot: SlotId, end: int) -> None:
        """An end beyond the slot's keeps all. Raises RuntimeFailure, changing nothing, also where a window is lost."""
        if end == 0:
            self.drop(slot)
            return
        if not self.limits.can_trim:
            raise RuntimeFailure(f"{self._info.memory_kind.value} memory cannot be trimmed, only dropped")
        if end < 0:
            raise RuntimeFailure(f"slot {slot} cannot be trimmed to {end}")
        if end < self._length(slot):
            self._need_window(slot, end)
            if not self._context.remove(slot, end):
                raise RuntimeFailure(f"the library could not trim slot {slot} to {end}")
            self._held[slot] = end

    def drop(self, slot: SlotId) -> None:
        self._length(slot)
        self._context.drop(slot)
        self._held[slot] = 0

    def span(self, slot: SlotId) -> tuple[int, int] | None:
        self._length(slot)
        return self._context.span(slot)

    def save(self, slot: SlotId, start: int, end: int) -> bytes:
        self._check_range(slot, start, end)
        self._check_movable(start, whole=end == self._held[slot])
        return self._state.save(slot, start, end)

    def restore(self, slot: SlotId, start: int, end: int, data: bytes) -> None:
        if self._length(slot) != start or end <= start:
            raise RuntimeFailure(f"slot {slot} holds {self._held[slot]} tokens, not {start}; end is {end}")
        self._check_movable(start, whole=True)
        self._state.restore(slot, start, end, data)
        self._held[slot] = end

    def state_size(self, slot: SlotId) -> int:
        """Bytes that saving the whole slot takes now."""
        self._length(slot)
        return self._context.state_size(slot)

    def close(self) -> None:
        """Frees the context and the model; the vocabulary keeps its pieces but no longer tokenizes."""
        self._candidates.close()
        self._context.close()
        self._loaded.close()

    def _warm_up(self) -> int:
        """Pages the weights in with two tokens, and measures what one adds to a saved state, in bytes."""
        token = self._vocab.bos_id or 0
        sizes: list[int] = []
        for position in range(2):
            row = np.array([token], dtype=np.int32)
            batch = Batch(row, np.array([position], np.int32), np.zeros(1, np.int32), np.ones(1, np.bool_))
            code = self._context.decode(self._buffer.fill(batch))
            if code != 0:
                raise SetupError(f"the model does not run: {decode_error(code, 1)}")
            sizes.append(self._context.state_size(0))
        self._context.clear()
        return sizes[1] - sizes[0]

    def _length(self, slot: int) -> int:
        if not 0 <= slot < self.limits.n_slots:
            raise RuntimeFailure(f"slots lie in [0, {self.limits.n_slots}), got {slot}")
        return self._held[slot]

    def _read_length(self, slot: int) -> int:
        span = self._context.span(slot)
        return 0 if span is None else span[1] + 1

    def _check_range(self, slot: int, start: int, end: int) -> None:
        held = self._length(slot)
        if not 0 <= start < end <= held:
            raise RuntimeFailure(f"slot {slot} holds [0, {held}), not [{start}, {end})")

    def _need_ranges(self) -> None:
        if not self.limits.can_copy_ranges:
            raise RuntimeFailure("this memory does not share ranges of cells")

    def _check_movable(self, start: int, *, whole: bool) -> None:
        if not self.limits.can_copy_ranges and not (start == 0 and whole):
            raise RuntimeFailure("this memory is saved and restored as whole sequences only")

    def _need_window(self, slot: int, end: int) -> None:
        """A sliding window must still reach back from `end`: cells outside it are freed silently."""
        span, window = self._context.span(slot), self._info.n_swa
        if window and span is not None and span[0] > max(0, end - window):
            raise RuntimeFailure(f"slot {slot} lost its window: positions before {span[0]} are gone")

"""Filters a row of logits with llama.cpp's own samplers. Knows logits and filters; never draws, keeps nothing of a row.

One array of candidates is reused for every row, and one sampler chain for every filter seen lately.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from millpond.errors import RuntimeFailure
from millpond.runtime.base import CandidateFilter, Logits
from millpond.runtime.llamacpp.bindings import LlamaTokenDataArray
from millpond.runtime.llamacpp.library import Library

_MAX_CHAINS = 64
_MIN_KEEP = 1
_BLOCK = 64
_SIGN_BIT = np.uint32(0x80000000)


class LlamaCppCandidates:
    """Implements millpond.runtime.base.Candidates for rows of `n_vocab` logits. One thread at a time."""

    def __init__(self, library: Library, n_vocab: int) -> None:
        self._n_vocab = n_vocab
        self._ids = np.arange(n_vocab, dtype=np.int32)
        self._data = np.zeros(n_vocab, dtype=np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
        self._address = self._data.ctypes.data
        self._array = LlamaTokenDataArray()
        self._array_pointer = ctypes.pointer(self._array)
        self._chains = _ChainCache(library)
        self._apply = library.bindings.llama_sampler_apply

    def filter(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids and probabilities (sum 1), most probable first, ties to the lowest id. -inf is never returned.

        Temperature 0 leaves the most probable token. Raises RuntimeFailure when no logit is finite or one is NaN.
        """
        best = float(logits.max())
        if not np.isfinite(best):
            raise RuntimeFailure(f"no token can be chosen: the largest logit is {best}")
        if spec.temperature <= 0.0:
            return self._ids[logits == best][:1].copy(), np.ones(1, dtype=np.float32)
        if spec.top_k <= 0 and spec.top_p >= 1.0 and spec.min_p <= 0.0:
            ids, kept = _sorted_by_logit(self._ids, logits)
        else:
            ids, kept = self._run_chain(logits, spec)
        possible = kept > -np.inf
        if not possible.all():
            ids, kept = ids[possible], kept[possible]
        scaled = (kept / np.float32(spec.temperature)).astype(np.float64)
        weights = np.exp(scaled - scaled[0])
        return ids, (weights / weights.sum()).astype(np.float32)

    def close(self) -> None:
        self._chains.close()

    def _run_chain(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        offered, is_sorted = self._offer(logits, spec)
        data = self._data[: len(offered)]
        data["id"] = offered
        data["logit"] = logits[offered]
        array = self._array
        array.data, array.size, array.selected, array.sorted = self._address, len(offered), -1, is_sorted
        self._apply(self._chains.chain(spec), self._array_pointer)
        if array.data != self._address:
            raise RuntimeFailure("a sampler moved the candidates: not the build that was declared")
        kept = self._data[: array.size]
        ids, values = _sorted_by_logit(kept["id"], kept["logit"])
        return _lowest_of_last_tie(ids, offered, logits), values

    def _offer(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], bool]:
        """Ids the chain gets to see, and whether they are sorted: what it would drop first costs it most."""
        if spec.top_k > 0:
            return _superset_of_top(logits, spec.top_k), False
        # A grammar leaves a few of all ids: the others need not be sorted.
        possible = np.flatnonzero(logits > -np.inf).astype(np.int32)
        if spec.top_p < 1.0:
            return _sorted_by_logit(possible, logits[possible])[0], True
        return possible, False


def _superset_of_top(logits: Logits, k: int) -> NDArray[np.int32]:
    """Ascending ids of at least every logit that is among the k largest or ties with the last of them.

    At least k logits reach the k-th largest of the block maxima, so nothing below it is among the top k.
    """
    n_blocks = len(logits) // _BLOCK
    if k > n_blocks:
        return np.arange(len(logits), dtype=np.int32)
    maxima = logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
    floor = np.partition(maxima, n_blocks - k)[n_blocks - k]
    if floor == -np.inf:
        return np.flatnonzero(logits > floor).astype(np.int32)
    return np.flatnonzero(logits >= floor).astype(np.int32)


def _sorted_by_logit(
    ids: NDArray[np.int32], logits: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Copies, largest logit first, ties to the lowest id: one sort of (flipped logit bits, id) in 64 bits."""
    bits = (logits + np.float32(0.0)).view(np.uint32)
    ascending = np.where(bits & _SIGN_BIT, ~bits, bits | _SIGN_BIT)
    keys = (~ascending).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    flipped = ~(keys >> np.uint64(32)).astype(np.uint32)
    restored = np.where(flipped & _SIGN_BIT, flipped & ~_SIGN_BIT, ~flipped)
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int32), restored.astype(np.uint32).view(np.float32)


def _lowest_of_last_tie(ids: NDArray[np.int32], offered: NDArray[np.int32], logits: Logits) -> NDArray[np.int32]:
    """llama.cpp cuts a tie anywhere: the kept ids of the last logit become the lowest offered ones that have it."""
    last = logits[ids[-1]]
    tied = offered[logits[offered] == last]
    n_kept = int(np.count_nonzero(logits[ids] == last))
    if n_kept < len(tied):
        ids[len(ids) - n_kept :] = tied[:n_kept]
    return ids


class _ChainCache:
    """Sampler chains by filter; the least recently used one is freed first. Temperature, last, needs no chain."""

    def __init__(self, library: Library) -> None:
        self._bindings = library.bindings
        self._chains: OrderedDict[tuple[int, float, float], int] = OrderedDict()

    def chain(self, spec: CandidateFilter) -> int:
        key = (spec.top_k, spec.top_p, spec.min_p)
        chain = self._chains.get(key)
        if chain is not None:
            self._chains.move_to_end(key)
            return chain
        if len(self._chains) >= _MAX_CHAINS:
            self._bindings.llama_sampler_free(self._chains.popitem(last=False)[1])
        chain = self._chains[key] = self._build(spec)
        return chain

    def close(self) -> None:
        while self._chains:
            self._bindings.llama_sampler_free(self._chains.popitem()[1])

    def _build(self, spec: CandidateFilter) -> int:
        bindings = self._bindings
        chain = bindings.llama_sampler_chain_init(bindings.llama_sampler_chain_default_params())
        if spec.top_k > 0:
            bindings.llama_sampler_chain_add(chain, bindings.llama_sampler_init_top_k(spec.top_k))
        if spec.top_p < 1.0:
            bindings.llama_sampler_chain_add(chain, bindings.llama_sampler_init_top_p(spec.top_p, _MIN_KEEP))
        if spec.min_p > 0.0:
            bindings.llama_sampler_chain_add(chain, bindings.llama_sampler_init_min_p(spec.min_p, _MIN_KEEP))
        return chain

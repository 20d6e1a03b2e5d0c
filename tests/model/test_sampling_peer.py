"""Our penalties and shapers against llama.cpp's own samplers, on the same rows and histories."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond.runtime.base import Logits
from millpond.runtime.llamacpp import load_library
from millpond.runtime.llamacpp.bindings import LlamaTokenDataArray
from millpond.runtime.llamacpp.vocab import LlamaCppVocab, load_vocab
from millpond.sampling.ids import TokensWithText, as_ids
from millpond.sampling.processors import OccurrencePenalty, RepetitionPenalty, TopNSigma
from millpond.sampling.repeats import Dry
from millpond.sampling.shaping import dynamic_temperature, obvious_choices
from millpond.sampling_params import DryPenalty, DynamicTemperature

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]
N_VOCAB = 300
RECORD = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])


class Peer:
    """One sampler of the library. `accept` and the samplers here are not among our declarations."""

    def __init__(self, name: str, *arguments: tuple[Any, Any]) -> None:
        self._library = load_library(os.environ)
        dll: Any = ctypes.CDLL(str(self._library.path))
        create = getattr(dll, name)
        create.restype, create.argtypes = ctypes.c_void_p, [kind for kind, _ in arguments]
        self._sampler = create(*[value for _, value in arguments])
        self._accept: Callable[[int, int], None] = dll.llama_sampler_accept
        dll.llama_sampler_accept.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        dll.llama_sampler_accept.restype = None

    def accept(self, ids: Sequence[int]) -> None:
        for token in ids:
            self._accept(self._sampler, token)

    def apply(self, row: Logits, *, is_sorted: bool = False) -> tuple[list[int], list[float]]:
        """Ids and logits that are left, in the library's order."""
        data = np.zeros(len(row), RECORD)
        data["id"], data["logit"] = np.arange(len(row)), row
        if is_sorted:
            data = data[np.argsort(-row, kind="stable")]
        array = LlamaTokenDataArray()
        array.data, array.size, array.selected, array.sorted = data.ctypes.data, len(data), -1, is_sorted
        self._library.bindings.llama_sampler_apply(self._sampler, ctypes.pointer(array))
        start = (array.data - data.ctypes.data) // RECORD.itemsize
        kept = data[start : start + array.size]
        return kept["id"].tolist(), kept["logit"].tolist()

    def adjusted(self, row: Logits) -> Logits:
        ids, logits = self.apply(row)
        changed = np.full(len(row), -np.inf, np.float32)
        changed[ids] = logits
        return changed


def row_of(seed: int, size: int = N_VOCAB) -> Logits:
    return (np.random.default_rng(seed).standard_normal(size) * 3).astype(np.float32)


def history(seed: int, length: int = 120) -> list[int]:
    """Full of repetitions."""
    rng = np.random.default_rng(seed)
    parts = [rng.integers(20, 40, rng.integers(2, 9)).tolist() for _ in range(4)]
    ids: list[int] = []
    while len(ids) < length:
        ids += parts[rng.integers(4)]
    return ids[:length]


@pytest.fixture(scope="module")
def vocab(smollm2_path: Path) -> LlamaCppVocab:
    return load_vocab(smollm2_path, os.environ)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("last", [1000, 30])
def test_dry(vocab: LlamaCppVocab, seed: int, last: int):
    breakers = (ctypes.c_char_p * 2)(b"\n", b":")
    pointer: Any = vocab._pointer  # pyright: ignore[reportPrivateUsage]
    peer = Peer(
        "llama_sampler_init_dry",
        (ctypes.c_void_p, pointer),
        (ctypes.c_float, 0.8),
        (ctypes.c_float, 1.75),
        (ctypes.c_int32, 2),
        (ctypes.c_int32, last),
        (ctypes.POINTER(ctypes.c_char_p), breakers),
        (ctypes.c_size_t, 2),
    )
    colon = vocab.tokenize(":", parse_special=False)[0]
    ids = history(seed)
    if seed % 2:
        ids[80] = colon
    peer.accept(ids)
    row = row_of(seed, vocab.n_tokens)
    ours = row.copy()
    tokens = TokensWithText(vocab.n_tokens, lambda token: vocab.piece(token, special=True))
    params = DryPenalty(0.8, range=last, breakers=("\n", ":"))
    Dry(params, tokens.ids(params.breakers)).apply(ours, as_ids(ids[:50]), ids[50:])
    assert (ours != row).any() or last < 120
    np.testing.assert_allclose(ours, peer.adjusted(row), rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_penalties(seed: int):
    peer = Peer(
        "llama_sampler_init_penalties",
        (ctypes.c_int32, N_VOCAB),
        (ctypes.c_int32, 64),
        (ctypes.c_float, 1.3),
        (ctypes.c_float, 0.4),
        (ctypes.c_float, 0.7),
    )
    ids = history(seed, 60)
    peer.accept(ids)
    row = row_of(seed)
    ours = row.copy()
    RepetitionPenalty(1.3, 64).apply(ours, as_ids(()), ids)
    OccurrencePenalty(presence=0.7, frequency=0.4).apply(ours, as_ids(()), ids)
    np.testing.assert_allclose(ours, peer.adjusted(row), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", [0.5, 1.0, 3.0])
def test_top_n_sigma(n: float):
    for seed in range(5):
        row = row_of(seed)
        ours = row.copy()
        TopNSigma(n).apply(ours, as_ids(()), [])
        assert (ours > -np.inf).tolist() == (
            Peer("llama_sampler_init_top_n_sigma", (ctypes.c_float, n)).adjusted(row) > -np.inf
        ).tolist()


@pytest.mark.parametrize("threshold", [0.01, 0.1, 0.3, 0.5, 0.6])
def test_xtc(threshold: float):
    """With probability 1 the library's random number does not matter."""
    for seed in range(5):
        row = row_of(seed, 40)
        peer = Peer(
            "llama_sampler_init_xtc",
            (ctypes.c_float, 1.0),
            (ctypes.c_float, threshold),
            (ctypes.c_size_t, 1),
            (ctypes.c_uint32, 5),
        )
        kept, _ = peer.apply(row, is_sorted=True)
        order = np.argsort(-row, kind="stable")
        assert kept == order[obvious_choices(row[order].astype(np.float64), threshold) :].tolist()


@pytest.mark.parametrize(("temperature", "spread", "exponent"), [(1.0, 0.5, 1.0), (0.8, 1.5, 2.0), (0.3, 0.3, 0.5)])
def test_dynamic_temperature(temperature: float, spread: float, exponent: float):
    for seed in range(5):
        row = row_of(seed, 40)
        peer = Peer(
            "llama_sampler_init_temp_ext",
            (ctypes.c_float, temperature),
            (ctypes.c_float, spread),
            (ctypes.c_float, exponent),
        )
        _, logits = peer.apply(row, is_sorted=True)
        ordered = np.sort(row)[::-1].astype(np.float64)
        found = dynamic_temperature(ordered, temperature, DynamicTemperature(spread, exponent))
        np.testing.assert_allclose(ordered / found, logits, rtol=1e-3)

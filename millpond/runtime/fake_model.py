"""The fake model: a next-token function of a token history. Pure; knows no slot, no cell pool and no fault.

A cell's value is a 64-bit mix of everything its row saw (the sum of the values of all cells in view, the recurrent
state, its own position and token), as a KV entry is a function of the whole history. So one cell that is wrong,
missing, doubled or foreign changes every later value, and with it the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from millpond.runtime.base import Logits
from millpond.runtime.fake_vocab import IM_END, FakeVocab
from millpond.types import MemoryKind, TokenId

MASK = (1 << 64) - 1
_TOKEN = 0x9E3779B97F4A7C15
_POSITION = 0xC2B2AE3D27D4EB4F
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_NOISE_ROWS = 64
_TOP, _RUNNERS_UP, _COMPLETION, _UNLIKELY = 6.0, (5.0, 4.25, 3.5), 16.0, -12.0


def mix(view: int, position: int, token: TokenId) -> int:
    """Value of a cell: `view` stands for what its row attends to."""
    value = (view ^ (token * _TOKEN + (position + 1) * _POSITION)) & MASK
    value = ((value ^ (value >> 30)) * _FIRST) & MASK
    value = ((value ^ (value >> 27)) * _SECOND) & MASK
    return value ^ (value >> 31)


class FakeModel:
    """Logits of a value. With `eog_every` n, about one row in n has an end-of-generation token on top."""

    def __init__(
        self, vocab: FakeVocab, memory_kind: MemoryKind, *, seed: int = 0, eog_every: int | None = None
    ) -> None:
        self.vocab = vocab
        self.has_state = memory_kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)
        self.start = mix(seed, 0, 0)
        """View of an empty slot."""
        self._eog_every = eog_every
        self._eog_ids = sorted(vocab.eog_ids)
        self._readable = vocab.readable_ids
        self._completions = vocab.completions
        self._noise = self._make_noise(seed)

    def logits(self, value: int, token: TokenId) -> Logits:
        """A fresh float32[n_vocab] for a row whose cell has `value` and holds `token`."""
        row = self._noise[value % _NOISE_ROWS].copy()
        readable, count = self._readable, len(self._readable)
        for index, height in enumerate(_RUNNERS_UP):
            row[readable[(value >> (13 * index + 7)) % count]] = height
        if token in self._completions:
            row[self._completions[token]] = _COMPLETION
        elif self._eog_every is not None and (value >> 21) % self._eog_every == 0:
            row[IM_END] = _TOP
        else:
            row[readable[(value >> 3) % count]] = _TOP
        return row

    def expected(
        self, prompt_ids: Sequence[TokenId], n_tokens: int, choose: Callable[[Logits, int], TokenId]
    ) -> list[TokenId]:
        """Output of an undisturbed run: `choose(logits, output_index)` draws each token; ends after an EOG one."""
        if not prompt_ids:
            raise ValueError("the prompt is empty")
        view, state, output = self.start, 0, list[TokenId]()
        history: Iterable[tuple[int, TokenId]] = enumerate(prompt_ids)
        value, token = 0, 0
        for _ in range(n_tokens):
            for position, token in history:
                value = mix(view ^ state, position, token)
                view = (view + value) & MASK
                state = value if self.has_state else 0
            chosen = int(choose(self.logits(value, token), len(output)))
            history = [(len(prompt_ids) + len(output), chosen)]
            output.append(chosen)
            if chosen in self._eog_ids:
                break
        return output

    def _make_noise(self, seed: int) -> NDArray[np.float32]:
        shape = (_NOISE_ROWS, self.vocab.n_tokens)
        noise = np.random.default_rng(seed).uniform(-8.0, -2.0, shape).astype(np.float32)
        noise[:, self._eog_ids] = _UNLIKELY
        return noise


def greedy(logits: Logits, output_index: int) -> TokenId:
    """For FakeModel.expected."""
    del output_index
    return int(np.argmax(logits))


def greedy_without(banned: Iterable[TokenId]) -> Callable[[Logits, int], TokenId]:
    """For FakeModel.expected: the best token that is not banned (ignore_eos bans the end-of-generation ids)."""
    ids = sorted(banned)

    def choose(logits: Logits, output_index: int) -> TokenId:
        allowed = logits.copy()
        allowed[ids] = -np.inf
        return greedy(allowed, output_index)

    return choose

"""What a loaded model's memory really does, tried before anybody relies on it. Knows the runtime only.

For recurrent, hybrid and sliding-window memory the library accepts operations that leave a wrong state behind, and
some architectures mix up rows that are decoded together (shared/llama_cpp.md section 2, public report 34). So each
ability is proven on this model: what fails is switched off, and said.
"""

from __future__ import annotations

import numpy as np

from millpond.errors import RuntimeFailure
from millpond.outputs import MemoryAbilities
from millpond.runtime.base import Batch, Logits, Runtime
from millpond.types import SlotId, TokenId

PROBE_TOKENS = 24
RESTORE_TOLERANCE = 0.05
"""Largest difference of a logit after a restore: the same work in the same shape."""
BATCH_TOLERANCE = 1.0
"""Beside another row the kernels differ: noise is below this, a mixed-up state far above."""


def probe_memory(runtime: Runtime) -> MemoryAbilities:
    """Leaves every slot empty. Takes a few dozen rows."""
    probe = _Probe(runtime)
    try:
        restores = probe.restores()
        trims = restores and runtime.limits.can_trim and probe.trims()
        batches = not restores or runtime.limits.n_slots < 2 or probe.batches()
    except RuntimeFailure as error:
        return MemoryAbilities(False, False, False, True, (f"the memory test failed: {error}",))
    finally:
        probe.clear()
    findings: list[str] = []
    if not restores:
        findings.append("a restored state does not go on like the original: nothing is saved or reused")
    elif runtime.limits.can_trim and not trims:
        findings.append("a sequence that was cut back goes on wrong: after a failed step it starts over")
    if not batches:
        findings.append("sequences decoded together disturb each other: they run one at a time")
    return MemoryAbilities(restores, trims, batches, True, tuple(findings))


class _Probe:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        n_vocab = runtime.model.n_vocab
        self._tokens = [(17 + 101 * index) % n_vocab for index in range(PROBE_TOKENS + 2)]
        self._here = SlotId(0)
        self._there = SlotId(min(1, runtime.limits.n_slots - 1))
        self._expected = np.zeros(n_vocab, np.float32)

    def restores(self) -> bool:
        self._prefill()
        saved = self._runtime.save(self._here, 0, PROBE_TOKENS)
        self._expected = self._next([self._here], PROBE_TOKENS)[0]
        self._runtime.drop(self._there)
        self._runtime.restore(self._there, 0, PROBE_TOKENS, saved)
        return self._goes_on(self._there)

    def trims(self) -> bool:
        """After restores(): the original is cut back by its last token, which is then computed again."""
        try:
            self._runtime.trim(self._here, PROBE_TOKENS)
        except RuntimeFailure:
            return False
        return self._goes_on(self._here)

    def _goes_on(self, slot: SlotId) -> bool:
        """The slot holds PROBE_TOKENS tokens; then one more, as every slot of the probe."""
        return _distance(self._next([slot], PROBE_TOKENS)[0], self._expected) <= RESTORE_TOLERANCE

    def batches(self) -> bool:
        """Both slots hold the same PROBE_TOKENS + 1 tokens, after restores() with two slots."""
        length = PROBE_TOKENS + 1
        saved = self._runtime.save(self._there, 0, length)
        alone = self._next([self._there], length)[0]
        self._runtime.drop(self._there)
        self._runtime.restore(self._there, 0, length, saved)
        together = self._next([self._here, self._there], length)
        return all(_distance(row, alone) <= BATCH_TOLERANCE for row in together)

    def clear(self) -> None:
        self._runtime.drop(self._here)
        self._runtime.drop(self._there)

    def _prefill(self) -> None:
        self._decode(self._tokens[:PROBE_TOKENS], list(range(PROBE_TOKENS)), [self._here] * PROBE_TOKENS)

    def _next(self, slots: list[SlotId], position: int) -> list[Logits]:
        self._decode([self._tokens[position]] * len(slots), [position] * len(slots), slots)
        return [self._runtime.logits(row).copy() for row in range(len(slots))]

    def _decode(self, tokens: list[TokenId], positions: list[int], slots: list[SlotId]) -> None:
        self._runtime.decode(
            Batch(
                np.array(tokens, np.int32),
                np.array(positions, np.int32),
                np.array(slots, np.int32),
                np.ones(len(tokens), np.bool_),
            )
        )


def _distance(first: Logits, second: Logits) -> float:
    return float(np.max(np.abs(first - second)))

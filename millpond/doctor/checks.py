"""The exactness checks on one runtime: the same tokens in another company must give the same logits, bit for bit.

Knows tokens, slots and logits of a Runtime with at least 8 empty slots; no files, no candidates.

    even slots   long    P tokens, more than 512 cells in view: there attention may take other kernels
    odd slots    short   S tokens
Each history is computed once, in slot 0 and 1, and restored into the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from millpond.doctor.exact_settings import Check, ExactSettings, Speed, Trial, Verdict
from millpond.runtime.base import Batch, Runtime
from millpond.types import SlotId, TokenId

N_SLOTS = 8
LONG = 530
SHORT = 40
DECODED = 70
"""Tokens decoded one by one beyond the long history; a chunk of as many takes the kernels of wide queries."""
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 17, 31, 33, 64, 65)
MIXED_CHUNKS = (30, 41)
STEPS = 6
COMPANIES: tuple[tuple[tuple[int, ...], ...], ...] = (
    (tuple(range(8)),),
    ((0, 1, 2, 3), (4, 5, 6, 7)),
    ((0, 1, 2, 3, 4), (5, 6, 7)),
    ((0, 2, 3, 4, 6, 7), (1, 5)),
    ((0,), (1, 2, 3, 4, 5, 6, 7)),
    (tuple(range(8)),),
)
"""Who decodes together in each of STEPS steps."""

CELLS_PER_SLOT = 768
"""Holds LONG + DECODED, a multiple of the step that llama.cpp rounds to."""

Rows = dict[int, NDArray[np.float32]]
"""Logits by position."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Lengths, cut down for models with a short context."""

    long: int
    short: int
    decoded: int
    chunks: tuple[int, ...]

    @classmethod
    def for_context(cls, n_ctx: int) -> Plan:
        """`n_ctx`: tokens that a sequence may have."""
        decoded = min(DECODED, n_ctx // 4)
        long = min(LONG, n_ctx - decoded)
        ends = list(accumulate(CHUNKS))
        fitting = sum(end <= long for end in ends)
        return cls(long, min(SHORT, long // 2), decoded, CHUNKS[:fitting])


class Probe:
    """Feeds tokens to slots and keeps count of what each holds; logits come back as copies."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._lengths = [0] * N_SLOTS

    def feed(self, parts: Mapping[int, Sequence[TokenId]], *, wanted: Sequence[int] | None = None) -> dict[int, Rows]:
        """One batch. Logits of each slot's last row, or of the positions `wanted` where the batch has them."""
        slots = sorted(parts)
        counts = [len(parts[slot]) for slot in slots]
        starts = [self._lengths[slot] for slot in slots]
        positions = np.concatenate([np.arange(s, s + n, dtype=np.int32) for s, n in zip(starts, counts, strict=True)])
        owners = np.repeat(np.array(slots, np.int32), counts)
        if wanted is None:
            asks = np.zeros(len(positions), np.bool_)
            asks[np.cumsum(counts) - 1] = True
        else:
            asks = np.isin(positions, np.array(wanted, np.int32))
        tokens = np.concatenate([np.array(parts[slot], np.int32) for slot in slots])
        self.runtime.decode(Batch(tokens, positions, owners, asks))
        for slot, start, count in zip(slots, starts, counts, strict=True):
            self._lengths[slot] = start + count
        found: dict[int, Rows] = {slot: {} for slot in slots}
        for row in np.flatnonzero(asks).tolist():
            found[int(owners[row])][int(positions[row])] = self.runtime.logits(row).copy()
        return found

    def save(self, slot: int) -> bytes:
        return self.runtime.save(SlotId(slot), 0, self._lengths[slot])

    def restore(self, slot: int, data: bytes, length: int) -> None:
        """Into the slot, emptied first."""
        self.drop(slot)
        self.runtime.restore(SlotId(slot), 0, length, data)
        self._lengths[slot] = length

    def drop(self, slot: int) -> None:
        self.runtime.drop(SlotId(slot))
        self._lengths[slot] = 0


class Comparison:
    """Collects pairs of logits that ought to be the same."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._rows = 0
        self._exact = True
        self._largest = 0.0

    def add(self, expected: Rows, found: Rows) -> None:
        """Every position of `found` must be in `expected`."""
        for position, row in found.items():
            other = expected[position]
            self._rows += 1
            if not np.array_equal(row.view(np.uint32), other.view(np.uint32)):
                self._exact = False
                self._largest = max(self._largest, float(np.nanmax(np.abs(row - other))))

    def verdict(self) -> Verdict:
        return Verdict(self._check, self._exact, self._largest, self._rows)


class Trials:
    """The checks of one candidate on one runtime, over one made-up history. `clock` in seconds, monotonic."""

    def __init__(self, runtime: Runtime, clock: Callable[[], float]) -> None:
        n_ctx = min(runtime.limits.cells_per_slot, runtime.model.n_ctx_train or CELLS_PER_SLOT)
        self._plan = Plan.for_context(n_ctx)
        self._probe = Probe(runtime)
        self._clock = clock
        self._tokens = plain_tokens(runtime, self._plan.long + self._plan.decoded)
        self._whole: Rows = {}
        """Logits of the long history prefilled in one piece, where chunks end."""
        self._alone: dict[int, Rows] = {}
        """By slot: logits of STEPS tokens decoded alone."""
        self._saved = {0: b"", 1: b""}

    def run(self, settings: ExactSettings, report: Callable[[str], None]) -> Trial:
        """`report` hears what is being done. Raises RuntimeFailure where the library fails."""
        report("prefill")
        speed = self._prepare()
        verdicts: list[Verdict] = []
        for check, run in self._checks():
            report(check.value)
            verdicts.append(run())
            if not verdicts[-1].exact:
                break
        return Trial(settings, tuple(verdicts), speed, self._plan.long + self._plan.decoded)

    def _checks(self) -> Iterator[tuple[Check, Callable[[], Verdict]]]:
        yield Check.BATCH, self._batch
        yield Check.RESTORE, self._restore
        yield Check.CHUNK, self._chunk
        yield Check.MIXED, self._mixed
        yield Check.REPREFILL, self._reprefill

    def _prepare(self) -> Speed:
        """Prefills long and short history whole, and decodes STEPS tokens of each slot alone."""
        probe, plan = self._probe, self._plan
        ends = [*accumulate(plan.chunks), *accumulate(MIXED_CHUNKS), plan.long]
        began = self._clock()
        self._whole = probe.feed({0: self._tokens[: plan.long]}, wanted=[end - 1 for end in ends])[0]
        prefilled = self._clock()
        probe.feed({1: self._tokens[: plan.short]})
        self._saved = {0: probe.save(0), 1: probe.save(1)}
        self._refill()
        decoding = self._clock()
        for slot in range(N_SLOTS):
            self._alone[slot] = {}
            for step in range(STEPS):
                self._alone[slot].update(probe.feed({slot: [self._next(slot, step)]})[slot])
        decoded = self._clock()
        per_token = (decoded - decoding) / (N_SLOTS * STEPS)
        return Speed(plan.long / max(prefilled - began, 1e-9), per_token * 1e3)

    def _refill(self) -> None:
        """Long history in even slots, short in odd ones."""
        for slot in range(N_SLOTS):
            self._probe.restore(slot, self._saved[slot % 2], self._length(slot))

    def _length(self, slot: int) -> int:
        return self._plan.short if slot % 2 else self._plan.long

    def _next(self, slot: int, step: int) -> TokenId:
        """What stream `slot` is given at `step`: another token for each."""
        return self._tokens[(slot * STEPS + step) * 5 % len(self._tokens)]

    def _batch(self) -> Verdict:
        comparison = Comparison(Check.BATCH)
        self._refill()
        for step, companies in enumerate(COMPANIES):
            for company in companies:
                found = self._probe.feed({slot: [self._next(slot, step)] for slot in company})
                for slot, rows in found.items():
                    comparison.add(self._alone[slot], rows)
        return comparison.verdict()

    def _restore(self) -> Verdict:
        """The state is taken after decoding, and goes to a slot that held something else."""
        comparison = Comparison(Check.RESTORE)
        probe = self._probe
        for slot, target in ((0, 3), (1, 2)):
            self._refill()
            probe.feed({slot: [self._next(slot, 0)]})
            probe.restore(target, probe.save(slot), self._length(slot) + 1)
            for step in range(1, STEPS):
                comparison.add(self._alone[slot], probe.feed({target: [self._next(slot, step)]})[target])
        return comparison.verdict()

    def _chunk(self) -> Verdict:
        comparison = Comparison(Check.CHUNK)
        self._probe.drop(3)
        for start, end in pairwise([0, *accumulate(self._plan.chunks)]):
            comparison.add(self._whole, self._probe.feed({3: self._tokens[start:end]})[3])
        return comparison.verdict()

    def _mixed(self) -> Verdict:
        """Slot 2 is prefilled while the others decode."""
        comparison = Comparison(Check.MIXED)
        self._refill()
        self._probe.drop(2)
        chunks = pairwise([0, *accumulate(size for size in MIXED_CHUNKS)])
        for step, (start, end) in enumerate(chunks):
            if end > self._plan.long:
                break
            parts = {slot: [self._next(slot, step)] for slot in range(N_SLOTS) if slot != 2}
            found = self._probe.feed({**parts, 2: self._tokens[start:end]})
            comparison.add(self._whole, found.pop(2))
            for slot, rows in found.items():
                comparison.add(self._alone[slot], rows)
        return comparison.verdict()

    def _reprefill(self) -> Verdict:
        comparison = Comparison(Check.REPREFILL)
        probe, plan = self._probe, self._plan
        self._refill()
        decoded: Rows = {}
        following = self._tokens[plan.long : plan.long + plan.decoded]
        for token in following:
            decoded.update(probe.feed({0: [token]})[0])
        found = probe.feed({2: following}, wanted=range(plan.long, plan.long + plan.decoded))[2]
        comparison.add(decoded, found)
        return comparison.verdict()


def plain_tokens(runtime: Runtime, count: int) -> list[TokenId]:
    """Ids spread over the vocabulary, no control tokens; the same for every run."""
    vocab = runtime.vocab
    stride = 7919 if vocab.n_tokens % 7919 else 7907
    found: list[TokenId] = []
    at = 0
    while len(found) < count:
        at = (at + stride) % vocab.n_tokens
        if not vocab.is_control(at) and at not in vocab.eog_ids:
            found.append(at)
    return found

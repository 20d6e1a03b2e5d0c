"""Oracle 3: are greedy ids what the model says, up to float noise? Knows a Runtime; not how the ids came about.

In the unified pool outputs are right but not bit-stable, so ids cannot be compared with a solo run. Instead one
teacher-forced pass over prompt + output asks at each place how far the emitted id is below the largest logit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millpond.errors import InvalidParameter
from millpond.runtime.base import Batch, Logits, Runtime
from millpond.types import SlotId, TokenId

LARGEST_CONSISTENT_GAP = 1.0
"""In logits. Right outputs stay under 0.3; a lost, doubled or altered token is far above."""
_CHUNK_ROWS = 128
_SLOT = SlotId(0)


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the id at `output_index` lies below the best allowed id, in logits; never negative."""

    size: float
    output_index: int


def largest_gap(
    runtime: Runtime, prompt_ids: Sequence[TokenId], output_ids: Sequence[TokenId], banned: Collection[TokenId] = ()
) -> float:
    """The largest distance in logits between an emitted id and the best id that was not `banned`.

    Uses slot 0, which must be empty, and leaves it empty. Raises InvalidParameter if there is nothing to check, an
    emitted id is banned, or the ids do not fit the context.
    """
    return max(gap.size for gap in gaps(runtime, prompt_ids, output_ids, banned))


def worst_gap(
    runtime: Runtime, prompt_ids: Sequence[TokenId], output_ids: Sequence[TokenId], banned: Collection[TokenId] = ()
) -> Gap:
    """As largest_gap, with the place."""
    return max(gaps(runtime, prompt_ids, output_ids, banned), key=lambda gap: gap.size)


def gaps(
    runtime: Runtime, prompt_ids: Sequence[TokenId], output_ids: Sequence[TokenId], banned: Collection[TokenId] = ()
) -> list[Gap]:
    """One Gap per output id, in order. See largest_gap for the errors."""
    _check(runtime, prompt_ids, output_ids, banned)
    # The last id is predicted, never fed.
    history = np.array([*prompt_ids, *output_ids[:-1]], dtype=np.int32)
    masked = np.array(sorted(banned), dtype=np.intp)
    found: list[Gap] = []
    try:
        for start, batch in _chunks(history, first_wanted=len(prompt_ids) - 1, rows=_rows(runtime)):
            runtime.decode(batch)
            for row in np.flatnonzero(batch.wants_logits).tolist():
                index = start + row - (len(prompt_ids) - 1)
                found.append(Gap(_distance(runtime.logits(row), output_ids[index], masked), index))
    finally:
        runtime.drop(_SLOT)
    return found


def with_lost_token(output_ids: Sequence[TokenId], index: int) -> list[TokenId]:
    """A planted defect, to show that the oracle sees it: the id at `index` is missing."""
    return [*output_ids[:index], *output_ids[index + 1 :]]


def with_wrong_token(output_ids: Sequence[TokenId], index: int, token_id: TokenId) -> list[TokenId]:
    """A planted defect: another id at `index`."""
    return [*output_ids[:index], token_id, *output_ids[index + 1 :]]


def _check(
    runtime: Runtime, prompt_ids: Sequence[TokenId], output_ids: Sequence[TokenId], banned: Collection[TokenId]
) -> None:
    if not prompt_ids or not output_ids:
        raise InvalidParameter("output_ids", "the oracle needs a prompt and an output")
    emitted = set(output_ids) & set(banned)
    if emitted:
        raise InvalidParameter("output_ids", f"banned ids were emitted: {sorted(emitted)}")
    needed, room = len(prompt_ids) + len(output_ids) - 1, runtime.limits.cells_per_slot
    if needed > room:
        raise InvalidParameter("output_ids", f"{needed} tokens do not fit the oracle's context of {room}")


def _rows(runtime: Runtime) -> int:
    return min(_CHUNK_ROWS, runtime.limits.n_batch)


def _chunks(history: NDArray[np.int32], first_wanted: int, rows: int) -> Iterator[tuple[int, Batch]]:
    for start in range(0, len(history), rows):
        ids = history[start : start + rows]
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        yield start, Batch(ids, positions, np.full(len(ids), _SLOT, dtype=np.int32), positions >= first_wanted)


def _distance(logits: Logits, token_id: TokenId, masked: NDArray[np.intp]) -> float:
    allowed = logits.copy()
    allowed[masked] = -np.inf
    return float(allowed.max() - logits[token_id])

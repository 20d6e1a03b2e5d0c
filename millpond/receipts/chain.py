"""Is a file of receipts what was written? Knows rows and hashes; replays nothing.

A changed, added, removed or reordered row breaks the chain. Rows cut off at the end do not: compare the head with one
that was noted elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from millpond.receipts.receipt import chain_hash, decode_receipt
from millpond.receipts.store import EndRow


@dataclass(frozen=True, slots=True)
class Verdict:
    count: int
    head: str
    """Hash of the last row."""
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        return not self.problems


def verify(rows: Iterable[EndRow], anchor: str, *, head: str | None = None) -> Verdict:
    """`anchor`: what the first row must follow. `head`: noted at an earlier time, the hash that a row must have."""
    problems: list[str] = []
    previous, count = anchor, 0
    head_seen = head is None or head == anchor
    for row in rows:
        count += 1
        problems += _problems(row, previous)
        previous = row.hash
        head_seen = head_seen or row.hash == head
    if not head_seen:
        problems.append(f"no receipt has the hash {head}: what came up to it is gone or changed")
    return Verdict(count, previous, tuple(problems))


def _problems(row: EndRow, previous: str) -> list[str]:
    found: list[str] = []
    if row.previous != previous:
        found.append(f"receipt {row.number} does not follow the one before it: rows are missing, added or moved")
    if chain_hash(row.previous, row.body) != row.hash:
        return [*found, f"receipt {row.number} was changed: its content does not have its hash"]
    try:
        receipt = decode_receipt(row.body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        return [*found, f"receipt {row.number} cannot be read: {error}"]
    columns = (row.run, row.sequence, row.request_id, row.ended_at)
    if columns != (receipt.run, receipt.sequence, receipt.request_id, receipt.ended_at):
        found.append(f"receipt {row.number}: its columns are not those of its content")
    return found

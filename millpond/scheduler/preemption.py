"""Who is parked when cells or slots run out. PURE.

Lowest priority first, then fewest generated tokens (least is lost, and the deepest finish soonest and free everything),
then the newest. A resumed sequence is immune for 64 tokens unless all are: measured in met and unsloth's forks, the
choice among small victims is within noise, parking the largest costs most (shared/behaviours/met.md 2.1 and 5).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from millpond.scheduler.sequence import Sequence

IMMUNITY_TOKENS = 64


def choose_victim(running: Seq[Sequence]) -> Sequence | None:
    """None when fewer than two run: the last one is never parked for cells."""
    if len(running) < 2:
        return None
    candidates = [seq for seq in running if seq.num_output_tokens >= seq.immune_until] or list(running)
    return min(candidates, key=_victim_key)


def choose_slot_victim(running: Seq[Sequence], waiter: Sequence, *, turns: bool) -> Sequence | None:
    """Whose place a waiter may have: a runner of lower priority, or with `turns` one whose turn is over."""
    priority = waiter.request.priority
    lower = [seq for seq in running if seq.request.priority < priority]
    if lower:
        return min(lower, key=_victim_key)
    over = [
        seq
        for seq in running
        if turns
        and seq.request.priority == priority
        and seq.turn_ends is not None
        and seq.num_output_tokens >= seq.turn_ends
    ]
    return min(over, key=lambda seq: seq.order, default=None)


def _victim_key(sequence: Sequence) -> tuple[int, int, int]:
    return (sequence.request.priority, sequence.num_output_tokens, -sequence.order)

"""Who is parked when cells or slots run out. PURE.

Lowest priority first, then fewest generated tokens (least is lost, and the deepest finish soonest and free everything),
then the newest. A resumed sequence is immune for 64 tokens unless all are: measured in met and unsloth's forks, the
choice among small victims is within noise, parking the largest costs most (shared/behaviours/met.md 2.1 and 5).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

from millpond.scheduler.sequence import Sequence

IMMUNITY_TOKENS = 64


VictimRule: TypeAlias = Callable[[Sequence], tuple[int, ...]]
"""The sequence with the smallest value goes first."""


def least_generated(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, sequence.num_output_tokens, -sequence.order)


def newest(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, -sequence.order)


def most_generated(sequence: Sequence) -> tuple[int, ...]:
    return (sequence.request.priority, -sequence.num_output_tokens, -sequence.order)


VICTIM_RULES: dict[str, VictimRule] = {
    "least-generated": least_generated,
    "newest": newest,
    "most-generated": most_generated,
}


def choose_victim(running: Seq[Sequence], rule: VictimRule = least_generated) -> Sequence | None:
    """None when fewer than two run: the last one is never parked for cells."""
    if len(running) < 2:
        return None
    candidates = [seq for seq in running if seq.num_output_tokens >= seq.immune_until] or list(running)
    return min(candidates, key=rule)


def choose_slot_victim(running: Seq[Sequence], waiter: Sequence, *, turns: bool) -> Sequence | None:
    """Whose place a waiter may have: a runner of lower priority, or with `turns` one whose turn is over."""
    priority = waiter.request.priority
    lower = [seq for seq in running if seq.request.priority < priority]
    if lower:
        return min(lower, key=least_generated)
    over = [
        seq
        for seq in running
        if turns
        and seq.request.priority == priority
        and seq.turn_ends is not None
        and seq.num_output_tokens >= seq.turn_ends
    ]
    return min(over, key=lambda seq: seq.order, default=None)

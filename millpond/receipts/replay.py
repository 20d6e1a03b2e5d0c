"""Generates again what a receipt says, and compares. Knows receipts and ids; the engine is a function it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millpond.receipts.receipt import Receipt, params_of
from millpond.request import Request
from millpond.types import RequestId, TokenId


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where the outputs are not the same; None: the output had ended there."""

    index: int
    recorded: TokenId | None
    generated: TokenId | None

    def __str__(self) -> str:
        return f"token {self.index} was {_shown(self.recorded)} and is now {_shown(self.generated)}"


def first_difference(recorded: Sequence[TokenId], generated: Sequence[TokenId]) -> Difference | None:
    for index in range(max(len(recorded), len(generated))):
        old = recorded[index] if index < len(recorded) else None
        new = generated[index] if index < len(generated) else None
        if old != new:
            return Difference(index, old, new)
    return None


def request_of(receipt: Receipt, arrival: float) -> Request:
    """The recorded request, limited to the length that was recorded: what a stop string or a client cut is not made.

    Raises CallerError for parameters of another version.
    """
    return Request(
        request_id=RequestId(receipt.request_id),
        prompt_ids=tuple(receipt.prompt_ids),
        params=params_of(receipt),
        max_tokens=len(receipt.output_ids),
        seed=receipt.seed,
        arrival=arrival,
    )


def replay(
    receipt: Receipt, generate: Callable[[Request], Sequence[TokenId]], arrival: float = 0.0
) -> Difference | None:
    """None: the same output, token for token. An empty output is the same without being run."""
    if not receipt.output_ids:
        return None
    return first_difference(receipt.output_ids, generate(request_of(receipt, arrival)))


def _shown(token: TokenId | None) -> str:
    return "the end" if token is None else str(token)

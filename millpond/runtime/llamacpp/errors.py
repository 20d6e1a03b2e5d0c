"""How llama.cpp's refusals become Millpond's errors. Knows return codes and log texts; calls nothing."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.errors import DecodeFailed, KVExhausted, RuntimeFailure, StateRejected

NO_CELL = 1
_MEANINGS = {
    2: "aborted",
    -1: "the library refused the batch",
    -2: "out of memory or failed to prepare the batch",
    -3: "the computation failed",
}
_EXPLAINS = "error loading model: "
_NO_ROOM_MARKS = ("available cells in kv cache", "not enough cells in kv cache", "not enough cells in the recurrent")


def decode_error(code: int, rows: int) -> RuntimeFailure:
    """The error of a non-zero llama_decode."""
    if code == NO_CELL:
        return KVExhausted(f"no free KV cells for a batch of {rows} tokens")
    meaning = _MEANINGS.get(code, "unknown failure")
    return DecodeFailed(f"llama_decode returned {code} for {rows} rows: {meaning}", return_code=code)


def restore_error(reasons: Sequence[str], size: int) -> KVExhausted | StateRejected:
    """The error of a failed set_data: the return value is 0 either way, only the log says which."""
    if any(mark in reason for reason in reasons for mark in _NO_ROOM_MARKS):
        return KVExhausted("no free KV cells for the saved state")
    return StateRejected(f"{size} saved bytes were not taken: {_last(reasons)}")


def load_reason(reasons: Sequence[str]) -> str:
    """Why the library failed to load: its own explanation where it gave one, else the last thing it logged."""
    explanations = [reason.partition(_EXPLAINS)[2] for reason in reasons if _EXPLAINS in reason]
    return explanations[0] if explanations else _last(reasons)


def _last(reasons: Sequence[str]) -> str:
    return reasons[-1] if reasons else "the library gave no reason"

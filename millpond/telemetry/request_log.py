"""One log line for each output that ended and for each refusal. Knows ids, counts and times; texts only if asked to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from millpond.engine_client.observer import NullObserver
from millpond.engine_client.token_log import TokenLog
from millpond.types import TokenId

logger = logging.getLogger("millpond.requests")


class RequestLog(NullObserver):
    def __init__(self) -> None:
        self._piece: Callable[[TokenId], bytes] | None = None

    def show_texts(self, piece: Callable[[TokenId], bytes]) -> None:
        """From now on lines have the texts, too; `piece`: a token's bytes."""
        self._piece = piece

    def on_finished(self, log: TokenLog, now: float) -> None:
        finish = log.finish
        if finish is None or not logger.isEnabledFor(logging.INFO):
            return
        request, usage = log.request, finish.usage
        first = None if log.first_token_at is None else _ms(log.first_token_at - request.arrival)
        fields = {
            "sequence": int(log.sequence_id),
            "reason": finish.reason.value,
            "prompt_tokens": len(request.prompt_ids),
            "cached_tokens": usage.cached_tokens,
            "output_tokens": finish.output_length,
            "total_ms": _ms(now - request.arrival),
            "queue_ms": _ms(usage.queue_ms / 1e3),
            "first_token_ms": first,
            "parked_ms": _ms(log.total_parked(now)),
            "preemptions": usage.preemptions,
        }
        if self._piece is not None:
            fields |= {"prompt": _text(request.prompt_ids, self._piece), "output": _text(log.ids, self._piece)}
        words = "%s ended by %s: %d prompt tokens, %d output tokens, %.0f ms"
        values = (request.request_id, finish.reason.value, len(request.prompt_ids), finish.output_length)
        extra = {"request_id": request.request_id, "fields": fields}
        logger.info(words, *values, fields["total_ms"], extra=extra)

    def on_refused(self, kind: str) -> None:
        logger.info("refused a request: %s", kind, extra={"fields": {"reason": kind}})


def _text(ids: Sequence[TokenId], piece: Callable[[TokenId], bytes]) -> str:
    return b"".join(map(piece, ids)).decode("utf-8", "replace")


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)

"""A look at the engine and its requests, for people: values made when somebody looks, nothing kept for them before.

Knows logs and the engine's inspections; no JSON, no viewer. What a request says is never in it, only counts and times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millpond.engine_client.logbook import LogBook
from millpond.engine_client.supervisor import Supervisor
from millpond.engine_client.token_log import TokenLog
from millpond.outputs import PoolRun, SequenceProgress
from millpond.types import FinishReason, RequestId, SequenceId


@dataclass(frozen=True, slots=True)
class RequestView:
    """One output of a request. Times are monotonic seconds, on the clock of EngineView.now."""

    sequence_id: SequenceId
    request_id: RequestId
    namespace: str
    priority: int
    state: str
    """waiting, running, parked or ended."""
    parked_for: str | None
    """What was short: cells or slots; restart: its engine died. None: not parked, or the engine did not say yet."""
    prompt_tokens: int
    cached_tokens: int | None
    """Of the prompt, those not computed for it; None while nobody knows."""
    computed_tokens: int | None
    """Tokens that its cells hold now; None while nobody knows."""
    generated_tokens: int
    max_tokens: int
    accepted_at: float
    started_at: float | None
    first_token_at: float | None
    ended_at: float | None
    pauses: tuple[tuple[float, float | None], ...]
    """From and until; an open one has no end."""
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class EngineView:
    now: float
    requests: tuple[RequestView, ...]
    """Live ones, in order of acceptance."""
    tokens: int
    """Output tokens of all requests since the server started."""
    losses: int
    pool: tuple[PoolRun, ...] | None
    """As the engine last said; None: it did not yet."""


class EngineWindow:
    """One event loop thread uses it."""

    def __init__(self, book: LogBook, supervisor: Supervisor, clock: Callable[[], float]) -> None:
        self._book = book
        self._supervisor = supervisor
        self._clock = clock

    def ask(self) -> None:
        """Asks the engine for its pool; a `look` after its running step has it."""
        self._supervisor.inspect()

    def look(self) -> EngineView:
        inspection = self._supervisor.inspection
        progress = {} if inspection is None else {row.sequence_id: row for row in inspection.sequences}
        return EngineView(
            now=self._clock(),
            requests=tuple(request_view(log, progress.get(log.sequence_id)) for log in self._book.live),
            tokens=self._book.tokens,
            losses=self._book.losses,
            pool=None if inspection is None else tuple(inspection.pool),
        )

    def watch_ends(self, listener: Callable[[RequestView], None]) -> Callable[[], None]:
        """`listener` hears of every request that ends, until what is returned is called."""

        def tell(log: TokenLog) -> None:
            listener(request_view(log, None))

        self._book.end_listeners.append(tell)
        return lambda: self._book.end_listeners.remove(tell)


def request_view(log: TokenLog, progress: SequenceProgress | None) -> RequestView:
    """`progress`: where the engine said that it stands, if it did."""
    request, finish = log.request, log.finish
    cached = finish.usage.cached_tokens if finish is not None else progress and progress.cached_tokens
    pauses: list[tuple[float, float | None]] = [*log.pauses]
    if log.paused_at is not None:
        pauses.append((log.paused_at, log.finished_at))
    return RequestView(
        sequence_id=log.sequence_id,
        request_id=request.request_id,
        namespace=request.namespace,
        priority=request.priority,
        state=_state(log),
        parked_for=_parked_for(log, progress) if log.is_parked else None,
        prompt_tokens=len(request.prompt_ids),
        cached_tokens=cached,
        computed_tokens=progress and progress.computed_tokens,
        generated_tokens=len(log.ids),
        max_tokens=request.max_tokens,
        accepted_at=request.arrival,
        started_at=log.started_at,
        first_token_at=log.first_token_at,
        ended_at=log.finished_at,
        pauses=tuple(pauses),
        finish=None if finish is None else finish.reason,
    )


def _state(log: TokenLog) -> str:
    if log.finish is not None:
        return "ended"
    if log.is_parked:
        return "parked"
    return "waiting" if log.is_waiting else "running"


def _parked_for(log: TokenLog, progress: SequenceProgress | None) -> str | None:
    if progress is not None and progress.parked_for is not None:
        return progress.parked_for
    return "restart" if log.awaits_engine else None

"""What one viewer may see of a look, as plain values for JSON. PURE: knows views and who owns what; no HTTP, no clock.

A request of somebody else is a bar without a name: sizes, state and times. No prompt, no key and no namespace is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millpond.async_llm import EngineStatus, RequestView
from millpond.console.feed import Look
from millpond.outputs import PoolRun

MAX_REQUESTS = 128
"""Live requests in a snapshot; the rest is counted."""
MAX_RUNS = 1024
_ORDER = {"running": 0, "parked": 1, "waiting": 2}


@dataclass(frozen=True, slots=True)
class Viewer:
    sees_all: bool
    owns: Callable[[str], bool]
    """Whether requests of a namespace are the viewer's own."""


def snapshot(look: Look, viewer: Viewer) -> dict[str, Any]:
    """Times are seconds on the server's monotonic clock; `now` is when the look was taken."""
    view, status = look.view, look.status
    live = sorted(view.requests, key=lambda request: (_ORDER[request.state], request.sequence_id))
    shown = [*live[:MAX_REQUESTS], *look.ended]
    states = [request.state for request in view.requests]
    return {
        "now": round(view.now, 3),
        "engine": _engine(status),
        "sees_all": viewer.sees_all,
        "counts": {state: states.count(state) for state in _ORDER},
        "not_shown": max(0, len(live) - MAX_REQUESTS),
        "requests": [_request(request, viewer) for request in shown],
        "cells": _cells(status, view.pool),
        "pool": None if view.pool is None else _pool(view.pool),
        "tokens": view.tokens,
        "losses": view.losses,
        "totals": _totals(status),
    }


def _engine(status: EngineStatus) -> dict[str, Any]:
    info = status.info
    known = None
    if info is not None:
        known = {
            "model": info.model.name,
            "description": info.model.description,
            "cells": info.n_cells,
            "slots": info.n_slots,
            "max_running": info.max_running,
            "max_model_len": info.max_model_len,
            "unified": info.unified,
        }
    return {"state": status.state, "detail": status.detail, "restarts": status.restarts, "info": known}


def _request(request: RequestView, viewer: Viewer) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "sequence": request.sequence_id,
        "own": False,
        "state": request.state,
        "prompt": request.prompt_tokens,
        "generated": request.generated_tokens,
        "accepted_at": round(request.accepted_at, 3),
        "started_at": _time(request.started_at),
        "first_token_at": _time(request.first_token_at),
        "ended_at": _time(request.ended_at),
        "pauses": [[_time(start), _time(end)] for start, end in request.pauses],
        "parked_for": request.parked_for,
    }
    if not viewer.sees_all and not viewer.owns(request.namespace):
        return shown
    return shown | {
        "own": True,
        "id": request.request_id,
        "priority": request.priority,
        "cached": request.cached_tokens,
        "computed": request.computed_tokens,
        "max_tokens": request.max_tokens,
        "finish": None if request.finish is None else request.finish.value,
    }


def _time(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _cells(status: EngineStatus, pool: Sequence[PoolRun] | None) -> dict[str, int] | None:
    """From the pool where it is known: the figures of the last step may be those of a busier time."""
    if status.info is None:
        return None
    total = status.info.n_cells
    stats = status.stats
    if pool is not None:
        used = sum(run.cells for run in pool)
        cached = sum(run.cells for run in pool if not run.sequence_ids)
    else:
        used, cached = (0, 0) if stats is None else (stats.cells_used, stats.cells_cached)
    return {"total": total, "used": used, "cached": cached, "free": total - used}


def _pool(pool: Sequence[PoolRun]) -> list[list[Any]]:
    """[owners, slots that share it, first token, cells] a run; the smallest of very many are left out."""
    kept = pool
    if len(pool) > MAX_RUNS:
        smallest = sorted(run.cells for run in pool)[-MAX_RUNS]
        kept = [run for run in pool if run.cells >= smallest][:MAX_RUNS]
    return [[run.sequence_ids, len(run.slots), run.start, run.cells] for run in kept]


def _totals(status: EngineStatus) -> dict[str, float] | None:
    """Sums of this engine process."""
    if status.stats is None or status.stats.totals is None:
        return None
    return {name: round(value, 3) for name, value in asdict(status.stats.totals).items()}

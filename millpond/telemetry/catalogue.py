"""Every metric: its name, kind, labels and meaning, and where in the ledger its value is. Knows no exporter.

docs/metrics.md is made from this list. Seconds, bytes, tokens and cells are the units, and part of the names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from millpond.outputs import EngineInfo
from millpond.telemetry.histogram import Histogram
from millpond.telemetry.ledger import Ledger
from millpond.types import FinishReason


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class View:
    """What a value is read from, at one moment."""

    ledger: Ledger
    now: float
    """Monotonic seconds."""
    model: str
    version: str
    info: EngineInfo | None
    side_counts: Mapping[str, float]
    """Of receipts and plugins, by metric name; empty where they are off."""


Sample: TypeAlias = tuple[tuple[str, ...], float | Histogram]
"""Label values in the metric's order, and the value."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """Of a counter without the `_total` that the exposition adds."""
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[View], Iterable[Sample]]

    @property
    def exposed(self) -> str:
        """Name as it is queried."""
        return f"{self.name}_total" if self.kind is Kind.COUNTER else self.name


def one(read: Callable[[View], float]) -> Callable[[View], Iterable[Sample]]:
    return lambda view: [((), read(view))]


def several(read: Callable[[View], Mapping[str, float]]) -> Callable[[View], Iterable[Sample]]:
    return lambda view: [((label,), value) for label, value in sorted(read(view).items())]


def counter(name: str, help_text: str, read: Callable[[View], float]) -> Metric:
    return Metric(name, Kind.COUNTER, help_text, (), one(read))


def counters(name: str, label: str, help_text: str, read: Callable[[View], Mapping[str, float]]) -> Metric:
    return Metric(name, Kind.COUNTER, help_text, (label,), several(read))


def gauge(name: str, help_text: str, read: Callable[[View], float]) -> Metric:
    return Metric(name, Kind.GAUGE, help_text, (), one(read))


def histogram(name: str, help_text: str, read: Callable[[Ledger], Histogram]) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help_text, (), lambda view: [((), read(view.ledger))])


def pairs(read: Callable[[View], Mapping[tuple[str, str], float]]) -> Callable[[View], Iterable[Sample]]:
    """Of two labels."""
    return lambda view: sorted(read(view).items())


def _total(name: str, unit: float = 1.0) -> Callable[[View], float]:
    return lambda view: view.ledger.totals[name] * unit


def _totals(names: Mapping[str, str], unit: float = 1.0) -> Callable[[View], Mapping[str, float]]:
    return lambda view: {label: view.ledger.totals[name] * unit for label, name in names.items()}


def _states(view: View) -> Mapping[str, float]:
    return {state: float(count) for state, count in view.ledger.states().items()}


def _finished(view: View) -> Mapping[str, float]:
    return {reason.value: float(view.ledger.finished[reason]) for reason in FinishReason}


def _side(name: str) -> Callable[[View], float]:
    return lambda view: view.side_counts.get(name, 0.0)


def _cells(view: View) -> Mapping[str, float]:
    stats = view.ledger.stats
    pinned, cached = stats.cells_pinned, stats.cells_cached
    live = stats.cells_used - pinned - cached
    return {"live": live, "pinned": pinned, "cached": cached, "free": stats.cells_total - stats.cells_used}


def _restored(view: View) -> Mapping[str, float]:
    return _by_tier(view, "restored_tokens", "disk_tokens")


def _by_tier(view: View, all_of_it: str, from_disk: str) -> dict[str, float]:
    disk = view.ledger.totals[from_disk]
    return {"ram": view.ledger.totals[all_of_it] - disk, "disk": disk}


def _prefix_hits(view: View) -> Mapping[str, float]:
    cells = view.ledger.totals["resident_hit_tokens"]
    return {"cells": cells, **_by_tier(view, "stored_hit_tokens", "disk_hit_tokens")}


def _spill_bytes(view: View) -> Mapping[tuple[str, str], float]:
    moved = {
        "saved": _by_tier(view, "saved_bytes", "saved_disk_bytes"),
        "restored": _by_tier(view, "restored_bytes", "restored_disk_bytes"),
    }
    return {(direction, tier): n for direction, tiers in moved.items() for tier, n in tiers.items()}


def _info(view: View) -> Iterable[Sample]:
    model = None if view.info is None else view.info.model
    return [((view.version, view.model, "" if model is None else model.library), 1.0)]


MS = 1e-3

REQUESTS = (
    Metric(
        "millpond_requests",
        Kind.GAUGE,
        "Accepted outputs that have not ended, by what they do: waiting to begin, running, or parked to go on later.",
        ("state",),
        several(_states),
    ),
    gauge(
        "millpond_queued_prompt_tokens",
        "Prompt tokens of outputs that wait to begin.",
        lambda v: v.ledger.queued_prompt_tokens(),
    ),
    counter("millpond_requests_accepted", "Outputs accepted; each one ends exactly once.", lambda v: v.ledger.accepted),
    counters("millpond_requests_finished", "reason", "Outputs ended, by why.", _finished),
    counter(
        "millpond_requests_lost",
        "Accepted outputs that ended by an error of ours. The promise is 0.",
        lambda v: v.ledger.finished[FinishReason.ERROR],
    ),
    counters(
        "millpond_requests_refused",
        "reason",
        "Requests not accepted, by error code; malformed bodies are in millpond_http_responses_total alone.",
        lambda v: v.ledger.refused,
    ),
    counters(
        "millpond_http_responses",
        "status",
        "HTTP answers by status; scrapes and probes left out.",
        lambda v: {str(status): float(count) for status, count in v.ledger.responses.items()},
    ),
)
TIMES = (
    histogram("millpond_queue_seconds", "From acceptance to the first row of an output.", lambda led: led.queue),
    histogram(
        "millpond_time_to_first_token_seconds", "From acceptance to the first token.", lambda led: led.first_token
    ),
    histogram("millpond_prefill_seconds", "From the first row to the first token.", lambda led: led.prefill),
    histogram(
        "millpond_inter_token_seconds",
        "Between two tokens of one output, as they came from the engine (0 within a frame); pauses of parked ones "
        "included.",
        lambda led: led.gap,
    ),
    histogram(
        "millpond_decode_seconds", "From the first token to the end, parked time left out.", lambda led: led.decode
    ),
    histogram("millpond_request_seconds", "From acceptance to the end of an output.", lambda led: led.whole),
)
TOKENS = (
    counter(
        "millpond_prompt_tokens",
        "Prompt tokens of ended outputs that got a token: the sum of the next two.",
        lambda v: v.ledger.prompt_tokens,
    ),
    counter("millpond_prompt_tokens_computed", "Those of them that were computed.", lambda v: v.ledger.computed_tokens),
    counter("millpond_prompt_tokens_cached", "Those of them that were reused.", lambda v: v.ledger.cached_tokens),
    counters(
        "millpond_prefix_hit_tokens",
        "tier",
        "Prompt tokens reused, by where they were: cells of the pool, or saved state in RAM or on disk.",
        _prefix_hits,
    ),
    counter("millpond_generated_tokens", "Tokens sampled by the engine.", lambda v: v.ledger.generated_tokens),
    counter(
        "millpond_delivered_tokens",
        "Tokens handed to clients' streams, as their usage says; without those behind a stop string.",
        lambda v: v.ledger.delivered_tokens,
    ),
    histogram("millpond_request_prompt_tokens", "Prompt length of an output.", lambda led: led.prompt_lengths),
    histogram("millpond_request_output_tokens", "Length of an output.", lambda led: led.output_lengths),
)
KV = (
    Metric(
        "millpond_kv_cells",
        Kind.GAUGE,
        "KV cells of the pool: held by running outputs (live), by parked ones alone (pinned), by idle prefixes "
        "(cached), or free.",
        ("state",),
        several(_cells),
    ),
    gauge("millpond_kv_pool_cells", "KV cells of the pool in all.", lambda v: v.ledger.stats.cells_total),
    counter("millpond_kv_evicted_tokens", "Tokens of idle prefixes that left the cells.", _total("evicted_tokens")),
    counters(
        "millpond_preemptions",
        "lane",
        "Outputs parked, by who made them: a running one needed a cell (grow), a prompt or a restore did (prefill), "
        "the runtime found none (exhausted), or another one's turn or priority came (turn).",
        _totals(
            {
                "grow": "parked_to_grow",
                "prefill": "parked_to_prefill",
                "exhausted": "parked_exhausted",
                "turn": "parked_for_turn",
            }
        ),
    ),
    counters(
        "millpond_preemptions_over",
        "kind",
        "Parks that are over, resumed or ended, by what became of the state: all of it stayed in cells (kept), what "
        "left them is in a tier (saved), or some must be computed again (requeued).",
        _totals({"kept": "parks_kept", "saved": "parks_saved", "requeued": "parks_requeued"}),
    ),
    counter("millpond_resumes", "Parked outputs that went on.", _total("resumes")),
    counter(
        "millpond_parked_seconds",
        "Time that outputs spent parked or without an engine, summed.",
        lambda v: v.ledger.parked_seconds(v.now),
    ),
    counter("millpond_recomputed_tokens", "Tokens computed again because of a park.", _total("recomputed_tokens")),
    counters(
        "millpond_spill_tokens",
        "direction",
        "Tokens whose state was saved to a tier, or restored from one.",
        _totals({"saved": "saved_tokens", "restored": "restored_tokens"}),
    ),
    counters(
        "millpond_restored_tokens",
        "tier",
        "Tokens whose state was restored, by the tier that held it.",
        _restored,
    ),
    Metric(
        "millpond_spill_bytes",
        Kind.COUNTER,
        "Bytes of state saved to a tier, or restored from one; moves from RAM to disk are not counted.",
        ("direction", "tier"),
        pairs(_spill_bytes),
    ),
    Metric(
        "millpond_spill_held_bytes",
        Kind.GAUGE,
        "Bytes of state that a tier holds now; on disk files of other models count, too.",
        ("tier",),
        several(lambda v: {"ram": v.ledger.stats.ram_bytes, "disk": v.ledger.stats.disk_bytes}),
    ),
    counters(
        "millpond_spill_seconds",
        "direction",
        "Time of the engine's loop that saves and restores took.",
        _totals({"saved": "save_ms", "restored": "restore_ms"}, MS),
    ),
    counter(
        "millpond_failed_moves",
        "Copies and restores that failed; their outputs were computed again.",
        _total("failed_moves"),
    ),
    counter(
        "millpond_restore_failures",
        "Restores among them: the saved state was damaged, gone or refused.",
        _total("failed_restores"),
    ),
)
ENGINE = (
    Metric("millpond_info", Kind.GAUGE, "Always 1; what is served.", ("version", "model", "library"), _info),
    counter("millpond_engine_restarts", "Engine processes started after one died.", lambda v: v.ledger.restarts),
    counter("millpond_engine_steps", "Steps of the engine.", _total("steps")),
    counter("millpond_engine_rows", "Rows decoded, prompts' rows included.", _total("rows")),
    counter("millpond_engine_prefill_rows", "Rows decoded that only caught up.", _total("prefill_rows")),
    counter(
        "millpond_engine_failed_decodes", "Batches that the runtime refused or broke off.", _total("decode_failures")
    ),
    counters(
        "millpond_engine_step_seconds",
        "part",
        "Time of steps by part: schedule, move (KV operations), decode, sample, emit (settling and sending results, "
        "hearing commands).",
        _totals({part: f"{part}_ms" for part in ("schedule", "move", "decode", "sample", "emit")}, MS),
    ),
)
SIDE = (
    counter("millpond_receipts_written", "Receipts written.", _side("millpond_receipts_written")),
    counter(
        "millpond_receipts_dropped",
        "Receipt rows given up, because the writer was behind or the file could not be written.",
        _side("millpond_receipts_dropped"),
    ),
    counter("millpond_plugin_calls", "Calls of plugins' hooks.", _side("millpond_plugin_calls")),
    counter("millpond_plugin_failures", "Calls that raised an exception.", _side("millpond_plugin_failures")),
    counter("millpond_plugin_overruns", "Calls that took longer than the budget.", _side("millpond_plugin_overruns")),
    counter(
        "millpond_plugin_dropped", "Events not shown to a plugin that was behind.", _side("millpond_plugin_dropped")
    ),
    gauge("millpond_plugins_disabled", "Plugins switched off for failing.", _side("millpond_plugins_disabled")),
)
CATALOGUE: tuple[Metric, ...] = (*REQUESTS, *TIMES, *TOKENS, *KV, *ENGINE, *SIDE)

"""vLLM's names for what the catalogue counts, so that dashboards and routers made for it work. Knows names only.

Only what means the same here is given; every series has the labels model_name and engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millpond.telemetry.catalogue import Kind, Metric, Sample, View
from millpond.telemetry.histogram import Histogram
from millpond.types import FinishReason

ENGINE = "0"
LABELS = ("model_name", "engine")
_VLLM_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "abort"}


def _value(name: str, kind: Kind, help_text: str, read: Callable[[View], float]) -> Metric:
    return Metric(f"vllm:{name}", kind, help_text, LABELS, lambda view: [((view.model, ENGINE), read(view))])


def _histogram(name: str, help_text: str, read: Callable[[View], Histogram]) -> Metric:
    return Metric(f"vllm:{name}", Kind.HISTOGRAM, help_text, LABELS, lambda view: [((view.model, ENGINE), read(view))])


def _success(view: View) -> Iterable[Sample]:
    finished = view.ledger.finished
    return [((view.model, ENGINE, name), float(finished[reason])) for reason, name in _VLLM_REASONS.items()]


def _usage(view: View) -> float:
    stats = view.ledger.stats
    return stats.cells_used / stats.cells_total if stats.cells_total else 0.0


def _preemptions(view: View) -> float:
    causes = ("parked_to_grow", "parked_to_prefill", "parked_exhausted", "parked_for_turn")
    return sum(view.ledger.totals[cause] for cause in causes)


VLLM_NAMES: tuple[Metric, ...] = (
    _value("num_requests_running", Kind.GAUGE, "Running outputs.", lambda v: v.ledger.states()["running"]),
    _value(
        "num_requests_waiting",
        Kind.GAUGE,
        "Outputs that wait to begin or, parked, to go on.",
        lambda v: v.ledger.states()["waiting"] + v.ledger.states()["parked"],
    ),
    _value("kv_cache_usage_perc", Kind.GAUGE, "Share of the KV cells in use, 0 to 1.", _usage),
    _value("prompt_tokens", Kind.COUNTER, "Prompt tokens of ended outputs.", lambda v: v.ledger.prompt_tokens),
    _value("generation_tokens", Kind.COUNTER, "Tokens sampled.", lambda v: v.ledger.generated_tokens),
    _value("prefix_cache_queries", Kind.COUNTER, "Prompt tokens looked up.", lambda v: v.ledger.prompt_tokens),
    _value("prefix_cache_hits", Kind.COUNTER, "Prompt tokens reused.", lambda v: v.ledger.cached_tokens),
    _value("num_preemptions", Kind.COUNTER, "Outputs parked.", _preemptions),
    Metric("vllm:request_success", Kind.COUNTER, "Outputs ended, by reason.", (*LABELS, "finished_reason"), _success),
    _histogram("time_to_first_token_seconds", "To the first token.", lambda v: v.ledger.first_token),
    _histogram("inter_token_latency_seconds", "Between tokens.", lambda v: v.ledger.gap),
    _histogram("request_time_per_output_token_seconds", "Mean gap of an output.", lambda v: v.ledger.mean_gap),
    _histogram("e2e_request_latency_seconds", "To the end.", lambda v: v.ledger.whole),
    _histogram("request_queue_time_seconds", "Waiting to begin.", lambda v: v.ledger.queue),
    _histogram("request_prefill_time_seconds", "From the first row to the first token.", lambda v: v.ledger.prefill),
    _histogram("request_decode_time_seconds", "From the first token to the end.", lambda v: v.ledger.decode),
    _histogram("request_prompt_tokens", "Prompt length.", lambda v: v.ledger.prompt_lengths),
    _histogram("request_generation_tokens", "Output length.", lambda v: v.ledger.output_lengths),
)

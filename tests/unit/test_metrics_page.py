"""The exposition as promtool would check it, and docs/metrics.md and the dashboard against the catalogue."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_telemetry_ledger import Scene

from millpond.outputs import StepTotals
from millpond.telemetry.catalogue import CATALOGUE, Kind
from millpond.telemetry.exposition import MetricsPage
from millpond.telemetry.ledger import Ledger
from millpond.telemetry.reference import metrics_page
from millpond.telemetry.vllm_names import VLLM_NAMES
from millpond.types import FinishReason

ROOT = Path(__file__).parents[2]


def page_of(ledger: Ledger, compat: str = "none", **options) -> MetricsPage:
    return MetricsPage(
        ledger, model="m", version="1", compat=compat, clock=lambda: 1100.0, info=lambda: None, **options
    )


def busy_ledger() -> Ledger:
    scene = Scene()
    scene.open(4)
    spilled = {"saved_bytes": 10, "restored_bytes": 20, "restored_disk_bytes": 7}
    totals = StepTotals(steps=7, decode_ms=1500.0, emit_ms=30.0, parked_to_grow=2, **spilled)
    scene.frame(1, 2, 3, running=(1, 2, 3), cells=1024, totals=totals)
    scene.frame(1, 2, parked=(3,), cells=1024, totals=totals)
    scene.frame(1, ended=(1,), cells=1024, totals=totals)
    scene.ledger.on_refused("queue_full")
    scene.ledger.count_response(200)
    scene.ledger.on_delivered(scene.ledger.alive.__iter__().__next__(), 3, FinishReason.STOP)
    return scene.ledger


def text_of(page: MetricsPage) -> str:
    body, _ = page.render()
    return body.decode()


def values_of(text: str) -> dict[tuple[str, str], float]:
    return {
        (sample.name, ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_every_metric_has_help_and_type_once_and_no_series_twice(compat: str):
    text = text_of(page_of(busy_ledger(), compat))
    helps = re.findall(r"^# HELP (\S+) (.+)$", text, re.MULTILINE)
    types = re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)$", text, re.MULTILINE)
    expected = [metric.exposed for metric in (*CATALOGUE, *(VLLM_NAMES if compat == "vllm" else ()))]
    assert [name for name, _ in helps] == [name for name, _ in types] == expected
    assert all(words.strip() for _, words in helps)
    assert max(Counter(expected).values()) == 1
    series = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert max(Counter(series).values()) == 1


@pytest.mark.parametrize("compat", ["none", "vllm"])
def test_names_and_values_are_what_promtool_accepts(compat: str):
    text = text_of(page_of(busy_ledger(), compat))
    assert text.endswith("\n")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", sample.name)
            assert all(re.fullmatch(r"[a-z_][a-z0-9_]*", label) for label in sample.labels)
            assert sample.value >= 0.0
            if family.type == "counter":
                assert sample.name.endswith("_total")
            elif family.type == "gauge":
                assert not sample.name.endswith(("_total", "_count", "_sum", "_bucket"))


def test_histograms_are_cumulative_and_end_at_their_count():
    ledger = busy_ledger()
    for family in text_string_to_metric_families(text_of(page_of(ledger))):
        if family.type != "histogram":
            continue
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        values = [sample.value for sample in buckets]
        count = next(sample.value for sample in family.samples if sample.name.endswith("_count"))
        assert values == sorted(values) and buckets[-1].labels["le"] == "+Inf" and values[-1] == count
        bounds = [float(sample.labels["le"]) for sample in buckets]
        assert bounds == sorted(set(bounds))


def test_the_page_is_the_plain_text_format_with_vllm_names_as_they_are():
    body, content_type = page_of(busy_ledger(), "vllm").render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"\nvllm:num_requests_running{" in body


def test_values_are_those_of_the_ledger():
    values = values_of(text_of(page_of(busy_ledger(), "vllm", side_counts=lambda: {"millpond_plugin_calls": 3.0})))
    expected = {
        ("millpond_requests", "state=running"): 1.0,
        ("millpond_requests", "state=waiting"): 1.0,
        ("millpond_requests", "state=parked"): 1.0,
        ("millpond_requests_accepted_total", ""): 4.0,
        ("millpond_requests_finished_total", "reason=stop"): 1.0,
        ("millpond_requests_lost_total", ""): 0.0,
        ("millpond_requests_refused_total", "reason=queue_full"): 1.0,
        ("millpond_http_responses_total", "status=200"): 1.0,
        ("millpond_kv_pool_cells", ""): 1024.0,
        ("millpond_preemptions_total", "lane=grow"): 2.0,
        ("millpond_preemptions_total", "lane=turn"): 0.0,
        ("millpond_spill_bytes_total", "direction=restored,tier=ram"): 13.0,
        ("millpond_spill_bytes_total", "direction=restored,tier=disk"): 7.0,
        ("millpond_engine_steps_total", ""): 7.0,
        ("millpond_engine_step_seconds_total", "part=decode"): 1.5,
        ("millpond_engine_step_seconds_total", "part=emit"): 0.03,
        ("millpond_generated_tokens_total", ""): 6.0,
        ("millpond_delivered_tokens_total", ""): 3.0,
        ("millpond_plugin_calls_total", ""): 3.0,
        ("vllm:num_requests_waiting", "engine=0,model_name=m"): 2.0,
        ("vllm:num_preemptions_total", "engine=0,model_name=m"): 2.0,
        ("vllm:request_success_total", "engine=0,finished_reason=stop,model_name=m"): 1.0,
    }
    assert {key: values.get(key) for key in expected} == expected
    assert values["millpond_parked_seconds_total", ""] == 1100.0 - 1002.0


def test_nothing_moves_while_nothing_happens():
    scene = Scene()
    scene.open()
    scene.frame(1, running=(1,), cells=64)
    scene.frame(1, ended=(1,), cells=64)
    page = page_of(scene.ledger)
    first = text_of(page)
    scene.clock.now += 1000.0
    assert text_of(page) == first


def test_the_page_of_the_docs_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page(), "run: make docs"


def test_every_metric_is_in_the_docs_with_its_kind():
    for metric in (*CATALOGUE, *VLLM_NAMES):
        assert f"| `{metric.exposed}` | {metric.kind.value} |" in metrics_page()


def dashboard_queries() -> list[str]:
    board = json.loads((ROOT / "dashboards" / "millpond.json").read_text(encoding="utf-8"))
    assert board["title"] == "Millpond" and board["uid"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 10
    for panel in board["panels"]:
        assert panel["title"] and set(panel["gridPos"]) == {"x", "y", "w", "h"}
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_for_series_that_exist():
    known = {metric.exposed for metric in CATALOGUE if metric.kind is not Kind.HISTOGRAM}
    for metric in CATALOGUE:
        if metric.kind is Kind.HISTOGRAM:
            known |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    asked = [name for query in dashboard_queries() for name in re.findall(r"millpond_\w+", query)]
    assert asked and set(asked) <= known


def test_the_dashboard_looks_at_counters_as_rates():
    for query in dashboard_queries():
        for name in re.findall(r"millpond_\w+(?:_total|_bucket)\b", query):
            assert re.search(rf"(?:rate|increase)\(\s*{name}", query), query

"""docs/metrics.md, from the catalogue. Reads no ledger."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.telemetry import catalogue
from millpond.telemetry.catalogue import Metric
from millpond.telemetry.vllm_names import VLLM_NAMES

_INTRO = """# Metrics

Generated from `millpond/telemetry/catalogue.py` by `make docs`; a test holds it up to date. Do not edit it here.

`GET /metrics` answers in Prometheus' text format and wants the API key like any other route:
give the scraper an `authorization` section. `--no-metrics` switches it off.

Counters only grow while the server lives, across restarts of the engine too, and nothing moves while nothing happens.
These hold once every output has ended:

- `millpond_prompt_tokens_total` = `millpond_prompt_tokens_computed_total` + `millpond_prompt_tokens_cached_total`
- `millpond_delivered_tokens_total` = the sum of `usage.completion_tokens` of all answers, and what given-up
  streams had got
- `millpond_requests_accepted_total` = the sum of `millpond_requests_finished_total` (before: plus `millpond_requests`)
- `millpond_preemptions_total` = `millpond_resumes_total` + outputs that, parked, ended or lost their engine
- `millpond_preemptions_total` = the sum of `millpond_preemptions_over_total` + outputs that, parked, lost their engine
- the sum of `millpond_prefix_hit_tokens_total` = `millpond_prompt_tokens_cached_total` + hits of outputs that ended or
  lost their engine before their first token

The states of `millpond_kv_cells` always sum up to `millpond_kv_pool_cells`.

`dashboards/millpond.json` is a Grafana dashboard of them. `promtool check metrics` has nothing to say, but about vLLM's
names, for their colon; `tests/wire/test_promtool.py` runs it where it is installed (Debian's `prometheus`).

The engine tells its figures when something ends or changes its state, else after 50 ms of work.
What is not counted: time of the server process that renders and sends text.
"""
_SECTIONS: tuple[tuple[str, Sequence[Metric]], ...] = (
    ("Requests", catalogue.REQUESTS),
    ("Times", catalogue.TIMES),
    ("Tokens", catalogue.TOKENS),
    ("KV pool, preemption and spill", catalogue.KV),
    ("Engine", catalogue.ENGINE),
    ("Receipts and plugins", catalogue.SIDE),
)
_COMPAT = """With `--metrics-compat vllm` these are exported too, for dashboards and routers made for vLLM, with the
labels `model_name` and `engine`. Only what means the same is there.
"""


_LOG_LINES = """## Log lines

With `--log-format json` every line is an object: `time`, `level`, `logger`, `message`, and `request_id` where it is
about one. Each output that ends has a line of the logger `millpond.requests`, with its `sequence`, `reason`, token
counts, `total_ms`, `queue_ms`, `first_token_ms`, `parked_ms` and `preemptions`. No text of a prompt or an output is in
any line, unless `--log-prompts` adds `prompt` and `output` to those.
"""


def metrics_page() -> str:
    parts = [_INTRO]
    for title, metrics in _SECTIONS:
        parts.append(f"## {title}\n\n{_table(metrics)}")
    parts.append(f"## vLLM's names\n\n{_COMPAT}\n{_table(VLLM_NAMES)}")
    parts.append(_LOG_LINES)
    return "\n".join(parts)


def _table(metrics: Sequence[Metric]) -> str:
    rows = "\n".join(
        f"| `{metric.exposed}` | {metric.kind.value} | {' '.join(f'`{label}`' for label in metric.labels)} "
        f"| {metric.help} |"
        for metric in metrics
    )
    return f"| metric | kind | labels | meaning |\n|---|---|---|---|\n{rows}\n"

"""The simulated day: loads that repeat, figures that add up, the command's table; small, since the engine is real."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from millpond.bench.simulate import Case, Load, Machine, cases, jobs_of, play, play_all
from millpond.cli.main import build_app
from millpond.errors import InvalidParameter
from millpond.scheduler.preemption import VICTIM_RULES

LOAD = Load(requests=40, rate=4.0, longest=200, shared_tokens=60, prompt_median=40.0, output_median=40.0)
TIGHT = Machine(cells=300, max_running=6)


def test_the_same_seed_gives_the_same_load() -> None:
    assert jobs_of(LOAD) == jobs_of(LOAD)
    assert jobs_of(LOAD) != jobs_of(replace(LOAD, seed=2))


def test_a_load_is_what_was_asked() -> None:
    jobs = jobs_of(Load(requests=4000, rate=2.0, longest=4000))
    assert jobs[-1].at == pytest.approx(2000, rel=0.05)
    outputs = [job.request.max_tokens for job in jobs]
    assert statistics.median(outputs) == pytest.approx(120, rel=0.06)
    heads = Counter(job.request.prompt_ids[:200] for job in jobs)
    repeated = [count for count in heads.values() if count > 100]
    assert sum(repeated) == pytest.approx(2000, rel=0.06)
    assert len(repeated) == 4
    assert sum(job.request.priority for job in jobs) == pytest.approx(400, rel=0.15)
    assert all(job.request.arrival == job.at for job in jobs)


@pytest.mark.parametrize("longest", [3, 50, 201, 400])
def test_every_request_fits(longest: int) -> None:
    for job in jobs_of(Load(requests=200, longest=longest)):
        assert job.request.max_tokens >= 1
        assert len(job.request.prompt_ids) + job.request.max_tokens <= longest


def test_a_case_completes_everything_and_its_figures_add_up() -> None:
    jobs = jobs_of(LOAD)
    figures = play(Case(0.05, "least-generated", True), jobs, TIGHT, LOAD.longest)
    tokens = sum(job.request.max_tokens for job in jobs)
    assert figures.completed == 40
    assert figures.preemptions_per_1k > 0, "the pool must be too small, else nothing is tested"
    assert 0 < figures.goodput < 1000
    assert tokens / figures.goodput > jobs[-1].at - jobs[0].at
    assert 0 < figures.ttft_p50 <= figures.ttft_p99
    assert 0 < figures.gap_p50_ms <= figures.gap_p99_ms <= figures.longest_gap * 1e3
    assert figures == play(Case(0.05, "least-generated", True), jobs, TIGHT, LOAD.longest), "it is deterministic"


def test_without_a_tier_the_parked_are_computed_again() -> None:
    jobs = jobs_of(LOAD)
    spilled = play(Case(0.0, "newest", True), jobs, TIGHT, LOAD.longest)
    recomputed = play(Case(0.0, "newest", False), jobs, TIGHT, LOAD.longest)
    assert recomputed.restored_tokens == 0
    assert recomputed.recomputed_tokens > spilled.recomputed_tokens
    assert spilled.restored_tokens > 0


def test_a_roomy_pool_parks_nobody() -> None:
    jobs = jobs_of(replace(LOAD, priority_share=0.0))
    figures = play(Case(0.05, "newest", True), jobs, Machine(cells=8000, max_running=6), LOAD.longest)
    assert figures.preemptions_per_1k == 0
    assert figures.recomputed_tokens == 0


def test_the_grid_is_every_combination() -> None:
    grid = cases([0.0, 0.1], list(VICTIM_RULES), [True, False])
    assert len(grid) == len(set(grid)) == 4 * len(VICTIM_RULES)
    with pytest.raises(InvalidParameter, match="'oldest' is no rule; they are least-generated"):
        cases([0.0], ["oldest"], [True])


def test_requests_longer_than_the_pool_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="do not fit 100 cells"):
        next(play_all(cases([0.0], ["newest"], [True]), LOAD, Machine(cells=100)))


ARGUMENTS = (
    *("--requests", "30", "--rate", "4", "--prompt", "40", "--output", "40", "--longest", "200"),
    *("--shared", "0", "--cells", "300", "--running", "6"),
)


@pytest.mark.slow
def test_the_command_prints_a_row_a_case() -> None:
    flags = [*ARGUMENTS, "--victim", "newest", "--watermark", "0"]
    lines = CliRunner().invoke(build_app(), ["bench", "simulate", *flags, "--watermark", "0.2"]).stdout.splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        [spill, "newest", mark, "30"] for spill in ("on", "off") for mark in ("0", "0.2")
    ]
    ends = {len(line.rstrip()) for line in lines}
    assert len(ends) == 1, "columns of numbers end at the same place"
    again = CliRunner().invoke(build_app(), ["bench", "simulate", *flags, "--spill", "--json"])
    record = json.loads(again.stdout.splitlines()[0])
    assert record["case"] == {"watermark": 0.0, "victim": "newest", "spill": True}
    assert f"{record['goodput']:.1f}" == lines[1].split()[4]


def test_the_command_names_a_wrong_rule() -> None:
    result = CliRunner().invoke(build_app(), ["bench", "simulate", "--victim", "oldest"])
    assert (result.exit_code, result.stderr.startswith("error: victim: 'oldest' is no rule")) == (1, True)

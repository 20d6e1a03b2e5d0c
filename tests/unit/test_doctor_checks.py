"""The exactness checks: a runtime that is exact passes all, each kind of inexactness fails its own check."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
from skewed_runtime import Shape, SkewedRuntime

from millpond.doctor.checks import CHUNKS, DECODED, LONG, Plan, Trials, plain_tokens
from millpond.doctor.exact_settings import Check, ExactSettings, Trial
from millpond.types import MemoryKind

SETTINGS = ExactSettings("f16", "bf16", use_extra_bufts=True)

RULES: dict[Check, Callable[[Shape], bool]] = {
    Check.BATCH: lambda shape: shape.slots > 1 and shape.rows == shape.slots,
    Check.RESTORE: lambda shape: shape.slot == 3 and shape.rows == shape.slots,
    Check.CHUNK: lambda shape: shape.slots == 1 and 4 <= shape.rows < 60,
    Check.MIXED: lambda shape: shape.slots > 1 and shape.rows > shape.slots,
    Check.REPREFILL: lambda shape: shape.slots == 1 and shape.rows == DECODED,
}


def run(runtime: SkewedRuntime, doing: list[str] | None = None) -> Trial:
    ticks = count()
    return Trials(runtime, lambda: float(next(ticks))).run(SETTINGS, (doing if doing is not None else []).append)


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_an_exact_runtime_passes_every_check(kind: MemoryKind) -> None:
    doing: list[str] = []
    trial = run(SkewedRuntime(lambda shape: False, kind=kind), doing)
    assert [verdict.check for verdict in trial.verdicts] == list(Check)
    assert all(verdict.exact and verdict.largest_difference == 0.0 and verdict.rows for verdict in trial.verdicts)
    assert trial.is_exact() and trial.qualified == SETTINGS and trial.reason == ""
    assert doing == ["prefill", *(check.value for check in Check)]
    assert trial.longest_view == LONG + DECODED > 512


@pytest.mark.parametrize("check", list(Check))
def test_each_inexactness_fails_its_own_check_and_ends_the_trial(check: Check) -> None:
    trial = run(SkewedRuntime(RULES[check]))
    assert trial.verdicts[-1].check is check
    assert [verdict.check for verdict in trial.verdicts if not verdict.exact] == [check]
    assert trial.verdicts[-1].largest_difference == pytest.approx(0.25, rel=1e-5)
    assert trial.reason == f"{check.value} differs by 0.25"


def test_only_a_wrong_reprefill_leaves_the_settings_usable() -> None:
    trial = run(SkewedRuntime(RULES[Check.REPREFILL]))
    assert trial.qualified is not None and trial.qualified.restore_only
    assert run(SkewedRuntime(RULES[Check.CHUNK])).qualified is None


def test_the_last_bit_counts() -> None:
    trial = run(SkewedRuntime(RULES[Check.MIXED], by=1e-6))
    assert not trial.is_exact() and 0.0 < trial.verdicts[-1].largest_difference < 1e-5


@pytest.mark.parametrize("n_ctx", [16, 64, 512, 600, 4096])
def test_a_plan_fits_the_context_and_its_chunks_fit_the_history(n_ctx: int) -> None:
    plan = Plan.for_context(n_ctx)
    assert plan.long + plan.decoded <= n_ctx
    assert sum(plan.chunks) <= plan.long
    assert plan.short < plan.long and plan.chunks


def test_a_long_context_gets_every_chunk() -> None:
    assert Plan.for_context(768) == Plan(LONG, 40, DECODED, CHUNKS)


def test_a_model_with_a_short_context_is_checked_within_it() -> None:
    trial = run(SkewedRuntime(lambda shape: False, n_ctx_train=128))
    assert trial.is_exact() and trial.longest_view <= 128


def test_the_history_has_no_control_tokens_and_is_always_the_same() -> None:
    runtime = SkewedRuntime(lambda shape: False)
    tokens = plain_tokens(runtime, 300)
    assert tokens == plain_tokens(runtime, 300) and len(set(tokens)) > 100
    assert not any(runtime.vocab.is_control(token) or token in runtime.vocab.eog_ids for token in tokens)

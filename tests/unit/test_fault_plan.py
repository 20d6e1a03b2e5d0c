"""The text of a fault plan, when its faults strike, and the drastic ones through injected effects."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.errors import ConfigError, DecodeFailed, KVExhausted, RuntimeFailure
from millpond.runtime.base import Batch, ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.runtime.faults import Fault, FaultEffects, FaultPlan, FaultyRuntime
from millpond.types import SlotId


def _runtime(plan: str, effects: FaultEffects | None = None) -> FaultyRuntime:
    return FaultyRuntime(FakeRuntime(ContextParams(n_cells=256, n_slots=2)), FaultPlan.parse(plan), effects=effects)


def _one(token: int, position: int) -> Batch:
    return Batch(
        np.array([token], dtype=np.int32),
        np.array([position], dtype=np.int32),
        np.array([0], dtype=np.int32),
        np.array([True]),
    )


class Died(BaseException):
    pass


def _die() -> None:
    raise Died


def test_a_plan_is_read() -> None:
    plan = FaultPlan.parse(" decode@5=fail; save@1=enospc;poison=77=abort ; trim%3=fail;decode@2+=slow(0.5);")
    assert plan.faults == (
        Fault("decode", "fail", at=5),
        Fault("save", "enospc", at=1),
        Fault("decode", "abort", poison=77),
        Fault("trim", "fail", every=3),
        Fault("decode", "slow", 0.5, since=2),
    )
    assert FaultPlan.parse("") == FaultPlan()


def test_a_fault_may_belong_to_one_engine_epoch() -> None:
    text = "1:decode@5=abort; 2:decode@1=fail; poison=7=exit"
    assert [fault.action for fault in FaultPlan.parse(text, epoch=1).faults] == ["abort", "exit"]
    assert [fault.action for fault in FaultPlan.parse(text, epoch=2).faults] == ["fail", "exit"]
    assert [fault.action for fault in FaultPlan.parse(text, epoch=3).faults] == ["exit"]


OUTSIDE = (
    "decode; decode@5; decode@x=fail; decode@0=fail; load@1=fail; save@1=explode; decode@1=reject; save@1=exhausted;"
    "decode@1=slow; poison=abort; poison=-1=abort; decode%3+=fail; decode%0=fail; decode@1=fail(x)"
)


@pytest.mark.parametrize("text", OUTSIDE.split(";"))
def test_text_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="fault_plan"):
        FaultPlan.parse(text)


@pytest.mark.parametrize(
    ("when", "struck"), [("@3", [3]), ("@3+", [3, 4, 5, 6, 7]), ("%3", [3, 6]), ("@9", []), ("%1", list(range(1, 8)))]
)
def test_calls_are_counted_from_one(when: str, struck: list[int]) -> None:
    runtime = _runtime(f"trim{when}=fail")
    failed: list[int] = []
    for call in range(1, 8):
        try:
            runtime.trim(SlotId(0), 0)
        except RuntimeFailure:
            failed.append(call)
    assert failed == struck
    assert len(runtime.injector.fired) == len(struck)


def test_the_first_fault_that_matches_wins() -> None:
    runtime = _runtime("decode@1=exhausted; decode@1+=fail(0)")
    with pytest.raises(KVExhausted):
        runtime.decode(_one(60, 0))
    with pytest.raises(DecodeFailed):
        runtime.decode(_one(60, 0))


def test_a_failed_decode_leaves_as_many_rows_as_asked() -> None:
    batch = Batch(
        np.arange(60, 70, dtype=np.int32),
        np.arange(10, dtype=np.int32),
        np.zeros(10, dtype=np.int32),
        np.ones(10, dtype=np.bool_),
    )
    for plan, rows in (
        ("decode@1=fail", 5),
        ("decode@1=fail(0)", 0),
        ("decode@1=fail(9)", 9),
        ("decode@1=fail(99)", 10),
    ):
        runtime = _runtime(plan)
        with pytest.raises(DecodeFailed, match=f"{rows} of 10"):
            runtime.decode(batch)
        assert runtime.span(SlotId(0)) == ((0, rows - 1) if rows else None)


def test_a_poison_token_strikes_wherever_it_is_computed() -> None:
    runtime = _runtime("poison=77=abort", FaultEffects(abort=_die))
    runtime.decode(_one(76, 0))
    for _ in range(2):
        with pytest.raises(Died):
            runtime.decode(_one(77, 1))
    assert runtime.span(SlotId(0)) == (0, 0)
    runtime.decode(_one(78, 1))


@pytest.mark.parametrize("action", ["abort", "exit", "hang"])
def test_drastic_actions_happen_before_the_call(action: str) -> None:
    runtime = _runtime(f"decode@1={action}", FaultEffects(**{action: _die}))
    with pytest.raises(Died):
        runtime.decode(_one(60, 0))
    assert runtime.span(SlotId(0)) is None


def test_slow_sleeps_and_then_works() -> None:
    slept: list[float] = []
    runtime = _runtime("decode@1=slow(0.25)", FaultEffects(sleep=slept.append))
    runtime.decode(_one(60, 0))
    assert slept == [0.25]
    assert runtime.span(SlotId(0)) == (0, 0)


def test_the_fake_takes_the_same_plan() -> None:
    runtime = FakeRuntime(ContextParams(n_cells=256, n_slots=2), faults=FaultPlan.parse("decode@2=exhausted"))
    runtime.decode(_one(60, 0))
    with pytest.raises(KVExhausted):
        runtime.decode(_one(61, 1))
    runtime.decode(_one(61, 1))
    assert [fault.action for fault in runtime.injector.fired] == ["exhausted"]

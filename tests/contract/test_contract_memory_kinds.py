"""Memory that is not plain attention: recurrent, hybrid and sliding-window models, fake and tiny real ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from contract_driver import TINY, Driver, FakeMaker, LlamaCppMaker, Maker, driver_builder, tokens

from millpond.errors import DecodeFailed, KVExhausted, RuntimeFailure, StateRejected
from millpond.runtime.faults import FaultPlan, FaultyRuntime
from millpond.types import MemoryKind, SlotId

Make = Callable[..., Driver]
WRITERS = {
    MemoryKind.HYBRID: tiny_gguf.write_tiny_lfm2,
    MemoryKind.RECURRENT: tiny_gguf.write_tiny_mamba,
    MemoryKind.SLIDING_WINDOW: tiny_gguf.write_tiny_gemma3,
}
WINDOW = tiny_gguf.WINDOW


def _on_both(*kinds: MemoryKind) -> pytest.MarkDecorator:
    real = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]
    fake = [pytest.param(("fake", kind), id=f"fake-{kind.value}") for kind in kinds]
    tiny = [pytest.param(("llamacpp", kind), id=f"llamacpp-{kind.value}", marks=real) for kind in kinds]
    return pytest.mark.parametrize("kind_maker", [*fake, *tiny], indirect=True)


EVERY_KIND = _on_both(*WRITERS)
WITH_STATE = _on_both(MemoryKind.HYBRID, MemoryKind.RECURRENT)
HYBRID = _on_both(MemoryKind.HYBRID)
RECURRENT = _on_both(MemoryKind.RECURRENT)
SLIDING = _on_both(MemoryKind.SLIDING_WINDOW)


@pytest.fixture(scope="session")
def tiny_models(
    smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[MemoryKind, LlamaCppMaker]]:
    tokenizer = tiny_gguf.Tokenizer.read(smollm2_path)
    folder = tmp_path_factory.mktemp("tiny")
    makers: dict[MemoryKind, LlamaCppMaker] = {}
    for kind, write in WRITERS.items():
        path = folder / f"{kind.value}.gguf"
        write(path, tokenizer)
        makers[kind] = LlamaCppMaker(path, tolerance=TINY)
    yield makers
    for maker in makers.values():
        maker.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest, kind_maker: Maker) -> MemoryKind:
    return request.node.callspec.params["kind_maker"][1]


@pytest.fixture
def kind_maker(request: pytest.FixtureRequest) -> Maker:
    runtime, kind = request.param
    if runtime == "fake":
        return FakeMaker(kind, window=WINDOW)
    return request.getfixturevalue("tiny_models")[kind]


@pytest.fixture
def make(kind_maker: Maker) -> Iterator[Make]:
    yield from driver_builder(kind_maker)


@EVERY_KIND
def test_the_kind_is_read_from_the_model(make: Make, kind: MemoryKind) -> None:
    runtime = make().runtime
    assert runtime.model.memory_kind is kind
    assert runtime.model.n_swa == (WINDOW if kind is MemoryKind.SLIDING_WINDOW else 0)
    assert runtime.limits.can_trim is (kind is MemoryKind.SLIDING_WINDOW)
    assert not runtime.limits.can_copy_ranges


@EVERY_KIND
def test_one_wrong_token_shows_in_the_logits(make: Make, kind: MemoryKind) -> None:
    driver = make()
    right = driver.feed(0, tokens(40))
    wrong = tokens(40)
    wrong[36] = 7
    with pytest.raises(AssertionError):
        driver.assert_same(right, driver.feed(1, wrong))


@EVERY_KIND
@pytest.mark.parametrize("unified", [True, False])
def test_a_whole_state_moves_to_another_slot(make: Make, unified: bool) -> None:
    driver = make(n_cells=1024, unified=unified)
    driver.feed(0, tokens(100))
    data = driver.runtime.save(SlotId(0), 0, 100)
    driver.restore(2, 0, 100, data)
    driver.drop(0)
    for ids in ([44], [45, 46], [47]):
        restored = driver.feed(2, ids)
    driver.assert_same(restored, driver.feed(1, [*tokens(100), 44, 45, 46, 47]))


@EVERY_KIND
def test_pieces_copies_and_merges_are_refused(make: Make, kind: MemoryKind) -> None:
    driver = make()
    for slot in (0, 1):
        driver.feed(slot, tokens(30))
    for call in (
        lambda: driver.runtime.save(SlotId(0), 0, 20),
        lambda: driver.runtime.save(SlotId(0), 10, 30),
        lambda: driver.copy(0, 2, 30),
        lambda: driver.copy(0, 2, 20),
        lambda: driver.runtime.merge(SlotId(0), SlotId(1), 0, 30),
    ):
        with pytest.raises(RuntimeFailure):
            call()
    rows = driver.feed_together({0: 61, 1: 61})
    driver.assert_same(rows[0], rows[1])
    assert driver.span(2) is None


@EVERY_KIND
@pytest.mark.parametrize("keep", [0, 0.5, 0.99])
def test_truncated_states_are_rejected_and_the_slot_stays_empty(make: Make, keep: float) -> None:
    driver = make()
    driver.feed(0, tokens(30))
    data = driver.runtime.save(SlotId(0), 0, 30)
    with pytest.raises(StateRejected):
        driver.restore(1, 0, 30, data[: int(len(data) * keep)])
    assert driver.span(1) is None
    driver.restore(1, 0, 30, data)
    rows = driver.feed_together({0: 61, 1: 61})
    driver.assert_same(rows[0], rows[1])


@EVERY_KIND
def test_rows_of_other_slots_change_nothing(make: Make, kind: MemoryKind) -> None:
    driver = make()
    for slot in range(3):
        driver.feed(slot, tokens(20 + slot, salt=slot))
    together = [driver.feed_together({0: 50 + n, 2: 70 + n, 1: 90 + n}) for n in range(3)]
    driver.assert_same(together[-1][1], driver.feed(3, [*tokens(21, salt=1), 90, 91, 92]))


@WITH_STATE
def test_a_state_cannot_be_cut_only_dropped(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(30))
    for end in (29, 1):
        with pytest.raises(RuntimeFailure):
            driver.runtime.trim(SlotId(0), end)
    driver.assert_same(driver.feed(0, [44]), driver.feed(1, [*tokens(30), 44]))
    driver.trim(0, 0)
    assert driver.span(0) is None
    driver.assert_same(driver.feed(0, tokens(30)), driver.feed(2, tokens(30)))


@WITH_STATE
def test_the_span_of_a_state_is_its_last_position(make: Make) -> None:
    driver = make()
    assert driver.span(0) is None
    driver.feed(0, tokens(30))
    assert driver.span(0) == (29, 29)


@WITH_STATE
def test_after_a_half_done_decode_the_slot_is_recomputed(make: Make) -> None:
    inner = make()
    driver = Driver(FaultyRuntime(inner.runtime, FaultPlan.parse("decode@2=fail(3)")), inner.tolerance, inner.filler)
    driver.feed(0, tokens(30))
    with pytest.raises(DecodeFailed):
        driver.feed(0, [50, 51, 52, 53, 54])
    with pytest.raises(RuntimeFailure):
        driver.trim(0, 30)
    driver.drop(0)
    again = driver.feed(0, [*tokens(30), 50, 51, 52, 53, 54])
    driver.assert_same(again, driver.feed(1, [*tokens(30), 50, 51, 52, 53, 54]))


@HYBRID
def test_a_hybrid_pool_runs_out_of_cells(make: Make) -> None:
    driver = make(n_cells=256)
    driver.feed(0, tokens(200))
    with pytest.raises(KVExhausted):
        driver.feed(1, tokens(57, salt=1))
    assert [driver.span(slot) for slot in (0, 1)] == [(199, 199), None]
    driver.feed(1, tokens(56, salt=1))
    with pytest.raises(KVExhausted):
        driver.feed(0, [44])
    driver.drop(1)
    driver.assert_same(driver.feed(0, [44]), make(n_cells=512).feed(0, [*tokens(200), 44]))


@RECURRENT
def test_a_recurrent_model_takes_no_cells(make: Make) -> None:
    driver = make(n_cells=256)
    for slot in range(4):
        driver.feed(slot, tokens(150, salt=slot))
    driver.feed(0, tokens(150, salt=7))
    assert driver.span(0) == (299, 299)


@SLIDING
def test_a_window_is_lost_in_silence_but_the_span_tells(make: Make) -> None:
    driver = make(n_cells=256)
    driver.feed(1, tokens(10, salt=1))
    driver.feed(0, tokens(150))
    driver.drop(1)
    assert driver.span(0) == (0, 149)
    driver.feed(1, tokens(60, salt=2))
    span = driver.span(0)
    assert span is not None
    assert 0 < span[0] <= 150 - WINDOW and span[1] == 149
    with pytest.raises(RuntimeFailure):
        driver.runtime.trim(SlotId(0), span[0] + 5)
    assert driver.span(0) == span
    driver.drop(1)
    driver.assert_same(driver.feed(0, [44]), make(n_cells=512).feed(0, [*tokens(150), 44]))


@SLIDING
def test_an_undisturbed_window_can_be_trimmed(make: Make) -> None:
    driver = make(n_cells=512)
    driver.feed(0, tokens(150))
    driver.trim(0, 60)
    assert driver.span(0) == (0, 59)
    driver.assert_same(driver.feed(0, [44]), driver.feed(1, [*tokens(60), 44]))


@SLIDING
def test_a_restored_sequence_holds_its_window_only(make: Make) -> None:
    driver = make(n_cells=512)
    driver.feed(0, tokens(150))
    driver.restore(1, 0, 150, driver.runtime.save(SlotId(0), 0, 150))
    assert driver.span(0) == (0, 149)
    assert driver.span(1) == (150 - WINDOW, 149)
    with pytest.raises(RuntimeFailure):
        driver.runtime.trim(SlotId(1), 120)
    rows = driver.feed_together({0: 61, 1: 61})
    driver.assert_same(rows[0], rows[1])


def test_tiny_files_are_a_function_of_the_seed(tmp_path: Path) -> None:
    tokenizer = tiny_gguf.Tokenizer("smollm", [b"a", b"b", b"ab"], [1, 1, 1], ["a b"], 0, 1, "{{ messages }}")
    written: list[bytes] = []
    for index, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{index}.gguf"
        tiny_gguf.write_tiny_lfm2(path, tokenizer, seed=seed)
        written.append(path.read_bytes())
    assert written[0] == written[1] != written[2]
    assert not np.array_equal(np.frombuffer(written[0], np.uint8), np.frombuffer(written[2], np.uint8))

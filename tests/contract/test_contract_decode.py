"""Batches: which are refused before anything changes, which rows answer, and that company does not change a result."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from contract_driver import Driver, batch, tokens

from millpond.errors import InvalidBatch
from millpond.runtime.base import Batch

Make = Callable[..., Driver]


def _gapless(start: int, count: int, slot: int) -> list[tuple[int, int, int, bool]]:
    return [(60 + n, start + n, slot, False) for n in range(count)]


BAD_BATCHES: dict[str, Callable[[Driver], Batch]] = {
    "empty": lambda driver: batch(),
    "too many rows": lambda driver: batch(*_gapless(10, driver.runtime.limits.n_batch + 1, 0)),
    "negative token": lambda driver: batch((-1, 10, 0, True)),
    "token beyond the vocabulary": lambda driver: batch((driver.runtime.vocab.n_tokens, 10, 0, True)),
    "negative slot": lambda driver: batch((60, 0, -1, True)),
    "slot beyond the context": lambda driver: batch((60, 0, driver.runtime.limits.n_slots, True)),
    "position skipped": lambda driver: batch((60, 11, 0, True)),
    "position already held": lambda driver: batch((60, 9, 0, True)),
    "first position not 0": lambda driver: batch((60, 1, 1, True)),
    "negative position": lambda driver: batch((60, -1, 1, True)),
    "gap inside the batch": lambda driver: batch((60, 10, 0, False), (61, 12, 0, True)),
    "same position twice": lambda driver: batch((60, 10, 0, False), (61, 10, 0, True)),
    "positions out of order": lambda driver: batch((61, 11, 0, True), (60, 10, 0, False)),
    "good rows before a bad one": lambda driver: batch((60, 10, 0, False), (61, 0, 1, False), (62, 7, 2, True)),
}


@pytest.mark.parametrize("name", BAD_BATCHES)
def test_bad_batches_are_refused_before_anything_changes(make: Make, name: str) -> None:
    driver = make(n_cells=256, n_slots=4, n_batch=64, n_ubatch=64)
    driver.feed(0, tokens(10))
    with pytest.raises(InvalidBatch):
        driver.runtime.decode(BAD_BATCHES[name](driver))
    assert [driver.span(slot) for slot in range(4)] == [(0, 9), None, None, None]
    driver.assert_same(driver.feed(0, [99]), driver.feed(1, [*tokens(10), 99]))


def test_columns_of_unequal_length_are_refused(make: Make) -> None:
    driver = make()
    bad = batch((60, 0, 0, True), (61, 1, 0, True))
    bad.wants_logits = bad.wants_logits[:1]
    with pytest.raises(InvalidBatch):
        driver.runtime.decode(bad)
    assert driver.span(0) is None


def test_only_rows_that_asked_have_logits(make: Make) -> None:
    driver = make()
    driver.runtime.decode(batch((60, 0, 0, False), (61, 1, 0, True), (62, 0, 1, False), (63, 1, 1, True)))
    for row in (1, 3):
        logits = driver.runtime.logits(row)
        assert logits.shape == (driver.runtime.model.n_vocab,)
        assert logits.dtype == np.float32
        assert np.isfinite(logits).all()
    for row in (0, 2, 4, -1):
        with pytest.raises(InvalidBatch):
            driver.runtime.logits(row)


def test_the_next_decode_takes_the_last_ones_logits_away(make: Make) -> None:
    driver = make()
    driver.runtime.decode(batch((60, 0, 0, True)))
    driver.runtime.decode(batch((61, 1, 0, False), (62, 2, 0, True)))
    with pytest.raises(InvalidBatch):
        driver.runtime.logits(0)
    assert driver.runtime.logits(1).argmax() == driver.feed(1, [60, 61, 62]).argmax()


def test_no_logits_before_the_first_decode(make: Make) -> None:
    with pytest.raises(InvalidBatch):
        make().runtime.logits(0)


def test_one_wrong_token_shows_in_the_logits(make: Make) -> None:
    """Without this, no other comparison of logits here would mean anything."""
    driver = make()
    right = driver.feed(0, tokens(40))
    wrong = tokens(40)
    wrong[20] = 7
    with pytest.raises(AssertionError):
        driver.assert_same(right, driver.feed(1, wrong))


def test_a_prompt_in_pieces_ends_like_a_prompt_at_once(make: Make) -> None:
    driver = make()
    prompt = tokens(60)
    for start, end in ((0, 1), (1, 17), (17, 59)):
        driver.feed(0, prompt[start:end])
    driver.assert_same(driver.feed(0, prompt[59:]), driver.feed(1, prompt))


def test_rows_of_other_slots_change_nothing(make: Make) -> None:
    driver = make()
    for slot in range(3):
        driver.feed(slot, tokens(20 + slot, salt=slot))
    together = [driver.feed_together({0: 50 + n, 2: 70 + n, 1: 90 + n}) for n in range(4)]
    alone = driver.feed(3, [*tokens(21, salt=1), 90, 91, 92, 93])
    driver.assert_same(together[-1][1], alone)


def test_prefill_and_decode_rows_share_a_batch(make: Make) -> None:
    driver = make()
    driver.feed(0, tokens(20))
    prompt = tokens(15, salt=8)
    rows = [(token, n, 1, n == 14) for n, token in enumerate(prompt)]
    driver.runtime.decode(batch(*rows[:8], (55, 20, 0, True), *rows[8:]))
    running, prefilled = driver.runtime.logits(8).copy(), driver.runtime.logits(15).copy()
    driver.assert_same(prefilled, driver.feed(2, prompt))
    driver.assert_same(running, driver.feed(3, [*tokens(20), 55]))

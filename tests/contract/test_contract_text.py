"""Vocab and Candidates: the promises of runtime.base on both runtimes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from contract_driver import Driver

from millpond.runtime.base import CandidateFilter, Vocab
from millpond.runtime.fake_candidates import FakeCandidates

Make = Callable[..., Driver]
OPEN = CandidateFilter(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.fixture
def vocab(make: Make) -> Vocab:
    return make().runtime.vocab


@pytest.mark.parametrize(
    "text", ["", "a", "Hello, world!\n", "naïve café", "你好 😀🚀🦆", "  two  spaces\t", "x" * 300]
)
def test_text_survives_the_round_trip(vocab: Vocab, text: str) -> None:
    ids = vocab.tokenize(text, parse_special=False)
    assert b"".join(vocab.piece(token) for token in ids).decode() == text
    assert all(0 <= token < vocab.n_tokens for token in ids)
    assert len(text.encode()) <= len(ids) * vocab.max_piece_bytes


def test_some_characters_take_two_tokens(vocab: Vocab) -> None:
    pieces = [vocab.piece(token) for token in vocab.tokenize("🦆", parse_special=False)]
    assert len(pieces) > 1
    with pytest.raises(UnicodeDecodeError):
        pieces[0].decode()


def test_control_strings_are_tokens_only_where_asked(vocab: Vocab) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    special = vocab.tokenize(text, parse_special=True)
    plain = vocab.tokenize(text, parse_special=False)
    assert vocab.is_control(special[0]) and vocab.is_control(special[-1])
    assert not any(map(vocab.is_control, plain))
    assert b"".join(map(vocab.piece, plain)).decode() == text
    assert b"".join(map(vocab.piece, special)).decode() == "user\nhi"
    assert b"".join(vocab.piece(token, special=True) for token in special).decode() == text


def test_tokenize_adds_no_bos_and_no_eos(vocab: Vocab) -> None:
    assert vocab.tokenize("", parse_special=True) == []
    ids = vocab.tokenize("word", parse_special=True)
    assert vocab.bos_id not in ids
    assert not vocab.eog_ids & set(ids)


def test_end_of_generation_ids_are_control_tokens(vocab: Vocab) -> None:
    assert vocab.eog_ids
    assert all(map(vocab.is_control, vocab.eog_ids))
    assert vocab.tokenize("<|im_end|>", parse_special=True)[0] in vocab.eog_ids


def test_ids_outside_the_vocabulary_have_no_piece(vocab: Vocab) -> None:
    for token in (-1, vocab.n_tokens, vocab.n_tokens + 10**6):
        with pytest.raises(IndexError):
            vocab.piece(token)


def test_no_piece_is_longer_than_promised(vocab: Vocab) -> None:
    longest = max(len(vocab.piece(token, special=True)) for token in range(vocab.n_tokens))
    assert longest <= vocab.max_piece_bytes


def test_the_model_brings_a_chat_template(vocab: Vocab) -> None:
    assert vocab.chat_template is not None
    assert "add_generation_prompt" in vocab.chat_template


def test_vocabulary_and_logits_have_one_size(make: Make) -> None:
    driver = make()
    assert driver.runtime.vocab.n_tokens == driver.runtime.model.n_vocab == len(driver.feed(0, [50]))


def _row(driver: Driver, values: dict[int, float]) -> np.ndarray:
    row = np.full(driver.runtime.vocab.n_tokens, -20.0, dtype=np.float32)
    for token, value in values.items():
        row[token] = value
    return row


FILTERS = [
    OPEN,
    CandidateFilter(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    CandidateFilter(temperature=1.0, top_k=3, top_p=1.0, min_p=0.0),
    CandidateFilter(temperature=1.0, top_k=0, top_p=0.7, min_p=0.0),
    CandidateFilter(temperature=1.0, top_k=0, top_p=1.0, min_p=0.2),
    CandidateFilter(temperature=2.5, top_k=10, top_p=0.9, min_p=0.01),
    CandidateFilter(temperature=0.3, top_k=1, top_p=0.5, min_p=0.5),
    CandidateFilter(temperature=1.0, top_k=0, top_p=0.0, min_p=0.0),
    CandidateFilter(temperature=1.0, top_k=0, top_p=1.0, min_p=1.0),
]


@pytest.mark.parametrize("spec", FILTERS)
def test_filters_agree_with_the_reference_and_keep_the_order(make: Make, spec: CandidateFilter) -> None:
    driver = make()
    random = np.random.default_rng(5)
    likely = random.choice(driver.runtime.vocab.n_tokens, 60, replace=False)
    row = _row(driver, dict(zip(likely.tolist(), random.normal(0.0, 3.0, 60).tolist(), strict=True)))
    before = row.copy()
    ids, probabilities = driver.runtime.candidates.filter(row, spec)
    np.testing.assert_array_equal(row, before)
    assert len(ids) == len(probabilities) >= 1
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-5)
    assert (np.diff(probabilities) <= 0.0).all()
    wanted_ids, wanted = FakeCandidates().filter(row, spec)
    np.testing.assert_array_equal(ids, wanted_ids)
    np.testing.assert_allclose(probabilities, wanted, rtol=1e-4, atol=1e-7)


def test_known_probabilities(make: Make) -> None:
    driver = make()
    row = _row(driver, {11: np.log(0.5), 12: np.log(0.3), 13: np.log(0.2)})
    ids, probabilities = driver.runtime.candidates.filter(row, CandidateFilter(1.0, 0, 0.75, 0.0))
    assert ids.tolist() == [11, 12]
    assert probabilities.tolist() == pytest.approx([0.625, 0.375], abs=1e-4)
    ids, probabilities = driver.runtime.candidates.filter(row, CandidateFilter(0.5, 2, 1.0, 0.0))
    assert probabilities.tolist() == pytest.approx([25 / 34, 9 / 34], abs=1e-4)


def test_equal_logits_are_taken_from_the_lowest_id_up(make: Make) -> None:
    driver = make()
    row = _row(driver, {99: 5.0, 30: 5.0, 61: 5.0, 200: 5.0})
    ids, _ = driver.runtime.candidates.filter(row, CandidateFilter(1.0, 3, 1.0, 0.0))
    assert ids.tolist() == [30, 61, 99]


def test_banned_tokens_are_never_candidates(make: Make) -> None:
    driver = make()
    row = np.full(driver.runtime.vocab.n_tokens, -np.inf, dtype=np.float32)
    row[[70, 71]] = 1.0, 0.0
    for spec in FILTERS:
        ids, probabilities = driver.runtime.candidates.filter(row, spec)
        assert set(ids.tolist()) <= {70, 71}, spec
        assert ids[0] == 70 and np.isfinite(probabilities).all(), spec


def test_the_same_row_gives_the_same_candidates(make: Make) -> None:
    driver = make()
    row = driver.feed(0, [50, 51, 52])
    first = driver.runtime.candidates.filter(row, FILTERS[1])
    driver.runtime.candidates.filter(row[::-1].copy(), FILTERS[5])
    second = driver.runtime.candidates.filter(row, FILTERS[1])
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])

"""The streamed text equals the text decoded at once, whatever the bytes and however they were cut into tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millpond.runtime.fake_vocab import CONTROL_STRINGS, FakeVocab
from millpond.text.detokenizer import Detokenizer

# Bytes around every border of the UTF-8 table, so that random joins are often nearly valid.
_BORDER_BYTES = bytes.fromhex("00 41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
_odd_bytes = st.lists(st.sampled_from(_BORDER_BYTES), max_size=24).map(bytes)
_data = st.one_of(st.binary(max_size=40), _odd_bytes, st.text(max_size=20).map(str.encode))


@given(pieces=st.lists(_data, max_size=12))
@example(pieces=[b"\xf0", b"\x9f", b"\x98", b"\x80"])
@example(pieces=[b"\xf0\x9f\x98", b"A"])
@example(pieces=[b"\xed\xa0", b"\x80"])
@example(pieces=[b"\xe4\xbd", b""])
def test_streamed_text_equals_text_decoded_at_once(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(pieces.__getitem__)
    streamed = [detokenizer.feed_one(token) for token in range(len(pieces))]
    assert detokenizer.held_bytes <= 3
    assert "".join(streamed) + detokenizer.flush() == b"".join(pieces).decode("utf-8", "replace")


@given(data=_data, cuts=st.lists(st.integers(0, 40), max_size=8))
def test_the_result_does_not_depend_on_how_ids_are_grouped(data: bytes, cuts: list[int]) -> None:
    borders = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    detokenizer = Detokenizer(lambda token: data[token : token + 1])
    groups = [detokenizer.feed(range(start, end)) for start, end in itertools.pairwise(borders)]
    assert "".join(groups) + detokenizer.flush() == data.decode("utf-8", "replace")


@given(text=st.text(max_size=30))
def test_valid_text_never_shows_a_replacement_on_the_way(text: str) -> None:
    data = text.encode()
    detokenizer = Detokenizer(lambda token: data[token : token + 1])
    shown = "".join(detokenizer.feed_one(token) for token in range(len(data)))
    assert shown == text
    assert detokenizer.flush() == ""


def test_an_emoji_over_four_tokens_appears_once_and_whole() -> None:
    detokenizer = Detokenizer(lambda token: "😀".encode()[token : token + 1])
    assert [detokenizer.feed_one(token) for token in range(4)] == ["", "", "", "😀"]
    assert detokenizer.held_bytes == 0


def test_a_cut_character_is_replaced_as_soon_as_it_cannot_become_whole() -> None:
    pieces = [b"a\xf0\x9f", b"b"]
    detokenizer = Detokenizer(pieces.__getitem__)
    assert detokenizer.feed_one(0) == "a"
    assert detokenizer.held_bytes == 2
    assert detokenizer.feed_one(1) == "\ufffdb"


def test_flush_replaces_an_incomplete_tail_once() -> None:
    detokenizer = Detokenizer([b"\xe4\xbd"].__getitem__)
    assert detokenizer.feed_one(0) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_control_tokens_are_invisible() -> None:
    vocab = FakeVocab()
    ids = vocab.tokenize("one<|im_end|>two", parse_special=True)
    assert any(vocab.is_control(token) for token in ids)
    detokenizer = Detokenizer(vocab.piece)
    assert detokenizer.feed(ids) + detokenizer.flush() == "onetwo"


def test_a_control_token_does_not_break_a_character_in_two() -> None:
    vocab = FakeVocab()
    control = CONTROL_STRINGS.index("<|im_start|>")
    (first, second, third, fourth) = (vocab.tokenize("x", parse_special=False)[0], *_single_bytes(vocab, "好"))
    detokenizer = Detokenizer(vocab.piece)
    assert detokenizer.feed([first, second, control, third, fourth]) == "x好"


def test_an_unknown_id_is_an_index_error() -> None:
    vocab = FakeVocab()
    with pytest.raises(IndexError):
        Detokenizer(vocab.piece).feed([vocab.n_tokens])


def _single_bytes(vocab: FakeVocab, text: str) -> list[int]:
    by_piece = {vocab.piece(token): token for token in range(len(CONTROL_STRINGS), vocab.n_tokens)}
    return [by_piece[bytes([byte])] for byte in text.encode()]

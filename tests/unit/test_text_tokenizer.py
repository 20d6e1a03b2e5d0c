"""Encoding, decoding, and what is refused before the vocabulary sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import ContextLengthExceeded, InvalidParameter
from millpond.runtime.fake_vocab import CONTROL_STRINGS, END_OF_TEXT, IM_END, FakeVocab
from millpond.text.tokenizer import Tokenizer

_vocab = FakeVocab()


@given(text=st.text(max_size=60))
def test_text_round_trips(text: str) -> None:
    tokenizer = Tokenizer(_vocab, 1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_strings_are_plain_text_unless_asked_for() -> None:
    tokenizer = Tokenizer(_vocab, 1000)
    text = "a<|im_end|>b"
    assert IM_END not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text, parse_special=True).count(IM_END) == 1


@pytest.mark.parametrize("text", ["\0", "a\0b", "\ufeffbom", "\u202e", "\x7f\x1b[0m", "\r\n", "\U0010ffff"])
def test_odd_characters_are_text(text: str) -> None:
    tokenizer = Tokenizer(_vocab, 1000)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["\ud83d", "ok \ude00", "\udcff"])
def test_lone_surrogates_are_refused_by_field(text: str) -> None:
    with pytest.raises(InvalidParameter, match="surrogate") as caught:
        Tokenizer(_vocab, 1000).encode(text, field="prompt[3]")
    assert caught.value.param == "prompt[3]"


class UnreadableVocab(FakeVocab):
    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        raise AssertionError("the text was read")


def test_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = Tokenizer(UnreadableVocab(), 10)
    limit = 10 * _vocab.max_piece_bytes
    assert tokenizer.max_text_bytes == limit
    with pytest.raises(ContextLengthExceeded) as caught:
        tokenizer.encode("a" * (limit + 1))
    assert (caught.value.limit, caught.value.prompt_tokens, caught.value.param) == (10, None, "prompt")
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(AssertionError, match="read"):
        tokenizer.encode("a" * limit)


def test_the_size_counts_bytes_not_characters() -> None:
    limit = 10 * _vocab.max_piece_bytes
    with pytest.raises(ContextLengthExceeded):
        Tokenizer(UnreadableVocab(), 10).encode("好" * (limit // 3 + 1))


def test_bos_comes_once_and_only_where_the_model_wants_it() -> None:
    wants = Tokenizer(FakeVocab(adds_bos=True), 100)
    assert wants.encode("a", add_bos=True)[0] == END_OF_TEXT
    assert wants.encode("a")[0] != END_OF_TEXT
    assert wants.with_bos([END_OF_TEXT, 5]) == [END_OF_TEXT, 5]
    assert wants.with_bos([]) == [END_OF_TEXT]
    assert Tokenizer(FakeVocab(adds_bos=False), 100).with_bos([5]) == [5]


def test_decode_hides_control_tokens_and_replaces_bad_bytes() -> None:
    tokenizer = Tokenizer(_vocab, 100)
    by_piece = {_vocab.piece(token): token for token in range(len(CONTROL_STRINGS), _vocab.n_tokens)}
    assert tokenizer.decode([IM_END, by_piece[b"\xff"], by_piece[b"a"], by_piece[b"\xe4"]]) == "\ufffda\ufffd"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("bad", [-1, 512, 10**9, 2**70])
def test_ids_outside_the_vocabulary_are_named(bad: int) -> None:
    with pytest.raises(InvalidParameter) as caught:
        Tokenizer(_vocab, 100).check_ids([0, 511, bad], "prompt")
    assert caught.value.param == "prompt[2]"


@pytest.mark.parametrize("bad", [True, 1.0, "1", None])
def test_only_whole_numbers_are_ids(bad: object) -> None:
    with pytest.raises(InvalidParameter):
        Tokenizer(_vocab, 100).check_ids([bad], "prompt")  # pyright: ignore[reportArgumentType]

"""Ids of an output to visible text: held characters, stop strings with the index they end at, tokens without text."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InternalError
from millpond.runtime.fake_vocab import CONTROL_STRINGS, IM_END, FakeVocab
from millpond.text.channels import ChannelPlan, MarkerTokens
from millpond.text.output_processor import HiddenTokens, OutputProcessor, StopMatch, TextDelta
from millpond.text.stop import StopStrings
from millpond.text.tool_formats.base import ThinkTags, ToolSet, Turn
from millpond.text.tool_formats.registry import FORMATS
from millpond.text.tool_formats.stream import Markers

_vocab = FakeVocab()
_BYTES = {_vocab.piece(token): token for token in range(len(CONTROL_STRINGS), _vocab.n_tokens)}


def ids_of(text: str) -> list[int]:
    """One token a byte."""
    return [_BYTES[bytes([byte])] for byte in text.encode()]


def processor(*stops: str, stop_token_ids: frozenset[int] = frozenset(), min_tokens: int = 0) -> OutputProcessor:
    hidden = HiddenTokens(_vocab.eog_ids, stop_token_ids, min_tokens)
    return OutputProcessor(_vocab.piece, StopStrings(stops), hidden)


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_text_passes_and_an_end_token_gives_none(stops: tuple[str, ...]) -> None:
    output = processor(*stops)
    assert output.feed(ids_of("hello"), 0) == TextDelta("hello", 5)
    assert output.feed([*ids_of("!"), IM_END], 5) == TextDelta("!", 2)
    assert output.finish() == TextDelta("", 0)


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_the_requests_stop_tokens_give_no_text_once_they_count(stops: tuple[str, ...]) -> None:
    (letter,) = ids_of("x")
    output = processor(*stops, stop_token_ids=frozenset({letter}), min_tokens=2)
    assert output.feed(ids_of("xxx"), 0).text == "xx"


@pytest.mark.parametrize("stops", [(), ("zzz",)])
def test_a_character_over_several_tokens_is_held(stops: tuple[str, ...]) -> None:
    output = processor(*stops)
    parts = [output.feed([token], index).text for index, token in enumerate(ids_of("😀a"))]
    assert parts == ["", "", "", "😀", "a"]
    assert output.feed(ids_of("好")[:2], 5) == TextDelta("", 2)
    assert output.finish() == TextDelta("\ufffd", 0)


def test_a_stop_string_over_tokens_ends_at_the_token_that_completed_it() -> None:
    output = processor("own fox")
    fed = [output.feed([token], index) for index, token in enumerate(ids_of("brown fox jumps"))]
    assert "".join(delta.text for delta in fed) == "br"
    assert fed[8] == TextDelta("", 1, StopMatch("own fox", 9))
    assert all(delta == TextDelta("", 0) for delta in fed[9:])
    assert output.stop == StopMatch("own fox", 9)
    assert output.finish() == TextDelta("", 0)


def test_a_stop_string_inside_one_feed_counts_the_tokens_up_to_it() -> None:
    output = processor("b")
    assert output.feed(ids_of("aabcc"), 0) == TextDelta("aa", 3, StopMatch("b", 3))


def test_tokens_without_text_count_towards_the_index() -> None:
    output = processor("b")
    assert output.feed([IM_END, *ids_of("ab")], 0) == TextDelta("a", 3, StopMatch("b", 3))


def test_held_text_comes_at_the_end() -> None:
    output = processor("</end>")
    assert output.feed(ids_of("x</en"), 0) == TextDelta("x", 5)
    assert output.finish() == TextDelta("</en", 0)


def test_an_end_token_does_not_lose_held_text() -> None:
    output = processor("</end>")
    assert output.feed([*ids_of("x</e"), IM_END], 0) == TextDelta("x", 5)
    assert output.finish() == TextDelta("</e", 0)


def test_a_stop_string_may_become_complete_at_the_end() -> None:
    output = processor("a\ufffd")
    assert output.feed([*ids_of("xa"), *ids_of("😀")[:2]], 0) == TextDelta("x", 4)
    assert output.finish() == TextDelta("", 0, StopMatch("a\ufffd", 4))


@pytest.mark.parametrize("stops", [(), ("zzz",)])
@pytest.mark.parametrize("index", [0, 3])
def test_a_token_that_comes_twice_or_not_at_all_is_our_fault(stops: tuple[str, ...], index: int) -> None:
    output = processor(*stops)
    output.feed(ids_of("ab"), 0)
    with pytest.raises(InternalError):
        output.feed(ids_of("c"), index)


_tokens = st.lists(st.integers(0, _vocab.n_tokens - 1), max_size=30)


@given(
    tokens=_tokens,
    stops=st.lists(st.sampled_from(["the", "a", " and", "\ufffd", "e t", "😀"]), max_size=3),
    size=st.integers(1, 7),
)
def test_the_text_does_not_depend_on_how_tokens_are_grouped(tokens: list[int], stops: list[str], size: int) -> None:
    def run(step: int) -> tuple[str, StopMatch | None]:
        output = processor(*stops)
        deltas = [output.feed(tokens[at : at + step], at) for at in range(0, len(tokens), step) if output.stop is None]
        return "".join(delta.text for delta in [*deltas, output.finish()]), output.stop

    assert run(size) == run(1)
    assert run(max(len(tokens), 1)) == run(1)


@given(tokens=_tokens)
def test_without_stop_strings_all_text_arrives(tokens: list[int]) -> None:
    visible = [token for token in tokens if token not in _vocab.eog_ids]
    expected = b"".join(_vocab.piece(token) for token in visible).decode("utf-8", "replace")
    for stops in ((), ("\0\0\0\0\0\0never",)):
        output = processor(*stops)
        assert output.feed(tokens, 0).text + output.finish().text == expected


# -- channels ----------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


def channels(text: str, *, sizes: list[int], stops: list[str] | None = None, **options: Any) -> tuple[Any, ...]:
    """One byte a token; 256 is a marker. (text, reasoning, calls, stop, tokens read, reasoning tokens)."""
    markers = Markers(["<tool_call>"])
    tokens = MarkerTokens(markers, {256: markers.of("<tool_call>")}, {"<tool_call>": 256})
    turn = Turn(ToolSet({"f": {}}), ThinkTags("<think>", "</think>"))
    machine = ChannelPlan(FORMATS["hermes"], turn, tokens, **options).machine("r", 0)
    processor = OutputProcessor(
        lambda token: bytes([token]) if token < 256 else b"",
        StopStrings(stops or []),
        HiddenTokens(frozenset()),
        machine,
    )
    ids = [
        token for part in text.partition("<tool_call>") for token in ([256] if part == "<tool_call>" else part.encode())
    ]
    deltas: list[TextDelta] = []
    at = 0
    for size in itertools.cycle(sizes):
        if at >= len(ids) or processor.stop is not None:
            break
        deltas.append(processor.feed(ids[at : at + size], at))
        at += size
    deltas.append(processor.finish())
    calls: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        calls[call.index] = calls.get(call.index, "") + (f"{call.name}:" if call.name else "") + call.arguments
    return (
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        list(calls.values()),
        processor.stop,
        sum(delta.token_count for delta in deltas),
        processor.reasoning_tokens,
    )


@given(st.lists(st.integers(1, 9), min_size=1), st.sampled_from([[], ["e."], ["é"], ["}"]]), st.booleans())
def test_channels_are_the_same_in_any_grouping_of_tokens(sizes: list[int], stops: list[str], parallel: bool) -> None:
    text = f"<think>\nhm é</think>\n\nMore e.\n{CALL} tail é"
    alone = channels(text, sizes=[1], stops=stops, parallel=parallel)
    assert channels(text, sizes=sizes, stops=stops, parallel=parallel) == alone


def test_channels_of_one_output() -> None:
    text, reasoning, calls, stop, _, thought = channels(f"<think>\nhm</think>\n\nYes.\n{CALL}", sizes=[3])
    assert (text, reasoning, calls, stop) == ("Yes.", "hm", ['f:{"a": "é"}'], None)
    assert thought == len(">\nhm</think>")


def test_an_output_of_one_call_ends_with_it() -> None:
    _, _, calls, stop, count, _ = channels(CALL + CALL, sizes=[500], parallel=False)
    assert calls == ['f:{"a": "é"}']
    assert (
        stop == StopMatch(None, count) and count == len(CALL.encode()) - len("\n</tool_call>") - len("<tool_call>") + 1
    )


def test_a_stop_string_ends_a_call_where_it_stands() -> None:
    text, _, calls, stop, _, _ = channels("a" + CALL, sizes=[7], stops=["}"])
    assert (text, calls) == ("a", ['f:{"a": "é"'])
    assert stop is not None and stop.stop == "}"

"""Stop strings against a reference that sees the whole text, and what must stay hidden on the way."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millpond.errors import InvalidParameter
from millpond.text.stop import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, StopMatcher, StopStrings

_letters = st.text(alphabet="ab", max_size=40)
_stops = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """(text before the match, match): the first end wins, of several the longest string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(StopStrings(stops))
    shown: list[str] = []
    for part in parts:
        text, matched = matcher.feed(part)
        shown.append(text)
        if matched is not None:
            return "".join(shown), matched
    return "".join(shown) + matcher.flush(), None


@given(stops=_stops, text=_letters, cuts=st.lists(st.integers(0, 40), max_size=6))
@example(stops=["abab", "b"], text="aab", cuts=[])
@example(stops=["aab"], text="aaab", cuts=[2])
def test_equals_the_reference_however_the_text_is_cut(stops: list[str], text: str, cuts: list[int]) -> None:
    borders = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    parts = [text[start:end] for start, end in itertools.pairwise(borders)]
    assert run(stops, parts) == reference(stops, text)
    assert run(stops, list(text)) == reference(stops, text)


@given(stops=_stops, text=_letters)
def test_holds_back_exactly_what_could_still_become_a_stop_string(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopStrings(stops))
    shown = ""
    for index, character in enumerate(text):
        part, matched = matcher.feed(character)
        shown += part
        if matched is not None:
            return
        read = text[: index + 1]
        heads = [size for stop in stops for size in range(len(stop)) if read.endswith(stop[:size])]
        assert shown == read[: len(read) - max(heads)]


def test_the_head_of_a_stop_string_is_never_shown() -> None:
    matcher = StopMatcher(StopStrings(["own fox"]))
    assert [matcher.feed(part) for part in ("the quick", " br", "own", " f", "ox", " jumps")] == [
        ("the quick", None),
        (" br", None),
        ("", None),
        ("", None),
        ("", "own fox"),
        ("", None),
    ]


def test_a_match_inside_one_part_cuts_that_part() -> None:
    assert StopMatcher(StopStrings(["\n\n"])).feed("one\n\ntwo") == ("one", "\n\n")


def test_held_text_is_shown_when_it_turns_out_harmless() -> None:
    matcher = StopMatcher(StopStrings(["beta gamma"]))
    assert matcher.feed("alpha beta ") == ("alpha ", None)
    assert matcher.feed("delta") == ("beta delta", None)
    assert matcher.flush() == ""


def test_flush_shows_what_was_held() -> None:
    matcher = StopMatcher(StopStrings(["</end>"]))
    assert matcher.feed("x</en") == ("x", None)
    assert matcher.flush() == "</en"


def test_a_character_that_fails_one_stop_string_may_go_on_with_another() -> None:
    assert run(["abcd", "bcx"], ["ab", "cx"]) == ("a", "bcx")


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["a", "ab"], "xab", ("x", "a")),
        (["cab", "b"], "xcab", ("x", "cab")),
        (["b", "cab"], "xcab", ("x", "cab")),
        (["abcde", "cd"], "abcdx", ("ab", "cd")),
    ],
)
def test_the_first_complete_match_wins_and_of_several_the_longest(
    stops: list[str], text: str, expected: tuple[str, str]
) -> None:
    assert run(stops, [text]) == expected


@pytest.mark.parametrize("stop", ["]", "^", "-", "\\", ".", "\0", "😀", " ", "\n"])
def test_every_character_may_be_a_stop_string(stop: str) -> None:
    assert run([stop, "zz"], ["a", "b" + stop + "c"]) == ("ab", stop)
    assert run([stop], ["plain text"])[1] == (stop if stop in "plain text" else None)


def test_no_stop_strings_let_everything_through() -> None:
    stops = StopStrings([])
    assert not stops
    assert StopMatcher(stops).feed("anything") == ("anything", None)


def test_outputs_that_share_stop_strings_do_not_share_state() -> None:
    stops = StopStrings(["ab"])
    first, second = StopMatcher(stops), StopMatcher(stops)
    assert first.feed("a") == ("", None)
    assert second.feed("b") == ("b", None)
    assert first.feed("b") == ("", "ab")


def test_long_repetitive_stop_strings_are_found() -> None:
    stops = ["a" * (MAX_STOP_CHARACTERS - index) + "b" for index in range(1, MAX_STOP_STRINGS + 1)]
    text = "a" * 3000 + "b"
    assert run(stops, list(text)) == ("a" * (3000 - MAX_STOP_CHARACTERS + 1), stops[0])


@pytest.mark.parametrize(
    "stops",
    [[""], ["ok", ""], ["x" * (MAX_STOP_CHARACTERS + 1)], [str(n) for n in range(MAX_STOP_STRINGS + 1)], ["\ud83d"]],
)
def test_bad_stop_strings_are_refused_by_name(stops: list[str]) -> None:
    with pytest.raises(InvalidParameter) as caught:
        StopStrings(stops)
    assert caught.value.param == "stop"


def test_the_largest_allowed_stop_strings_are_taken() -> None:
    assert StopStrings([chr(ord("a") + index) * MAX_STOP_CHARACTERS for index in range(MAX_STOP_STRINGS)])

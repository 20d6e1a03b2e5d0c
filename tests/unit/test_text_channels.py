"""The channel machine: content, reasoning and calls of one output, the same however its text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.text.channels import ChannelDelta, ChannelPlan, MarkerTokens
from millpond.text.tool_formats.base import ThinkTags, ToolSet, Turn
from millpond.text.tool_formats.registry import FORMATS
from millpond.text.tool_formats.stream import Markers
from millpond.text.tool_formats.writer import HELD_CHARACTERS

THINK = ThinkTags("<think>", "</think>")
TOOLS = ToolSet(
    {
        "f": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}},
        "g": {"type": "object", "properties": {}},
    }
)

Parsed = tuple[str, str, list[tuple[str, str, str]]]


def plan(form: str, **options: Any) -> ChannelPlan:
    turn = Turn(options.pop("tools", TOOLS), options.pop("think", None), options.pop("thinking", False))
    return ChannelPlan(FORMATS[form], turn, options.pop("tokens", MarkerTokens.none()), **options)


def read(how: ChannelPlan, *pieces: str, was_cut: bool = False) -> Parsed:
    """(content, reasoning, [(id, name, arguments)]), gathered as a client does; the shape of each piece is checked."""
    machine = how.machine("request", 0)
    deltas = [*map(machine.feed, pieces), machine.finish(was_cut=was_cut)]
    return gather(deltas)


def gather(deltas: list[ChannelDelta]) -> Parsed:
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.index == len(calls):
            assert call.id and call.name
            calls.append([call.id, call.name, call.arguments])
        else:
            assert call.index == len(calls) - 1 and call.id is None and call.name is None
            calls[call.index][2] += call.arguments
    content, reasoning = "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas)
    return content, reasoning, [(call[0], call[1], call[2]) for call in calls]


def named(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in parsed[2]]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
SAMPLES = [
    ("hermes", CALL),
    ("hermes", f"<think>\nhm </thin\n</think>\n\nText.\n{CALL}\n{CALL} end "),
    ("hermes", '<tool_call>{"arguments": {"a": "</tool_call>\\u00e9"}, "id": 3, "name": "g"}}</tool_call>'),
    ("hermes", '<tool_call>[{"name": "f", "arguments": null}, {"name": "g"}]</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": True, "b": [1.5e3, -0], "c": "\\d\n"}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call> after'),
    ("hermes", "a < b <tool <tool_call>no</tool_call>"),
    ("llama3", '{"name": "f", "parameters": {"a": "{\\"}"}}; {"name": "g", "parameters": {}}'),
    ("llama3", 'Well. <|python_tag|>{"name": "f", "arguments": {}}'),
    ("llama3", '{"name": "unknown", "parameters": {}} and {"name": "f", "parameters": {}}'),
    ("llama3", '{"name": "f", "parameters": {"a": "x'),
    ("json", '[{"name": "f", "arguments": {"n": 1}}, {"name": "g", "arguments": {}}]'),
    ("json", '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}'),
    ("json", "[1, 2]"),
    ("json", '{"name": "f"'),
    ("hermes", CALL.replace('"x"', f'"{"long " * 99}"')),
    ("hermes", CALL.replace('"x"', f'"{"long " * 99}" broken') + CALL),
]


@given(st.sampled_from(SAMPLES), st.data(), st.booleans(), st.booleans())
def test_any_pieces_of_the_text_give_the_same(
    sample: tuple[str, str], data: st.DataObject, whole: bool, was_cut: bool
) -> None:
    form, text = sample
    text = text[: data.draw(st.integers(2, len(text)))]
    how = plan(form, think=THINK, whole_calls=whole)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = read(how, text, was_cut=was_cut)
    assert read(how, *pieces, was_cut=was_cut) == found == read(how, *text, was_cut=was_cut)


@given(st.sampled_from(["hermes", "llama3", "json"]), st.lists(st.sampled_from(sorted({*'{}[]":,a \n\\<>/', "name"}))))
def test_no_text_is_lost_or_raises_without_calls(form: str, parts: list[str]) -> None:
    text = "".join(parts)
    content, reasoning, calls = read(plan(form), *text)
    assert (content, reasoning, calls) == (text, "", [])


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_without_tools_everything_is_text(form: str) -> None:
    if FORMATS[form].think is None:
        assert read(plan(form, tools=None), CALL) == (CALL, "", [])


def test_ids_are_minted_once_and_differ() -> None:
    how = plan("hermes")
    first, again = read(how, CALL + CALL), read(how, *(CALL + CALL))
    assert first == again
    other = how.machine("request", 1)
    ids = [call[0] for call in first[2]] + [
        call[0] for call in gather([other.feed(CALL), other.finish(was_cut=False)])[2]
    ]
    assert len(set(ids)) == 3


def test_arguments_of_a_long_call_come_before_it_ends() -> None:
    machine = plan("hermes").machine("request", 0)
    start = machine.feed('<tool_call>\n{"name": "f", "arguments": {"a": "')
    assert start.tool_calls == ()
    held = machine.feed("x" * HELD_CHARACTERS)
    assert [(call.name, len(call.arguments)) for call in held.tool_calls] == [("f", HELD_CHARACTERS + 7)]
    assert [call.arguments for call in machine.feed("long ").tool_calls] == ["long "]


@pytest.mark.parametrize("text", [CALL[:size] for size in range(len(CALL) - len("\n</tool_call>"))])
def test_a_call_that_a_limit_cut_is_handed_out_as_it_is(text: str) -> None:
    content, _, calls = read(plan("hermes"), text, was_cut=True)
    assert content in ("", text) and (not content or not text.startswith("<tool_call>"))
    assert [name for _, name, _ in calls] == (["f"] if '"arguments": {' in text else [])
    assert all(text.endswith(arguments) or '{"a": "x"}'.startswith(arguments) for _, _, arguments in calls)
    assert read(plan("hermes", whole_calls=True), text, was_cut=True)[2] == []


@pytest.mark.parametrize("text", [CALL[:size] for size in range(len(CALL) - len("\n</tool_call>"))])
def test_a_call_that_the_model_left_open_is_none(text: str) -> None:
    machine = plan("hermes").machine("request", 0)
    _, _, calls = gather([machine.feed(text), machine.finish(was_cut=False)])
    assert calls == [] and not machine.waits_for_results


def test_a_long_call_that_the_model_left_open_is_seen_and_waits_for_no_results() -> None:
    text = CALL.replace("x", "long " * 99)
    machine = plan("hermes").machine("request", 0)
    _, _, calls = gather([machine.feed(text[:-30]), machine.finish(was_cut=False)])
    assert [name for _, name, _ in calls] == ["f"] and not machine.waits_for_results
    machine = plan("hermes").machine("request", 0)
    _, _, calls = gather([machine.feed(text), machine.finish(was_cut=False)])
    assert calls[0][2] == json.dumps({"a": "long " * 99}) and machine.waits_for_results


@pytest.mark.parametrize("was_cut", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_whole_call_before_a_cut_one_is_kept(whole: bool, was_cut: bool) -> None:
    found = read(plan("hermes", whole_calls=whole), CALL + CALL[: CALL.index("}}")], was_cut=was_cut)[2]
    cut = [("f", '{"a": "x"')] if was_cut and not whole else []
    assert [call[1:] for call in found] == [("f", '{"a": "x"}'), *cut]


LIST = '[f(a="x"), g(), f(a="y", n=1)]'


def test_a_list_of_calls_comes_as_one_and_as_far_as_a_limit_lets_it() -> None:
    cut = LIST[: LIST.index("n=")]
    assert [call[1:] for call in read(plan("pythonic"), LIST)[2]] == [
        ("f", '{"a": "x"}'),
        ("g", "{}"),
        ("f", '{"a": "y", "n": 1}'),
    ]
    assert read(plan("pythonic"), cut)[2] == []
    assert [call[2] for call in read(plan("pythonic"), cut, was_cut=True)[2]] == ['{"a": "x"}', "{}", '{"a": "y"']
    assert read(plan("pythonic", whole_calls=True), cut, was_cut=True)[2] == []


@pytest.mark.parametrize("whole", [False, True])
def test_broken_calls_are_text(whole: bool) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'
    assert read(plan("hermes", whole_calls=whole), text) == (text, "", [])


def test_of_a_long_broken_call_the_rest_is_arguments() -> None:
    broken = '{"a": "' + "x" * HELD_CHARACTERS + '" 1}}'
    content, _, calls = read(plan("hermes"), f'<tool_call>{{"name": "f", "arguments": {broken}</tool_call>')
    assert content == "" and calls[0][1:] == ("f", broken)


@pytest.mark.parametrize(
    ("thinking", "text", "content", "reasoning"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "yes", "hm"),
        (False, " \n<think>hm</think>yes", "yes", "hm"),
        (True, "hm\n</think>\n\nyes", "yes", "hm"),
        (True, "<think>\nhm</think>yes", "yes", "hm"),
        (True, "hm ", "", "hm "),
        (True, "</think>yes", "yes", ""),
        (False, "yes <think>no</think>", "yes <think>no</think>", ""),
        (False, " yes ", " yes ", ""),
        (False, "<think>a\n\nb", "", "a\n\nb"),
    ],
)
def test_reasoning(thinking: bool, text: str, content: str, reasoning: str) -> None:
    how = plan("hermes", think=THINK, thinking=thinking)
    assert read(how, text) == read(how, *text) == (content, reasoning, [])


def test_a_model_without_tags_does_not_reason() -> None:
    assert read(plan("hermes"), "<think>a</think>b") == ("<think>a</think>b", "", [])


def test_control_tokens_and_the_same_letters_are_told_apart() -> None:
    markers = Markers(["<|python_tag|>"])
    tag = markers.of("<|python_tag|>")
    how = plan("llama3", tokens=MarkerTokens(markers, {7: tag}, {"<|python_tag|>": 7}))
    call = '{"name": "f", "parameters": {"a": "' + tag + '"}}'
    assert named(read(how, "say ", tag, call)) == [("f", {"a": "<|python_tag|>"})]
    assert read(how, "say <|python_tag|>" + call)[2] == []
    assert read(how, "a", tag, "b")[0] == "ab"


def test_one_call_is_enough_where_calls_may_not_be_parallel() -> None:
    machine = plan("hermes", parallel=False).machine("request", 0)
    last = CALL.rindex("}")
    machine.feed(CALL[:last])
    assert not machine.is_over
    machine.feed(CALL[last:])
    assert machine.is_over


@pytest.mark.parametrize(("form", "text"), [("hermes", CALL + CALL), ("pythonic", LIST)])
@pytest.mark.parametrize("whole", [False, True])
def test_calls_behind_the_first_are_dropped_where_one_is_taken(form: str, text: str, whole: bool) -> None:
    how = plan(form, parallel=False, whole_calls=whole)
    assert [call[1:] for call in read(how, text)[2]] == [("f", '{"a": "x"}')]

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


def read(how: ChannelPlan, *pieces: str) -> Parsed:
    """(content, reasoning, [(id, name, arguments)]), gathered as a client does; the shape of each piece is checked."""
    machine = how.machine("request", 0)
    deltas = [*map(machine.feed, pieces), machine.finish()]
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
]


@given(st.sampled_from(SAMPLES), st.data(), st.booleans())
def test_any_cut_of_the_text_gives_the_same(sample: tuple[str, str], data: st.DataObject, whole: bool) -> None:
    form, text = sample
    how = plan(form, think=THINK, whole_calls=whole)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(how, *pieces) == read(how, text) == read(how, *text)


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
    ids = [call[0] for call in first[2]] + [call[0] for call in gather([other.feed(CALL), other.finish()])[2]]
    assert len(set(ids)) == 3


def test_arguments_come_before_the_call_ends() -> None:
    machine = plan("hermes").machine("request", 0)
    machine.feed('<tool_call>\n{"name": "f", "arguments": {"a": "')
    delta = machine.feed("long ")
    assert [call.arguments for call in delta.tool_calls] == ["long "]


@pytest.mark.parametrize("text", [CALL[:size] for size in range(len(CALL) - len("\n</tool_call>"))])
def test_a_cut_call_is_handed_out_as_it_is_or_not_at_all(text: str) -> None:
    content, _, calls = read(plan("hermes"), text)
    assert content in ("", text) and (not content or not text.startswith("<tool_call>"))
    assert [name for _, name, _ in calls] == (["f"] if '"arguments": {' in text else [])
    assert all(text.endswith(arguments) or '{"a": "x"}'.startswith(arguments) for _, _, arguments in calls)
    assert read(plan("hermes", whole_calls=True), text)[2] == []


def test_a_whole_call_before_a_cut_one_is_kept() -> None:
    assert named(read(plan("hermes", whole_calls=True), CALL + CALL[:-20])) == [("f", {"a": "x"})]


def test_broken_calls_are_text_where_nothing_was_shown() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>'
    assert read(plan("hermes", whole_calls=True), text) == (text, "", [])
    content, _, calls = read(plan("hermes"), text)
    assert content == "" and calls[0][1:] == ("f", '{"a" 1}}')


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

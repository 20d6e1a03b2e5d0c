"""One form of messages for every template; everything else is refused with the name of the field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from millpond.errors import InvalidParameter
from millpond.text.messages import normalise_messages


def one(message: dict[str, Any], **options: bool) -> dict[str, Any]:
    return normalise_messages([message], **options)[0]


def call(arguments: object, **more: object) -> dict[str, Any]:
    function: dict[str, object] = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function, **more}]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("text", "text"),
        ("", ""),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "one\ntwo"),
    ],
)
def test_content_becomes_a_string(content: object, expected: str) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": expected}


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content"),
        ({"role": "user", "content": ["text"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"text": "no type"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": None}]}, "messages[1].content[0].text"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "", "content": "x"}, "messages[1].role"),
        ({"role": None, "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ("hello", "messages[1]"),
        ({"role": "assistant", "content": "", "tool_calls": {}}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": ["x"]}, "messages[1].tool_calls[0]"),
        ({"role": "assistant", "content": "", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]},
            "messages[1].tool_calls[0].function.name",
        ),
        (call([1]), "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_errors_name_the_field(message: Any, field: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        normalise_messages([{"role": "user", "content": "fine"}, message])
    assert caught.value.param == field
    assert str(caught.value).startswith(field)


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidParameter) as caught:
        normalise_messages([])
    assert caught.value.param == "messages"


def test_developer_is_system_and_tool_messages_stay() -> None:
    tool = {"role": "tool", "content": "42", "tool_call_id": "c1"}
    assert normalise_messages([{"role": "developer", "content": "be brief"}, tool]) == [
        {"role": "system", "content": "be brief"},
        tool,
    ]


def test_null_fields_and_empty_calls_go_away() -> None:
    message = {"role": "assistant", "content": "hi", "tool_calls": [], "refusal": None, "audio": None, "name": "bo"}
    assert one(message) == {"role": "assistant", "content": "hi", "name": "bo"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ('{"a": ', '{"a": '),
        ("[1]", "[1]"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 100_000, "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", '{"a": ' + "9" * 5000 + "}"),
    ],
)
def test_arguments_become_an_object_where_they_are_one(arguments: object, expected: object) -> None:
    message = one(call(arguments))
    assert message["content"] == ""
    assert message["tool_calls"][0] == {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": expected},
    }


@pytest.mark.parametrize(
    ("arguments", "expected"), [('{"a": 1}', '{"a": 1}'), ({"a": "好"}, '{"a": "好"}'), (None, "{}"), ("", "{}")]
)
def test_arguments_stay_text_for_templates_that_paste_them(arguments: object, expected: str) -> None:
    message = one(call(arguments), text_arguments=True)
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_the_callers_messages_are_left_alone() -> None:
    messages = [call('{"a": 1}'), {"role": "developer", "content": [{"type": "text", "text": "x"}], "name": None}]
    before = copy.deepcopy(messages)
    normalise_messages(messages)
    assert messages == before

"""Brings chat messages into the one form that templates expect. Pure dicts in, new dicts out; knows no template.

What changes: null content becomes "", text parts are joined with newlines, `developer` becomes `system`, empty
`tool_calls` and null fields go away, a call's arguments become an object where they are JSON of one, and `reasoning` is
called `reasoning_content`. A result gets the name of the function it answers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from millpond.errors import InvalidParameter

ROLES = ("system", "developer", "user", "assistant", "tool")

Message = dict[str, Any]


def normalise_messages(messages: Sequence[Message], *, text_arguments: bool = False) -> list[Message]:
    """`text_arguments`: calls keep their arguments as JSON text, for templates that paste them.

    Raises InvalidParameter that names the field, like `messages[2].content`.
    """
    if not messages:
        raise InvalidParameter("messages", "must not be empty")
    normal = [
        _normalise(message, f"messages[{index}]", text_arguments=text_arguments)
        for index, message in enumerate(messages)
    ]
    _name_results(normal)
    return normal


def _name_results(messages: Sequence[Message]) -> None:
    """Clients say which call a result answers; some templates want the function's name."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and isinstance(answered, str) and answered in names:
            message.setdefault("name", names[answered])


def _normalise(message: Message, field: str, *, text_arguments: bool) -> Message:
    _require_dict(message, field)
    role = _normalise_role(message.get("role"), f"{field}.role")
    calls = _normalise_calls(message.get("tool_calls"), f"{field}.tool_calls", text_arguments=text_arguments)
    if "content" not in message and role != "assistant":
        raise InvalidParameter(f"{field}.content", "is missing")
    if "content" not in message and not calls:
        raise InvalidParameter(f"{field}.content", "is missing, and there are no tool_calls")
    known = {"role", "content", "tool_calls"}
    others = {key: value for key, value in message.items() if key not in known and value is not None}
    normal = {"role": role, "content": _normalise_content(message.get("content"), f"{field}.content"), **others}
    if calls:
        normal["tool_calls"] = calls
    if "reasoning" in normal:
        normal.setdefault("reasoning_content", normal.pop("reasoning"))
    return normal


def _normalise_role(role: object, field: str) -> str:
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidParameter(field, f"must be one of {', '.join(ROLES)}; got {_shown(role)}")
    return "system" if role == "developer" else role


def _normalise_content(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidParameter(field, f"must be a string, null or a list of parts; got {type(content).__name__}")
    parts = cast("list[object]", content)
    return "\n".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(parts))


def _part_text(part: object, field: str) -> str:
    _require_dict(part, field)
    values = cast("dict[str, object]", part)
    kind, text = values.get("type"), values.get("text")
    if kind != "text":
        raise InvalidParameter(f"{field}.type", f"this server takes parts of type 'text' only; got {_shown(kind)}")
    if not isinstance(text, str):
        raise InvalidParameter(f"{field}.text", "must be a string")
    return text


def _normalise_calls(calls: object, field: str, *, text_arguments: bool) -> list[Message]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidParameter(field, "must be a list")
    listed = cast("list[object]", calls)
    return [_normalise_call(call, f"{field}[{index}]", text_arguments) for index, call in enumerate(listed)]


def _normalise_call(call: object, field: str, text_arguments: bool) -> Message:
    _require_dict(call, field)
    values = cast("Message", call)
    function = values.get("function")
    _require_dict(function, f"{field}.function")
    named = cast("Message", function)
    if not isinstance(named.get("name"), str):
        raise InvalidParameter(f"{field}.function.name", "must be a string")
    arguments = _normalise_arguments(named.get("arguments"), f"{field}.function.arguments", text_arguments)
    return {"type": "function", **values, "function": {**named, "arguments": arguments}}


def _normalise_arguments(arguments: object, field: str, text_arguments: bool) -> object:
    """JSON text that is no object (a call cut short, say) stays text: the client repeats what a model once wrote."""
    if arguments is None or arguments == "":
        arguments = {}
    if text_arguments:
        return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str):
        _require_dict(arguments, field)
        return arguments
    try:
        parsed = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return arguments
    return cast("object", parsed) if isinstance(parsed, dict) else arguments


def _refuse_constant(name: str) -> NoReturn:
    """NaN and Infinity, which Python reads and JSON does not have."""
    raise ValueError(name)


def _require_dict(value: object, field: str) -> None:
    if not isinstance(value, dict):
        raise InvalidParameter(field, f"must be an object; got {type(value).__name__}")


def _shown(value: object) -> str:
    return repr(value[:40]) if isinstance(value, str) else type(value).__name__

"""Tools on the wire: what a chat request offers and demands, and how calls are written in answers. Pure; no parser."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from millpond.async_llm import Finish, ToolCallDelta
from millpond.errors import InvalidParameter
from millpond.server.schemas.chat import ChatRequest
from millpond.types import FinishReason

MAX_TOOL_NAME = 128


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """`offered` goes to the template and is what calls are read of. `forced`: one of these names must be called."""

    offered: tuple[dict[str, Any], ...] = ()
    forced: tuple[str, ...] = ()
    parallel: bool = True


def tool_plan(body: ChatRequest) -> ToolPlan:
    """tool_choice "none" is as if there were no tools: a model that sees none calls none. Raises InvalidParameter."""
    extras = body.model_extra or {}
    for name in ("functions", "function_call"):
        if extras.get(name):
            raise InvalidParameter(name, "is the old name; send tools and tool_choice")
    tools = tuple(_checked(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ()))
    names = [tool["function"]["name"] for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise InvalidParameter(f"tools[{place}].function.name", f"{name!r} is offered twice")
    return _chosen(body.tool_choice, tools, names, parallel=body.parallel_tool_calls is not False)


def _checked(tool: dict[str, Any], field_name: str) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise InvalidParameter(f"{field_name}.type", "only tools of type 'function' are supported")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidParameter(f"{field_name}.function", "must be an object")
    named = cast("dict[str, Any]", function)
    name = named.get("name")
    if not isinstance(name, str) or not name or len(name) > MAX_TOOL_NAME:
        raise InvalidParameter(f"{field_name}.function.name", f"must be a text of 1 to {MAX_TOOL_NAME} characters")
    for key, kind in (("description", str), ("parameters", dict)):
        if named.get(key) is not None and not isinstance(named[key], kind):
            shown = "a text" if kind is str else "an object"
            raise InvalidParameter(f"{field_name}.function.{key}", f"must be {shown}")
    return {"type": "function", "function": {key: value for key, value in named.items() if value is not None}}


def _chosen(choice: object, tools: tuple[dict[str, Any], ...], names: list[str], *, parallel: bool) -> ToolPlan:
    if choice in (None, "auto"):
        return ToolPlan(tools, (), parallel)
    if choice == "none":
        return ToolPlan()
    if not tools:
        raise InvalidParameter("tool_choice", "needs tools to choose from")
    if choice == "required":
        return ToolPlan(tools, tuple(names), parallel)
    if not isinstance(choice, dict):
        raise InvalidParameter("tool_choice", "must be 'auto', 'none', 'required' or an object that names a function")
    wanted = cast("dict[str, Any]", choice)
    if wanted.get("type") == "allowed_tools":
        return _allowed(wanted, tools, names, parallel=parallel)
    name = _function_name(wanted, "tool_choice", names)
    return ToolPlan(tools, (name,), parallel=False)


def _allowed(
    choice: dict[str, Any], tools: tuple[dict[str, Any], ...], names: list[str], *, parallel: bool
) -> ToolPlan:
    """`{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`: the others are not offered."""
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, dict):
        raise InvalidParameter("tool_choice.allowed_tools", "must be an object")
    given = cast("dict[str, Any]", allowed)
    listed: object = given.get("tools")
    if not isinstance(listed, list) or not listed:
        raise InvalidParameter("tool_choice.allowed_tools.tools", "must be a list that is not empty")
    items = cast("list[object]", listed)
    wanted = {_function_name(item, f"tool_choice.allowed_tools.tools[{n}]", names) for n, item in enumerate(items)}
    offered = tuple(tool for tool in tools if tool["function"]["name"] in wanted)
    mode = given.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidParameter("tool_choice.allowed_tools.mode", "must be 'auto' or 'required'")
    forced = tuple(tool["function"]["name"] for tool in offered) if mode == "required" else ()
    return ToolPlan(offered, forced, parallel)


def _function_name(choice: object, field_name: str, names: list[str]) -> str:
    given = cast("dict[str, Any]", choice) if isinstance(choice, dict) else {}
    function = given.get("function")
    name = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if given.get("type") != "function" or not isinstance(name, str):
        shape = "{'type': 'function', 'function': {'name': ...}}"
        raise InvalidParameter(field_name, f"must name a function: {shape}")
    if name not in names:
        raise InvalidParameter(field_name, f"names {name[:MAX_TOOL_NAME]!r}, which is not among the tools")
    return name


@dataclass(slots=True)
class CollectedCalls:
    """The calls of one output, gathered from their pieces."""

    calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def take(self, pieces: Sequence[ToolCallDelta]) -> None:
        for piece in pieces:
            if piece.index == len(self.calls):
                function = {"name": piece.name, "arguments": piece.arguments}
                self.calls.append({"id": piece.id, "type": "function", "function": function})
            else:
                self.calls[piece.index]["function"]["arguments"] += piece.arguments


def wire_pieces(pieces: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """Pieces as they stand in a chunk's delta: id, type and name in the first of a call only."""
    return [
        {"index": piece.index, "function": {"arguments": piece.arguments}}
        if piece.id is None
        else {
            "index": piece.index,
            "id": piece.id,
            "type": "function",
            "function": {"name": piece.name, "arguments": piece.arguments},
        }
        for piece in pieces
    ]


def finish_reason(finish: Finish) -> str:
    """An output that ended by itself with whole calls waits for their results; one cut inside a call is `length`."""
    waits = finish.waits_for_results and finish.reason is FinishReason.STOP
    return "tool_calls" if waits else wire_reason(finish.reason)


def wire_reason(reason: FinishReason) -> str:
    """OpenAI's words. An output that was cut for its repetitions did not stop by itself: see `stop_reason`."""
    return FinishReason.LENGTH.value if reason is FinishReason.REPETITION else reason.value


def stop_reason(reason: FinishReason) -> dict[str, str]:
    """What stands beside `finish_reason` where that does not tell the whole."""
    return {"stop_reason": reason.value} if reason is FinishReason.REPETITION else {}

"""Tools for models whose chat template does not show them: written into the messages, in the Hermes format.

So with calls and results in the history: as text, any template takes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from millpond.text.chat_template import TemplateAbilities

Message = dict[str, Any]

_BEFORE = "You can call these tools. One JSON object a line describes each:\n"
_AFTER = """
To call a tool, write a block like this, one for each call, with nothing else behind it:
<tool_call>
{"name": "NAME", "arguments": {"KEY": "VALUE"}}
</tool_call>
The result then comes in a <tool_response> block."""


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], shows: TemplateAbilities
) -> list[Message]:
    """New messages, normalised ones in: what the template does not show is text in them."""
    plain = [_as_text(message, shows) for message in messages]
    if not tools or shows.tools:
        return plain
    text = tools_text(tools)
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}".lstrip("\n")}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    functions = [tool.get("function") or tool for tool in tools]
    return _BEFORE + "\n".join(json.dumps(function, ensure_ascii=False) for function in functions) + "\n" + _AFTER


def _as_text(message: Message, shows: TemplateAbilities) -> Message:
    if message["role"] == "tool" and not (shows.tools and shows.results):
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message or shows.calls:
        return message
    calls = [_call_text(cast("Message", call["function"])) for call in message["tool_calls"]]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([*filter(None, [message["content"]]), *calls])}


def _call_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function["name"])}, "arguments": {text}}}\n</tool_call>'

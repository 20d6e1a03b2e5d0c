"""canitoolcall's live probe over HTTP: a scripted model that behaves, in several dialects, through the text side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from canitoolcall.probe import BUILTIN_SCENARIOS, probe
from fake_channel_engine import FakeChannelEngine
from fake_text_engine import Script
from wire_server import MODEL, running

from millpond.async_llm import ChatInput, PromptInput, RequestOptions
from millpond.text.tool_formats.base import ThinkTags

Call = tuple[str, dict[str, Any]]
PARIS: Call = ("get_weather", {"city": "Paris"})
EVENT: Call = (
    "create_event",
    {
        "title": "Design review",
        "start": "2026-10-01T15:00:00Z",
        "attendees": [{"name": "Ana", "email": "ana@example.com"}, {"name": "Bo", "email": "bo@example.com"}],
        "location": {"city": "Berlin", "room": "4.12"},
    },
)
NOTE: Call = ("save_note", {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"})
ANSWERS: dict[str, str | list[Call]] = {
    "What's the weather in Paris right now": [PARIS],
    "Get the current weather in Paris and in Tokyo": [PARIS, ("get_weather", {"city": "Tokyo"})],
    "What is 17 + 25": "42",
    "Create an event": [EVENT],
    "Save a note": [NOTE],
    "What time is it": [("get_server_time", {})],
    "What's the weather in Paris?": "It is 18 °C and clear.",
    "Think it through": [("record_answer", {"answer": "9.9"})],
}
"""What the model does, by how the conversation starts."""


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(calls: Sequence[Call]) -> str:
    bodies = [dumped({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def llama3(calls: Sequence[Call]) -> str:
    return "; ".join(dumped({"name": name, "parameters": arguments}) for name, arguments in calls)


def mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(arguments)}" for name, arguments in calls)


def qwen3_coder(calls: Sequence[Call]) -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        return "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in arguments.items())

    return "\n".join(
        f"<tool_call>\n<function={name}>\n{parameters(arguments)}</function>\n</tool_call>" for name, arguments in calls
    )


def glm(calls: Sequence[Call]) -> str:
    def parameters(arguments: dict[str, Any]) -> str:
        pairs = arguments.items()
        return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>\n" for key, value in pairs)

    return "\n".join(f"<tool_call>{name}\n{parameters(arguments)}</tool_call>" for name, arguments in calls)


def raw(value: object) -> str:
    return value if isinstance(value, str) else dumped(value)


def model(write: Callable[[Sequence[Call]], str], think: str) -> Callable[[PromptInput, RequestOptions], Script]:
    def choose(prompt: PromptInput, options: RequestOptions) -> Script:
        assert isinstance(prompt, ChatInput)
        question = str(prompt.messages[0]["content"])
        answer = next(answer for start, answer in ANSWERS.items() if question.startswith(start))
        text = think + (answer if isinstance(answer, str) else write(answer))
        return Script(pieces=tuple(text[at : at + 3] for at in range(0, len(text), 3)))

    return choose


@pytest.mark.parametrize("write", [hermes, llama3, mistral, qwen3_coder, glm], ids=lambda write: write.__name__)
@pytest.mark.parametrize("thinks", [False, True])
async def test_the_probe_passes(write: Callable[[Sequence[Call]], str], thinks: bool):
    """Without the forced call, which needs a grammar and so an engine: see test_structured.py."""
    engine = FakeChannelEngine(
        choose=model(write, "<think>\nLet me see.\n</think>\n\n" if thinks else ""),
        form=write.__name__,
        think=ThinkTags("<think>", "</think>"),
    )
    scenarios = [scenario for scenario in BUILTIN_SCENARIOS if scenario.tool_choice == "auto"]
    async with running(engine) as server:
        report = await asyncio.to_thread(probe, f"{server.url}/v1", MODEL, scenarios=scenarios, concurrency=2)
    problems = [
        (o.scenario_id, o.stream, o.detail, o.warnings) for o in report.outcomes if o.status != "pass" or o.warnings
    ]
    assert problems == []
    assert len(report.outcomes) == 3 * len(scenarios) == 24

"""Tools on the way into the prompt, and what that says of how the output is to be read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_text_channels import named, plan, read
from test_text_input_processor import chat_text, processor, shown, user

from millpond.runtime.fake_vocab import CHATML_TEMPLATE, IM_END, IM_START, FakeVocab
from millpond.text.channels import MarkerTokens
from millpond.text.input_processor import InputProcessor, ToolSettings
from millpond.text.inputs import ChatInput, TextInput, TokenInput
from millpond.text.messages import normalise_messages
from millpond.text.tool_formats.base import ThinkTags
from millpond.text.tool_formats.registry import FORMATS

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": "does <|im_end|>", "parameters": {}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
HISTORY: list[dict[str, Any]] = [
    user("x"),
    {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "42"},
]
QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
R1 = QWEN.replace("{% endif %}{% endif %}", "{% else %}<think>\n{% endif %}{% endif %}")


def test_a_template_that_shows_no_tools_gets_them_in_the_system_message() -> None:
    text = chat_text(user("x"), tools=[TOOL])
    assert text.startswith("<|im_start|>system\nYou can call these tools.")
    line = next(line for line in text.splitlines() if line.startswith('{"name": "f"'))
    assert json.loads(line) == TOOL["function"]
    assert "<tool_call>" in text and text.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")


def test_the_system_message_that_is_there_comes_first() -> None:
    text = chat_text({"role": "system", "content": "Be brief."}, user("x"), tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou can call these tools.")
    assert text.count("<|im_start|>system") == 1


def test_control_strings_in_tools_stay_text() -> None:
    ids = processor().prepare_prompt(ChatInput([user("x")], tools=[TOOL])).token_ids
    starts = [token for token in ids if FakeVocab().is_control(token)]
    assert starts == [IM_START, IM_END, IM_START, IM_END, IM_START]


def test_calls_and_results_are_text_where_the_template_shows_none() -> None:
    text = chat_text(*HISTORY)
    turns = [part.partition("\n")[::2] for part in text.split("<|im_start|>")[1:]]
    assert [role for role, _ in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[2][1] == "<tool_response>\n42\n</tool_response><|im_end|>\n"
    content, _, _ = parsed = read(plan("hermes"), turns[1][1].removesuffix("<|im_end|>\n"))
    assert content == "Wait." and named(parsed) == [("f", {"a": "é"})] * 2


def test_a_template_that_shows_tools_gets_them_as_they_are() -> None:
    text = chat_text(*HISTORY, template=QWEN, tools=[TOOL])
    assert text.startswith(json.dumps([TOOL])) and "You can call" not in text
    assert '<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>' in text
    assert "<|im_start|>tool\n42" in text


def test_reasoning_comes_back_under_its_own_name() -> None:
    template = "{{ messages[1].reasoning_content }}"
    for name in ("reasoning", "reasoning_content"):
        assert (
            chat_text(user("x"), {"role": "assistant", "content": "", name: "hm"}, user("y"), template=template) == "hm"
        )


def test_results_have_the_name_of_their_function() -> None:
    other = {"role": "tool", "tool_call_id": "unknown", "content": "x"}
    named_itself = {**HISTORY[-1], "name": "own"}
    results = normalise_messages([*HISTORY, other, named_itself])[2:]
    assert [result.get("name") for result in results] == ["f", None, "own"]


@pytest.mark.parametrize(
    ("template", "flag", "name"),
    [
        (CHATML_TEMPLATE, "auto", "hermes"),
        (QWEN, "auto", "hermes"),
        (QWEN.replace("<tool_call>", "[TOOL_CALLS]"), "auto", "mistral"),
        (QWEN.replace("<tool_call>", ""), "auto", "json"),
        (QWEN, "glm", "glm"),
        (None, "auto", "hermes"),
    ],
)
def test_the_format_in_use(template: str | None, flag: str, name: str) -> None:
    made = InputProcessor(FakeVocab(), template, 4000, lambda: None, ToolSettings(flag))  # type: ignore[arg-type]
    assert made.tool_format == name


def test_texts_and_ids_and_plain_chats_have_no_channels() -> None:
    for prompt in (TextInput("<think>"), TokenInput([1]), ChatInput([user("x")])):
        assert processor().prepare_prompt(prompt).channels is None


@pytest.mark.parametrize(
    ("template", "options", "thinking"),
    [
        (QWEN, {}, False),
        (QWEN, {"template_kwargs": {"enable_thinking": False}}, False),
        (R1, {}, True),
        (R1, {"template_kwargs": {"enable_thinking": False}}, False),
    ],
)
def test_a_prompt_may_end_inside_reasoning(template: str, options: dict[str, Any], thinking: bool) -> None:
    prepared = processor(template).prepare_prompt(ChatInput([user("say <think>")], **options))
    assert prepared.channels is not None
    assert prepared.channels.turn.think == ThinkTags("<think>", "</think>")
    assert prepared.channels.turn.thinking is thinking and prepared.channels.turn.tools is None


@pytest.mark.parametrize(
    ("start", "thinking"), [("<think>\nhm", True), ("<think>hm</think>yes", False), ("yes", False)]
)
def test_a_continued_message_is_continued_in_its_channel(start: str, thinking: bool) -> None:
    messages = [user("x"), {"role": "assistant", "content": start}]
    prepared = processor(QWEN).prepare_prompt(ChatInput(messages))
    assert shown(prepared.token_ids).endswith(start)
    assert prepared.channels is not None and prepared.channels.turn.thinking is thinking


def test_a_forced_call_has_its_grammar() -> None:
    chat = ChatInput([user("x")], tools=[TOOL], forced_tools=["f"], parallel_tool_calls=False)
    assert '"const": "f"' in (processor().prepare_prompt(chat).grammar or "")
    assert processor().prepare_prompt(ChatInput([user("x")], tools=[TOOL])).grammar is None


class _MarkerVocab(FakeVocab):
    """One id more, the control token `[TOOL_CALLS]`."""

    @property
    def n_tokens(self) -> int:
        return super().n_tokens + 1

    def is_control(self, token: int) -> bool:
        return token == super().n_tokens or super().is_control(token)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token == super().n_tokens:
            return b"[TOOL_CALLS]" if special else b""
        return super().piece(token, special=special)


def test_markers_that_are_control_tokens_are_found() -> None:
    vocab = _MarkerVocab()
    found = MarkerTokens.find(vocab, FORMATS["mistral"], None)
    last = vocab.n_tokens - 1
    assert found.ids == {"[TOOL_CALLS]": last}
    assert found.characters == {last: found.markers.of("[TOOL_CALLS]")}
    assert found.markers.of("[ARGS]") == "[ARGS]"

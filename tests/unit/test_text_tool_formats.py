"""Tool formats one by one: what models do that the recorded fixtures do not show, detection, and the grammars."""

# ruff: noqa: RUF001 - DeepSeek's markers have full-width bars

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text_channels import named, plan, read

from millpond.config import TOOL_FORMATS
from millpond.text.tool_formats.base import ThinkTags, ToolSet, Turn
from millpond.text.tool_formats.json_scanner import MAX_DEPTH, JsonEnd, JsonScanner
from millpond.text.tool_formats.registry import FORMATS, detect_format, detect_think_tags
from millpond.text.tool_formats.values import json_of, schema_types


def test_every_format_can_be_chosen_by_flag() -> None:
    assert set(TOOL_FORMATS) == {"auto", *FORMATS}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }} arguments", "hermes"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>", "glm"),
        ("<|start_header_id|>assistant", "llama3"),
        ("<|header_start|>assistant", "pythonic"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS]", "mistral"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|turn>model<|channel>thought<|tool_call>call:", "gemma4"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("<｜DSML｜tool_calls>", "deepseek_dsml"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|open|>message<|sep|>", "kimi_k3"),
        ("<|im_start|>{{ tools | tojson }}", None),
    ],
)
def test_the_template_tells_the_format(template: str, name: str | None) -> None:
    found = detect_format(template)
    assert (found.name if found else None) == name


def test_the_template_tells_the_reasoning_tags() -> None:
    assert detect_think_tags("content.split('</think>')") == ThinkTags("<think>", "</think>")
    assert detect_think_tags("[THINK]{{ x }}[/THINK]") == ThinkTags("[THINK]", "[/THINK]")
    assert detect_think_tags("<|im_start|>") is None


# -- JSON as it comes ------------------------------------------------------------

_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(_json, st.booleans(), st.sampled_from([None, 2]), st.integers(1, 5))
def test_json_passes_unchanged(value: object, ascii_only: bool, indent: int | None, size: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    scanner = JsonScanner(str)
    rest, out = text + " }", ""
    while rest and scanner.end is None:
        count, shown = scanner.feed(rest[:size])
        out += shown
        rest = rest[count:] if count else rest[size:]
    assert scanner.end is JsonEnd.WHOLE
    assert out == text


@pytest.mark.parametrize(
    ("text", "mended"),
    [
        ('{"a": "x\ny\t"}', '{"a": "x\\ny\\t"}'),
        ('{"a": True, "b": [None, False]}', '{"a": true, "b": [null, false]}'),
        (r'{"a": "it\'s \d+ \u00e9 \uzz"}', r'{"a": "it' + "'" + r's \\d+ \u00e9 \\uzz"}'),
    ],
)
def test_slips_are_mended(text: str, mended: str) -> None:
    for pieces in ([text], list(text)):
        scanner = JsonScanner(str)
        out = "".join(scanner.feed(piece)[1] for piece in pieces)
        if len(pieces) == 1:
            assert out == mended
    json.loads(mended)


@pytest.mark.parametrize(
    "text",
    ["}", '{"a" 1}', "{1: 2}", '{"a": 1,}', "[1 2]", "nul ", "01 ", '{"a":}', "[}", "[" * (MAX_DEPTH + 1), "'a'"],
)
def test_what_is_no_json_ends_it(text: str) -> None:
    scanner = JsonScanner(str)
    scanner.feed(text)
    assert scanner.end is JsonEnd.BROKEN


# -- values by schema ------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("null", {"type": ["string", "null"]}, None),
        ("gym", {"type": ["string", "null"]}, "gym"),
        ("5", {"type": ["string", "null"]}, "5"),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        ("red", {"enum": ["red", "green"]}, "red"),
        ("2", {"enum": [1, 2]}, 2),
        ("{'a': 1}", {"type": "object"}, {"a": 1}),
        ("not json", {"type": "object"}, "not json"),
        ("5", None, 5),
        ("five", None, "five"),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e20", {"type": "number"}, 1e20),
        ("5", {"anyOf": [{}, {"type": "null"}]}, 5),
    ],
)
def test_values_get_the_type_of_the_schema(text: str, schema: Mapping[str, Any] | None, value: object) -> None:
    found = json.loads(json_of(text, schema))
    assert found == value and type(found) is type(value)


def test_endless_unions_end() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        schema = {"anyOf": [schema]}
    assert schema_types(schema) is None


# -- what the fixtures do not show ------------------------------------------------------------

CODER = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {}}\n{"name": "g"}\n</tool_call>', [("f", {}), ("g", {})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x"}}}</tool_call>', [("f", {"a": "x"})]),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {"a": "x"}}</tool_call>', [("f", {"a": "x"})]),
        ("qwen3_coder", CODER.format("a\n\n"), [("f", {"a": "a\n\n"})]),
        ("qwen3_coder", CODER.format("</parameter> x\n</function> y"), [("f", {"a": "</parameter> x\n</function> y"})]),
        ("qwen3_coder", CODER.replace("</function>\n", ""), None),
        ("qwen3_coder", "<function=f> is how it starts", []),
        (
            "llama3",
            '{"name": "f", "parameters": {"a": "x"}}\n{"name": "g", "parameters": {}}',
            [("f", {"a": "x"}), ("g", {})],
        ),
        ("pythonic", "[f(a='x', n=-1), g()]", [("f", {"a": "x", "n": -1}), ("g", {})]),
        ("pythonic", '[f(a="[(,", n={"b": [1, (2, 3)]})]', [("f", {"a": "[(,", "n": {"b": [1, [2, 3]]}})]),
        ("pythonic", "[1, 2]", []),
        ("pythonic", "[unknown(a=1)]", []),
        ("pythonic", '{"name": "f", "parameters": {}}', [("f", {})]),
        ("mistral", '[TOOL_CALLS]f{"a": "x"}[TOOL_CALLS]g{}', [("f", {"a": "x"}), ("g", {})]),
        ("kimi_k2", "<|tool_calls_section_begin|>", []),
        ("glm", "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>", [("f", {"n": 3})]),
        ("gemma4", "<|tool_call>call:f{}<tool_call|>", [("f", {})]),
        ("gemma4", "<|tool_call>call:f{a:word,n:3}<tool_call|>", [("f", {"a": "word", "n": 3})]),
        ("json", '{"function": "f", "arguments": {"n": 1}}', [("f", {"n": 1})]),
    ],
)
def test_other_ways_of_calling(form: str, text: str, calls: list[tuple[str, Any]] | None) -> None:
    parsed = read(plan(form), text)
    assert parsed == read(plan(form), *text)
    if calls is None:
        calls = [("f", {"a": "{}"})]
    assert named(parsed) == calls
    if not calls and "section" not in text:
        assert parsed[0] == text


def test_the_model_s_own_ids_are_kept_where_its_template_wants_them_back() -> None:
    call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert read(plan("kimi_k2"), call)[2] == [("functions.f:7", "f", "{}")]


def test_mistral_s_ids_have_nine_letters() -> None:
    (call_id, _, _), *_ = read(plan("mistral"), "[TOOL_CALLS]f[ARGS]{}")[2]
    assert len(call_id) == 9 and call_id.isalnum()


@pytest.mark.parametrize("form", sorted(FORMATS))
@given(
    st.lists(
        st.sampled_from("abf{}[]()<>|/=:\"', \n1")
        | st.sampled_from(
            sorted(
                {m for f in FORMATS.values() for m in f.markers}
                | {"<function=f>", "<parameter=a>", "</parameter>", "call:", "f(a="}
            )
        ),
        max_size=30,
    )
)
def test_no_text_stops_a_parser_and_any_cut_is_the_same(form: str, parts: list[str]) -> None:
    text = "".join(parts)
    how = plan(form, think=FORMATS[form].think or ThinkTags("<think>", "</think>"))
    assert read(how, *parts) == read(how, *text) == read(how, text)


# -- grammars ------------------------------------------------------------

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}},
    "required": ["city"],
}
OFFERED = ToolSet({"get_weather": WEATHER, "get_time": {}})


def byte_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer("byte")


def accepts(grammar: str, text: str) -> bool:
    """Is `text` a whole sentence of the grammar?"""
    tokenizer = byte_tokenizer()
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    for token in tokenizer.tokenize_str(text):
        if not matcher.consume_token(token):
            return False
    return matcher.is_accepting()


ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '{"name": "get_weather", "parameters": {"city": "Rome"}}',
    "json": '[{"name": "get_weather", "arguments": {"city": "Rome"}}]',
    "pythonic": '[get_weather(city="Rome")]',
    "mistral": '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}',
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Rome"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_dsml": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "glm": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|>",
    "harmony": '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}',
}


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("parallel", [False, True])
def test_the_grammar_takes_what_the_parser_reads(form: str, parallel: bool) -> None:
    text = ONE_CALL[form] if parallel or form != "json" else ONE_CALL[form][1:-1]
    grammar = FORMATS[form].grammar(OFFERED, parallel=parallel, markers={})
    assert accepts(grammar, text)
    assert named(read(plan(form, tools=OFFERED), text)) == [("get_weather", {"city": "Rome"})]
    assert not accepts(grammar, "Rome is a city.")
    assert not accepts(grammar, text.replace("get_weather", "get_money"))


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_the_grammar_of_one_tool_takes_no_other(form: str) -> None:
    grammar = FORMATS[form].grammar(OFFERED.only(["get_time"]), parallel=False, markers={})
    text = ONE_CALL[form] if form != "json" else ONE_CALL[form][1:-1]
    assert not accepts(grammar, text)


THOUGHTS = {
    "harmony": ("<|channel|>analysis<|message|>", "a < b<|end|><|start|>assistant"),
    "gemma4": ("<|channel>thought\n", "a < b\n<channel|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "a < b<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"),
}


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize("thinking", [False, True])
def test_a_forced_call_may_be_thought_about_first(form: str, thinking: bool) -> None:
    chosen = FORMATS[form]
    turn = Turn(OFFERED, chosen.think or ThinkTags("<think>", "</think>"), thinking)
    opening, thought = THOUGHTS.get(form, ("<think>\n", "a < b\n</think>\n\n"))
    text = ("" if thinking else opening) + thought + (ONE_CALL[form][1:-1] if form == "json" else ONE_CALL[form])
    grammar = chosen.forced_grammar(OFFERED, turn, parallel=False, markers={})
    assert accepts(grammar, text)
    assert not accepts(grammar, thought + "The end.")
    parsed = read(plan(form, tools=OFFERED, think=turn.think, thinking=thinking), *text)
    assert (parsed[0], parsed[1]) == ("", "a < b") and named(parsed) == [("get_weather", {"city": "Rome"})]


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_markers_that_are_control_tokens_are_so_in_the_grammar(form: str) -> None:
    """The byte tokenizer has 256 bytes and a few special tokens: any id of these will do."""
    markers = dict.fromkeys(FORMATS[form].markers, 256)
    turn = Turn(OFFERED, FORMATS[form].think or ThinkTags("<think>", "</think>"))
    grammar = FORMATS[form].forced_grammar(OFFERED, turn, parallel=True, markers=markers)
    matcher = llguidance.LLMatcher(byte_tokenizer(), llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()

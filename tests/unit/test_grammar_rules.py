"""What may be compiled and what is refused, by name and path; and what the accepted grammars then accept."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import InvalidParameter, QueueFull
from millpond.runtime.fake_vocab import FakeVocab
from millpond.sampling.structured import CompileThread, Grammar, GrammarCompiler
from millpond.sampling.structured.json_schema import MAX_DEPTH, MAX_NODES
from millpond.sampling.structured.lark import MAX_RULES
from millpond.sampling.structured.regex import MAX_DEPTH as MAX_GROUP_DEPTH
from millpond.sampling.structured.regex import RegexError, check_regex
from millpond.sampling_params import MAX_GRAMMAR_BYTES, GrammarKind, GrammarSpec

VOCAB = FakeVocab(512)
COMPILER = GrammarCompiler(VOCAB)
JSON, REGEX, CHOICE = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE
LARK, GBNF, GRAMMAR = GrammarKind.LARK, GrammarKind.GBNF, GrammarKind.GRAMMAR


def compiled(kind: GrammarKind, text: Any, **options: Any) -> Grammar:
    return COMPILER.compile(GrammarSpec(kind, text if isinstance(text, str) else json.dumps(text), **options))


def accepts(grammar: Grammar, text: str) -> bool:
    """The text is a whole output: all of it may come, and then the end."""
    matcher = grammar.matcher()
    ids = VOCAB.tokenize(text, parse_special=False)
    return matcher.count_accepted((), ids) == len(ids) and bool(matcher.allowed(ids)[sorted(VOCAB.eog_ids)].all())


def refusal(kind: GrammarKind, text: Any) -> str:
    with pytest.raises(InvalidParameter) as caught:
        compiled(kind, text, param="the_field")
    assert caught.value.param == "the_field"
    return str(caught.value)


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (OBJECT, ['{"a":1}', '{"a":1,"b":"y"}'], ['{"a": 1}', "{}", '{"a":1,"b":"z"}', '{"a":1,"c":1}', '{"a":1']),
        ({"type": "object"}, ["{}", '{"k":[1,null]}'], ["[]", "1", "{} "]),
        ({"not": False, "uniqueItems": False, "type": "boolean"}, ["true"], ["1"]),
        ({"type": "string", "format": "password", "x-guidance": {"lenient": True}}, ['"p"'], ["1"]),
        ({"type": "string", "pattern": r"^hello there indeed\!$"}, ['"hello there indeed!"'], ['"hello"', '"x"']),
        ({"enum": [f"value{n}" for n in range(2000)]}, ['"value0"', '"value1999"'], ['"value2000"', '"value"']),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["7", "null"], ['"a"']),
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}, "anyOf": [{"required": ["a"]}]},
            ['{"a":1}'],
            ["{}"],
        ),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}},
            ["[]", "[[],[[]]]"],
            ["[1]"],
        ),
        ({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}, ["15"], ["16", "105"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {"not": {}}}, "additionalProperties": {"not": {}}},
            ["{}", '{"a":1}'],
            ['{"b":1}', '{"a":1,"c":2}'],
        ),
        ({"anyOf": [{"not": {}}, {"type": "array", "items": {"not": True}}]}, ["[]"], ["[1]", "1"]),
        (
            {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
            ['{"a":1}', '{"b":[]}', '{"a":1,"b":2}'],
            ["{}"],
        ),
    ],
)
def test_a_schema_accepts_what_is_valid_and_nothing_else(schema: Any, valid: list[str], invalid: list[str]):
    grammar = compiled(JSON, schema)
    assert [text for text in valid if not accepts(grammar, text)] == []
    assert [text for text in invalid if accepts(grammar, text)] == []


def test_whitespace_is_compact_unless_asked():
    flexible = compiled(JSON, OBJECT, flexible_whitespace=True)
    assert accepts(flexible, '{"a": 1,\n"b": "x"}') and accepts(flexible, '{"a":1}')
    assert not accepts(compiled(JSON, OBJECT), '{"a": 1}')


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "at $: the keyword 'not'"),
        ({"properties": {"a": {"items": {"not": {"type": "null"}}}}}, "at $.properties.a.items: the keyword 'not'"),
        ({"anyOf": [{}, {"if": {}}]}, "at $.anyOf[1]: the keyword 'if'"),
        ({"uniqueItems": True}, "'uniqueItems'"),
        ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"properties": {"q": {"type": "string", "format": "regex"}}}, "at $.properties.q: Unknown format: regex"),
        ({"properties": {"q": {"type": "objekt"}}}, "at $.properties.q: 'type' must be one of"),
        ({"properties": {"q": {"type": "string", "pattern": "^+[a-z]$"}}}, "at $.properties.q: 'pattern': there is"),
        ({"type": "string", "pattern": "^{2}x$"}, "nothing to repeat"),
        ({"type": "string", "pattern": "(?<=x)a"}, "look-around"),
        ({"type": "string", "pattern": "(" * 2000 + "a" + ")" * 2000}, "nested deeper"),
        ({"type": "string", "pattern": "(" * 5000 + "a" + ")" * 5000}, "at most 8192 characters"),
        ({"patternProperties": {"(": {}}}, "not closed"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "at $:"),
        ({"properties": {"q": {"oneOf": [{"type": "string"}, {"maxLength": 3}]}}}, "at $.properties.q: 'oneOf'"),
        ({"type": "integer", "multipleOf": 1000003}, "'multipleOf'"),
        ({"type": "integer", "exclusiveMinimum": True}, "'exclusiveMinimum' must be a number"),
        ({"type": "string", "minLength": -1}, "'minLength'"),
        ({"$ref": "#/nope"}, "'$ref'"),
        ({"$ref": "https://example.com/schema"}, "only references inside"),
        ({"properties": [1]}, "at $.properties: must be an object"),
        ({"anyOf": 5}, "at $.anyOf: must be an array"),
        ({"items": 5}, "at $.items: a schema is"),
        ({"required": ["zzz"], "type": "object", "additionalProperties": False}, "zzz"),
        ({"enum": [*range(20_000)]}, "'enum' has too many values"),
        ({"anyOf": [{}] * (MAX_NODES + 1)}, f"more than {MAX_NODES} subschemas"),
        (nested(3000), "this is not JSON"),
        (nested(MAX_DEPTH + 1), "nested deeper"),
        ("5", "a schema is an object"),
        ("{", "this is not JSON"),
        ("false", "false"),
        ("x" * (MAX_GRAMMAR_BYTES + 1), "is too long"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_keyword_and_path(schema: Any, named: str):
    assert named in refusal(JSON, schema)


CYCLE = {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}
ENDLESS = {"a": {"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"]}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": CYCLE},
        {"$ref": "#/$defs/a", "$defs": ENDLESS},
        {"properties": {"deep": {"$ref": "#/$defs/a"}}, "$defs": CYCLE},
        {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/a"}], "$defs": ENDLESS},
    ],
)
def test_references_that_never_end_are_refused(schema: Any):
    assert "$ref" in refusal(JSON, schema)


@pytest.mark.parametrize(
    ("kind", "text", "valid", "invalid"),
    [
        (REGEX, r"[a-c]{2}\d", ["ab1"], ["ab", "abc", "xab1"]),
        (REGEX, "^yes$|^no$", ["yes", "no"], ["maybe"]),
        (REGEX, "a/b|c\\/d", ["a/b", "c/d"], ["a"]),
        (CHOICE, ["yes", "yes sir", 'q"\n'], ["yes", "yes sir", 'q"\n'], ["ye", "no"]),
        (LARK, 'start: "a"+ TAIL\nTAIL: /[0-9]/', ["aa1"], ["1", "aa"]),
        (LARK, 'start: "%json {" %json {"type":"integer"}', ["%json {5"], ["5"]),
        (GRAMMAR, 'root ::= "yes" | "caf\\u00e9" | "\\x41"', ["yes", "café", "A"], ["a"]),
        (GRAMMAR, 'start: "lark"', ["lark"], ["gbnf"]),
        (GBNF, 'root ::= w "x" root?\nw ::= [a-z]+', ["abx", "abxcx"], ["ab", "x"]),
        (GBNF, 'root ::= [a-z]+ | "true!"', ["true!", "tree", "trueb"], ["true?"]),
        (GBNF, 'root ::= ("aab" | "a")+', ["a", "aaab", "aabaa"], ["b", "ab"]),
        (GBNF, 'root ::= a-b a_b .\na-b ::= "x"\na_b ::= "y"', ["xyz", "xy\n"], ["xy"]),
        (GBNF, 'root ::= pair ("," pair)*\npair ::= [a-z] "=" [0-9]{1,3}', ["a=1", "a=1,b=22"], ["a=", "a=1,"]),
    ],
)
def test_other_notations_accept_what_they_say(kind: GrammarKind, text: Any, valid: list[str], invalid: list[str]):
    grammar = compiled(kind, text)
    assert [one for one in valid if not accepts(grammar, one)] == []
    assert [one for one in invalid if accepts(grammar, one)] == []


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        (REGEX, "(a)" * 60_000, "characters"),
        (REGEX, "(" * (MAX_GROUP_DEPTH + 1), "nested deeper"),
        (REGEX, "(a)" * 2000, "more than 1000 groups"),
        (REGEX, "a{1000000000}", "counts too far"),
        (REGEX, "((a{100}){100}){100}", "written out"),
        (REGEX, "(?=a)", "look-around"),
        (REGEX, r"(a)\1", "back references"),
        (REGEX, r"\bword\b", "word boundaries"),
        (REGEX, "a**", "nothing to repeat"),
        (REGEX, "x{2,1}", "ends before it starts"),
        (REGEX, "[a-", "class is not closed"),
        (REGEX, "a)", "not opened"),
        (REGEX, "\\", "backslash"),
        (REGEX, r"[^\s\S]", "no token can come next"),
        (CHOICE, "[]", "1 to 10000"),
        (CHOICE, "[1]", "list of strings"),
        (LARK, "start: other", "unknown name"),
        (LARK, "start: start", "no token can come next"),
        (LARK, 'start: %json {"not": {}}', "the keyword 'not'"),
        (LARK, "start: %json {", "no JSON"),
        (LARK, "start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(MAX_RULES + 1)), "rules"),
        (LARK, "start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (LARK, "x" * 70_000, "at most 65536 characters"),
        (GBNF, "root ::= other", "not defined"),
        (GBNF, 'other ::= "a"', "no rule 'root'"),
        (GBNF, "root ::= (", "not GBNF"),
        (GBNF, 'root ::= "a', "not GBNF"),
        (GBNF, "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested deeper"),
        (GBNF, "", "no rule 'root'"),
        (GBNF, "".join(f'r{n} ::= "a"\n' for n in range(MAX_RULES + 1)) + "root ::= r0", "rules"),
    ],
)
def test_what_does_not_compile_or_costs_too_much_is_refused(kind: GrammarKind, text: Any, named: str):
    assert named in refusal(kind, text)


@pytest.mark.parametrize("think", [False, True])
def test_a_thought_may_come_before_the_answer_and_a_call_instead_of_it(think: bool):
    thought = 'thought[suffix="</t>"]: /(?s:.*)/\n'
    may_think = "thought" if think else '("<t>" thought)?'
    preface = f"preface: {may_think}\n{thought}"
    alternative = f'start: {may_think} "<call>" /[a-z]+/\n{thought}'
    grammar = compiled(JSON, {"type": "integer"}, preface=preface, alternative=alternative)
    opened = "" if think else "<t>"
    assert accepts(grammar, f"{opened}hm 5</t>5") and accepts(grammar, f"{opened}hm</t><call>abc")
    assert accepts(grammar, "5") != think and accepts(grammar, "<call>abc") != think
    assert not accepts(grammar, f"{opened}hm</t>five")


def test_the_same_spec_is_compiled_once():
    spec = GrammarSpec(REGEX, "once|more")
    assert COMPILER.compile(spec) is COMPILER.compile(GrammarSpec(REGEX, "once|more"))


@settings(max_examples=400)
@given(st.text(alphabet="ab()[]{}|*+?^$\\.,-1290:<>=!kdDwP/", max_size=40))
def test_the_scan_of_a_regex_ends_and_lets_through_only_what_python_reads_too(pattern: str):
    """Python's engine knows more (look-behind, back references), so what passes our scan must pass Python's parser,
    but for the few spellings that only the compiler's dialect has: those the compiler itself accepts or refuses."""
    try:
        check_regex(pattern)
    except RegexError:
        return
    try:
        re.compile(pattern)
    except re.error:
        assert re.search(r"\(\?P?<|\\[a-zA-Z0-9]|\[|\(\?[a-z-]", pattern), pattern


LIMITS = """
import json
from millpond.errors import InvalidParameter, QueueFull
from millpond.runtime.fake_vocab import FakeVocab
from millpond.sampling.structured import CompileThread, GrammarCompiler
from millpond.sampling_params import GrammarKind, GrammarSpec

thread = CompileThread(GrammarCompiler(FakeVocab(512)))
chain = "".join(f"R{n}: R{n + 1} \\"a\\"\\n" for n in range(490))
deep = {"type": "array"}
for _ in range(60):
    deep = {"type": "array", "items": deep}
defs = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(700)} | {"d700": {}}
specs = [
    GrammarSpec(GrammarKind.LARK, "start: R0\\n" + chain + 'R490: "a"\\n'),
    GrammarSpec(GrammarKind.LARK, ("start: R0\\n" + chain + 'R490: "a"\\n').lower()),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(deep)),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/d0", "$defs": defs})),
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"allOf": [{"anyOf": [{"required": [f"k{i}{j}"]} for j in range(9)]}
        for i in range(12)]})),
    GrammarSpec(GrammarKind.REGEX, "(" * 49 + "a" + ")" * 49),
    GrammarSpec(GrammarKind.REGEX, ".*a.{2000}b.{2000}"),
]
for spec in specs:
    future = thread.submit(spec)
    try:
        matcher = future.result().matcher()
        for _ in range(3):
            matcher.allowed(())
    except InvalidParameter as error:
        print(error)
print("alive")
"""


def test_at_the_very_limits_the_process_lives():
    """The compiler recurses in native code: too deep a grammar would end the process, not raise."""
    ran = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout.endswith("alive\n"), ran


def test_a_flood_of_grammars_is_told_so_and_a_kept_one_is_not_in_its_way():
    release = threading.Event()

    class Slow(GrammarCompiler):
        def compile(self, spec: GrammarSpec) -> Grammar:
            release.wait(30)
            return super().compile(spec)

    compiler = Slow(VOCAB)
    release.set()
    kept = GrammarSpec(REGEX, "kept")
    compiler.compile(kept)
    release.clear()
    thread = CompileThread(compiler, max_waiting=3)
    futures = [thread.submit(GrammarSpec(REGEX, f"a{n}")) for n in range(9)]
    refused = [future for future in futures if future.done()]
    assert len(refused) in (5, 6) and all(isinstance(future.exception(), QueueFull) for future in refused)
    assert thread.submit(kept).done()
    futures[1].cancel()
    release.set()
    assert futures[0].result(30) is compiler.kept(GrammarSpec(REGEX, "a0"))
    thread.close()

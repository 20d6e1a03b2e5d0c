"""The sandbox: what templates may use, and that whatever goes wrong in one is a TemplateError."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from millpond.errors import ConfigError, TemplateError
from millpond.text.chat_template import ChatTemplate, TemplateTokens

_NOW = datetime(2031, 2, 3, 4, 5, tzinfo=UTC)
_EACH_CALL = "{{% for m in messages %}}{{% for c in m.tool_calls %}}{{{{ {} }}}}{{% endfor %}}{{% endfor %}}"
_USER = [{"role": "user", "content": "hello"}]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, TemplateTokens(bos="<s>", eos="</s>"), lambda: _NOW)


def render(source: str, messages: list[dict[str, Any]] = _USER, **options: Any) -> str:
    return template(source).render(messages, **{"max_characters": 10_000, **options})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ tools is none }}", "True"),
        ("{{ strftime_now('%Y-%m-%d') }}", "2031-02-03"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hello!"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ missing }}|", "|"),
        ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"),
        ("{{ '<b>&' }}", "<b>&"),
        ("{{ 'ab' * 3 }}", "ababab"),
        ("{{ 3 * 4 }}", "12"),
    ],
)
def test_templates_have_what_they_are_written_for(source: str, expected: str) -> None:
    assert render(source) == expected


def test_tojson_leaves_every_character_as_it_is() -> None:
    odd = "好<|>&'\U000f0000"
    source = (
        "{{ messages[0].content | tojson }} {{ messages[0] | tojson(indent=1) }} {{ odd | tojson(ensure_ascii=true) }}"
    )
    text = render(source, [{"content": odd}], kwargs={"odd": odd})
    assert text == f'"{odd}" {{\n "content": "{odd}"\n}} "{odd}"'


def test_tools_and_keyword_arguments_reach_the_template() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    source = "{{ tools[0].function.name }}{{ enable_thinking }}"
    assert render(source, tools=tools, kwargs={"enable_thinking": False}) == "fFalse"


def test_keyword_arguments_do_not_replace_ours() -> None:
    assert render("{{ bos_token }}{{ messages | length }}", kwargs={"bos_token": "x", "messages": []}) == "<s>1"


def test_a_refusal_is_told_in_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ missing.field }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ missing | tojson }}",
        "{{ missing() }}",
        "{{ messages[0].content.nothing() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ range(1000000000) }}",
        "{{ 'x' * 1000000000 }}",
        "{{ 1000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{{ strftime_now(5) }}",
        "{{ 'abc'.encode('utf-8').decode('utf-16') }}",
    ],
)
def test_whatever_goes_wrong_is_a_template_error(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        render(source)
    assert str(caught.value).removeprefix("the chat template")


def test_output_is_bounded() -> None:
    source = "{% for i in range(1000) %}{% for j in range(1000) %}xxxxxxxxxx{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="more than 500 characters"):
        render(source, max_characters=500)
    assert len(render("{{ 'x' * 500 }}", max_characters=500)) == 500


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nosuch %}", "{{ 'x' | nosuchfilter }}"])
def test_a_template_that_does_not_compile_is_a_setup_error(source: str) -> None:
    with pytest.raises(ConfigError) as caught:
        template(source)
    assert caught.value.setting == "chat_template"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        (_EACH_CALL.format("c.function.arguments | tojson"), False),
        (_EACH_CALL.format("'args ' + c.function.arguments"), True),
        ("{{ raise_exception('never') }}", False),
    ],
)
def test_templates_that_paste_arguments_are_recognised(source: str, expected: bool) -> None:
    assert template(source).wants_text_arguments is expected


def test_one_render_leaves_nothing_for_the_next() -> None:
    compiled = template(
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"
    )
    assert [compiled.render(_USER * n, max_characters=10) for n in (1, 3, 2)] == ["1", "3", "2"]

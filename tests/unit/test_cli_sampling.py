"""SamplingParams as flags, JSON and typed text: every field is there, every wrong value is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from millpond.cli.sampling import changed_values, params_of, parsed_value, sampling_fields, stop_strings, with_sampling
from millpond.errors import InvalidParameter
from millpond.sampling_params import SamplingParams


def run(*arguments: str) -> tuple[SamplingParams | None, str]:
    """What a command with the sampling flags gets."""
    found: list[SamplingParams] = []

    def command(sampling: Mapping[str, object], name: Annotated[str, typer.Option()] = "") -> None:
        found.append(params_of(sampling))

    app = typer.Typer()
    app.command()(with_sampling(command))
    result = CliRunner().invoke(app, list(arguments))
    return (found[0] if found else None), result.output + str(result.exception)


def test_every_field_has_help_and_a_flag() -> None:
    objects = {"grammar", "dry", "xtc", "dynamic_temperature", "thinking", "repetition_guard"}
    names = [entry.name for entry in fields(SamplingParams) if entry.name not in objects]
    assert [entry.name for entry in sampling_fields()] == names
    assert all(entry.help for entry in sampling_fields())
    _, output = run("--help")
    for entry in sampling_fields():
        assert entry.flag in output


def test_no_flag_gives_the_defaults() -> None:
    assert run()[0] == SamplingParams()


def test_flags_of_every_kind() -> None:
    arguments = ["--temperature", "0", "--max-tokens", "9", "--ignore-eos", "--seed", "0", "--logit-bias", "5=-2.5"]
    params, _ = run(*arguments, "--logit-bias", "6=1", "--stop-token-ids", "3", "--stop-token-ids", "4")
    assert params == SamplingParams(
        temperature=0.0,
        max_tokens=9,
        ignore_eos=True,
        seed=0,
        logit_bias=((5, -2.5), (6, 1.0)),
        stop_token_ids=(3, 4),
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", "hot"], "--temperature"),
        (["--logit-bias", "5"], "logit_bias: '5' is not ID=BIAS, like 50=-2.5"),
        (["--logit-bias", "x=5"], "logit_bias: {'x': 5.0} is not an object like"),
        (["--top-p", "2"], "top_p: must be between 0.0 and 1.0, got 2.0"),
    ],
)
def test_a_wrong_flag_is_named(arguments: list[str], words: str) -> None:
    params, output = run(*arguments)
    assert params is None
    assert words in output


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temprature": 1}, "temprature: is not a sampling parameter; did you mean temperature?"),
        ({"xyz": 1}, "xyz: is not a sampling parameter; they are max_tokens, "),
        ({"max_tokens": 2.5}, "max_tokens: 2.5 is not a whole number, or none"),
        ({"max_tokens": True}, "max_tokens: True is not a whole number"),
        ({"temperature": "1"}, "temperature: '1' is not a number"),
        ({"temperature": None}, "temperature: None is not a number"),
        ({"ignore_eos": 1}, "ignore_eos: 1 is not true or false"),
        ({"stop_token_ids": 5}, "stop_token_ids: 5 is not a list of token ids"),
        ({"stop_token_ids": [5.0]}, "stop_token_ids: [5.0] is not a list of token ids"),
        ({"logit_bias": [[5, 1]]}, "logit_bias: [[5, 1]] is not an object like"),
        ({"logit_bias": {"-5": 1}}, "logit_bias: {'-5': 1} is not an object like"),
        ({"logit_bias": {"5": True}}, "logit_bias: {'5': True} is not an object like"),
        ({"min_p": float("nan")}, "min_p: must be between"),
        ({"max_tokens": 0}, "max_tokens: must be between 1"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        params_of(values)
    assert str(caught.value).startswith(words)
    assert caught.value.param == next(iter(values))


def test_json_forms_are_taken() -> None:
    base = SamplingParams(max_tokens=7, top_k=3)
    values: dict[str, object] = {"temperature": 1, "top_k": 5.0, "max_tokens": None, "logit_bias": {"7": -100}}
    assert params_of(values, base) == SamplingParams(temperature=1.0, top_k=5, logit_bias=((7, -100.0),))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", " 0.5 ", 0.5),
        ("max_tokens", "none", None),
        ("max_tokens", "12", 12),
        ("ignore_eos", "On", True),
        ("ignore_eos", "no", False),
        ("stop_token_ids", "1 2", [1, 2]),
        ("stop_token_ids", "", []),
        ("logit_bias", "5=1 6=-2", {"5": 1.0, "6": -2.0}),
    ],
)
def test_typed_values(name: str, text: str, value: object) -> None:
    assert parsed_value(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"), [("temperature", "x"), ("temperature", "none"), ("ignore_eos", "maybe"), ("top_q", "1")]
)
def test_wrong_typed_values(name: str, text: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        parsed_value(name, text)


@given(
    st.builds(
        SamplingParams,
        max_tokens=st.none() | st.integers(1, 99),
        temperature=st.floats(0, 2),
        top_k=st.integers(0, 50),
        ignore_eos=st.booleans(),
        seed=st.none() | st.integers(0, 2**64 - 1),
        logit_bias=st.lists(st.tuples(st.integers(0, 99), st.floats(-9, 9)), unique_by=lambda pair: pair[0]).map(tuple),
        stop_token_ids=st.lists(st.integers(0, 99)).map(tuple),
    )
)
def test_what_changed_makes_the_params_again(params: SamplingParams) -> None:
    assert params_of(changed_values(params)) == params
    assert changed_values(SamplingParams()) == {}


def test_stop_strings() -> None:
    assert stop_strings("x") == ("x",)
    assert stop_strings(["a", "b"]) == ("a", "b")
    for wrong in (5, [5], {"a": 1}, None):
        with pytest.raises(InvalidParameter, match="stop"):
            stop_strings(wrong)

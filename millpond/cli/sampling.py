"""SamplingParams from flags, JSON objects and typed text. Knows how each is written; ranges are SamplingParams' own.

Names and defaults come from the fields of SamplingParams; only the help text is here, held complete by a test.
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Optional, cast

import typer

from millpond.errors import InvalidParameter
from millpond.sampling_params import SamplingParams

SAMPLING = "sampling"
"""Name of the parameter that takes {field name: value given}."""
_NONE = ("none", "auto")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_HELP: Mapping[str, str] = types.MappingProxyType(
    {
        "max_tokens": "longest output in tokens",
        "min_tokens": "no end of the output before so many tokens",
        "temperature": "how random; 0: always the likeliest token",
        "top_k": "draw among the so many likeliest; 0: off",
        "top_p": "draw among the likeliest that together have this probability; 1: off",
        "min_p": "draw among those at least this likely, relative to the likeliest; 0: off",
        "repetition_penalty": "divides the score of tokens that were there; 1: off",
        "presence_penalty": "taken from the score of tokens that the output has",
        "frequency_penalty": "the same, for every time they occur",
        "penalty_window": "last tokens that the repetition penalty looks at; 0: all",
        "lz_penalty": "taken from the score of tokens that would complete an n-gram of the output again",
        "banned_token_ids": "token that is never chosen; may be given more than once",
        "allowed_token_ids": "nothing but these tokens is chosen; may be given more than once",
        "top_n_sigma": "leave out scores so many standard deviations below the best; 0: off",
        "logit_bias": "added to the score of a token, as ID=BIAS; may be given more than once",
        "stop_token_ids": "token that ends the output; may be given more than once",
        "ignore_eos": "go on where the model would end",
        "seed": "makes the draw repeatable",
        "logprobs": "alternatives reported for each token",
        "prompt_logprobs": "the same for each token of the prompt but the first",
    }
)


@dataclass(frozen=True, slots=True)
class SamplingField:
    """One field of SamplingParams. `kind`: bool, int, float, or tuple (ids, and logit_bias)."""

    name: str
    kind: type
    optional: bool
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def expects(self) -> str:
        if self.name == "logit_bias":
            return 'an object like {"50": -2.5}'
        if self.kind is tuple:
            return "a list of token ids"
        words = {bool: "true or false", int: "a whole number", float: "a number"}[self.kind]
        return f"{words}, or none" if self.optional else words


def sampling_fields() -> tuple[SamplingField, ...]:
    """Those that are a number, a switch or a list; a field that is an object of its own has no flag."""
    hints = typing.get_type_hints(SamplingParams)
    found = [_field(entry.name, hints[entry.name], entry.default) for entry in fields(SamplingParams)]
    return tuple(entry for entry in found if entry.kind in (bool, int, float, tuple))


def _field(name: str, hint: Any, default: Any) -> SamplingField:
    parts = typing.get_args(hint)
    about = _HELP.get(name, "")
    if typing.get_origin(hint) is tuple:
        return SamplingField(name, tuple, False, default, about)
    kinds = [part for part in parts if part is not type(None)] or [hint]
    return SamplingField(name, kinds[0], type(None) in parts, default, about)


# -- flags -------------------------------------------------------------------------------------------------------------


def with_sampling(command: Callable[..., None]) -> Callable[..., None]:
    """`command(sampling=..., its own parameters)` with one option for each field."""
    known = sampling_fields()
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != SAMPLING]

    def run(**given: Any) -> None:
        values = {entry.name: given.pop(entry.name) for entry in known}
        command(sampling=_given(values), **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [_parameter(entry) for entry in known]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _given(values: Mapping[str, Any]) -> dict[str, object]:
    """What was given, in the form that JSON has it in."""
    given = {name: value for name, value in values.items() if value not in (None, [])}
    if "logit_bias" in given:
        given["logit_bias"] = dict(_bias_entry(entry) for entry in given["logit_bias"])
    return given


def _bias_entry(text: str) -> tuple[str, float]:
    token, _, bias = text.partition("=")
    try:
        return token.strip(), float(bias)
    except ValueError:
        raise InvalidParameter("logit_bias", f"{text!r} is not ID=BIAS, like 50=-2.5") from None


def _parameter(entry: SamplingField) -> inspect.Parameter:
    kind: Any = list[str] if entry.name == "logit_bias" else list[int] if entry.kind is tuple else entry.kind
    names = [f"{entry.flag}/{entry.flag.replace('--', '--no-', 1)}"] if entry.kind is bool else [entry.flag]
    option = typer.Option(
        *names,
        help=entry.help,
        metavar={bool: None, int: "INT", float: "NUMBER", tuple: "ID"}[entry.kind],
        show_default=str(entry.default).lower() if entry.default not in (None, ()) else False,
        rich_help_panel="Sampling",
    )
    annotation = Annotated[Optional[kind], option]  # noqa: UP045
    return inspect.Parameter(entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


# -- values ------------------------------------------------------------------------------------------------------------


def params_of(values: Mapping[str, object], base: SamplingParams | None = None) -> SamplingParams:
    """`base` with these values, as JSON has them. Raises InvalidParameter, which names the field."""
    known = {entry.name: entry for entry in sampling_fields()}
    for name in values:
        if name not in known:
            raise InvalidParameter(name, f"is not a sampling parameter{_did_you_mean(name, known)}")
    checked: dict[str, Any] = {name: _checked(known[name], value) for name, value in values.items()}
    return replace(base or SamplingParams(), **checked)


def parsed_value(name: str, text: str) -> object:
    """The value that typed text stands for, as JSON would have it. Raises InvalidParameter."""
    known = {entry.name: entry for entry in sampling_fields()}
    if name not in known:
        raise InvalidParameter(name, f"is not a sampling parameter{_did_you_mean(name, known)}")
    entry, text = known[name], text.strip()
    if entry.optional and text.lower() in _NONE:
        return None
    if name == "logit_bias":
        return dict(_bias_entry(part) for part in text.split())
    if entry.kind is tuple:
        return [_parsed_number(entry, part, int) for part in text.split()]
    if entry.kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise _wrong(entry, text)
        return text.lower() in _TRUE
    return _parsed_number(entry, text, entry.kind)


def _parsed_number(entry: SamplingField, text: str, kind: type) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise _wrong(entry, text) from None


def changed_values(params: SamplingParams) -> dict[str, object]:
    """The fields that differ from the defaults, as JSON has them: what `params_of` makes the params of again."""
    changed: dict[str, object] = {}
    for entry in sampling_fields():
        value = getattr(params, entry.name)
        if value == entry.default:
            continue
        if entry.name == "logit_bias":
            value = {str(token): bias for token, bias in params.logit_bias}
        elif entry.kind is tuple:
            value = list(value)
        changed[entry.name] = value
    return changed


def _checked(entry: SamplingField, value: object) -> Any:
    if value is None and (entry.optional or entry.kind is tuple):
        return entry.default
    if entry.name == "logit_bias":
        return _bias(entry, value)
    if entry.kind is tuple:
        parts = _list(value)
        if parts is None or any(type(part) is not int for part in parts):
            raise _wrong(entry, value)
        return tuple(parts)
    if entry.kind is float and type(value) is int:
        value = float(value)
    if entry.kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not entry.kind:
        raise _wrong(entry, value)
    return value


def _bias(entry: SamplingField, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise _wrong(entry, value)
    table = cast("dict[object, object]", value)
    biases: list[tuple[int, float]] = []
    for token, bias in table.items():
        digits = isinstance(token, str) and token.isascii() and token.isdigit()
        if not digits or isinstance(bias, bool) or not isinstance(bias, int | float):
            raise _wrong(entry, table)
        biases.append((int(cast(str, token)), float(bias)))
    return tuple(biases)


def _list(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None


def _wrong(entry: SamplingField, value: object) -> InvalidParameter:
    return InvalidParameter(entry.name, f"{value!r} is not {entry.expects}")


def _did_you_mean(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; they are {', '.join(known)}"


def stop_strings(value: object) -> tuple[str, ...]:
    """The JSON field "stop": a string or a list of them. Raises InvalidParameter."""
    parts = [value] if isinstance(value, str) else _list(value)
    if parts is None or not all(isinstance(part, str) for part in parts):
        raise InvalidParameter("stop", f"{value!r} is not a string or a list of strings")
    return tuple(cast("list[str]", parts))

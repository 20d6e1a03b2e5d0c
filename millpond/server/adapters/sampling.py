"""How a wire request wants its tokens chosen, in OpenAI's names and llama-server's, as SamplingParams. Pure.

Absent fields keep SamplingParams' defaults. Of two names of one thing, the first in `_first` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from millpond.errors import InvalidParameter
from millpond.sampling_params import DryPenalty, DynamicTemperature, RepetitionGuard, SamplingParams, Xtc
from millpond.server.adapters.grammar import grammar_of
from millpond.server.schemas.generation import GenerationFields

_Value = TypeVar("_Value")
_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "lz_penalty",
    "ignore_eos",
)
_ID_LISTS = ("stop_token_ids", "banned_token_ids", "allowed_token_ids")
_NEUTRAL_ONLY: Mapping[str, tuple[object, ...]] = {"typical_p": (1, 1.0), "typ_p": (1, 1.0), "mirostat": (0,)}
"""llama-server's samplers that are not here: other values would be ignored, so they are refused."""


def sampling_params(fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """Raises InvalidParameter."""
    _refuse_unknown_samplers(fields)
    given: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAME}
    given |= {name: None if (ids := getattr(fields, name)) is None else tuple(ids) for name in _ID_LISTS}
    given |= {
        "max_tokens": _first(max_tokens, fields.n_predict if fields.n_predict != -1 else None),
        "logprobs": logprobs,
        "repetition_penalty": _repetition_penalty(fields),
        "penalty_window": _first(fields.penalty_window, _last_tokens(fields.repeat_last_n)),
        "logit_bias": None if fields.logit_bias is None else _logit_bias(fields.logit_bias),
        "top_n_sigma": None if fields.top_n_sigma is None else max(0.0, fields.top_n_sigma),
        "dry": _dry(fields),
        "xtc": None if fields.xtc_probability is None else Xtc(fields.xtc_probability, _or(fields.xtc_threshold, 0.1)),
        "dynamic_temperature": _dynamic_temperature(fields),
        "repetition_guard": _repetition_guard(fields),
        "grammar": grammar_of(fields),
    }
    params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise InvalidParameter("min_tokens", f"must not exceed max_tokens ({params.max_tokens})")
    if fields.allowed_token_ids == []:
        raise InvalidParameter("allowed_token_ids", "must not be empty; leave it out to allow every token")
    return params


def _first(*values: _Value | None) -> _Value | None:
    return next((value for value in values if value is not None), None)


def _or(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _last_tokens(asked: int | None) -> int | None:
    """SamplingParams says 0 for all."""
    return 0 if asked == -1 else asked


def _repetition_penalty(fields: GenerationFields) -> float | None:
    if fields.penalty_window is None and fields.repeat_last_n == 0:
        return 1.0
    return _first(fields.repetition_penalty, fields.repeat_penalty)


def _dry(fields: GenerationFields) -> DryPenalty | None:
    if not fields.dry_multiplier or fields.dry_penalty_last_n == 0:
        return None
    usual = DryPenalty(fields.dry_multiplier)
    breakers = fields.dry_sequence_breakers
    return DryPenalty(
        fields.dry_multiplier,
        _or(fields.dry_base, usual.base),
        _or(fields.dry_allowed_length, usual.allowed_length),
        _or(_last_tokens(fields.dry_penalty_last_n), usual.range),
        usual.breakers if breakers is None else tuple(breakers),
    )


def _dynamic_temperature(fields: GenerationFields) -> DynamicTemperature | None:
    if not fields.dynatemp_range:
        return None
    return DynamicTemperature(fields.dynatemp_range, _or(fields.dynatemp_exponent, 1.0))


def _repetition_guard(fields: GenerationFields) -> RepetitionGuard | None:
    asked = fields.repetition_detection
    if asked is None:
        return None
    usual = RepetitionGuard()
    longest = _or(asked.max_pattern_size, usual.max_period)
    return RepetitionGuard(
        _or(asked.min_pattern_size, min(usual.min_period, longest)), longest, _or(asked.min_count, usual.min_count)
    )


def _logit_bias(bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    entries: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParameter("logit_bias", f"keys must be token ids, got {key[:50]!r}")
        if int(key) in entries:
            raise InvalidParameter("logit_bias", f"token id {int(key)} is named twice")
        entries[int(key)] = value
    return tuple(entries.items())


def _refuse_unknown_samplers(fields: GenerationFields) -> None:
    extras = fields.model_extra or {}
    for name, neutral in _NEUTRAL_ONLY.items():
        if extras.get(name) is not None and extras[name] not in neutral:
            raise InvalidParameter(name, f"is not supported, except as {neutral[0]}")

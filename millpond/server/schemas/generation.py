"""Fields that chat and text completions share. Knows JSON types and ranges; not what the values do.

Strict types (the string "5" is no number, 5.0 is the integer 5), unknown fields accepted, null is absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from millpond.sampling_params import (
    MAX_CHOICES,
    MAX_DRY_BREAKERS,
    MAX_GRAMMAR_BYTES,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_LIST,
)
from millpond.server.limits import MAX_NAME_LENGTH, MAX_OUTPUTS, MAX_STOP_LENGTH, MAX_STOP_STRINGS

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1


def _integral(value: Any) -> Any:
    """5.0 is an integer in JSON; some clients write every number so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, BeforeValidator(_integral)]
TokenCount = Annotated[Integer, Field(ge=1, le=INT32_MAX)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
TokenIdField = Annotated[Integer, Field(ge=0, le=INT32_MAX)]
LastTokens = Annotated[Integer, Field(ge=-1, le=INT32_MAX)]
"""llama-server's way to say it: -1 is all, 0 switches off what looks at them."""
TokenList = Annotated[list[TokenIdField], Field(max_length=MAX_TOKEN_LIST)]
DryBreaker = Annotated[str, Field(min_length=1, max_length=64)]
GrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class WireModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(WireModel):
    include_usage: bool | None = None


class RepetitionDetection(WireModel):
    min_pattern_size: Annotated[Integer, Field(ge=1, le=64)] | None = None
    max_pattern_size: Annotated[Integer, Field(ge=1, le=64)] | None = None
    min_count: Annotated[Integer, Field(ge=3, le=1000)] | None = None


class GenerationFields(WireModel):
    model: str | None = None
    max_tokens: TokenCount | None = None
    n_predict: Annotated[Integer, Field(ge=-1, le=INT32_MAX)] | None = None
    min_tokens: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    n: Annotated[Integer, Field(ge=1, le=MAX_OUTPUTS)] | None = None
    stop: StopString | StopList | None = None
    stop_token_ids: Annotated[list[TokenIdField], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    top_k: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    top_p: Fraction | None = None
    min_p: Fraction | None = None
    seed: Annotated[Integer, Field(ge=0, le=UINT64_MAX)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]], Field(max_length=MAX_LOGIT_BIAS_ENTRIES)]
        | None
    ) = None
    ignore_eos: bool | None = None
    penalty_window: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    repeat_last_n: LastTokens | None = None
    lz_penalty: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dry_base: Annotated[float, Field(ge=1.0, le=10.0)] | None = None
    dry_allowed_length: Annotated[Integer, Field(ge=1, le=INT32_MAX)] | None = None
    dry_penalty_last_n: LastTokens | None = None
    dry_sequence_breakers: Annotated[list[DryBreaker], Field(max_length=MAX_DRY_BREAKERS)] | None = None
    banned_token_ids: TokenList | None = None
    allowed_token_ids: TokenList | None = None
    top_n_sigma: Annotated[float, Field(ge=-1.0, le=100.0)] | None = None
    xtc_probability: Fraction | None = None
    xtc_threshold: Fraction | None = None
    dynatemp_range: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    dynatemp_exponent: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), le=INT32_MAX)] | None = None
    cache_salt: Name | None = None
    prompt_cache_key: Name | None = None
    timeout: Annotated[float, Field(gt=0.0, le=1e9)] | None = None
    repetition_detection: RepetitionDetection | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_whitespace: Literal["compact", "flexible"] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None

"""What a wire request comes down to, whatever its dialect: prompts, parameters, options. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from millpond.async_llm import PromptInput, RequestOptions
from millpond.errors import InvalidParameter, UnknownModel
from millpond.sampling_params import SamplingParams
from millpond.server.keys import ApiKey
from millpond.server.limits import MAX_OUTPUTS
from millpond.server.schemas.generation import GenerationFields
from millpond.types import RequestId


@dataclass(frozen=True, slots=True)
class Caller:
    """What the server knows of a request besides its body."""

    request_id: str
    key: ApiKey
    """The authenticated one; ANONYMOUS without."""
    default_timeout: float
    """Seconds; 0: none. A client may ask for less, not for more."""
    served_model: str
    strip_billing_line: bool = True


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    prompts: Sequence[PromptInput]
    params: SamplingParams
    options: Sequence[RequestOptions]
    """One for each prompt."""
    stream: bool
    include_usage: bool
    return_token_ids: bool
    prompt_only: bool = False
    """The client wants no output, only what the model says of the prompt; one token is made and not shown."""
    notes: tuple[str, ...] = ()
    """What was done to the request that its client may want to know; shown in the answer's extension."""

    @property
    def n_outputs(self) -> int:
        return sum(options.n for options in self.options)


def build_plan(
    fields: GenerationFields, prompts: Sequence[PromptInput], params: SamplingParams, caller: Caller
) -> GenerationPlan:
    """Raises InvalidParameter for n beyond the limit, UnknownModel for another model's name."""
    check_model(fields.model, caller.served_model)
    refuse_unsupported(fields)
    n = fields.n or 1
    if n * len(prompts) > MAX_OUTPUTS:
        raise InvalidParameter("n", f"at most {MAX_OUTPUTS} outputs a request, got {n * len(prompts)}")
    return GenerationPlan(
        prompts=prompts,
        params=params,
        options=[_options(fields, caller, n, place if len(prompts) > 1 else None) for place in range(len(prompts))],
        stream=bool(fields.stream),
        include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
    )


def _options(fields: GenerationFields, caller: Caller, n: int, place: int | None) -> RequestOptions:
    suffix = "" if place is None else f"-{place}"
    return RequestOptions(
        request_id=RequestId(caller.request_id + suffix),
        n=n,
        stop=[fields.stop] if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        priority=caller.key.priority(fields.priority),
        namespace=namespace(caller.key.namespace, fields.cache_salt, fields.prompt_cache_key),
        timeout=_timeout(fields.timeout, caller.default_timeout),
    )


def _timeout(asked: float | None, default: float) -> float | None:
    if asked is None:
        return None
    return min(asked, default) if default > 0 else asked


def namespace(of_key: str, cache_salt: str | None, prompt_cache_key: str | None) -> str:
    """Two callers share prefixes only if all three are equal; JSON keeps the parts apart. "" when all are empty."""
    parts = [of_key, cache_salt or "", prompt_cache_key or ""]
    return msgspec.json.encode(parts).decode() if any(parts) else ""


def key_namespace(whole: str) -> str:
    """The API key's part of what `namespace` made."""
    return msgspec.json.decode(whole, type=list[str])[0] if whole else ""


def check_model(name: str | None, served: str) -> None:
    """Raises UnknownModel unless the name is the served one, empty or absent."""
    if name and name != served:
        raise UnknownModel(name[:200], served)


def refuse_unsupported(fields: GenerationFields) -> None:
    """Fails closed on what would change the output and is not built yet."""
    extras = fields.model_extra or {}
    modalities = extras.get("modalities")
    if isinstance(modalities, list) and any(kind != "text" for kind in cast(list[Any], modalities)):
        raise unsupported("modalities", "only text is supported")


def unsupported(field: str, what: str) -> InvalidParameter:
    return InvalidParameter(field, what)

"""What a client asked, in token ids, frozen at acceptance. Knows parameters; not how or when it will run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId, TokenId


@dataclass(frozen=True, slots=True)
class Request:
    """One output to generate. A wire request with n > 1 becomes n of these; the prefix cache shares their prompt."""

    request_id: RequestId
    prompt_ids: tuple[TokenId, ...]
    params: SamplingParams
    max_tokens: int
    """Output limit, resolved against the context at acceptance."""
    seed: int
    """Drawn at acceptance when the client gave none."""
    arrival: float
    """Seconds on the machine's monotonic clock, which both processes share."""
    deadline: float | None = None
    """Same clock; the sequence ends with DEADLINE when it passes, in whatever state it is."""
    priority: int = 0
    """Higher runs first."""
    namespace: str = ""
    """(authenticated key, cache_salt): prefixes are shared inside one namespace only."""


def output_limit(params: SamplingParams, n_prompt_tokens: int, max_model_len: int) -> int:
    """Most output tokens: what was asked, as far as it fits."""
    rest = max_model_len - n_prompt_tokens
    return rest if params.max_tokens is None else min(params.max_tokens, rest)


def finish_reason_of(
    request: Request, output_ids: Sequence[TokenId], eog_ids: frozenset[TokenId]
) -> FinishReason | None:
    """Why the output ends at its last token, or None if it goes on.

    Pure in (request, ids), so engine and server agree, and a log that is complete is never sent back to an engine.
    """
    if not output_ids:
        return None
    last, params = output_ids[-1], request.params
    over_minimum = len(output_ids) > params.min_tokens
    if last in eog_ids and (params.grammar is not None or (over_minimum and not params.ignore_eos)):
        return FinishReason.STOP
    if over_minimum and last in params.stop_token_ids:
        return FinishReason.STOP
    if len(output_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    looped = params.repetition_guard is not None and params.repetition_guard.sees_loop(output_ids)
    return FinishReason.REPETITION if looped else None

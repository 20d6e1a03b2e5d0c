"""Counts and times of a finished request in OpenAI's `usage` and in the `millpond` extension. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millpond.async_llm import Finish


@dataclass(frozen=True, slots=True)
class PromptFinishes:
    """The outputs of one prompt."""

    prompt_tokens: int
    finishes: Sequence[Finish]


def usage(prompts: Sequence[PromptFinishes]) -> dict[str, Any]:
    """A prompt counts once, however many outputs it has; cached is what its luckless output (the first) found."""
    prompt_tokens = sum(prompt.prompt_tokens for prompt in prompts)
    completion_tokens = sum(finish.completion_tokens for prompt in prompts for finish in prompt.finishes)
    reasoning_tokens = sum(finish.reasoning_tokens for prompt in prompts for finish in prompt.finishes)
    cached = sum(min((f.usage.cached_tokens for f in prompt.finishes), default=0) for prompt in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def extension(prompts: Sequence[PromptFinishes], notes: Sequence[str] = ()) -> dict[str, Any]:
    """Tokens and preemptions are sums over all outputs; times in ms are those of the slowest output."""
    noted: dict[str, Any] = {"notes": list(notes)} if notes else {}
    usages = [finish.usage for prompt in prompts for finish in prompt.finishes]
    return {
        "computed_prompt_tokens": sum(u.computed_prompt_tokens for u in usages),
        "cached_tokens": sum(u.cached_tokens for u in usages),
        "queue_ms": round(max((u.queue_ms for u in usages), default=0.0), 3),
        "prefill_ms": round(max((u.prefill_ms for u in usages), default=0.0), 3),
        "decode_ms": round(max((u.decode_ms for u in usages), default=0.0), 3),
        "parked_ms": round(max((u.parked_ms for u in usages), default=0.0), 3),
        "preemptions": sum(u.preemptions for u in usages),
        **noted,
    }

"""What a plugin can implement, and the values it gets and gives. Knows ids, parameters and counts; no text, no engine.

A plugin is a module or an object with functions marked by `hookimpl`, found through the entry point group
`millpond.plugins`. Each plugin runs on a thread of its own, one call at a time, in the order of events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pluggy

from millpond.outputs import SequenceUsage
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId, TokenId

PROJECT = "millpond"
GROUP = "millpond.plugins"
MID_GENERATION_EVERY = 32
"""Output tokens between two calls of mid_generation."""
REPETITION_WINDOW = 128
REPETITION_GRAM = 4

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    request_id: RequestId
    prompt_ids: tuple[TokenId, ...]
    params: SamplingParams
    priority: int


@dataclass(frozen=True, slots=True)
class Change:
    """None: as it was."""

    params: SamplingParams | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The client gets this message, with status 403."""

    message: str


@dataclass(frozen=True, slots=True)
class FirstToken:
    request_id: RequestId
    sequence_id: SequenceId
    prompt_tokens: int
    token_id: TokenId
    margin: float | None
    """Log probability of the best token less that of the second; None unless two logprobs were asked for."""
    entropy: float | None
    """In nats, of the best tokens that were reported, the rest taken as one; None without logprobs.

    A plugin asks for them in on_request, with a Change of `params.logprobs`: the client's answer stays as it was.
    """


class SeenToken(NamedTuple):
    request_id: RequestId
    sequence_id: SequenceId
    output_index: int
    token_id: TokenId


@dataclass(frozen=True, slots=True)
class Progress:
    request_id: RequestId
    sequence_id: SequenceId
    length: int
    """Output tokens so far."""
    recent_ids: tuple[TokenId, ...]
    """The last of them, at most REPETITION_WINDOW."""
    repetition: float
    """Share of the recent groups of REPETITION_GRAM tokens that had been there before: 0.0 none, near 1.0 a loop."""
    entropy: float | None
    """Mean over the recent tokens, as in FirstToken."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The output ends with what it has; its client sees `stop`."""


@dataclass(frozen=True, slots=True)
class Ending:
    request_id: RequestId
    sequence_id: SequenceId
    output_ids: tuple[TokenId, ...]
    reason: FinishReason
    usage: SequenceUsage


class Hooks:
    """The hooks, each with the time budget of the setting `plugin_budget_ms`."""

    @hookspec
    def on_request(self, request: IncomingRequest) -> Change | Refusal | None:
        """Before a request is accepted, in the order of the plugins; each sees what the one before it changed.

        The request waits for the answer, at most the budget: a late one counts as none.
        """

    @hookspec
    def after_prefill(self, first: FirstToken) -> None:
        """An output has its first token."""

    @hookspec
    def on_token(self, tokens: Sequence[SeenToken]) -> None:
        """The tokens of one step of the engine, or of a few short ones, of all outputs together. Read only."""

    @hookspec
    def mid_generation(self, progress: Progress) -> Stop | None:
        """Every MID_GENERATION_EVERY output tokens. The output goes on meanwhile: a Stop takes effect when it comes."""

    @hookspec
    def on_finish(self, ending: Ending) -> None:
        """An output ended, for whatever reason."""


def repetition(ids: Sequence[TokenId]) -> float:
    """Share of the groups of REPETITION_GRAM consecutive ids that are not there for the first time; 0.0 for few ids."""
    groups = [tuple(ids[start : start + REPETITION_GRAM]) for start in range(len(ids) - REPETITION_GRAM + 1)]
    return 1.0 - len(set(groups)) / len(groups) if groups else 0.0

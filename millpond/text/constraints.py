"""What a whole output may be: its answer by a grammar, its thoughts by a budget. Knows how outputs are read; compiles
nothing.

The grammar is of the answer. A model that thinks may think before it; one that was offered tools may call them instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from millpond.sampling_params import GrammarKind, GrammarSpec, ThinkingBudget
from millpond.text.channels import ChannelPlan
from millpond.text.input_processor import PreparedPrompt
from millpond.types import TokenId

SENTENCE_TOKENS = 64
"""How long a thought may go on over its budget, to end with a sentence; never more than twice the budget."""


class Encode(Protocol):
    def __call__(self, text: str, *, parse_special: bool) -> Sequence[TokenId]: ...


def output_grammar(answer: GrammarSpec | None, prepared: PreparedPrompt) -> GrammarSpec | None:
    """The grammar of every output of a prompt. A forced tool call leaves no place for an answer.

    Raises InvalidParameter when thinking and tools make it too long.
    """
    if prepared.grammar is not None:
        return GrammarSpec(GrammarKind.LARK, prepared.grammar, param="tool_choice")
    if answer is None or prepared.channels is None:
        return answer
    channels = prepared.channels
    return replace(answer, preface=_preface(channels), alternative=_calls(channels))


def thinking_budget(budget: int, prepared: PreparedPrompt, encode: Encode, max_tokens: int) -> ThinkingBudget | None:
    """None where the outputs have no reasoning channel. A tenth of `max_tokens` is kept for the answer."""
    channels = prepared.channels
    think = channels.turn.think if channels is not None else None
    if channels is None or think is None:
        return None
    close_ids = tuple(encode(think.close, parse_special=True))
    room = max(0, max_tokens - -(-max_tokens // 10) - len(close_ids))
    allowed = min(budget, room)
    return ThinkingBudget(
        open_ids=tuple(encode(think.open, parse_special=True)),
        close_ids=close_ids,
        budget=allowed,
        hard_limit=min(allowed + min(SENTENCE_TOKENS, 2 * allowed), room),
        starts_open=channels.turn.thinking,
        reopens=channels.form.think is not None,
    )


def _preface(channels: ChannelPlan) -> str:
    thought, rules = channels.form.thought_rules(channels.turn, channels.tokens.ids)
    return "\n".join([f"preface: {thought}", *rules, ""]) if thought else ""


def _calls(channels: ChannelPlan) -> str:
    tools = channels.turn.tools
    if tools is None:
        return ""
    return channels.form.forced_grammar(tools, channels.turn, parallel=channels.parallel, markers=channels.tokens.ids)

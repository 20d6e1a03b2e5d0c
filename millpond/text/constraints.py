"""What a whole output may be when its answer must match a grammar. Knows how outputs are read; compiles nothing.

The grammar is of the answer. A model that thinks may think before it; one that was offered tools may call them instead.
"""

from __future__ import annotations

from dataclasses import replace

from millpond.sampling_params import GrammarKind, GrammarSpec
from millpond.text.channels import ChannelPlan
from millpond.text.input_processor import PreparedPrompt


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


def _preface(channels: ChannelPlan) -> str:
    thought, rules = channels.form.thought_rules(channels.turn, channels.tokens.ids)
    return "\n".join([f"preface: {thought}", *rules, ""]) if thought else ""


def _calls(channels: ChannelPlan) -> str:
    tools = channels.turn.tools
    if tools is None:
        return ""
    return channels.form.forced_grammar(tools, channels.turn, parallel=channels.parallel, markers=channels.tokens.ids)

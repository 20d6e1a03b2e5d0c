"""The thinking budget: where the closing tag is forced, and that it is a function of the ids alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.errors import InvalidParameter
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling.ids import as_ids
from millpond.sampling.thinking import ThinkingLimit
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams, ThinkingBudget
from millpond.text.constraints import output_grammar, thinking_budget
from millpond.text.input_processor import InputProcessor
from millpond.text.inputs import ChatInput
from millpond.text.output_processor import HiddenTokens, OutputProcessor
from millpond.types import FinishReason, RequestId, SequenceId

PIECES = [b"<think>", b"</think>", b"<eos>", b" word", b"end.", b" ", b"\n", b"</", b"think", b">"]
OPEN, CLOSE, EOS, WORD, END, SPACE, LINE, HALF, THINK, BRACKET = range(10)
EOG = frozenset({EOS})


def limit_of(close: tuple[int, ...] = (CLOSE,), **fields: Any) -> ThinkingLimit:
    given = {"budget": 3, "hard_limit": 6, "starts_open": True} | fields
    return ThinkingLimit(ThinkingBudget((OPEN,), close, **given), EOG, PIECES.__getitem__)


def allowed(limit: ThinkingLimit, output_ids: list[int]) -> set[int]:
    row = np.zeros(len(PIECES), dtype=np.float32)
    limit.apply(row, as_ids(()), output_ids)
    return set(np.flatnonzero(row > -np.inf).tolist())


EVERY = set(range(10))


@pytest.mark.parametrize(
    ("output_ids", "expected"),
    [
        ([], EVERY - {EOS}),
        ([WORD, END], EVERY - {EOS}),
        ([WORD, WORD, END], {CLOSE}),
        ([WORD, WORD, LINE], {CLOSE}),
        ([WORD, WORD, WORD], EVERY - {EOS}),
        ([WORD, WORD, WORD, END], {CLOSE}),
        ([WORD] * 6, {CLOSE}),
        ([WORD] * 6 + [CLOSE], EVERY),
        ([WORD, CLOSE], EVERY),
        ([WORD, CLOSE, WORD, OPEN], EVERY - {EOS}),
        ([WORD, CLOSE, WORD, OPEN, WORD, END], {CLOSE}),
        ([WORD, WORD, END, CLOSE, OPEN], {CLOSE}),
        ([WORD, HALF, THINK, BRACKET], EVERY),
    ],
)
def test_the_tag_is_forced_at_a_sentence_over_the_budget_or_at_the_hard_limit(
    output_ids: list[int], expected: set[int]
):
    assert allowed(limit_of(), output_ids) == expected


@pytest.mark.parametrize(
    ("output_ids", "expected"),
    [
        ([OPEN], {CLOSE}),
        ([SPACE, LINE, OPEN], {CLOSE}),
        ([WORD, OPEN], EVERY),
        ([WORD, LINE, OPEN, WORD], EVERY),
        ([SPACE] * 300 + [WORD, OPEN], EVERY),
        ([OPEN, CLOSE], EVERY),
        ([OPEN, CLOSE, OPEN], EVERY),
    ],
)
def test_where_a_tag_inside_an_answer_is_text_it_opens_no_thought(output_ids: list[int], expected: set[int]):
    fields: dict[str, Any] = {"budget": 0, "hard_limit": 0, "reopens": False}
    assert allowed(limit_of(starts_open=False, **fields), output_ids) == expected
    assert allowed(limit_of(starts_open=True, **fields), [CLOSE, *output_ids]) == EVERY


def test_no_budget_closes_at_once_and_a_closed_start_is_free():
    assert allowed(limit_of(budget=0, hard_limit=0), []) == {CLOSE}
    assert allowed(limit_of(starts_open=False), []) == EVERY
    assert allowed(limit_of(starts_open=False, budget=0, hard_limit=0), [WORD, OPEN]) == {CLOSE}


def test_a_tag_of_several_tokens_is_forced_whole_and_finished_where_it_began_by_itself():
    close = (HALF, THINK, BRACKET)
    limit = limit_of(close)
    ids = [WORD] * 6
    for token in close:
        assert allowed(limit, ids) == {token}
        ids.append(token)
    assert allowed(limit, ids) == EVERY
    assert allowed(limit_of(close), [WORD] * 5 + [HALF]) == {THINK}


@given(st.lists(st.lists(st.integers(0, 9), max_size=15), max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_the_state_is_a_function_of_the_ids(outputs: list[list[int]], several: bool, starts: bool, reopens: bool):
    close = (HALF, THINK, BRACKET) if several else (CLOSE,)
    wandering = limit_of(close, starts_open=starts, reopens=reopens)
    for output_ids in outputs:
        fresh = limit_of(close, starts_open=starts, reopens=reopens)
        assert allowed(wandering, output_ids) == allowed(fresh, output_ids)


def test_values_are_checked():
    for fields in ({"budget": -1}, {"hard_limit": 2}):
        with pytest.raises(InvalidParameter, match="thinking_budget"):
            limit_of(**fields)


# -- whole outputs -----------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{% if false %}</think>{% endif %}"
)
CHAT = ChatInput([{"role": "user", "content": "why"}])


def answer(
    budget: int,
    max_tokens: int = 120,
    grammar: GrammarSpec | None = None,
    *,
    template: str = TEMPLATE,
    whole: GrammarSpec | None = None,
) -> tuple[str, str, int, FinishReason]:
    """(reasoning, content, reasoning tokens, end) of a fake model that never closes its thoughts by itself.

    `grammar` is of the answer, `whole` of all that the model writes.
    """
    runtime = FakeRuntime(ContextParams(n_cells=600, n_slots=2))
    vocab = runtime.vocab
    text = InputProcessor(vocab, template, 600, lambda: datetime(2026, 1, 1, tzinfo=UTC))
    prepared = text.prepare_prompt(CHAT)
    thinking = thinking_budget(budget, prepared, text.tokenizer.encode, max_tokens)
    assert thinking is not None and thinking.starts_open == (template == TEMPLATE)
    params = SamplingParams(
        temperature=0.0, thinking=thinking, grammar=whole or output_grammar(grammar, prepared), ignore_eos=True
    )
    request = Request(RequestId("t"), prepared.token_ids, params, max_tokens, seed=1, arrival=0.0)
    assert prepared.channels is not None
    processor = OutputProcessor(vocab.piece, [], HiddenTokens(vocab.eog_ids), prepared.channels.machine("t", 0))
    core = build_core(runtime, EngineConfig(), lambda: runtime.virtual_time)
    core.add(SequenceId(1), request)
    deltas, ends = [], []
    while not ends:
        result = core.step()
        deltas += [processor.feed([token.token_id], token.output_index) for token in result.tokens]
        ends += result.finished
    deltas.append(processor.finish())
    reasoning, content = "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas)
    return reasoning, content, processor.reasoning_tokens, ends[0].reason


@pytest.mark.parametrize("budget", [0, 5, 50, 10_000])
def test_the_reader_sees_the_tag_and_content_follows(budget: int):
    reasoning, content, thought, _ = answer(budget)
    assert "think>" not in content and "</" not in reasoning
    assert content, "a tenth of the output is left for the answer"
    assert bool(reasoning.strip()) == (budget > 0)
    assert thought <= min(budget + min(64, 2 * budget), 100) + 8, "the budget, a sentence, and the tag"


def test_a_grammar_constrains_what_follows_the_forced_tag():
    spec = GrammarSpec(GrammarKind.CHOICE, '["yes","no"]')
    _, content, thought, end = answer(20, grammar=spec)
    assert content.strip() in ("yes", "no") and thought >= 20 and end is FinishReason.STOP


@pytest.mark.parametrize("budget", [0, 10, 30])
def test_a_thought_that_opens_by_itself_is_bounded(budget: int):
    opens_none = TEMPLATE.replace("assistant\n<think>\n", "assistant\n")
    whole = GrammarSpec(GrammarKind.GRAMMAR, 'root ::= "<think>" [a-z ]{0,80} "</think>" [a-z]{9}')
    reasoning, content, thought, _ = answer(budget, 200, template=opens_none, whole=whole)
    assert len(content) == 9 and "think" not in reasoning
    assert budget <= thought <= 3 * budget + len("></think>")

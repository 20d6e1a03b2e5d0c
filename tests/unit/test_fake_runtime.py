"""FakeRuntime beyond the contract: determinism, expected outputs, ends, virtual cost, vocabularies of any size."""

from __future__ import annotations

import numpy as np
import pytest

from millpond.runtime.base import Batch, CandidateFilter, ContextParams, Logits
from millpond.runtime.fake import CostModel, FakeRuntime
from millpond.runtime.fake_vocab import FakeVocab
from millpond.types import MemoryKind, SlotId

PROMPT = [60, 61, 62, 63, 64]
PARAMS = ContextParams(n_cells=1024, n_slots=4)


def _batch(tokens: list[int], start: int, slot: int = 0) -> Batch:
    return Batch(
        np.array(tokens, dtype=np.int32),
        np.arange(start, start + len(tokens), dtype=np.int32),
        np.full(len(tokens), slot, dtype=np.int32),
        np.ones(len(tokens), dtype=np.bool_),
    )


def _generate(runtime: FakeRuntime, prompt: list[int], count: int) -> list[int]:
    runtime.decode(_batch(prompt, 0))
    output = [int(runtime.logits(len(prompt) - 1).argmax())]
    while len(output) < count and output[-1] not in runtime.vocab.eog_ids:
        runtime.decode(_batch([output[-1]], len(prompt) + len(output) - 1))
        output.append(int(runtime.logits(0).argmax()))
    return output


@pytest.mark.parametrize("kind", list(MemoryKind))
def test_decoding_gives_the_expected_output(kind: MemoryKind) -> None:
    runtime = FakeRuntime(PARAMS, memory_kind=kind, window=16)
    expected = runtime.expected_greedy(PROMPT, 60)
    assert runtime.cells_used == runtime.rows_computed == 0
    assert _generate(runtime, PROMPT, 60) == expected
    assert len(expected) == 60


def test_the_output_depends_on_the_seed_and_on_nothing_else() -> None:
    outputs = [FakeRuntime(PARAMS, seed=seed).expected_greedy(PROMPT, 40) for seed in (0, 0, 1)]
    assert outputs[0] == outputs[1] != outputs[2]
    other_pool = FakeRuntime(ContextParams(n_cells=512, n_slots=1, unified=False))
    assert other_pool.expected_greedy(PROMPT, 40) == outputs[0]


def test_two_prompts_soon_part_for_good() -> None:
    runtime = FakeRuntime(PARAMS)
    one, other = (runtime.expected_greedy([first, *PROMPT], 200) for first in (60, 61))
    same = sum(a == b for a, b in zip(one, other, strict=True))
    assert same < 10


def test_the_greedy_output_is_readable_text_without_end_tokens() -> None:
    runtime = FakeRuntime(PARAMS)
    output = runtime.expected_greedy(PROMPT, 2000)
    assert not runtime.vocab.eog_ids & set(output)
    text = b"".join(map(runtime.vocab.piece, output[:-1])).decode("utf-8", errors="strict")
    assert any(character in text for character in "😀🚀🦆你好"), "characters that take two tokens occur"


def test_eog_every_ends_outputs_and_ignore_eos_bans_it() -> None:
    runtime = FakeRuntime(PARAMS, eog_every=10)
    outputs = [runtime.expected_greedy([*PROMPT, last], 500) for last in range(60, 110)]
    assert all(len(output) < 500 and output[-1] in runtime.vocab.eog_ids for output in outputs)
    assert 4 < np.mean([len(output) for output in outputs]) < 20
    banned = runtime.expected_greedy(PROMPT, 500, ignore_eos=True)
    assert len(banned) == 500 and not runtime.vocab.eog_ids & set(banned)


def test_a_chosen_draw_is_followed() -> None:
    runtime = FakeRuntime(PARAMS)

    def second_best(logits: Logits, output_index: int) -> int:
        return int(np.argsort(-logits, kind="stable")[output_index % 2])

    output = runtime.expected_tokens(PROMPT, 20, second_best)
    for index in range(20):
        runtime.decode(_batch([*PROMPT, *output[:index]], 0))
        assert second_best(runtime.logits(len(PROMPT) + index - 1), index) == output[index]
        runtime.drop(SlotId(0))


def test_an_empty_prompt_has_no_output() -> None:
    with pytest.raises(ValueError, match="empty"):
        FakeRuntime(PARAMS).expected_greedy([], 5)


def test_sampling_has_runners_up_and_no_likely_end_token() -> None:
    runtime = FakeRuntime(PARAMS)
    runtime.decode(_batch(PROMPT, 0))
    ids, probabilities = runtime.candidates.filter(
        runtime.logits(4), CandidateFilter(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)
    )
    assert 2 <= len(ids) <= 8
    assert probabilities[0] < 0.9
    assert not runtime.vocab.eog_ids & set(ids.tolist())


@pytest.mark.parametrize(("asked", "round_to", "cells"), [(64, 1, 64), (1000, 256, 1024), (1, 256, 256), (33, 32, 64)])
def test_the_rounding_of_the_pool_can_be_chosen(asked: int, round_to: int, cells: int) -> None:
    runtime = FakeRuntime(ContextParams(n_cells=asked, n_slots=1), round_to=round_to)
    assert runtime.limits.n_cells == runtime.cells_free == cells


def test_virtual_time_follows_the_cost_model() -> None:
    heard: list[float] = []
    cost = CostModel(step=1.0, row=0.1, cell=0.001, moved=0.01)
    runtime = FakeRuntime(PARAMS, cost=cost, on_cost=heard.append)
    runtime.decode(_batch(PROMPT, 0))
    runtime.decode(_batch([65], 5))
    data = runtime.save(SlotId(0), 0, 6)
    runtime.restore(SlotId(1), 0, 6, data)
    assert heard == pytest.approx([1.0 + 0.5 + 0.025, 1.0 + 0.1 + 0.006, 0.06, 0.06])
    assert runtime.virtual_time == pytest.approx(sum(heard))
    assert runtime.rows_computed == 6


def test_idle_cells_cost_in_a_unified_pool_only() -> None:
    def cost_of_a_row(*, unified: bool) -> float:
        cost = CostModel(step=0.0, row=0.0, cell=1.0)
        runtime = FakeRuntime(ContextParams(n_cells=1024, n_slots=4, unified=unified), cost=cost)
        runtime.decode(_batch(PROMPT * 20, 0, slot=1))
        before = runtime.virtual_time
        runtime.decode(_batch([60], 0))
        return runtime.virtual_time - before

    assert cost_of_a_row(unified=True) == 101
    assert cost_of_a_row(unified=False) == 0


def test_facts_of_the_model_can_be_replaced() -> None:
    runtime = FakeRuntime(PARAMS, n_ctx_train=4096, model_overrides={"name": "duck", "digest": "ab"})
    assert (runtime.model.name, runtime.model.digest, runtime.model.n_ctx_train) == ("duck", "ab", 4096)


def test_close_frees_every_cell() -> None:
    runtime = FakeRuntime(PARAMS)
    runtime.decode(_batch(PROMPT, 0))
    runtime.copy(SlotId(0), SlotId(1), 3)
    runtime.close()
    assert runtime.cells_used == 0


@pytest.mark.parametrize("n_tokens", [16, 64, 259, 512, 5000])
def test_vocabularies_of_any_size(n_tokens: int) -> None:
    vocab = FakeVocab(n_tokens)
    pieces = [vocab.piece(token, special=True) for token in range(n_tokens)]
    assert len(set(pieces)) == n_tokens
    ids = vocab.tokenize("a\N{DUCK}Zz", parse_special=False)
    assert all(3 <= token < n_tokens for token in ids)
    assert (b"".join(map(vocab.piece, ids)) == "a\N{DUCK}Zz".encode()) is (n_tokens >= 259)
    runtime = FakeRuntime(PARAMS, vocab_size=n_tokens)
    assert len(set(runtime.expected_greedy([5, 6], 300))) > 5


def test_a_vocabulary_needs_some_tokens() -> None:
    with pytest.raises(ValueError, match="16"):
        FakeVocab(15)

"""A matcher's state is a function of the ids it is asked about; the mask keeps outputs inside the grammar."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from sampling_reference import PLAIN, SortingCandidates, request_of

from millpond.errors import GrammarFailed
from millpond.runtime.fake_vocab import FakeVocab
from millpond.sampling.sampler import SamplerFactory
from millpond.sampling.structured import GrammarCompiler, guidance
from millpond.sampling.structured.guidance import GuidanceGrammar, GuidanceVocabulary
from millpond.sampling_params import GrammarKind, GrammarSpec

VOCAB = FakeVocab(512)
EOG = VOCAB.eog_ids
COMPILER = GrammarCompiler(VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SPEC = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
GBNF = GrammarSpec(GrammarKind.GBNF, 'root ::= ("ab" | [a-z]+ "." | "x" root)')
FACTORY = SamplerFactory(VOCAB.n_tokens, EOG, SortingCandidates())


def random_walk(spec: GrammarSpec, rng: random.Random, length: int) -> list[int]:
    """Ids that the grammar allows one after the other, ends left out where anything else may come."""
    matcher = COMPILER.compile(spec).matcher()
    ids: list[int] = []
    while len(ids) < length:
        options = [int(i) for i in np.flatnonzero(matcher.allowed(ids)) if int(i) not in EOG]
        if not options:
            break
        ids.append(rng.choice(options))
    return ids


@pytest.mark.parametrize("seed", range(12))
def test_the_mask_is_the_same_however_the_matcher_got_there(seed: int):
    rng = random.Random(seed)
    walk = random_walk(SPEC, rng, 40)
    other = random_walk(SPEC, rng, 40)
    wandering = COMPILER.compile(SPEC).matcher()
    for _ in range(30):
        base = rng.choice([walk, other, random_walk(SPEC, rng, 40)])
        ids = base[: rng.randint(0, len(base))]
        fresh = COMPILER.compile(SPEC).matcher()
        assert (wandering.allowed(ids) == fresh.allowed(ids)).all()
        assert wandering.forced(ids) == fresh.forced(ids)
        assert wandering.count_accepted(ids, walk) == fresh.count_accepted(ids, walk)


def test_ids_that_do_not_match_fail_and_leave_no_mask():
    matcher = COMPILER.compile(SPEC).matcher()
    wrong = VOCAB.tokenize("[1]", parse_special=False)
    with pytest.raises(GrammarFailed):
        matcher.allowed(wrong)
    right = VOCAB.tokenize('{"name":"', parse_special=False)
    assert matcher.allowed(right).any(), "the matcher is of use again for ids that match"


def test_a_full_table_of_states_is_replaced_and_a_grammar_that_needs_more_fails(monkeypatch: pytest.MonkeyPatch):
    limits = guidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    monkeypatch.setattr(guidance, "LIMITS", limits)
    grammar = GuidanceGrammar(
        GuidanceVocabulary(VOCAB), json.dumps({"grammars": [{"lark_grammar": "start: /(a|b)*a(a|b){12}/"}]})
    )
    rng = random.Random(3)

    def follow(length: int) -> None:
        matcher = grammar.matcher()
        ids: list[int] = []
        for _ in range(length):
            assert matcher.allowed(ids).any()
            ids += VOCAB.tokenize(rng.choice("ab"), parse_special=False)

    for _ in range(60):
        follow(20)
    with pytest.raises(GrammarFailed, match="states"):
        follow(2000)
    follow(20)


def sample_all(spec: GrammarSpec, seed: int, limit: int = 200, **params: Any) -> tuple[list[int], list[int]]:
    """An output of a model that says nothing sensible, and how many tokens came with each choice."""
    request = request_of([5, 6], seed, grammar=spec, **PLAIN | params)
    sampler = FACTORY.create(request, COMPILER.compile(spec))
    rng = np.random.default_rng(seed)
    ids, steps = list[int](), list[int]()
    while len(ids) < limit:
        row = rng.normal(0.0, 3.0, VOCAB.n_tokens).astype(np.float32)
        sampled = sampler.sample(row, ids)
        ids += [sampled.token_id, *sampled.forced]
        steps.append(1 + len(sampled.forced))
        if sampled.token_id in EOG:
            break
    return ids, steps


def text_of(ids: list[int]) -> str:
    return b"".join(map(VOCAB.piece, ids)).decode()


@pytest.mark.parametrize("seed", range(25))
def test_outputs_of_noise_are_valid_documents(seed: int):
    ids, _ = sample_all(SPEC, seed)
    document = json.loads(text_of(ids))
    assert list(document) == ["name", "age", "tags"] and 0 <= document["age"] <= 130
    assert set(document["tags"]) <= {"red", "green"} and len(document["name"]) <= 12
    assert text_of(ids) == json.dumps(document, separators=(",", ":"), ensure_ascii=False) or "\\" in text_of(ids)


def test_forced_text_comes_without_choices_and_an_end_only_where_complete():
    ids, steps = sample_all(SPEC, 3)
    assert len(steps) < len(ids), "the keys are forced"
    assert sum(steps) == len(ids)
    assert [i for i in ids if i in EOG] == ids[-1:]
    several = sample_all(SPEC, 3, logprobs=2)[1]
    assert set(several) == {1}, "logprobs need a row for every token"


def test_the_end_is_banned_before_min_tokens_only_where_something_else_may_come():
    open_ended = GrammarSpec(GrammarKind.REGEX, "[a-z]*")
    for seed in range(20):
        ids, _ = sample_all(open_ended, seed, min_tokens=15, limit=60)
        assert not EOG.intersection(ids[:15])
    closed = GrammarSpec(GrammarKind.CHOICE, '["yes","no"]')
    ids, _ = sample_all(closed, 1, min_tokens=50)
    assert text_of(ids) in ("yes", "no") and ids[-1] in EOG


def test_no_bias_opens_what_the_grammar_forbids():
    spec = GrammarSpec(GrammarKind.REGEX, "[a-f]{8}")
    z = VOCAB.tokenize("z", parse_special=False)[0]
    ids, _ = sample_all(spec, 2, logit_bias=((z, 100.0),))
    assert set(text_of(ids)) <= set("abcdef")


@pytest.mark.parametrize("spec", [SPEC, GrammarSpec(GrammarKind.REGEX, "([a-c]{2,3}é?)+"), GBNF], ids=str)
def test_where_nothing_is_forced_asking_about_one_token_says_the_same_as_the_mask(spec: GrammarSpec):
    rng = random.Random(4)
    matcher = COMPILER.compile(spec).matcher()
    for _ in range(6):
        walk = random_walk(spec, rng, 30)
        for length in range(0, len(walk), 3):
            if matcher.forced(walk[:length]):
                continue
            mask = matcher.allowed(walk[:length]).copy()
            one_by_one = [matcher.count_accepted(walk[:length], (token,)) == 1 for token in range(VOCAB.n_tokens)]
            assert [t for t in range(VOCAB.n_tokens) if mask[t] != one_by_one[t] and t not in EOG] == []


@pytest.mark.parametrize("fields", [{}, {"min_tokens": 12}, {"presence_penalty": 2.0}, {"logit_bias": ((9, 5.0),)}])
@pytest.mark.parametrize("seed", range(6))
def test_a_greedy_choice_is_the_largest_logit_that_the_mask_leaves(seed: int, fields: dict[str, Any]):
    """The sampler asks for the mask only where the largest of all is not allowed."""
    rng = np.random.default_rng(seed)
    sampler = FACTORY.create(request_of(temperature=0.0, **fields), COMPILER.compile(SPEC))
    plain = FACTORY.create(request_of(temperature=0.0, **fields, logprobs=0))
    ids: list[int] = []
    masks = 0
    for _ in range(60):
        row = rng.normal(0.0, 3.0, VOCAB.n_tokens).astype(np.float32)
        liked = COMPILER.compile(SPEC).matcher().forced(ids)[:1] or random_walk(SPEC, random.Random(seed), 1)
        row[liked] += np.float32(rng.choice([0.0, 30.0]))
        given = row.copy()
        chosen = sampler.sample(row, ids).token_id
        assert (row == given).all(), "the model's logits are read only"
        mask = COMPILER.compile(SPEC).matcher().allowed(ids).copy()
        if len(ids) < fields.get("min_tokens", 0) and mask[[t for t in range(VOCAB.n_tokens) if t not in EOG]].any():
            mask[sorted(EOG)] = False
        masks += plain.sample(row, ids).token_id != chosen
        expected = np.where(mask, row, np.float32(-np.inf))
        assert chosen == plain.sample(expected, ids).token_id
        if chosen in EOG:
            break
        ids.append(chosen)
    assert masks > 0

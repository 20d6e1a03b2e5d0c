"""Constrained outputs under preemption, in the whole engine: valid, and the same as alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future
from typing import Any

import pytest
from workload import seeds, solo_output

from millpond.bench.simulation import Job, Pool, Simulation
from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.errors import InvalidParameter
from millpond.outputs import FinishEvent
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling.structured import Grammar, GrammarCompiler, guidance
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Lima", "Accra"]},
        "inhabitants_of_the_whole_area": {"type": "integer", "minimum": 10, "maximum": 99_999_999},
        "remarks": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 2, "maxItems": 6},
    },
    "required": ["city", "inhabitants_of_the_whole_area", "remarks"],
    "additionalProperties": False,
}
SPECS = (
    GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    GrammarSpec(GrammarKind.REGEX, "([a-f]{4}-){12}[0-9]{3}"),
    GrammarSpec(GrammarKind.CHOICE, json.dumps(["a quite long answer that is forced", "another", "a third"])),
)


def constrained(*, grammar: GrammarSpec = SPECS[2], **fields: Any) -> Request:
    given = {"max_tokens": 30, "seed": 1, "arrival": 0.0} | fields
    return Request(RequestId("c"), (9, 8, 7), SamplingParams(grammar=grammar, temperature=0.0), **given)


def request(number: int, rng: random.Random, *, max_tokens: int = 400, **params: Any) -> Request:
    spec = rng.choice(SPECS)
    return Request(
        RequestId(f"r{number}"),
        tuple(rng.randrange(3, 250) for _ in range(rng.randint(20, 80))),
        SamplingParams(grammar=spec, temperature=rng.choice([0.0, 0.9]), top_k=0, **params),
        max_tokens,
        seed=rng.randrange(2**32),
        arrival=0.0,
    )


def text_of(ids: list[int]) -> str:
    vocab = FakeRuntime(ContextParams(n_cells=8, n_slots=1)).vocab
    return b"".join(map(vocab.piece, ids)).decode()


def valid(spec: GrammarSpec, text: str) -> bool:
    if spec.kind is GrammarKind.CHOICE:
        return text in json.loads(spec.text)
    if spec.kind is GrammarKind.JSON_SCHEMA:
        document = json.loads(text)
        return list(document) == SCHEMA["required"] and 2 <= len(document["remarks"]) <= 6
    return len(text) == 63 and text[60:].isdigit()


@pytest.mark.parametrize("faults", ["", "save%3=enospc;restore%4=truncate", "decode%17=exhausted"])
@pytest.mark.parametrize("seed", seeds(4, fast=1))
def test_under_four_times_overcommit_every_output_is_valid_and_equals_its_solo_run(seed: int, faults: str):
    rng = random.Random(seed)
    jobs = [Job(rng.random(), request(number, rng)) for number in range(16)]
    pool = Pool(420, n_slots=24, faults=faults)
    simulation = Simulation(pool, EngineConfig(max_running=12, max_model_len=400))
    report = simulation.run(jobs, max_steps=20_000)
    assert report.stats.preemptions > 0
    for number, job in enumerate(jobs):
        output, spec = report.outputs[number], job.request.params.grammar
        assert report.finishes[number].reason is FinishReason.STOP
        assert spec is not None and valid(spec, text_of(output))
        assert output == solo_output(job.request)


def test_a_limit_cuts_forced_text_at_its_token():
    rng = random.Random(1)
    for limit in range(1, 30, 4):
        job = Job(0.0, request(0, rng, max_tokens=limit))
        report = Simulation(Pool(600), EngineConfig(max_running=2)).run([job])
        assert len(report.outputs[0]) == limit or report.finishes[0].reason is FinishReason.STOP
        assert report.finishes[0].output_length == len(report.outputs[0])


@pytest.mark.parametrize("given", [1, 7, 20, 40])
def test_an_engine_that_is_given_the_first_tokens_goes_on_as_the_first_would_have(given: int):
    asked = constrained(grammar=SPECS[0], max_tokens=200)
    whole = solo_output(asked)
    assert len(whole) > given
    core = build_core(FakeRuntime(ContextParams(n_cells=600, n_slots=4)), EngineConfig(), lambda: 0.0)
    core.add(SequenceId(1), asked, whole[:given])
    output = whole[:given]
    while core.has_work:
        output += [token.token_id for token in core.step().tokens]
    assert output == whole


class Slow:
    """Grammars compile when the test says so."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._compiler = GrammarCompiler(runtime.vocab)
        self.waiting: list[tuple[GrammarSpec, Future[Grammar]]] = []

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self.waiting.append((spec, future))
        return future

    def finish(self) -> None:
        for spec, future in self.waiting:
            try:
                future.set_result(self._compiler.compile(spec))
            except InvalidParameter as error:
                future.set_exception(error)


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        runtime = FakeRuntime(ContextParams(n_cells=600, n_slots=4))
        self.slow = Slow(runtime)
        self.core = build_core(runtime, EngineConfig(), lambda: self.now, compile_grammar=self.slow.submit)
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, FinishEvent] = {}

    def step(self, times: int = 1) -> bool:
        """Whether anything happened."""
        progressed = False
        for _ in range(times):
            result = self.core.step()
            self.core.scheduler.check()
            progressed = progressed or result.progressed
            for token in result.tokens:
                self.tokens.setdefault(token.sequence_id, []).append(token.token_id)
            self.finished |= {event.sequence_id: event for event in result.finished}
        return progressed


FREE = Request(RequestId("f"), (5, 6), SamplingParams(temperature=0.0, ignore_eos=True), 8, seed=1, arrival=0.0)


def test_a_grammar_that_compiles_slowly_holds_up_nobody_else():
    bench = Bench()
    bench.core.add(SequenceId(1), constrained())
    bench.core.add(SequenceId(2), FREE)
    bench.step(20)
    assert set(bench.finished) == {2} and 1 not in bench.tokens
    assert bench.core.has_work and not bench.step(), "it waits without work to do"
    assert bench.core.stats().waiting == 1
    bench.slow.finish()
    bench.step(40)
    assert bench.finished[1].reason is FinishReason.STOP
    assert text_of(bench.tokens[1]) in json.loads(SPECS[2].text)


def test_while_it_compiles_a_sequence_can_be_cancelled_and_its_deadline_counts():
    bench = Bench()
    bench.core.add(SequenceId(1), constrained())
    bench.core.add(SequenceId(2), constrained(deadline=5.0))
    bench.step()
    bench.core.end(SequenceId(1), FinishReason.CANCELLED)
    bench.step()
    assert bench.finished[1].reason is FinishReason.CANCELLED
    bench.now = 6.0
    bench.step()
    assert bench.finished[2].reason is FinishReason.DEADLINE
    assert not bench.core.has_work
    for _, future in bench.slow.waiting:
        assert future.cancelled()


def test_a_grammar_that_does_not_compile_ends_its_sequence_alone():
    bench = Bench()
    bench.core.add(SequenceId(1), constrained(grammar=GrammarSpec(GrammarKind.LARK, "start: nothing")))
    bench.core.add(SequenceId(2), FREE)
    bench.slow.finish()
    bench.step(20)
    assert bench.finished[1].reason is FinishReason.GRAMMAR and "unknown name" in bench.finished[1].message
    assert bench.finished[2].reason is FinishReason.LENGTH


def test_a_grammar_that_becomes_too_complex_ends_its_sequence_alone(monkeypatch: pytest.MonkeyPatch):
    """Its table of states fills up in the middle of the output."""
    monkeypatch.setattr(guidance, "LIMITS", guidance.LLParserLimits(max_lexer_states=300, verbose_errors=False))
    bench = Bench()
    mess = GrammarSpec(GrammarKind.REGEX, "(a|b)*a(a|b){12}")
    bench.core.add(SequenceId(1), constrained(grammar=mess, max_tokens=500))
    bench.core.add(SequenceId(2), FREE)
    bench.slow.finish()
    bench.step(600)
    assert bench.finished[1].reason is FinishReason.GRAMMAR and len(bench.tokens[1]) > 10
    assert "states" in bench.finished[1].message
    assert bench.finished[2].reason is FinishReason.LENGTH

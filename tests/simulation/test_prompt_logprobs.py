"""Log-probabilities of prompts in the whole engine: complete and right beside caches, parking and faults."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from workload import seeds

from millpond.bench.simulation import Job, Pool, Simulation
from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.outputs import TokenEvent, TokenLogprobs
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId

PROMPT = tuple(random.Random(1).randrange(3, 250) for _ in range(90))


def request(prompt: tuple[int, ...] = PROMPT, prompt_logprobs: int | None = 2, max_tokens: int = 5) -> Request:
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2, prompt_logprobs=prompt_logprobs)
    return Request(RequestId("r"), prompt, params, max_tokens, seed=1, arrival=0.0)


def expected(prompt: tuple[int, ...]) -> list[TokenLogprobs]:
    """One token at a time: what each row says of the next token."""
    runtime = FakeRuntime(ContextParams(n_cells=len(prompt) + 8, n_slots=1))
    rows: list[np.ndarray] = []

    def keep(logits: np.ndarray, index: int) -> int:
        rows.append(logits.astype(np.float64))
        return prompt[index + 1]

    runtime.expected_tokens(prompt[:1], len(prompt) - 1, keep)
    found: list[TokenLogprobs] = []
    for row, token in zip(rows, prompt[1:], strict=True):
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        best = np.lexsort((np.arange(len(logs)), -logs))[:2]
        found.append(TokenLogprobs(float(logs[token]), tuple((int(i), float(logs[i])) for i in best)))
    return found


def assert_close(found: tuple[TokenLogprobs, ...], wanted: list[TokenLogprobs]) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.chosen == pytest.approx(theirs.chosen, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def tokens_of(simulation: Simulation, jobs: list[Job]) -> dict[int, list[TokenEvent]]:
    """The token events of each job."""
    events: dict[int, list[TokenEvent]] = {}
    step = simulation.core.step

    def watched(*arguments: object) -> object:
        result = step(*arguments)  # pyright: ignore[reportArgumentType]
        for token in result.tokens:
            events.setdefault(token.sequence_id, []).append(token)
        return result

    simulation.core.step = watched  # type: ignore[method-assign]
    simulation.run(jobs, max_steps=20_000)
    return events


def reported(simulation: Simulation, jobs: list[Job]) -> dict[int, list[tuple[int, tuple[TokenLogprobs, ...]]]]:
    """By job: output index and prompt logprobs of its token events."""
    events = tokens_of(simulation, jobs)
    return {job: [(token.output_index, token.prompt_logprobs) for token in tokens] for job, tokens in events.items()}


def test_they_come_with_the_first_token_and_only_there():
    events = reported(Simulation(Pool(400), EngineConfig()), [Job(0.0, request())])[0]
    assert [index for index, _ in events] == [0, 1, 2, 3, 4]
    assert_close(events[0][1], expected(PROMPT))
    assert all(not about for _, about in events[1:])


def test_a_cached_prompt_gives_the_same_again_and_is_of_use_to_others():
    jobs = [Job(float(n), replace(request(), arrival=float(n))) for n in range(3)]
    jobs.append(Job(3.0, replace(request(prompt_logprobs=None), arrival=3.0)))
    simulation = Simulation(Pool(400), EngineConfig())
    finishes = {}
    events = reported(simulation, jobs)
    for number in range(3):
        assert_close(events[number][0][1], expected(PROMPT))
    report = Simulation(Pool(400), EngineConfig()).run(jobs)
    finishes = {number: report.finishes[number].usage.cached_tokens for number in range(4)}
    assert finishes == {0: 0, 1: 0, 2: 0, 3: len(PROMPT) - 1}


@pytest.mark.parametrize("faults", ["", "decode%7=exhausted", "save%3=enospc;restore%2=truncate", "decode%11=fail"])
@pytest.mark.parametrize("seed", seeds(3, fast=1))
def test_under_pressure_they_are_complete_and_right(seed: int, faults: str):
    rng = random.Random(seed)
    jobs: list[Job] = []
    for _ in range(12):
        prompt = tuple([*PROMPT[: rng.randint(0, 90)], *(rng.randrange(3, 250) for _ in range(rng.randint(1, 90)))])
        wants = rng.choice([2, 2, None])
        jobs.append(Job(rng.random() * 0.3, request(prompt, wants, max_tokens=rng.randint(1, 60))))
    pool = Pool(300, n_slots=16, faults=faults)
    simulation = Simulation(pool, EngineConfig(max_running=8, max_model_len=300))
    events = reported(simulation, jobs)
    assert simulation.core.scheduler.preemptions > 0
    for number, job in enumerate(jobs):
        about = events[number][0][1]
        if job.request.params.prompt_logprobs is None:
            assert about == ()
        else:
            assert_close(about, expected(job.request.prompt_ids))


def test_a_prompt_of_one_token_has_none():
    events = reported(Simulation(Pool(400), EngineConfig()), [Job(0.0, request((7,)))])[0]
    assert events[0] == (0, ())


def test_after_the_first_token_a_new_engine_does_not_compute_them_again():
    core = build_core(FakeRuntime(ContextParams(n_cells=400, n_slots=4)), EngineConfig(), lambda: 0.0)
    asked = request()
    core.add(SequenceId(1), asked, (9, 8))
    tokens, finished = [], []
    while core.has_work and not finished:
        result = core.step()
        tokens += result.tokens
        finished += result.finished
    assert [token.output_index for token in tokens] == [2, 3, 4] and not any(t.prompt_logprobs for t in tokens)
    assert finished[0].reason is FinishReason.LENGTH


def test_under_pressure_every_output_token_has_the_log_probabilities_of_its_solo_run():
    rng = random.Random(7)
    jobs = [
        Job(rng.random() * 0.2, request(PROMPT[: rng.randint(20, 90)], None, max_tokens=rng.randint(20, 80)))
        for _ in range(12)
    ]
    crowded = Simulation(Pool(300, n_slots=16), EngineConfig(max_running=8, max_model_len=300))
    found = tokens_of(crowded, jobs)
    assert crowded.core.scheduler.preemptions > 0
    for number, job in enumerate(jobs):
        alone = tokens_of(Simulation(Pool(400), EngineConfig()), [replace(job, at=0.0)])[0]
        assert [token.logprobs for token in found[number]] == [token.logprobs for token in alone]
        assert [token.output_index for token in found[number]] == list(range(job.request.max_tokens))
        assert all(token.logprobs is not None for token in alone)

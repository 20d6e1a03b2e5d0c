"""Seeded random jobs, and what each gives alone."""

from __future__ import annotations

import random
from typing import Any

import pytest

from millpond.bench.simulation import Job, Pool, Simulation
from millpond.config import EngineConfig
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.types import MemoryKind, RequestId


def seeds(count: int, *, fast: int) -> list[Any]:
    """For parametrize: `fast` of them in the fast run, the rest in the slow one."""
    return [*range(fast), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(fast, count))]


def random_jobs(rng: random.Random, count: int, *, longest: int, cancels: bool = True) -> list[Job]:
    """Mixed sizes; half of the prompts share one of two prefixes; some have priorities, deadlines or leave early."""
    shared = [[rng.randrange(1, 250) for _ in range(rng.randint(20, longest // 3))] for _ in range(2)]
    jobs: list[Job] = []
    at = 0.0
    for number in range(count):
        at += rng.expovariate(4.0) if rng.random() < 0.7 else 0.0
        own = [rng.randrange(1, 250) for _ in range(rng.randint(1, longest // 4))]
        prompt = [*(rng.choice(shared) if rng.random() < 0.5 else []), *own]
        output = rng.randint(1, max(2, min(longest // 3, longest - len(prompt) - 1)))
        greedy = rng.random() < 0.6
        params = SamplingParams(
            temperature=0.0 if greedy else 0.9, ignore_eos=True, repetition_penalty=1.0 if rng.random() < 0.7 else 1.2
        )
        leaves = at + rng.uniform(0.0, 3.0) if cancels and rng.random() < 0.1 else None
        deadline = at + rng.uniform(0.5, 6.0) if cancels and rng.random() < 0.05 else None
        request = Request(
            RequestId(f"r{number}"),
            tuple(prompt),
            params,
            output,
            seed=rng.randrange(2**32),
            arrival=at,
            deadline=deadline,
            priority=rng.choice([0, 0, 0, 0, 1]),
            namespace=rng.choice(["", "", "tenant"]),
        )
        jobs.append(Job(at, request, leaves))
    return jobs


def solo_output(request: Request, memory_kind: MemoryKind = MemoryKind.ATTENTION) -> list[int]:
    """What the request gives alone in a pool of its own, cache off."""
    need = len(request.prompt_ids) + request.max_tokens + 1
    alone = Simulation(
        Pool(need, n_slots=1, memory_kind=memory_kind), EngineConfig(max_running=1, prefix_cache=False, spill_ram=0)
    )
    undisturbed = Request(
        request.request_id, request.prompt_ids, request.params, request.max_tokens, request.seed, arrival=0.0
    )
    return alone.run([Job(0.0, undisturbed)]).outputs[0]

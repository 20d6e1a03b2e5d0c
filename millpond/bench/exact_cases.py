"""The loads under which exact outputs must not change, on one runtime. Knows engine settings and requests; no model.

solo       each request alone in an engine of its own, reuse and tiers off: what the others are compared with
together   all at once, a slot each
turns      fewer slots than requests, time slices; parked ones are saved
requeued   the same without a tier: parked ones are prefilled again
priority   urgent ones come late and take the slots of others
cached     every prompt for a second time, in another order: prefixes come back from saved states
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from millpond.bench.core_runs import Arrival, CoreRun, Outcome, run_core, uneven_clock
from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.errors import InternalError
from millpond.request import Request
from millpond.runtime.base import Runtime
from millpond.sampling_params import SamplingParams
from millpond.types import RequestId, TokenId

SHORTEST = 20
LATER = 10_000
"""Steps after which all that came before has ended."""
CASES = ("together", "turns", "requeued", "priority", "cached")


@dataclass(frozen=True, slots=True)
class CaseResult:
    name: str
    wrong: tuple[str, ...]
    """Which requests differ from solo, and where."""
    preemptions: int
    restored_bytes: int
    recomputed_tokens: int
    chunks: frozenset[int]
    """Prefill rows that a step had."""


def exact_requests(
    seed: int, count: int, vocabulary: list[TokenId], *, longest: int, output: tuple[int, int]
) -> list[Request]:
    """Prompts of SHORTEST to `longest` tokens, both ends and all magnitudes; every second one is sampled at 0.8."""
    rng = random.Random(seed)
    between = [int(SHORTEST * (longest / SHORTEST) ** rng.random()) for _ in range(count - 2)]
    lengths = [SHORTEST, longest, *between][:count]
    rng.shuffle(lengths)
    requests: list[Request] = []
    for number, length in enumerate(lengths):
        params = SamplingParams(temperature=0.8 if number % 2 else 0.0, ignore_eos=True, logprobs=0)
        requests.append(
            Request(
                RequestId(f"exact-{seed}-{number}"),
                tuple(rng.choices(vocabulary, k=length)),
                params,
                rng.randint(*output),
                seed=rng.randrange(2**32),
                arrival=0.0,
            )
        )
    return requests


def solo_outcomes(runtime: Runtime, config: EngineConfig, requests: list[Request]) -> list[Outcome]:
    alone = replace(config, max_running=1, prefix_cache=False, spill_ram=0, max_step_ms=1e9, quantum=0)
    found: list[Outcome] = []
    for request in requests:
        core = build_core(runtime, alone, uneven_clock(0, 1.0, 1.0))
        found += run_core(core, [Arrival(0, request)]).outcomes
    return found


def run_case(
    name: str, runtime: Runtime, config: EngineConfig, requests: list[Request], solo: list[Outcome], seed: int
) -> CaseResult:
    """`config` is exact and qualified; the runtime's slots are empty before and after."""
    rng = random.Random(f"{name} {seed}")
    few = max(2, len(requests) // 3)
    shortest = min(request.max_tokens for request in requests)
    uneven = replace(config, max_step_ms=rng.choice([30.0, 80.0, 200.0, 1000.0]))
    arrivals = [Arrival(rng.randint(0, 12), request) for request in requests]
    match name:
        case "together":
            uneven = replace(uneven, max_running=len(requests), prefix_cache=False)
        case "turns":
            uneven = replace(uneven, max_running=few, quantum=rng.randint(4, 9), always_save=True)
        case "requeued":
            turn = max(4, shortest - rng.randint(1, 4))
            uneven = replace(uneven, max_running=2, quantum=turn, spill_ram=0, prefix_cache=False)
            arrivals, solo = arrivals[::2], solo[::2]
        case "priority":
            uneven = replace(uneven, max_running=few, always_save=True)
            arrivals = [
                Arrival(arrival.step + 3 * place, replace(arrival.request, priority=place))
                for place, arrival in enumerate(arrivals)
            ]
        case "cached":
            uneven = replace(uneven, max_running=few)
            requests, solo = requests[::2], solo[::2]
            later = [Arrival(LATER, replace(request, request_id=RequestId("again"))) for request in requests]
            arrivals, solo = [*arrivals[::2], *later], [*solo, *solo]
        case _:
            raise InternalError(f"no case is named {name}")
    run = run_core(build_core(runtime, uneven, uneven_clock(seed)), arrivals)
    return _result(name, run, solo)


def _result(name: str, run: CoreRun, expected: list[Outcome]) -> CaseResult:
    wrong: list[str] = []
    for place, (outcome, solo) in enumerate(zip(run.outcomes, expected, strict=True)):
        at = outcome.differs_at(solo)
        if at is not None:
            wrong.append(f"request {place} at output {at} of {len(solo.token_ids)}")
    stats = run.stats
    return CaseResult(name, tuple(wrong), stats.preemptions, run.restored_bytes, stats.recomputed_tokens, run.chunks)

"""Cost of one token's sampling on a vocabulary of 49,152: python benchmarks/bench_sampling.py [--repeats N]

Needs no model and no server. Candidates are a numpy stand-in, so the rows with filters show the sampler's own share.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millpond.request import Request
from millpond.runtime.base import CandidateFilter, Logits
from millpond.sampling import SamplerFactory
from millpond.sampling.draw import uniform
from millpond.sampling_params import SamplingParams
from millpond.types import RequestId

VOCAB = 49152
OUTPUT = list(range(100, 700))
UNFILTERED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, ignore_eos": {"temperature": 0.0, "ignore_eos": True},
    "greedy, repetition (window 64)": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, repetition (window 0: 1,600 ids)": {"temperature": 0.0, "repetition_penalty": 1.1, "penalty_window": 0},
    "greedy, presence and frequency (600 ids)": {
        "temperature": 0.0,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "greedy, logprobs 0": {"temperature": 0.0, "logprobs": 0},
    "greedy, logprobs 20": {"temperature": 0.0, "logprobs": 20},
    "drawn, filtered (without the filter's own time)": {},
    "drawn, no filter": UNFILTERED,
}


class FixedCandidates:
    """Forty candidates at once, so that only the sampler is measured."""

    def filter(self, logits: Logits, spec: CandidateFilter) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return np.arange(40, dtype=np.int32), np.full(40, 1 / 40, dtype=np.float32)


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of single calls."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2000)
    repeats = parser.parse_args().repeats
    logits = np.random.Generator(np.random.PCG64(0)).normal(0, 4, VOCAB).astype(np.float32)
    factory = SamplerFactory(VOCAB, frozenset({0, 2}), FixedCandidates())
    print(f"{'draw alone':<50} {microseconds(lambda: uniform(7, 42), repeats):8.1f} µs")
    for name, params in CASES.items():
        request = Request(RequestId("b"), tuple(range(1000)), SamplingParams(**params), 1000, 7, 0.0)
        sampler = factory.create(request)
        cost = microseconds(lambda sampler=sampler: sampler.sample(logits, OUTPUT), repeats)
        print(f"{name:<50} {cost:8.1f} µs")


if __name__ == "__main__":
    main()

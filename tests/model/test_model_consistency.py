"""The consistency oracle on the real model: what it accepts, and that planted defects do not pass it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP, largest_gap, with_lost_token, with_wrong_token
from millpond.runtime.base import Batch, ContextParams
from millpond.runtime.llamacpp import LlamaCppRuntime
from millpond.types import SlotId

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

PROMPT = "The history of the water mill begins"
LENGTH = 48


@pytest.fixture(scope="module")
def runtime(smollm2_path: Path) -> Iterator[LlamaCppRuntime]:
    params = ContextParams(n_cells=512, n_slots=2, threads=1)
    loaded = LlamaCppRuntime.load(smollm2_path, params, digest="", gpu_layers=0, progress=None, environ={})
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def greedy(runtime: LlamaCppRuntime) -> tuple[list[int], list[int]]:
    """Prompt ids and what one token at a time brings, end ids banned."""
    prompt_ids = runtime.vocab.tokenize(PROMPT, parse_special=False)
    banned = sorted(runtime.vocab.eog_ids)
    output: list[int] = []
    feed, start = prompt_ids, 0
    while len(output) < LENGTH:
        positions = np.arange(start, start + len(feed), dtype=np.int32)
        last = positions == positions[-1]
        runtime.decode(Batch(np.array(feed, np.int32), positions, np.zeros(len(feed), np.int32), last))
        row = runtime.logits(len(feed) - 1).copy()
        row[banned] = -np.inf
        start += len(feed)
        output.append(int(row.argmax()))
        feed = output[-1:]
    runtime.drop(SlotId(0))
    return prompt_ids, output


def test_a_greedy_output_is_consistent(runtime: LlamaCppRuntime, greedy: tuple[list[int], list[int]]):
    assert largest_gap(runtime, *greedy, runtime.vocab.eog_ids) < LARGEST_CONSISTENT_GAP
    assert runtime.span(SlotId(0)) is None


@pytest.mark.parametrize("index", [0, 7, 20, 40])
def test_a_lost_token_is_not(runtime: LlamaCppRuntime, greedy: tuple[list[int], list[int]], index: int):
    prompt_ids, output = greedy
    assert largest_gap(runtime, prompt_ids, with_lost_token(output, index)) > LARGEST_CONSISTENT_GAP


@pytest.mark.parametrize("index", [0, 20, LENGTH - 1])
def test_a_wrong_token_is_not(runtime: LlamaCppRuntime, greedy: tuple[list[int], list[int]], index: int):
    prompt_ids, output = greedy
    wrong = with_wrong_token(output, index, (output[index] + 1) % 49152)
    assert largest_gap(runtime, prompt_ids, wrong) > LARGEST_CONSISTENT_GAP

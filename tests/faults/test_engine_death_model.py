"""kill -9 of the real engine and model: in --exact the ids equal solo runs, by default they are consistent."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP, largest_gap
from millpond.config import EngineConfig, QueueConfig
from millpond.engine_client.client import EngineClient
from millpond.engine_client.supervisor import EngineCommand
from millpond.engine_client.token_log import TokenLog
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.llamacpp import LlamaCppRuntime
from millpond.runtime.llamacpp.vocab import load_vocab
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId

pytestmark = [pytest.mark.faults, pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROMPTS = ("The old mill by the", "A duck is a bird that", "Water flows down the", "In the year 1900 a")
LENGTH = 24


@asynccontextmanager
async def engine(model: Path, *, exact: bool) -> AsyncIterator[EngineClient]:
    kv_type_v = "bf16" if exact else "f16"
    config = EngineConfig(
        model_path=str(model), max_running=4, exact=exact, kv_type_v=kv_type_v, kv_cells=1024, threads=2
    )
    client = EngineClient(
        config,
        QueueConfig(),
        eog_ids=load_vocab(model, os.environ).eog_ids,
        clock=time.monotonic,
        command=EngineCommand((sys.executable, "-m", "millpond.wiring"), {**os.environ, "PYTHONPATH": str(ROOT)}),
    )
    client.start()
    try:
        async with asyncio.timeout(240.0):
            yield client
    finally:
        await client.stop()


def requests(model: Path) -> list[Request]:
    vocab = load_vocab(model, os.environ)
    params = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    return [
        Request(RequestId(text), tuple(vocab.tokenize(text, parse_special=False)), params, LENGTH, 1, time.monotonic())
        for text in PROMPTS
    ]


async def all_ended(logs: list[TokenLog]) -> None:
    for log in logs:
        while log.finish is None:
            await log.wait_beyond(len(log.ids))


async def run_with_a_kill(client: EngineClient, asked: list[Request]) -> list[TokenLog]:
    logs = client.submit(asked)
    await logs[3].wait_beyond(LENGTH // 2)
    assert client.engine_pid is not None
    os.kill(client.engine_pid, signal.SIGKILL)
    await all_ended(logs)
    assert (client.restarts, client.losses) == (1, 0)
    for log in logs:
        assert log.finish is not None
        assert (log.finish.reason, len(log.ids)) == (FinishReason.LENGTH, LENGTH)
    return logs


async def test_in_exact_mode_the_ids_equal_solo_runs(smollm2_path: Path):
    asked = requests(smollm2_path)
    async with engine(smollm2_path, exact=True) as client:
        solo: list[list[int]] = []
        for request in asked:
            logs = client.submit([request])
            await all_ended(logs)
            solo.append(logs[0].ids)
        killed = await run_with_a_kill(client, asked)
        assert [log.ids for log in killed] == solo


async def test_by_default_the_ids_are_consistent(smollm2_path: Path):
    asked = requests(smollm2_path)
    async with engine(smollm2_path, exact=False) as client:
        killed = await run_with_a_kill(client, asked)
    params = ContextParams(n_cells=512, n_slots=1, threads=2)
    runtime = LlamaCppRuntime.load(smollm2_path, params, digest="", gpu_layers=0, progress=None, environ=os.environ)
    try:
        for log in killed:
            gap = largest_gap(runtime, log.request.prompt_ids, log.ids, runtime.vocab.eog_ids)
            assert gap < LARGEST_CONSISTENT_GAP
    finally:
        runtime.close()

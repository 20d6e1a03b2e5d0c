"""Real engine processes over FakeRuntime, the requests they get and what every one of them must become."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from millpond.config import EngineConfig, QueueConfig
from millpond.engine_client.client import EngineClient
from millpond.engine_client.supervisor import EngineCommand, SupervisorTiming
from millpond.engine_client.token_log import TokenLog
from millpond.request import Request
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId

SCRIPT = Path(__file__).with_name("fake_engine.py")
ROOT = Path(__file__).parents[2]
TIMING = SupervisorTiming(stall_timeout=20.0, first_backoff=0.02, max_backoff=0.1, tick=0.05)
IMPATIENT = replace(TIMING, stall_timeout=1.0)
"""On a busy machine it may kill a sound engine, which must not matter."""
PATIENCE = 60.0
AFTERWARDS = (9, 8, 7)
ORACLE = FakeRuntime(ContextParams(n_cells=256, n_slots=1))


def engine_command(file_limit: int | None = None) -> EngineCommand:
    """`file_limit`: bytes, see fake_engine.py."""
    limit = {} if file_limit is None else {"FAKE_FILE_LIMIT": str(file_limit)}
    return EngineCommand((sys.executable, str(SCRIPT)), {**os.environ, "PYTHONPATH": str(ROOT), **limit})


@asynccontextmanager
async def engine(
    fault_plan: str = "",
    *,
    timing: SupervisorTiming = TIMING,
    flush_seconds: float = 0.0,
    file_limit: int | None = None,
    **settings: Any,
) -> AsyncIterator[EngineClient]:
    """`settings` are fields of EngineConfig. After the test a normal request works, and nothing is left open."""
    before = psutil.Process().num_fds()
    config = EngineConfig(**{"max_running": 4, "fault_plan": fault_plan} | settings)
    client = EngineClient(
        config,
        QueueConfig(),
        eog_ids=ORACLE.vocab.eog_ids,
        clock=time.monotonic,
        command=engine_command(file_limit),
        timing=timing,
    )
    client.start()
    try:
        async with asyncio.timeout(PATIENCE):
            yield client
            [log] = client.submit([request(0, 8, prompt=AFTERWARDS)])
            await all_ended([log])
        assert_undisturbed(log)
    finally:
        await client.stop(flush_seconds)
    assert client.live_sequences == 0
    assert client.engine_pid is None
    assert psutil.Process().num_fds() == before


def request(number: int, n: int = 60, *, prompt: Sequence[int] | None = None, **fields: Any) -> Request:
    ids = prompt or tuple(3 + (number * 37 + place * 11) % 60 for place in range(20 + 7 * number))
    params = SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True)
    return Request(RequestId(f"r{number}"), tuple(ids), params, n, number, time.monotonic(), **fields)


async def all_ended(logs: list[TokenLog]) -> None:
    for log in logs:
        while log.finish is None:
            await log.wait_beyond(len(log.ids))


def assert_undisturbed(log: TokenLog) -> None:
    wanted = ORACLE.expected_greedy(log.request.prompt_ids, log.request.max_tokens, ignore_eos=True)
    assert log.ids == wanted
    assert log.finish is not None
    assert (log.finish.reason, log.finish.output_length) == (FinishReason.LENGTH, log.request.max_tokens)
    usage = log.finish.usage
    assert usage.cached_tokens + usage.computed_prompt_tokens == usage.prompt_tokens == len(log.request.prompt_ids)


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def kill(client: EngineClient, number: signal.Signals = signal.SIGKILL) -> None:
    """Sends the signal; after SIGKILL, returns when another process is there."""
    await eventually(lambda: client.engine_pid is not None)
    pid = client.engine_pid
    assert pid is not None
    os.kill(pid, number)
    if number is signal.SIGKILL:
        await eventually(lambda: client.engine_pid not in (None, pid))

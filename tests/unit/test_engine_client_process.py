"""EngineClient with a scripted engine process: normal service, every kind of death, drain and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import EOG, undisturbed

from millpond.config import EngineConfig, QueueConfig
from millpond.engine_client.client import EngineClient
from millpond.engine_client.logbook import POISON_MESSAGE
from millpond.engine_client.poison import RULES, DeathKind
from millpond.engine_client.supervisor import EngineCommand, SupervisorTiming
from millpond.engine_client.token_log import TokenLog
from millpond.errors import EngineFailed, NeverFits, NotReady, QueueFull
from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, RequestId

SCRIPT = Path(__file__).with_name("scripted_engine.py")
ROOT = Path(__file__).parents[2]
FAST = SupervisorTiming(
    stall_timeout=10.0, first_backoff=0.01, max_backoff=0.05, max_failed_loads=3, stop_grace=0.25, tick=0.02
)
IMPATIENT = replace(FAST, stall_timeout=0.4)
"""On a busy machine it may kill a sound engine, which must not matter."""
LIMIT = 30.0


def request(n: int = 20, *, prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> Request:
    values: dict[str, Any] = {"params": SamplingParams(max_tokens=n), "seed": 1, "arrival": time.monotonic()} | fields
    return Request(request_id=RequestId("r"), prompt_ids=prompt, max_tokens=n, **values)


@asynccontextmanager
async def running(
    plan: dict[str, Any], *, timing: SupervisorTiming = FAST, engine: EngineConfig | None = None, **queue: Any
) -> AsyncIterator[EngineClient]:
    command = EngineCommand((sys.executable, str(SCRIPT), json.dumps(plan)), {**os.environ, "PYTHONPATH": str(ROOT)})
    client = EngineClient(
        engine or EngineConfig(max_running=4),
        QueueConfig(**queue),
        eog_ids=frozenset({EOG}),
        clock=time.monotonic,
        command=command,
        timing=timing,
    )
    client.start()
    try:
        async with asyncio.timeout(LIMIT):
            yield client
    finally:
        await client.stop()
        assert client.engine_pid is None
        assert client.live_sequences == 0


async def ended(log: TokenLog) -> TokenLog:
    while log.finish is None:
        await log.wait_beyond(len(log.ids))
    return log


async def eventually(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def open_descriptors() -> int:
    """0 where the system does not list them."""
    listing = Path("/proc/self/fd")
    return len(list(listing.iterdir())) if listing.exists() else 0


def assert_right(log: TokenLog) -> None:
    assert log.ids == undisturbed(log.request)
    assert log.finish is not None
    assert log.finish.output_length == len(log.ids)
    assert log.finish.reason in (FinishReason.LENGTH, FinishReason.STOP)


async def test_serves_several_requests_with_the_engines_usage():
    async with running({}) as client:
        info = await client.wait_ready()
        assert info.model.name == "scripted"
        logs = client.submit([request(30, prompt=(i, 2, 3), seed=i) for i in range(1, 7)])
        for log in logs:
            assert_right(await ended(log))
            assert log.finish is not None
            assert log.finish.usage.cached_tokens == 1
        assert client.losses == client.restarts == 0
        assert client.state == ("ready", "ready")


async def test_requests_are_accepted_while_loading():
    async with running({"load": {"1": "wait"}}) as client:
        assert client.state[0] == "loading"
        [log] = client.submit([request()])
        assert_right(await ended(log))


async def test_flow_control_lets_a_long_output_pass():
    async with running({}) as client:
        [log] = client.submit([request(400)])
        assert_right(await ended(log))
        assert client.restarts == 0


@pytest.mark.parametrize("kind", ["crash", "crash_after", "repeat", "skip", "garbage", "huge", "error", "stale"])
async def test_no_fault_changes_a_token(kind: str):
    async with running({"faults": {"1": [[7, kind]]}}) as client:
        logs = client.submit([request(25, prompt=(i, 9)) for i in range(3, 6)])
        for log in logs:
            assert_right(await ended(log))
        survives = kind in ("repeat", "stale")
        assert client.restarts == (0 if survives else 1)
        assert client.losses == 0
        assert logs[0].finish is not None
        assert logs[0].finish.usage.preemptions == (0 if survives else 1)


async def test_a_hanging_step_is_noticed_and_repeated():
    async with running({"faults": {"1": [[7, "hang"]]}}, timing=IMPATIENT) as client:
        logs = client.submit([request(25, prompt=(i, 9)) for i in range(3, 6)])
        for log in logs:
            assert_right(await ended(log))
        assert client.restarts >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGABRT, DeathKind.CRASH), (signal.SIGKILL, DeathKind.KILLED)], ids=lambda it: it.name
)
async def test_a_poison_request_fails_alone(tmp_path: Path, number: signal.Signals, kind: DeathKind):
    """SIGKILL: as the kernel does it to one that needs too much memory."""
    notes = tmp_path / "notes"
    plan = {"poison": [[666, 4]], "poison_signal": number, "notes": str(notes), "step_seconds": 0.002}
    async with running(plan) as client:
        logs = client.submit([request(30, prompt=(p, 8)) for p in (11, 666, 12, 13)])
        for log in logs:
            await ended(log)
        good, bad = [logs[0], logs[2], logs[3]], logs[1]
        for log in good:
            assert_right(log)
        assert bad.finish is not None
        assert (bad.finish.reason, bad.finish.message) == (FinishReason.ERROR, POISON_MESSAGE)
        assert bad.ids == undisturbed(bad.request)[:4]
        assert client.losses == 1
        [after] = client.submit([request()])
        assert_right(await ended(after))
    assert max(int(line.split()[0]) for line in notes.read_text().splitlines()) == 2 + RULES[kind].deaths


async def test_three_outside_kills_in_one_output_lose_nothing():
    async with running({"step_seconds": 0.003}) as client:
        [log] = client.submit([request(60)])
        for kill in range(1, 4):
            await log.wait_beyond(10 * kill)
            pid = client.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await eventually(lambda pid=pid: client.engine_pid not in (None, pid))
        assert_right(await ended(log))
        assert client.restarts == 3


async def test_a_stopped_process_is_replaced():
    async with running({"step_seconds": 0.002}, timing=IMPATIENT) as client:
        [log] = client.submit([request(60)])
        await log.wait_beyond(5)
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGSTOP)
        await eventually(lambda: client.state[0] == "stalled")
        assert_right(await ended(log))
        assert client.restarts >= 1


async def test_an_idle_engine_that_dies_is_replaced_and_serves():
    async with running({}) as client:
        await client.wait_ready()
        assert client.engine_pid is not None
        os.kill(client.engine_pid, signal.SIGKILL)
        await eventually(lambda: client.restarts == 1)
        await client.wait_ready()
        [log] = client.submit([request()])
        assert_right(await ended(log))


@pytest.mark.parametrize(("load", "restarts"), [({"1": "setup_error"}, 0), ({str(e): "exit" for e in range(9)}, 2)])
async def test_a_model_that_does_not_load_fails_everything_and_says_why(load: dict[str, str], restarts: int):
    async with running({"load": load}) as client:
        [log] = client.submit([request()])
        await ended(log)
        assert log.finish is not None
        assert log.finish.reason is FinishReason.ERROR
        assert "/secret" not in log.finish.message
        with pytest.raises(EngineFailed):
            client.submit([request()])
        with pytest.raises(EngineFailed):
            await client.wait_ready()
        state, detail = client.state
        assert state == "failed"
        assert ("no such file" in detail) if restarts == 0 else ("exit code 3" in detail)
        assert client.restarts == restarts


async def test_a_load_that_fails_after_one_that_did_not_is_tried_again():
    async with running({"load": {"2": "setup_error"}, "faults": {"1": [[5, "crash"]]}}) as client:
        [log] = client.submit([request()])
        assert_right(await ended(log))
        assert (client.restarts, client.losses) == (2, 0)


async def test_a_model_that_vanished_fails_the_running_requests():
    gone = {str(epoch): "setup_error" for epoch in range(2, 9)}
    async with running({"load": gone, "faults": {"1": [[5, "crash"]]}}) as client:
        [log] = client.submit([request()])
        await ended(log)
        assert log.finish is not None
        assert log.finish.reason is FinishReason.ERROR
        assert log.ids == undisturbed(log.request)[:4]
        assert client.losses == 1


async def test_a_program_that_cannot_be_started_fails():
    client = EngineClient(
        EngineConfig(),
        QueueConfig(),
        eog_ids=frozenset(),
        clock=time.monotonic,
        command=EngineCommand(("/no/such/program",)),
        timing=FAST,
    )
    client.start()
    with pytest.raises(EngineFailed):
        await client.wait_ready()
    assert client.state[0] == "failed"
    await client.stop()


async def test_a_bug_in_the_supervisor_fails_everything_instead_of_hanging():
    client = EngineClient(
        EngineConfig(),
        QueueConfig(),
        eog_ids=frozenset(),
        clock=time.monotonic,
        command=EngineCommand(env={"NUMBER": 1}),  # no such environment: Popen raises TypeError
        timing=FAST,
    )
    client.start()
    [log] = client.submit([request()])
    await ended(log)
    assert log.finish is not None
    assert log.finish.reason is FinishReason.ERROR
    assert client.state[0] == "failed"
    assert "TypeError" in client.state[1]
    await client.stop()


async def test_who_waits_for_an_engine_is_told_of_the_stop():
    async with running({"load": {"1": "hang"}}) as client:
        waiting = asyncio.create_task(client.wait_info(None))
        await eventually(lambda: client.engine_pid is not None)
        await client.stop()
        with pytest.raises(NotReady):
            await waiting


@pytest.mark.slow
async def test_a_hanging_load_is_replaced():
    timing = SupervisorTiming(load_timeout=2.0, first_backoff=0.01, stop_grace=0.25, tick=0.02)
    async with running({"load": {"1": "hang"}}, timing=timing) as client:
        [log] = client.submit([request()])
        assert_right(await ended(log))
        assert client.restarts >= 1


async def test_end_cuts_the_log_and_brings_the_engines_usage():
    async with running({"step_seconds": 0.002}) as client:
        [log] = client.submit([request(500)])
        await log.wait_beyond(10)
        client.end(log.sequence_id, FinishReason.STOP, 7)
        client.end(log.sequence_id, FinishReason.CANCELLED)
        assert log.ids == undisturbed(log.request)[:7]
        await ended(log)
        assert log.finish is not None
        assert (log.finish.reason, log.finish.output_length) == (FinishReason.STOP, 7)
        assert log.finish.usage.cached_tokens == 1
        assert len(log.ids) == 7


async def test_a_deadline_holds_while_the_engine_is_away():
    async with running({"load": {"1": "hang"}}) as client:
        [log] = client.submit([request(deadline=time.monotonic() + 0.1)])
        await ended(log)
        assert log.finish is not None
        assert log.finish.reason is FinishReason.DEADLINE
        assert client.losses == 0


async def test_limits_are_checked_at_once():
    async with running({"load": {"1": "wait"}}, queue_requests=2, queue_tokens=30) as client:
        logs = client.submit([request() for _ in range(6)])
        with pytest.raises(QueueFull) as full:
            client.submit([request()])
        assert full.value.retry_after >= 1
        for log in logs:
            assert_right(await ended(log))
        [log] = client.submit([request(prompt=tuple(range(100, 200)))])
        with pytest.raises(QueueFull):
            client.submit([request(), request()])
        with pytest.raises(NeverFits):
            client.submit([request(prompt=(5,) * 2048)])
        assert_right(await ended(log))


async def test_drain_finishes_what_runs_and_refuses_the_rest():
    async with running({"step_seconds": 0.002}) as client:
        [log] = client.submit([request(40)])
        await log.wait_beyond(1)
        drained = asyncio.create_task(client.drain(10.0))
        await eventually(lambda: client.state[0] == "draining")
        with pytest.raises(NotReady):
            client.submit([request()])
        await drained
        assert_right(log)


async def test_drain_outlives_an_engine_death():
    async with running({"step_seconds": 0.002, "faults": {"1": [[20, "crash"]]}}) as client:
        [log] = client.submit([request(40)])
        await log.wait_beyond(1)
        await client.drain(10.0)
        assert_right(log)
        assert client.restarts == 1


async def test_the_drain_deadline_ends_what_is_left():
    async with running({"step_seconds": 0.01}) as client:
        [log] = client.submit([request(2000)])
        await log.wait_beyond(1)
        await client.drain(0.05)
        assert log.finish is not None
        assert log.finish.reason is FinishReason.SHUTDOWN
        assert log.ids == undisturbed(log.request)[: len(log.ids)]
        assert client.losses == 0


@pytest.mark.parametrize("plan", [{}, {"ignores_stop": True}, {"load": {"1": "hang"}}])
async def test_stop_leaves_no_process(plan: dict[str, Any]):
    async with running(plan) as client:
        await eventually(lambda: client.engine_pid is not None)
        pid = client.engine_pid
        assert pid is not None
        await client.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_descriptors_return_to_the_baseline():
    before = open_descriptors()
    faults = {str(epoch): [[3, "crash"]] for epoch in range(1, 5)}
    async with running({"faults": faults}) as client:
        [log] = client.submit([request(30)])
        assert_right(await ended(log))
    after = open_descriptors()
    assert after == before


def test_the_same_under_uvloop():
    uvloop = pytest.importorskip("uvloop", reason="uvloop is not available on this system")

    async def serve() -> None:
        async with running({"faults": {"1": [[7, "crash"]]}}) as client:
            logs = client.submit([request(25, prompt=(i, 9)) for i in range(3, 6)])
            for log in logs:
                assert_right(await ended(log))
            assert client.restarts == 1

    runner: Callable[[Awaitable[None]], None] = uvloop.run
    runner(serve())

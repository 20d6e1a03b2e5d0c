"""Engines that die and signals that come under a whole server: HTTP down to a fake model, every id checked."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from fault_engine import ORACLE, eventually
from fault_server import (
    LONG_PROMPT,
    PATIENCE,
    SLOTS,
    TEXT,
    FaultServer,
    completion,
    connect,
    prompt_of,
    raw,
    reset,
    served,
    undisturbed,
)

from millpond.bench.stream_client import LiveStream
from millpond.engine_client.logbook import POISON_MESSAGE

pytestmark = pytest.mark.faults


async def parked(server: FaultServer) -> bool:
    """Some request is parked now, by the metrics page."""
    _, page = await server.get("/metrics")
    [line] = [line for line in page.splitlines() if line.startswith(b'millpond_requests{state="parked"}')]
    return float(line.split()[-1]) > 0


async def test_health_and_readiness_answer_beside_300_idle_streams_and_a_long_prefill():
    queue = {"queue_requests": 400}
    async with served(queue=queue, expect_exit=None) as server:
        hogs = [await server.open(prompt_of(number), 900) for number in range(4)]
        waiting = [await server.open(prompt_of(number), 900, priority=-1) for number in range(300)]
        long = await server.open(LONG_PROMPT, 5, priority=1)
        for _ in range(20):
            assert (await server.status("/health"))[0] == 200
            assert await server.status("/ready") == (200, {"status": "ready", "reason": ""})
        undisturbed(await long.result(PATIENCE), LONG_PROMPT, 5)
        for stream in (*hogs, *waiting):
            stream.close()
        await server.recovered()


@dataclass(frozen=True, slots=True)
class Phase:
    """When `strikes` returns, the engine is in it."""

    strikes: Callable[[FaultServer, Sequence[LiveStream]], Awaitable[object]]
    requests: int = 6
    prompt_tokens: int = 30
    output_tokens: int = 60


async def _loading(server: FaultServer, streams: Sequence[LiveStream]) -> None:
    killed = await server.signal_engine()
    await eventually(lambda: (engine := server.engine()) is not None and engine.pid != killed)


async def _some_parked(server: FaultServer, streams: Sequence[LiveStream]) -> None:
    while not await parked(server):
        await asyncio.sleep(0.01)


PHASES = {
    "load": Phase(_loading),
    "prefill": Phase(lambda server, streams: asyncio.sleep(0.2), requests=2, prompt_tokens=700),
    "decode": Phase(lambda server, streams: streams[1].wait_events(20)),
    "parked": Phase(_some_parked, prompt_tokens=200, output_tokens=150),
}


async def test_kill_9_of_the_engine_in_any_phase_is_only_a_pause():
    async with served() as server:
        for phase in PHASES.values():
            prompts = [prompt_of(number, phase.prompt_tokens) for number in range(phase.requests)]
            streams = [await server.open(prompt, phase.output_tokens) for prompt in prompts]
            async with asyncio.timeout(PATIENCE):
                await phase.strikes(server, streams)
            await server.signal_engine()
            for prompt, stream in zip(prompts, streams, strict=True):
                undisturbed(await stream.result(PATIENCE), prompt, phase.output_tokens)
        await server.recovered()


async def test_clients_that_reset_while_the_engine_is_stopped_or_away_leave_nothing_behind():
    async with served() as server:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            writers: list[asyncio.StreamWriter] = []
            for place in range(8):
                reader, writer = await connect(server)
                writer.write(raw(TEXT, completion(prompt_of(place), 800)))
                if place < 4:
                    await reader.readuntil(b"data: ")
                writers.append(writer)
            await server.signal_engine(number)
            late = [(await connect(server))[1] for _ in range(4)]
            for writer in late:
                writer.write(raw(TEXT, completion(prompt_of(3), 800)))
                await writer.drain()
            await asyncio.sleep(0.05)
            for writer in (*writers, *late):
                reset(writer)
            if number is signal.SIGSTOP:
                await server.signal_engine(signal.SIGCONT)
            await server.recovered()


async def test_a_request_that_kills_the_engine_gets_one_error_and_its_neighbours_do_not_notice():
    poison = 250
    prompts = [prompt_of(number) for number in range(9, 12)]
    for prompt in prompts:
        assert poison not in (*prompt, *ORACLE.expected_greedy(tuple(prompt), 60, ignore_eos=True))
    async with served(engine=SLOTS | {"fault_plan": f"poison={poison}=abort"}) as server:
        good = [await server.open(prompt, 60) for prompt in prompts]
        await good[0].wait_events(3)
        bad = await server.open([*prompt_of(1), poison], 20)
        for prompt, stream in zip(prompts, good, strict=True):
            undisturbed(await stream.result(PATIENCE), prompt, 60)
        failed = await bad.result(PATIENCE)
        assert failed.error is not None and POISON_MESSAGE in failed.error
        assert (failed.done, failed.finish_reason, list(failed.token_ids)) == (False, None, [])
        server.engine_pid = None
        await server.recovered()


async def test_a_model_that_cannot_be_loaded_again_fails_every_client_and_readiness_says_why(tmp_path: Path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"weights")
    async with served(fakes={"model": str(model)}) as server:
        streams = [await server.open(prompt_of(number), 400) for number in range(6)]
        await streams[0].wait_events(3)
        model.unlink()
        await server.signal_engine()
        for stream in streams:
            result = await stream.result(PATIENCE)
            assert result.error is not None and str(tmp_path) not in result.error
            assert not result.done and result.finish_reason is None
        status, body = await server.status("/ready")
        assert (status, body["status"]) == (503, "failed")
        assert str(model) in body["reason"]
        assert (await server.status("/health"))[0] == 200
        late = await (await server.open(prompt_of(1), 5)).result(PATIENCE)
        assert late.status == 500 and late.error is not None and str(tmp_path) not in late.error


async def test_a_stopped_engine_is_told_by_readiness_and_replaced():
    async with served(queue={"stall_timeout": 3.0}) as server:
        stream = await server.open(prompt_of(1), 60)
        await stream.wait_events(5)
        stopped = await server.signal_engine(signal.SIGSTOP)
        seen: set[str] = set()
        while "stalled" not in seen:
            status, body = await server.status("/ready")
            seen.add(body["status"])
            assert (status == 200) == (body["status"] == "ready")
            assert (await server.status("/health"))[0] == 200
        undisturbed(await stream.result(PATIENCE), prompt_of(1), 60)
        assert not psutil.pid_exists(stopped)
        await server.recovered()


async def test_a_short_stop_of_the_engine_is_no_death():
    async with served() as server:
        stream = await server.open(prompt_of(1), 60)
        await stream.wait_events(5)
        pid = await server.signal_engine(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        await server.signal_engine(signal.SIGCONT)
        undisturbed(await stream.result(PATIENCE), prompt_of(1), 60)
        engine = server.engine()
        assert engine is not None and engine.pid == pid
        await server.recovered()


async def test_ready_says_loading_and_requests_wait_for_the_engine():
    async with served() as server:
        await server.signal_engine()
        states = {(await server.status("/ready"))[1]["status"] for _ in range(10)}
        assert states & {"restarting", "loading"}
        await server.check(prompt_of(2), 10)
        await server.recovered()


async def test_ctrl_c_reaches_both_processes_and_the_stream_still_ends_well():
    async with served(expect_exit=None) as server:
        stream = await server.open(prompt_of(1), 80)
        await stream.wait_events(5)
        engine = server.engine()
        os.killpg(server.pid, signal.SIGINT)
        undisturbed(await stream.result(PATIENCE), prompt_of(1), 80)
        assert await server.process.wait() == 0
        assert engine is not None and not engine.is_running()


async def test_at_the_drain_deadline_a_stream_gets_an_error_and_no_end():
    async with served(server={"drain_timeout": 0.3}, expect_exit=None) as server:
        stream = await server.open(prompt_of(1), 900)
        await stream.wait_events(5)
        server.process.terminate()
        result = await stream.result(PATIENCE)
        assert result.error is not None and not result.done and result.finish_reason is None
        assert await server.process.wait() == 0


async def test_without_its_server_the_engine_ends():
    async with served(expect_exit=None) as server:
        stream = await server.open(prompt_of(1), 900)
        await stream.wait_events(5)
        engine = server.engine()
        assert engine is not None
        server.process.kill()
        await server.process.wait()
        await eventually(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)

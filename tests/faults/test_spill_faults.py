"""Saved state on disk under faults: full disks, damaged files, drains. Outputs are what an undisturbed run gives."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_engine import all_ended, assert_undisturbed, engine, kill, request
from fault_server import PATIENCE, prompt_of, served, undisturbed

pytestmark = pytest.mark.faults

LONG = tuple(3 + place * 7 % 60 for place in range(400))
SPILL: dict[str, Any] = {"spill_ram": 0, "spill_disk": 64, "instance": "server-1"}


async def run_once(folder: Path, *, flush_seconds: float = 5.0, **settings: Any) -> int:
    """Cached tokens of one request over LONG, on a fresh engine that is then stopped in order."""
    [cached] = await run_all(folder, [LONG], flush_seconds=flush_seconds, **settings)
    return cached


async def run_all(
    folder: Path, prompts: Sequence[tuple[int, ...]], *, flush_seconds: float = 5.0, **settings: Any
) -> list[int]:
    """Cached tokens of a request over each prompt, one after the other."""
    cached: list[int] = []
    async with engine(flush_seconds=flush_seconds, spill_dir=str(folder), **SPILL | settings) as client:
        for prompt in prompts:
            [log] = client.submit([request(1, 20, prompt=prompt)])
            await all_ended([log])
            assert_undisturbed(log)
            assert log.finish is not None
            cached.append(log.finish.usage.cached_tokens)
        assert (client.restarts, client.losses) == (0, 0)
    return cached


@pytest.mark.parametrize("ram", [0, 16])
async def test_a_drain_writes_prefixes_that_the_next_server_finds(tmp_path: Path, ram: int):
    assert await run_once(tmp_path, spill_ram=ram) == 0
    assert await run_once(tmp_path, spill_ram=ram, instance="server-2") >= len(LONG) - 16


async def test_a_drain_without_time_writes_nothing_and_says_nothing(tmp_path: Path):
    await run_once(tmp_path, flush_seconds=0.0)
    assert list(tmp_path.rglob("*.kv")) == []


async def test_what_was_cold_and_in_ram_is_written_too(tmp_path: Path):
    settings: dict[str, Any] = SPILL | {"spill_ram": 16, "cache_cells": 0}
    async with engine(flush_seconds=5.0, spill_dir=str(tmp_path), **settings) as client:
        logs = client.submit([request(1, 20, prompt=LONG)])
        await all_ended(logs)
        other = client.submit([request(2)])
        await all_ended(other)
    assert await run_once(tmp_path, instance="server-2") >= len(LONG) - 16


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flip(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


DAMAGES: list[Callable[[bytes], bytes]] = [_cut, _flip, lambda data: b"", lambda data: b"\0" * len(data)]


async def test_damaged_files_are_computed_again(tmp_path: Path):
    """Each kind of damage in all files of a prompt of its own."""
    prompts = [tuple(3 + (place * 7 + kind) % 60 for place in range(400)) for kind in range(len(DAMAGES))]
    seen: set[Path] = set()
    for prompt, damage in zip(prompts, DAMAGES, strict=True):
        assert await run_all(tmp_path, [prompt]) == [0]
        files = set((tmp_path / "prefix").glob("*.kv")) - seen
        assert len(files) >= 3
        for file in files:
            file.write_bytes(damage(file.read_bytes()))
        seen |= files
    assert await run_all(tmp_path, prompts, instance="server-2") == [0] * len(DAMAGES)
    again = await run_all(tmp_path, prompts, instance="server-3")
    assert min(again) >= 128, "the first page at least was found out and written again"


async def test_a_server_that_is_up_outlives_what_happens_to_its_files(tmp_path: Path):
    """Cut, altered, emptied and removed while requests are parked in them, and the engine killed over it all."""
    engine_settings = SPILL | {"kv_cells": 640, "max_running": 4, "spill_dir": str(tmp_path)}
    del engine_settings["instance"]
    async with served(engine=engine_settings) as server:
        for _ in range(2):
            prompts = [prompt_of(number, 150) for number in range(6)]
            streams = [await server.open(prompt, 60) for prompt in prompts]
            while len(files := list(tmp_path.rglob("*.kv"))) < 4:
                await asyncio.sleep(0.01)
            for file, damage in zip(files, itertools.cycle((None, *DAMAGES))):
                with contextlib.suppress(FileNotFoundError):
                    whole = file.read_bytes()
                    file.unlink() if damage is None else file.write_bytes(damage(whole) if whole else b"short")
            await server.signal_engine()
            for prompt, stream in zip(prompts, streams, strict=True):
                undisturbed(await stream.result(PATIENCE), prompt, 60)
        await server.recovered()


@pytest.mark.parametrize(
    "fault", ["save%2=enospc", "save%1=enospc", "restore%2=reject", "save%2=truncate", "restore%2=truncate"]
)
async def test_saves_and_restores_that_fail_under_pressure_cost_only_time(tmp_path: Path, fault: str):
    async with engine(fault, kv_cells=512, spill_dir=str(tmp_path), **SPILL) as client:
        logs = client.submit([request(number, 150) for number in range(5)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (0, 0)


@pytest.mark.parametrize("file_limit", [0, 900])
async def test_a_disk_that_is_full_costs_only_time(tmp_path: Path, file_limit: int):
    """Writes fail at the first byte, or in the midst of a file, as the system lets them."""
    async with engine(
        kv_cells=512, file_limit=file_limit, spill_dir=str(tmp_path), flush_seconds=5.0, **SPILL
    ) as client:
        logs = client.submit([request(number, 150) for number in range(5)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (0, 0)
    left = [file for file in tmp_path.rglob("*.kv") if file.stat().st_size >= file_limit]
    assert left == [], "what was cut off in the midst looks whole"


async def test_a_killed_engine_finds_parked_state_on_disk(tmp_path: Path):
    async with engine(kv_cells=512, spill_dir=str(tmp_path), **SPILL) as client:
        logs = client.submit([request(number, 150) for number in range(5)])
        while not any(log.preemptions for log in logs):
            await asyncio.sleep(0.01)
        await kill(client)
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)
        assert (client.restarts, client.losses) == (1, 0)


async def test_a_folder_that_cannot_be_written_is_as_none(tmp_path: Path):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    async with engine(kv_cells=512, spill_dir=str(blocked), **SPILL) as client:
        logs = client.submit([request(number, 150) for number in range(5)])
        await all_ended(logs)
        for log in logs:
            assert_undisturbed(log)

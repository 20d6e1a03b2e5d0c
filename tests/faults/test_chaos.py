"""Everything at once, by seed: kills, stops, resets, cancels, pressure. No request is lost, doubled or changed."""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fault_server import PATIENCE, FaultServer, prompt_of, served, undisturbed

pytestmark = pytest.mark.faults

CLIENTS = 8
REQUESTS_EACH = 3
SHARED = prompt_of(77, 140)


@dataclass
class Chaos:
    server: FaultServer
    rng: random.Random
    ended_well: int = 0
    left: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def client(self) -> None:
        for _ in range(REQUESTS_EACH):
            prompt = [*(SHARED if self.rng.random() < 0.5 else []), *prompt_of(self.rng.randrange(30), 40)]
            n = self.rng.randrange(5, 90)
            stream = await self.server.open(prompt, n, priority=self.rng.randrange(3))
            if self.rng.random() < 0.25:
                await asyncio.sleep(self.rng.random() * 0.2)
                stream.close()
                self.left += 1
                continue
            undisturbed(await stream.result(PATIENCE), prompt, n)
            self.ended_well += 1

    async def attacker(self) -> None:
        """Now and then it strikes again and again, before any request is a token further; then it lets some end."""
        while not self.over.is_set():
            done = self.ended_well
            await self.server.until_ready()
            await asyncio.sleep(self.rng.random() * 0.5)
            if self.rng.random() < 0.6:
                await self.server.signal_engine(signal.SIGKILL)
            else:
                await self.server.signal_engine(signal.SIGSTOP)
                await asyncio.sleep(self.rng.random() * 0.3)
                await self.server.signal_engine(signal.SIGCONT)
            while self.rng.random() < 0.7 and self.ended_well < done + 6 and not self.over.is_set():
                await asyncio.sleep(0.05)


async def test_nothing_is_lost_whatever_happens(fault_seed: int, tmp_path: Path):
    rng = random.Random(fault_seed)
    spill = {"spill_dir": str(tmp_path)} if rng.random() < 0.7 else {}
    plan = rng.choice(["", "save%5=enospc", "restore%3=truncate; decode%97=exhausted", "decode%211=abort"])
    engine = {"max_running": 4, "kv_cells": 640, "spill_ram": rng.choice([0, 1]), "fault_plan": plan, **spill}
    async with served(engine=engine) as server:
        chaos = Chaos(server, rng)
        attacker = asyncio.ensure_future(chaos.attacker())
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*(chaos.client() for _ in range(CLIENTS)))
        chaos.over.set()
        await attacker
        assert chaos.ended_well + chaos.left == CLIENTS * REQUESTS_EACH
        await server.recovered()

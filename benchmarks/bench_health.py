"""How fast /health answers when all else is busy: python benchmarks/bench_health.py [--only load,prefill,idle,burst]

load: every place taken by streams and a queue behind them; prefill: a 2,000-token prompt beside a stream; idle: 300
open SSE connections that wait, and a long prefill; burst: the same 300 while they arrive, which has no target. A probe
on a fresh connection every 50 ms; the target is 100 ms.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable

from harness import Bench, Measured, at_most
from prompts import PromptSource, read_vocabulary
from servers import RunningServer, millpond_spec, running
from settings import parse_settings

from millpond.bench.pairs import Comparison, percentile
from millpond.bench.stream_client import LiveStream

CELLS = 8192
PROBE_SECONDS = 0.05
PROBES = 150
LIMIT_MS = 100

Setup = Callable[[RunningServer, PromptSource], Awaitable[list[LiveStream]]]


async def probe(port: int) -> float:
    """Milliseconds from before the connection to the end of the answer."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    return (time.perf_counter() - began) * 1000


async def under_load(server: RunningServer, prompts: PromptSource) -> list[LiveStream]:
    return [await server.stream(prompts.ids(100), 400) for _ in range(32)]


async def beside_prefill(server: RunningServer, prompts: PromptSource) -> list[LiveStream]:
    streams = [await server.stream(prompts.ids(20), 400)]
    await streams[0].wait_events(3)
    return [*streams, *[await server.stream(prompts.ids(2000), 1) for _ in range(2)]]


async def beside_burst(server: RunningServer, prompts: PromptSource) -> list[LiveStream]:
    """The same 300 as `beside_idle`, while they arrive."""
    busy = [await server.stream(prompts.ids(2000), 400) for _ in range(3)]
    return busy + [await server.stream(prompts.ids(10), 1000, priority=-1) for _ in range(300)]


async def beside_idle(server: RunningServer, prompts: PromptSource) -> list[LiveStream]:
    streams = await beside_burst(server, prompts)
    await asyncio.sleep(2.0)
    return streams


SECTIONS: dict[str, Setup] = {"load": under_load, "prefill": beside_prefill, "idle": beside_idle, "burst": beside_burst}


def measured(setup: Setup) -> Callable[[RunningServer, PromptSource], Awaitable[Measured]]:
    async def measure(server: RunningServer, prompts: PromptSource) -> Measured:
        streams = await setup(server, prompts)
        found: list[float] = []
        for _ in range(PROBES):
            found.append(await probe(server.port))
            await asyncio.sleep(PROBE_SECONDS)
        for stream in streams:
            stream.close()
        await asyncio.sleep(1.0)
        return {"median": percentile(found, 0.5), "p99": percentile(found, 0.99), "max": max(found)}

    return measure


def main() -> int:
    settings = parse_settings(str(__doc__), tuple(SECTIONS))
    flags = ("--max-running", "8", "--queue-requests", "400")
    spec = millpond_spec(settings, CELLS, *flags, name="millpond health")
    with running(spec) as server:
        bench = Bench("bench_health", settings, read_vocabulary(server.port))
        bench.warm_up(server)
        for name in settings.only:
            found = bench.single(name, server, measured(SECTIONS[name]))
            for figure in ("median", "p99"):
                bench.add(f"/health, {name}: {figure}", "ms", [found[figure]])
            target = None if name == "burst" else at_most(LIMIT_MS, Comparison.VALUE)
            bench.add(f"/health, {name}: largest", "ms", [found["max"]], (), target)
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

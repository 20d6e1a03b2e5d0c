"""How fast /health answers when all else is busy: python benchmarks/bench_health.py [--only load,prefill,idle,burst]

load: every place taken by streams and a queue behind them; prefill: a 2,000-token prompt beside a stream; idle: 300
open SSE connections that wait, and a long prefill; burst: 300 requests that arrive at once, probed as they come. A
probe on a fresh connection every 50 ms (burst: 10 ms); the target is 100 ms. turns: the same burst on a server that
counts the CPU time of each turn of its event loop, which other work on the machine does not change.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from harness import Bench, Measured, at_most
from prompts import PromptSource, read_vocabulary
from servers import ROOT, RunningServer, ServerSpec, millpond_spec, running
from settings import parse_settings

from millpond.bench.pairs import Comparison, percentile

CELLS = 8192
PROBE_SECONDS = 0.05
PROBES = 150
LIMIT_MS = 100

BURST = 300
VALUE = Comparison.VALUE
BURST_SECONDS = 3.0
FLAGS = ("--max-running", "8", "--queue-requests", "400")


class Open(Protocol):
    def close(self) -> object: ...


Setup = Callable[[RunningServer, PromptSource], Awaitable[Sequence[Open]]]


async def probe(port: int) -> float:
    """Milliseconds from before the connection to the end of the answer."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: probe\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 ")
    return (time.perf_counter() - began) * 1000


async def under_load(server: RunningServer, prompts: PromptSource) -> Sequence[Open]:
    return [await server.stream(prompts.ids(100), 400) for _ in range(32)]


async def beside_prefill(server: RunningServer, prompts: PromptSource) -> Sequence[Open]:
    stream = await server.stream(prompts.ids(20), 400)
    await stream.wait_events(3)
    return [stream, *[await server.stream(prompts.ids(2000), 1) for _ in range(2)]]


async def beside_idle(server: RunningServer, prompts: PromptSource) -> Sequence[Open]:
    busy = [await server.stream(prompts.ids(2000), 400) for _ in range(3)]
    waiting = [await server.stream(prompts.ids(10), 1000, priority=-1) for _ in range(BURST)]
    await asyncio.sleep(2.0)
    return [*busy, *waiting]


def send_burst(port: int, requests: Sequence[bytes]) -> list[socket.socket]:
    """All of them at once, for a thread: each is in the kernel's hands when it returns."""
    sockets: list[socket.socket] = []
    for request in requests:
        sockets.append(socket.create_connection(("127.0.0.1", port)))
        sockets[-1].sendall(request)
    return sockets


def post(prompt: Sequence[int]) -> bytes:
    asked = {"max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True, "priority": -1}
    body = json.dumps({"prompt": list(prompt), **asked}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: burst\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


async def probes(port: int, count: int, pause: float, until: float = float("inf")) -> list[float]:
    found: list[float] = []
    while len(found) < count and time.monotonic() < until:
        found.append(await probe(port))
        await asyncio.sleep(pause)
    return found


async def in_burst(server: RunningServer, prompts: PromptSource) -> Measured:
    busy = [await server.stream(prompts.ids(2000), 400) for _ in range(3)]
    requests = [post(prompts.ids(10)) for _ in range(BURST)]
    ends = time.monotonic() + BURST_SECONDS
    sending = asyncio.create_task(asyncio.to_thread(send_burst, server.port, requests))
    found = await probes(server.port, sys.maxsize, 0.01, ends)
    for opened in (*busy, *await sending):
        opened.close()
    await asyncio.sleep(1.0)
    return summary(found)


def after(setup: Setup) -> Callable[[RunningServer, PromptSource], Awaitable[Measured]]:
    async def measure(server: RunningServer, prompts: PromptSource) -> Measured:
        streams = await setup(server, prompts)
        found = await probes(server.port, PROBES, PROBE_SECONDS)
        for stream in streams:
            stream.close()
        await asyncio.sleep(1.0)
        return summary(found)

    return measure


def summary(found: Sequence[float]) -> Measured:
    return {"median": percentile(found, 0.5), "p99": percentile(found, 0.99), "max": max(found)}


SECTIONS: dict[str, Callable[[RunningServer, PromptSource], Awaitable[Measured]]] = {
    "load": after(under_load),
    "prefill": after(beside_prefill),
    "idle": after(beside_idle),
    "burst": in_burst,
}


def longest_turns(bench: Bench) -> None:
    """CPU milliseconds, from the first request of the burst on."""
    ordinary = millpond_spec(bench.settings, CELLS, *FLAGS, name="millpond turns")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "turns"
        program = str(ROOT / "benchmarks" / "turns_server.py")
        command = (ordinary.command[0], program, str(path), *ordinary.command[4:])
        with bench.server(ServerSpec(ordinary.name, command, ordinary.ready_path)) as server:
            began = time.monotonic()
            bench.single("turns", server, in_burst)
            rows = [tuple(map(float, line.split())) for line in path.read_text().splitlines()]
    turns = sorted((row[1] for row in rows if row[0] >= began), reverse=True)
    bench.add("turns of the event loop in a burst: longest", "ms CPU", turns[:1] or [0.0], (), at_most(50, VALUE))
    bench.add("turns of the event loop in a burst: tenth longest", "ms CPU", turns[9:10] or [0.0])


def main() -> int:
    settings = parse_settings(str(__doc__), (*SECTIONS, "turns"))
    with running(millpond_spec(settings, CELLS, *FLAGS, name="millpond health")) as server:
        bench = Bench("bench_health", settings, read_vocabulary(server.port))
        bench.warm_up(server)
        for name in settings.only:
            if name in SECTIONS:
                found = bench.single(name, server, SECTIONS[name])
                for figure in ("median", "p99"):
                    bench.add(f"/health, {name}: {figure}", "ms", [found[figure]])
                bench.add(f"/health, {name}: largest", "ms", [found["max"]], (), at_most(LIMIT_MS, VALUE))
    if "turns" in settings.only:
        longest_turns(bench)
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

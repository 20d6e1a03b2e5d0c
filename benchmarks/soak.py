"""Minutes of mixed load with random faults on the real server: python benchmarks/soak.py [--minutes 5] [--exact]

Clients stream, ask for whole answers, cancel, reset and read slowly, over shared prefixes, with priorities, in a pool
that is far too small; meanwhile the engine is killed and stopped. Lost, duplicated and changed must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import psutil
from loads import Job, Outcome, OutputBook
from prompts import PromptSource, read_vocabulary
from servers import REQUEST_TIMEOUT, RunningServer, millpond_spec, running
from settings import Settings, default_model

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP
from millpond.bench.stream_client import Read, StreamResult, open_stream, parse_response

CELLS = 1024
CLIENTS = 8
KEPT_OUTPUTS = 48
"""Outputs that are checked token by token when the load is over."""
PLANTED_OUTPUTS = 2
PATH = "/v1/completions"
REFUSED = (429, 503)
SAMPLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Vitals:
    server_rss: int
    engine_rss: int
    fds: int


@dataclass(slots=True)
class Tally:
    counts: Counter[str] = field(default_factory=Counter[str])
    failures: list[str] = field(default_factory=list[str])
    outputs: list[tuple[Job, tuple[int, ...]]] = field(default_factory=list[tuple[Job, tuple[int, ...]]])
    vitals: list[Vitals] = field(default_factory=list[Vitals])
    restarts: int = 0

    def record(self, job: Job, status: int, token_ids: Sequence[int], finished: bool, error: str | None) -> None:
        """One request that its client waited for."""
        if status in REFUSED:
            self.counts["refused"] += 1
        elif len(token_ids) > job.max_tokens:
            self.counts["duplicated"] += 1
        elif not finished or len(token_ids) < job.max_tokens:
            self.counts["lost"] += 1
            self.failures.append(f"status {status}, {len(token_ids)} of {job.max_tokens} tokens: {error or 'no end'}")
        else:
            self.counts["completed"] += 1
            self.outputs.append((job, tuple(token_ids)))

    def record_result(self, job: Job, result: StreamResult) -> None:
        self.record(job, result.status, result.token_ids, result.completed, result.error)


class Load:
    """Clients and attackers of one server until `ends` (perf_counter seconds)."""

    def __init__(self, server: RunningServer, prompts: PromptSource, rng: random.Random, ends: float) -> None:
        self._server = server
        self._prompts = prompts
        self._rng = rng
        self._ends = ends
        self._prefixes = [prompts.prose(length) for length in (120, 260)]
        self.tally = Tally()

    async def run(self) -> None:
        clients = [asyncio.ensure_future(self._client()) for _ in range(CLIENTS)]
        others = [asyncio.ensure_future(work) for work in (self._attack(), self._watch())]
        await asyncio.gather(*clients)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(SAMPLE_SECONDS)

    def _job(self) -> Job:
        rng = self._rng
        shared = rng.choice(self._prefixes) if rng.random() < 0.5 else []
        own = self._prompts.prose(rng.randrange(8, 120))
        return Job((*shared, *own), rng.randrange(8, 120), rng.choice((-1, 0, 0, 1)))

    async def _client(self) -> None:
        kinds = (self._stream, self._whole, self._slow, self._cancel, self._reset)
        while time.perf_counter() < self._ends:
            [kind] = self._rng.choices(kinds, weights=(60, 15, 5, 10, 10))
            self.tally.counts["sent"] += 1
            await kind(self._job())

    async def _stream(self, job: Job) -> None:
        stream = await self._server.stream(job.prompt_ids, job.max_tokens, priority=job.priority)
        self.tally.record_result(job, await stream.result(REQUEST_TIMEOUT))

    async def _cancel(self, job: Job) -> None:
        stream = await self._server.stream(job.prompt_ids, job.max_tokens, priority=job.priority)
        await asyncio.sleep(self._rng.random() * 2.0)
        stream.close()
        self.tally.counts["ended by design"] += 1

    async def _whole(self, job: Job) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(_post(job, stream=False))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        status = int(head.split()[1]) if head else 0
        answer = json.loads(body) if body else {}
        choice = answer["choices"][0] if status == 200 else {}
        ids = choice.get("token_ids", ())
        self.tally.record(job, status, ids, choice.get("finish_reason") == "length", str(answer.get("error")))

    async def _slow(self, job: Job) -> None:
        """Takes a few kilobytes at a time from a small socket; it must get everything all the same."""
        loop, reads = asyncio.get_running_loop(), list[Read]()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", self._server.port))
            started = time.perf_counter()
            await loop.sock_sendall(sock, _post(job, stream=True, logprobs=20))
            while data := await loop.sock_recv(sock, 2048):
                reads.append((time.perf_counter(), data))
                await asyncio.sleep(0.005)
        self.tally.record_result(job, parse_response(started, reads, time.perf_counter()))

    async def _reset(self, job: Job) -> None:
        """RST at some moment: before the request is whole, in prefill, in decode, parked."""
        request = _post(job, stream=True)
        if self._rng.random() < 0.3:
            request = request[: self._rng.randrange(len(request))]
        _, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        writer.write(request)
        await asyncio.sleep(self._rng.random() * 1.5)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
        self.tally.counts["ended by design"] += 1

    async def _attack(self) -> None:
        """Kills, sometimes one engine after another before its requests are a token further, and stops."""
        for turn in itertools.count():
            await asyncio.sleep(self._rng.uniform(6.0, 14.0))
            engine = self._server.engine()
            if engine is None:
                continue
            if turn % 2 == 0:
                for _ in range(self._rng.choice((1, 1, 2, 3))):
                    await self._kill(engine)
                    await asyncio.sleep(self._rng.uniform(0.0, 1.0))
                    engine = self._server.engine() or engine
                continue
            engine.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._rng.uniform(0.2, 3.0))
            engine.send_signal(signal.SIGCONT)
            self.tally.counts["stopped"] += 1

    async def _kill(self, engine: psutil.Process) -> None:
        """Returns when the next engine is ready."""
        try:
            engine.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            return
        self.tally.counts["kill -9"] += 1
        while not await asyncio.to_thread(self._server.is_ready):
            await asyncio.sleep(0.05)

    async def _watch(self) -> None:
        seen: set[int] = set()
        while True:
            engine = self._server.engine()
            if engine is not None:
                seen.add(engine.pid)
                self.tally.restarts = len(seen) - 1
                self.tally.vitals.append(_vitals(self._server.process, engine))
            await asyncio.sleep(SAMPLE_SECONDS)


def _vitals(server: psutil.Process, engine: psutil.Process) -> Vitals:
    try:
        engine_rss = engine.memory_info().rss
    except psutil.NoSuchProcess:
        engine_rss = 0
    return Vitals(server.memory_info().rss, engine_rss, server.num_fds())


def _post(job: Job, *, stream: bool, **extra: object) -> bytes:
    asked = {"max_tokens": job.max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": list(job.prompt_ids), "stream": stream, "priority": job.priority, **asked, **extra}
    if stream:
        body["stream_options"] = {"include_usage": True}
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def solo_differences(server: RunningServer, kept: Sequence[tuple[Job, tuple[int, ...]]]) -> int:
    """Outputs that another run, alone on the quiet server, does not repeat."""
    changed = 0
    for job, ids in kept:
        stream = await open_stream(server.port, PATH, json.loads(_post(job, stream=True).partition(b"\r\n\r\n")[2]))
        changed += (await stream.result(REQUEST_TIMEOUT)).token_ids != ids
    return changed


def inconsistent(settings: Settings, kept: Sequence[tuple[Job, tuple[int, ...]]]) -> tuple[int, float]:
    """Outputs in which the model would not have chosen some token, and the largest gap in logits."""
    book = OutputBook()
    for part in (kept[:PLANTED_OUTPUTS], kept[PLANTED_OUTPUTS:]):  # defects are planted in the first alone
        results = [StreamResult(200, 0.0, 0.0, token_ids=ids) for _, ids in part]
        book.keep("soak", Outcome(tuple(job for job, _ in part), tuple(results)))
    found, planted = book.worst(settings.model, settings.threads)
    print(f"of {planted.each} planted defects each: {planted.wrong_seen} wrong, {planted.lost_seen} lost tokens found")
    sizes = [gap.size for gap in found["soak"]]
    return sum(size > LARGEST_CONSISTENT_GAP for size in sizes), max(sizes)


def report(tally: Tally, changed: int, checked: int, minutes: float) -> bool:
    """Prints the figures; True if nothing was lost, duplicated or changed and every request is accounted for."""
    counts = tally.counts
    print(f"\nsoak of {minutes:g} minutes")
    for name in ("sent", "completed", "ended by design", "refused", "lost", "duplicated"):
        print(f"  {name:16} {counts[name]}")
    print(f"  {'changed':16} {changed} of {checked} outputs checked")
    print(f"  {'faults':16} {counts['kill -9']} kill -9, {counts['stopped']} stops; {tally.restarts} restarts")
    tenth = max(1, len(tally.vitals) // 5)
    for name, unit, scale in (("server_rss", "MiB", 2**20), ("engine_rss", "MiB", 2**20), ("fds", "", 1)):
        early, late = (mean(getattr(v, name) for v in part) / scale for part in _ends(tally.vitals, tenth))
        print(f"  {name:16} {early:.1f} -> {late:.1f} {unit}".rstrip())
    for failure in tally.failures[:10]:
        print(f"  lost: {failure}")
    accounted = sum(counts[name] for name in ("completed", "ended by design", "refused", "lost", "duplicated"))
    return not (counts["lost"] or counts["duplicated"] or changed) and accounted == counts["sent"]


def _ends(vitals: Sequence[Vitals], size: int) -> tuple[Sequence[Vitals], Sequence[Vitals]]:
    """The first fifth (after the very first sample) and the last."""
    return vitals[1 : 1 + size] or vitals, vitals[-size:]


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--exact", action="store_true", help="serve with --exact and compare ids with solo runs")
    given = parser.parse_args()
    settings = Settings(given.model or default_model(os.environ), given.threads, None, (), (), (), False)
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--max-running", "4", "--spill-ram", "16", "--spill-dir", folder, "--queue-requests", "6"]
        flags += ["--exact", "--max-model-len", "512"] if given.exact else []
        cells = 2048 if given.exact else CELLS
        with running(millpond_spec(settings, cells, *flags, name="millpond-soak")) as server:
            load = Load(
                server,
                PromptSource(read_vocabulary(server.port), f"soak {given.seed}"),
                rng,
                time.perf_counter() + 60.0 * given.minutes,
            )
            asyncio.run(load.run())
            print(f"load over: {dict(load.tally.counts)}", flush=True)
            outputs = load.tally.outputs
            kept = rng.sample(outputs, min(KEPT_OUTPUTS, len(outputs)))
            changed = asyncio.run(solo_differences(server, kept)) if given.exact else 0
    if not given.exact:
        changed, largest = inconsistent(settings, kept)
        print(f"largest gap to the top logit: {largest:.3f}")
    return 0 if report(load.tally, changed, len(kept), given.minutes) else 1


if __name__ == "__main__":
    sys.exit(main())

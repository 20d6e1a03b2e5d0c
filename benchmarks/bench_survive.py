"""What an engine death costs open streams: python benchmarks/bench_survive.py [--only default,exact,poison]

default, exact: kill -9 in mid-generation of 4 streams; their pause against a measured load + re-prefill of the same
histories, and their ids (equal to solo runs in --exact, consistent by default). poison: a request that aborts the
engine beside 3 good streams.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

import psutil
from harness import Bench, Measured, at_most
from loads import Job, Outcome, OutputBook, run_load
from prompts import PromptSource, read_vocabulary
from servers import REQUEST_TIMEOUT, ROOT, RunningServer, ServerSpec, millpond_spec, running
from settings import Settings, parse_settings

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP
from millpond.bench.pairs import Comparison, Target
from millpond.bench.stream_client import StreamResult

STREAMS = 4
PROMPT = 160
OUTPUT = 120
KILL_AT = 60
CELLS = 2048
POISON = 1
"""A control token of the model: no greedy prose holds it."""


def spec(settings: Settings, *flags: str, name: str) -> ServerSpec:
    return millpond_spec(settings, CELLS, "--max-running", str(STREAMS), *flags, name=name)


async def load_seconds(server: RunningServer) -> float:
    """From the death of an idle engine until the server is ready again."""
    engine = server.engine()
    assert engine is not None
    began = time.perf_counter()
    engine.send_signal(signal.SIGKILL)
    while not (await asyncio.to_thread(server.is_ready) and _is_another(server, engine)):
        await asyncio.sleep(0.01)
    return time.perf_counter() - began


def _is_another(server: RunningServer, dead: psutil.Process) -> bool:
    engine = server.engine()
    return engine is not None and engine.pid != dead.pid


async def prefill_seconds(server: RunningServer, histories: Sequence[Sequence[int]]) -> float:
    """All histories cold and at once, to the first token of the last."""
    outcome = await run_load(server, [Job(tuple(history), 1) for history in histories])
    return max(result.last_at for result in outcome.results) - min(result.started for result in outcome.results)


async def killed(server: RunningServer, jobs: Sequence[Job]) -> tuple[Outcome, float]:
    """The jobs with a kill when each has KILL_AT tokens, and the longest pause of any of them, seconds."""
    streams = [await server.stream(job.prompt_ids, job.max_tokens) for job in jobs]
    for stream in streams:
        await stream.wait_events(KILL_AT)
    engine = server.engine()
    assert engine is not None
    engine.send_signal(signal.SIGKILL)
    results = [await stream.result(REQUEST_TIMEOUT) for stream in streams]
    pause = max(longest_gap(result) for result in results)
    return Outcome(tuple(jobs), tuple(results)), pause


def longest_gap(result: StreamResult) -> float:
    return max((later.at - earlier.at for earlier, later in pairwise(result.deltas)), default=0.0)


async def one_kill(server: RunningServer, prompts: PromptSource, kept: list[Outcome]) -> Measured:
    jobs = [Job(tuple(prompts.prose(PROMPT)), OUTPUT) for _ in range(STREAMS)]
    outcome, pause = await killed(server, jobs)
    kept.append(outcome)
    return {"complete": float(outcome.complete), "pause": pause}


async def parts(server: RunningServer, killed_once: Outcome) -> Measured:
    """What a death of the same histories must cost."""
    pairs = zip(killed_once.jobs, killed_once.results, strict=True)
    histories = [(*job.prompt_ids, *result.token_ids[:KILL_AT]) for job, result in pairs]
    return {"load": await load_seconds(server), "prefill": await prefill_seconds(server, histories)}


def kill_section(bench: Bench, book: OutputBook, label: str, *flags: str) -> None:
    """Each death is its server's first: later ones have a pause before the restart, which grows."""
    kept: list[Outcome] = []
    runs: list[Measured] = []
    solo_equal = 0
    subject = spec(bench.settings, *flags, name=f"millpond {label}")
    for turn in range(bench.settings.pairs_or(3)):
        with bench.server(subject) as server:
            run = bench.single(f"{label} {turn}", server, lambda s, p: one_kill(s, p, kept))
            solo_equal += asyncio.run(_equal_to_solo(server, kept[-1:])) if label == "exact" else 0
        with bench.server(subject) as server:
            run |= bench.single(f"{label} {turn} parts", server, lambda s, p: parts(s, kept[-1]))
        runs.append(run | {"ratio": run["pause"] / (run["load"] + run["prefill"])})
    value = Comparison.VALUE
    all_complete = Target(value, STREAMS, at_most=False)
    bench.add(f"{label}: complete of {STREAMS}", "", [run["complete"] for run in runs], (), all_complete)
    for name in ("pause", "load", "prefill"):
        bench.add(f"{label}: {name}", "s", [run[name] for run in runs])
    bench.add(f"{label}: pause ÷ (load + prefill)", "", [run["ratio"] for run in runs], target=at_most(1.5, value))
    if label == "exact":
        target = Target(value, STREAMS * len(kept), at_most=False)
        bench.add(f"{label}: outputs equal to solo runs", "", [solo_equal], target=target)
    for outcome in kept:
        book.keep(label, outcome)


async def _equal_to_solo(server: RunningServer, kept: Sequence[Outcome]) -> int:
    equal = 0
    for outcome in kept:
        for job, result in zip(outcome.jobs, outcome.results, strict=True):
            solo = await server.complete(job.prompt_ids, job.max_tokens)
            equal += solo.token_ids == result.token_ids
    return equal


async def poisoned(server: RunningServer, prompts: PromptSource) -> Measured:
    good = [Job(tuple(prompts.prose(PROMPT)), OUTPUT) for _ in range(3)]
    streams = [await server.stream(job.prompt_ids, job.max_tokens) for job in good]
    for stream in streams:
        await stream.wait_events(5)
    bad = await server.try_complete([*prompts.prose(PROMPT), POISON], OUTPUT)
    results = [await stream.result(REQUEST_TIMEOUT) for stream in streams]
    return {
        "good complete": float(Outcome(tuple(good), tuple(results)).complete),
        "bad failed": float(bad.error is not None and not bad.done),
    }


def poison_section(bench: Bench) -> None:
    ordinary = spec(bench.settings, name="millpond poison")
    program = str(ROOT / "benchmarks" / "faulty_server.py")
    command = (ordinary.command[0], program, f"poison={POISON}=abort", *ordinary.command[4:])
    poison = ServerSpec(ordinary.name, command, ordinary.ready_path)
    with bench.server(poison) as server:
        found = bench.single("poison", server, poisoned)
    value = Comparison.VALUE
    bench.add("poison: good streams complete of 3", "", [found["good complete"]], (), Target(value, 3, at_most=False))
    bench.add("poison: the bad one got an error", "", [found["bad failed"]], (), Target(value, 1, at_most=False))


def main() -> int:
    settings = parse_settings(str(__doc__), ("default", "exact", "poison"))
    book = OutputBook()
    with running(spec(settings, name="millpond words")) as server:
        bench = Bench("bench_survive", settings, read_vocabulary(server.port))
    for name, flags in (("default", ()), ("exact", ("--exact", "--max-model-len", "512"))):
        if name in settings.only:
            kill_section(bench, book, name, *flags)
    if "poison" in settings.only:
        poison_section(bench)
    if book.outcomes:
        found, _ = book.worst(settings.model, settings.threads)
        for label, gaps in found.items():
            target = at_most(LARGEST_CONSISTENT_GAP, Comparison.VALUE)
            bench.add(f"{label}: largest gap to the top logit", "", [max(gap.size for gap in gaps)], target=target)
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

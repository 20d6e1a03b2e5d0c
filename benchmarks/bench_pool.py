"""The KV pool under pressure, beside llama.cpp's own server: python benchmarks/bench_pool.py [--only exhaustion,...]

Sections: exhaustion (4 x 600 tokens in 1024 cells, four spill settings), mixed (16 requests at 4x overcommit),
cold_prefix (4 requests, one 540-token prefix), warm_prefix, save_gap (a stream beside a save and a restore), cpu (CPU
seconds a token, cache on and off). See README.md in this folder for the method.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path

from harness import Bench, Measure, Measured, at_least, at_most, peer_beside
from loads import Job, Outcome, OutputBook, run_load
from prompts import PromptSource
from servers import REQUEST_TIMEOUT, RunningServer, completed, millpond_spec, peer_spec
from settings import parse_settings

from millpond.bench.consistency import LARGEST_CONSISTENT_GAP
from millpond.bench.pairs import Comparison, Target, median_interval, percentile
from millpond.bench.stream_client import StreamResult
from millpond.errors import InternalError

ROOMY = 4096
TIGHT = 1024
OUTPUT = 600
PREFIX = 540
SUFFIX = 8
MIXED_SIZES = ((40, 120), (120, 100), (24, 200), (300, 120))
"""(prompt, output); one round is 1024 cells, four rounds are 16 requests at 4x overcommit of 1024 cells."""
TINY_DISK_MIB = 4

Section = Callable[[Bench, RunningServer, OutputBook], None]


def four_times_600(prompts: PromptSource) -> list[Job]:
    return [Job(tuple(prompts.prose(20)), OUTPUT) for _ in range(4)]


def sixteen_mixed(prompts: PromptSource) -> list[Job]:
    return [Job(tuple(prompts.prose(prompt)), output) for _ in range(4) for prompt, output in MIXED_SIZES]


def load_measure(jobs_of: Callable[[PromptSource], list[Job]], label: str, book: OutputBook) -> Measure:
    """A measurement that sends a load and keeps its outputs for the oracle."""

    async def measure(server: RunningServer, prompts: PromptSource) -> Measured:
        outcome = await run_load(server, jobs_of(prompts))
        for failure in outcome.failures:
            print(f"    {server.spec.name}: {failure}")
        book.keep(f"{label}, {server.spec.name}", outcome)
        return {
            "complete": float(outcome.complete),
            "all ids": float(outcome.all_ids_came),
            "tok/s": outcome.tokens_per_second,
            "preemptions": float(outcome.total("preemptions")),
        }

    return measure


def add_pressure_figures(
    bench: Bench, label: str, requests: int, ours: Sequence[Measured], peer: Measured | None
) -> None:
    other = [peer["complete"]] * len(ours) if peer else []
    value = Comparison.VALUE
    complete = [run["complete"] for run in ours]
    bench.add(f"{label}: complete", "", complete, other, Target(value, requests, at_most=False))
    if not bench.settings.self_test:
        bench.add(f"{label}: every id came", "", [run["all ids"] for run in ours], (), Target(value, 1, at_most=False))
        moved = [run["preemptions"] for run in ours]
        bench.add(f"{label}: preemptions", "", moved, (), Target(value, 1, at_most=False))


def exhaustion(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    measure = load_measure(four_times_600, "4 x 600", book)
    with bench.server(peer_spec(bench.settings, TIGHT, name="peer-tight")) as tight_peer:
        of_peer = bench.single("4 x 600 alone", tight_peer, measure)
    _pressured_beside_roomy(bench, measure, of_peer)
    with tiny_filesystem() as folder:
        variants: dict[str, tuple[str, ...]] = {
            "requeue only": ("--spill-ram", "0"),
            "1 MiB RAM": ("--spill-ram", "1"),
        }
        if folder is not None:
            variants["disk fills"] = ("--spill-ram", "0", "--spill-dir", str(folder), "--spill-disk", "4096")
        else:
            bench.note(f"disk fills: left out, no {TINY_DISK_MIB} MiB file system could be mounted (needs root)")
        for name, arguments in variants.items():
            with bench.server(millpond_spec(bench.settings, TIGHT, *arguments, name=f"millpond {name}")) as ours:
                found = bench.single(f"4 x 600 {name}", ours, measure)
            add_pressure_figures(bench, f"4 x 600 in 1024 cells, {name}", 4, [found], of_peer)


def _pressured_beside_roomy(bench: Bench, measure: Measure, of_peer: Measured) -> None:
    tight = millpond_spec(bench.settings, TIGHT, name="millpond tight")
    roomy = millpond_spec(bench.settings, ROOMY, name="millpond roomy")
    with bench.server(tight) as pressured, bench.server(roomy) as free:
        found = bench.pairs("4 x 600", bench.settings.pairs_or(3), pressured, free, measure)
    runs = [dict(zip(found, values, strict=True)) for values in zip(*(ours for ours, _ in found.values()), strict=True)]
    add_pressure_figures(bench, "4 x 600 in 1024 cells, 1 GiB RAM", 4, runs, of_peer)
    bench.add("4 x 600 in 1024 cells (other: the same in 4096)", "tok/s", *found["tok/s"], target=at_least(0.85))


@contextlib.contextmanager
def tiny_filesystem() -> Generator[Path | None]:
    """A folder on a file system that is soon full, so that writes really fail with ENOSPC; None if it cannot be had."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={TINY_DISK_MIB}m", "tmpfs", folder]
        if subprocess.run(command, check=False, capture_output=True).returncode != 0:
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


def mixed(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    measure = load_measure(sixteen_mixed, "16 mixed", book)
    tight_peer, tight_ours = peer_spec(bench.settings, TIGHT, name="peer-tight"), millpond_spec(bench.settings, TIGHT)
    with bench.server(tight_peer) as other, bench.server(tight_ours) as ours:
        of_peer = bench.single("16 mixed", other, measure)
        found = bench.single("16 mixed", ours, measure)
    add_pressure_figures(bench, "16 mixed requests, 4x overcommit", 16, [found], of_peer)


async def cold_prefix_once(server: RunningServer, prompts: PromptSource) -> Measured:
    prefix = prompts.ids(PREFIX)
    jobs = [Job((*prefix, *prompts.ids(SUFFIX)), 16) for _ in range(4)]
    outcome = await run_load(server, jobs)
    _need_all(outcome)
    distinct = PREFIX + 4 * SUFFIX
    return {"wall": outcome.wall, "computed": outcome.total("computed_prompt_tokens") / distinct}


def cold_prefix(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    with bench.server(millpond_spec(bench.settings, ROOMY)) as ours:
        found = bench.pairs("cold_prefix", bench.settings.pairs_or(5), ours, peer, cold_prefix_once)
    bench.add("4 requests, same cold 540-token prefix: wall", "s", *found["wall"], target=at_most(0.4))
    computed, value = found["computed"][0], Comparison.VALUE
    bench.add("the same: computed ÷ distinct prompt tokens", "", computed, target=at_most(1.15, value))


async def warm_prefix_once(server: RunningServer, prompts: PromptSource) -> Measured:
    prefix = prompts.ids(PREFIX)
    cold = await server.complete([*prefix, *prompts.ids(SUFFIX)], 8)
    warm = await server.complete([*prefix, *prompts.ids(SUFFIX)], 8)
    return {"cold": cold.ttft, "warm": warm.ttft, "ratio": warm.ttft / cold.ttft}


def warm_prefix(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    with bench.server(millpond_spec(bench.settings, ROOMY)) as ours:
        found = bench.pairs("warm_prefix", bench.settings.pairs_or(5), ours, peer, warm_prefix_once)
    bench.add("540-token prefix: cold TTFT", "s", *found["cold"])
    bench.add("540-token prefix: warm TTFT", "s", *found["warm"])
    bench.add("540-token prefix: warm ÷ cold", "", *found["ratio"], target=at_most(0.1, Comparison.VALUE))


PARKED_PROMPT = 1000
SAVE_CELLS = 2048


async def save_gap_once(server: RunningServer, prompts: PromptSource) -> Measured:
    """Three streams fill 2048 cells by decoding; the one of low priority is parked and resumed after another ended."""
    parked = await server.stream(prompts.ids(PARKED_PROMPT), 220, priority=-1)
    await parked.wait_events(3)
    watched = await server.stream(prompts.ids(20), 450, priority=2)
    await watched.wait_events(3)
    pusher = await server.stream(prompts.ids(600), 250, priority=1)
    pushing = completed(await pusher.result(REQUEST_TIMEOUT), 250)
    was_parked = completed(await parked.result(REQUEST_TIMEOUT), 220)
    return _gaps_around(completed(await watched.result(REQUEST_TIMEOUT), 450), was_parked, pushing)


def _gaps_around(watched: StreamResult, parked: StreamResult, pushing: StreamResult) -> Measured:
    """The pause is the parked stream's longest silence; a second on either side of it belongs to save and restore."""
    if int(parked.extension.get("preemptions", 0)) < 1 or int(watched.extension.get("preemptions", 0)) > 0:
        raise InternalError("the wrong stream was parked, or none: nothing was measured")
    times = [delta.at for delta in parked.deltas]
    begin, end = max(pairwise(times), key=lambda pair: pair[1] - pair[0])
    ordinary = watched.gaps(since=pushing.deltas[1].at, until=begin - 0.5)
    around = watched.gaps(begin - 0.5, begin + 1.0) + watched.gaps(end - 1.0, end + 0.5)
    p99 = percentile(ordinary, 0.99)
    return {"ordinary p99": p99 * 1000, "largest": max(around) * 1000, "ratio": max(around) / p99, "pause": end - begin}


def save_gap(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    if bench.settings.self_test:
        bench.note("save_gap: left out of a self test, the peer parks nothing")
        return
    with bench.server(millpond_spec(bench.settings, SAVE_CELLS, "--no-prefix-cache")) as ours:
        runs = [bench.single(f"save_gap {n}", ours, save_gap_once) for n in range(1, bench.settings.pairs_or(3) + 1)]
    bench.add("a stream's ordinary p99 gap", "ms", [run["ordinary p99"] for run in runs])
    bench.add("its largest gap around a save and restore of 1,000 tokens", "ms", [run["largest"] for run in runs])
    bench.add("that ÷ p99", "", [run["ratio"] for run in runs], target=at_most(2, Comparison.VALUE))


async def cpu_once(server: RunningServer, prompts: PromptSource) -> Measured:
    before = server.cpu_seconds()
    result = await server.complete(prompts.ids(20), 128)
    return {"ms": (server.cpu_seconds() - before) * 1000 / result.completion_tokens}


async def fill_with_strangers(server: RunningServer, prompts: PromptSource) -> Measured:
    """More idle prefixes than --cache-cells takes, one after the other."""
    results = [await server.complete(prompts.ids(300), 1) for _ in range(16)]
    return {"tokens": float(sum(result.prompt_tokens for result in results))}


def cpu(bench: Bench, peer: RunningServer, book: OutputBook) -> None:
    off_arguments = () if bench.settings.self_test else ("--no-prefix-cache",)
    cached = millpond_spec(bench.settings, ROOMY, name="millpond cache on")
    uncached = millpond_spec(bench.settings, ROOMY, *off_arguments, name="millpond cache off")
    with bench.server(cached) as on, bench.server(uncached) as off:
        for server in (on, off):
            bench.single("strangers", server, fill_with_strangers)
        found = bench.pairs("cpu", max(10, bench.settings.pairs_or(24)), on, off, cpu_once)
    name = "CPU a token, cache full of strangers (other: cache off)"
    figure = bench.add(name, "ms", *found["ms"], target=at_most(1.05))
    low, high = median_interval(figure.compared)
    bench.note(f"cpu: 95 % interval of the median ratio {low:.4f} to {high:.4f} over {len(figure.compared)} pairs")


def check_outputs(bench: Bench, book: OutputBook) -> None:
    """Oracle 3, after all servers have ended: it needs the cores for itself."""
    if not book.outcomes:
        return
    found, planted = book.worst(bench.settings.model, bench.settings.threads)
    bound = at_most(LARGEST_CONSISTENT_GAP, Comparison.VALUE)
    for label, gaps in found.items():
        bench.add(f"{label}: largest gap to the top logit", "", [max(gap.size for gap in gaps)], target=bound)
    all_wrong = Target(Comparison.VALUE, planted.each, at_most=False)
    bench.add(f"planted: wrong tokens seen of {planted.each}", "", [planted.wrong_seen], target=all_wrong)
    bench.note(f"planted: {planted.lost_seen} of {planted.each} single lost tokens were seen")


def _need_all(outcome: Outcome) -> None:
    if outcome.failures:
        raise InternalError("; ".join(outcome.failures))


SECTIONS: dict[str, Section] = {
    "exhaustion": exhaustion,
    "mixed": mixed,
    "cold_prefix": cold_prefix,
    "warm_prefix": warm_prefix,
    "save_gap": save_gap,
    "cpu": cpu,
}


def main() -> int:
    settings = parse_settings(str(__doc__), tuple(SECTIONS))
    book = OutputBook()
    with peer_beside(settings, ROOMY) as (peer, vocabulary):
        bench = Bench("bench_pool", settings, vocabulary)
        bench.warm_up(peer)
        for name in settings.only:
            SECTIONS[name](bench, peer, book)
    check_outputs(bench, book)
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

"""Streaming speed beside llama.cpp's own server: python benchmarks/bench_serve.py [--only ttft,...] [--pairs N]

Sections: one_stream and four_streams (tokens a second), ttft (20-token prompt), long_arrival (a 600-token prompt comes
while another stream runs). See README.md in this folder for the method.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from itertools import pairwise

from harness import Bench, Measured, at_least, at_most, peer_beside
from prompts import PromptSource
from servers import REQUEST_TIMEOUT, RunningServer, completed, millpond_spec
from settings import parse_settings

from millpond.bench.pairs import Comparison
from millpond.bench.stream_client import StreamResult

CELLS = 4096
SHORT_PROMPT = 20
LONG_PROMPT = 600
OUTPUT = 128
RUNNER_OUTPUT = 256
ARRIVAL_AFTER = 24
"""Events of the running stream before the long prompt is sent."""


async def run_streams(server: RunningServer, prompts: PromptSource, count: int) -> Measured:
    """`count` streams at once: tokens by usage, over the time from the first request to the last token."""
    texts = [prompts.text(SHORT_PROMPT) for _ in range(count)]
    results = await asyncio.gather(*(server.complete(text, OUTPUT) for text in texts))
    seconds = max(result.last_at for result in results) - min(result.started for result in results)
    return {"tok/s": sum(result.completion_tokens for result in results) / seconds}


async def one_stream(server: RunningServer, prompts: PromptSource) -> Measured:
    return await run_streams(server, prompts, 1)


async def four_streams(server: RunningServer, prompts: PromptSource) -> Measured:
    return await run_streams(server, prompts, 4)


async def ttft(server: RunningServer, prompts: PromptSource) -> Measured:
    result = await server.complete(prompts.text(SHORT_PROMPT), 4)
    return {"ms": result.ttft * 1000, "prompt tokens": float(result.prompt_tokens)}


async def long_arrival(server: RunningServer, prompts: PromptSource) -> Measured:
    """A stream runs; a long prompt comes. The gap is the runner's largest from then until the newcomer's end."""
    runner = await server.stream(prompts.text(SHORT_PROMPT), RUNNER_OUTPUT)
    await runner.wait_events(ARRIVAL_AFTER)
    newcomer = await server.complete(prompts.text(LONG_PROMPT), 8)
    running = completed(await runner.result(REQUEST_TIMEOUT), RUNNER_OUTPUT)
    return {"gap": largest_gap_after(running, newcomer), "ttft": newcomer.ttft}


def largest_gap_after(running: StreamResult, newcomer: StreamResult) -> float:
    """A stall that began before the newcomer's end counts, however late the delta that ends it."""
    return max(
        later.at - earlier.at
        for earlier, later in pairwise(running.deltas)
        if later.at >= newcomer.started and earlier.at <= newcomer.last_at
    )


def section_one_stream(bench: Bench, ours: RunningServer, peer: RunningServer) -> None:
    found = bench.pairs("one_stream", bench.settings.pairs_or(15), ours, peer, one_stream)
    bench.add("1 stream, 128 tokens", "tok/s", *found["tok/s"], target=at_least(0.95))


def section_four_streams(bench: Bench, ours: RunningServer, peer: RunningServer) -> None:
    found = bench.pairs("four_streams", bench.settings.pairs_or(9), ours, peer, four_streams)
    bench.add("4 streams, 128 tokens each", "tok/s", *found["tok/s"], target=at_least(0.95))


def section_ttft(bench: Bench, ours: RunningServer, peer: RunningServer) -> None:
    found = bench.pairs("ttft", bench.settings.pairs_or(20), ours, peer, ttft)
    bench.add("TTFT, 20-token prompt", "ms", *found["ms"], target=at_most(10, Comparison.DIFFERENCE))
    bench.note(f"TTFT prompts had {sorted(set(found['prompt tokens'][0]))} tokens, unique, so no cache helped")


def section_long_arrival(bench: Bench, ours: RunningServer, peer: RunningServer) -> None:
    found = bench.pairs("long_arrival", bench.settings.pairs_or(5), ours, peer, long_arrival)
    bench.add("600-token prompt arrives: largest gap of the runner", "s", *found["gap"], target=at_most(0.1))
    bench.add("600-token prompt beside a runner: its TTFT", "s", *found["ttft"], target=at_most(1.3))


SECTIONS: dict[str, Callable[[Bench, RunningServer, RunningServer], None]] = {
    "one_stream": section_one_stream,
    "four_streams": section_four_streams,
    "ttft": section_ttft,
    "long_arrival": section_long_arrival,
}


def main() -> int:
    settings = parse_settings(str(__doc__), tuple(SECTIONS))
    with peer_beside(settings, CELLS) as (peer, vocabulary):
        bench = Bench("bench_serve", settings, vocabulary)
        with bench.server(millpond_spec(settings, CELLS)) as ours:
            bench.warm_up(peer)
            for name in settings.only:
                SECTIONS[name](bench, ours, peer)
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

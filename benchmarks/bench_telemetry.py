"""What watching costs: python benchmarks/bench_telemetry.py [--pairs N]

Two Millponds, one with everything on (metrics under both names, JSON log lines, receipts, a scraper that asks once a
second) and one with everything off: user + system seconds of server and engine process per output token, four streams.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import urllib.request
from pathlib import Path

from harness import Bench, Measured, at_most, peer_beside
from prompts import PromptSource
from servers import RunningServer, millpond_spec
from settings import parse_settings

from millpond.bench.pairs import median_interval

CELLS = 4096
STREAMS = 4
OUTPUT = 128
PAIRS = 12
SCRAPE_SECONDS = 1.0
OFF = ("--no-metrics", "--no-plugins", "--log-level", "warning")


async def scrape(server: RunningServer) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.to_thread(_read, f"http://127.0.0.1:{server.port}/metrics")
        await asyncio.sleep(SCRAPE_SECONDS)


def _read(url: str) -> None:
    with urllib.request.urlopen(url) as page:
        page.read()


async def cpu_once(server: RunningServer, prompts: PromptSource) -> Measured:
    scraping = asyncio.ensure_future(scrape(server)) if "on" in server.spec.name else None
    before = server.cpu_seconds()
    results = await asyncio.gather(*(server.complete(prompts.ids(20), OUTPUT) for _ in range(STREAMS)))
    spent = server.cpu_seconds() - before
    if scraping is not None:
        scraping.cancel()
        await asyncio.wait([scraping])
    return {"ms": spent * 1000 / sum(result.completion_tokens for result in results)}


def main() -> int:
    settings = parse_settings(str(__doc__), ())
    with tempfile.TemporaryDirectory() as folder, peer_beside(settings, CELLS) as (_, vocabulary):
        bench = Bench("bench_telemetry", settings, vocabulary)
        receipts = str(Path(folder) / "receipts.db")
        watch = ("--metrics-compat", "vllm", "--log-format", "json", "--receipts", receipts)
        on = millpond_spec(settings, CELLS, *watch, name="millpond telemetry on")
        off = millpond_spec(settings, CELLS, *OFF, name="millpond telemetry off")
        with bench.server(on) as watched, bench.server(off) as unwatched:
            found = bench.pairs("cpu", settings.pairs_or(PAIRS), watched, unwatched, cpu_once)
        figure = bench.add("CPU a token, all telemetry on (other: off)", "ms", *found["ms"], target=at_most(1.03))
        low, high = median_interval(figure.compared)
        bench.note(f"95 % interval of the median ratio {low:.4f} to {high:.4f} over {len(figure.compared)} pairs")
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

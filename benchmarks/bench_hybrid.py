"""Chats whose state cannot be cut, restarts, and memory under many prompts: python benchmarks/bench_hybrid.py

Sections: warm_turn (a tiny hybrid, 1,500 tokens of history, beside llama.cpp's own server), restart (SmolLM2 and the
tiny hybrid with a disk tier, ended and started again), memory (200 distinct prompts under small budgets). The tiny
hybrid is an LFM2 with random weights, written here: only what is computed is counted on it, never what it says.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import Bench, at_most, peer_beside
from servers import ROOT, RunningServer, millpond_spec, peer_spec, running
from settings import Settings, parse_settings

from millpond.bench.pairs import Comparison, Target
from millpond.bench.stream_client import StreamResult

CELLS = 2048
HISTORY = 1500
TURN = 40
ANSWER = 16
HYBRID_EXTRA, PAGED_EXTRA = 128, 8
PROMPTS = 200
SPILL_RAM_MIB = 16


def write_tiny(settings: Settings, folder: Path) -> Path:
    """The tests' LFM2, with the tokenizer of the benchmark's model."""
    sys.path.insert(0, str(ROOT / "tests" / "model"))
    tiny_gguf = importlib.import_module("tiny_gguf")
    path = folder / "tiny-lfm2.gguf"
    tiny_gguf.write_tiny_lfm2(path, tiny_gguf.Tokenizer.read(settings.model))
    return path


def complete(server: RunningServer, ids: Sequence[int], n_tokens: int = ANSWER) -> StreamResult:
    return asyncio.run(server.complete(ids, n_tokens))


def computed(result: StreamResult) -> float:
    return float(result.extension["computed_prompt_tokens"])


def peer_completion(server: RunningServer, ids: Sequence[int]) -> dict[str, Any]:
    """The peer's own route: its ids and its counts."""
    body = {
        "prompt": list(ids), "n_predict": ANSWER, "temperature": 0, "ignore_eos": True, "return_tokens": True,
        "cache_prompt": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


def warm_turn(bench: Bench, folder: Path) -> None:
    settings = replace(bench.settings, model=write_tiny(bench.settings, folder))
    source = bench.prompts("warm turn")
    history, turn = source.ids(HISTORY), source.ids(TURN)
    with running(millpond_spec(settings, CELLS, name="millpond tiny")) as ours:
        first = complete(ours, history)
        second = complete(ours, [*history, *first.token_ids, *turn])
    with running(peer_spec(settings, CELLS, name="peer tiny")) as peer:
        said = peer_completion(peer, history)
        timings = peer_completion(peer, [*history, *said["tokens"], *turn])["timings"]
    target = Target(Comparison.VALUE, TURN + HYBRID_EXTRA, at_most=True)
    bench.add("tiny LFM2: tokens computed in a warm turn", "", [computed(second)], [float(timings["prompt_n"])], target)
    bench.note(f"tiny LFM2 warm turn: the peer computed {timings['prompt_n']}, cached {timings['cache_n']}")


def restart(bench: Bench, folder: Path) -> None:
    tiny = replace(bench.settings, model=write_tiny(bench.settings, folder))
    for name, settings, extra in (("SmolLM2", bench.settings, PAGED_EXTRA), ("tiny LFM2", tiny, HYBRID_EXTRA)):
        pairs = [
            one_restart(bench, settings, name, folder / str(pair), pair) for pair in range(bench.settings.pairs_or(3))
        ]
        most = Target(Comparison.VALUE, TURN + extra, at_most=True)
        bench.add(f"{name} after a restart: tokens computed", "", [computed(warm) for warm, _ in pairs], (), most)
        if name == "SmolLM2":
            warm, cold = ([result.ttft * 1e3 for result in column] for column in zip(*pairs, strict=True))
            bench.add(f"{name} after a restart: TTFT, beside a cold prompt's", "ms", warm, cold, at_most(0.25))


def one_restart(
    bench: Bench, settings: Settings, name: str, folder: Path, pair: int
) -> tuple[StreamResult, StreamResult]:
    """The next turn of a chat after the restart, and a prompt of its length that nobody has seen."""
    source = bench.prompts(f"restart {name} {pair}")
    history, turn = source.ids(HISTORY), source.ids(TURN)
    spec = millpond_spec(settings, CELLS, "--spill-dir", f"{folder}-{name.split()[0]}", name=f"millpond {name}")
    with bench.server(spec) as before:
        first = complete(before, history)
    with bench.server(spec) as after:
        prompt = [*history, *first.token_ids, *turn]
        warm, cold = complete(after, prompt), complete(after, source.ids(len(prompt)))
    print(f"  {name} {pair + 1}: of {len(prompt)} tokens {computed(warm):g} were computed", flush=True)
    return warm, cold


def memory(bench: Bench, folder: Path) -> None:
    tiny = replace(bench.settings, model=write_tiny(bench.settings, folder))
    budget = ("--spill-ram", str(SPILL_RAM_MIB))
    for name, settings, length in (("SmolLM2", bench.settings, 48), ("tiny LFM2", tiny, 600)):
        source = bench.prompts(f"memory {name}")
        with running(millpond_spec(settings, CELLS, *budget, name="millpond memory")) as server:
            complete(server, source.ids(CELLS - 64), 8)
            full = server.resident_mib()
            for _ in range(PROMPTS):
                complete(server, source.ids(length), 4)
            ended = server.resident_mib()
        bench.note(f"{name}: {full:.0f} MiB with every cell in use once, {ended:.0f} MiB after {PROMPTS} prompts")
        allowed = Target(Comparison.VALUE, 1.1 * (full + SPILL_RAM_MIB), at_most=True)
        bench.add(f"{name}: RSS after {PROMPTS} distinct prompts", "MiB", [ended], (), allowed)


SECTIONS: dict[str, Callable[[Bench, Path], None]] = {"warm_turn": warm_turn, "restart": restart, "memory": memory}


def main() -> int:
    settings = parse_settings(str(__doc__), tuple(SECTIONS))
    with peer_beside(settings, CELLS) as (_, vocabulary):
        bench = Bench("bench_hybrid", settings, vocabulary)
    for name in settings.only:
        with tempfile.TemporaryDirectory() as folder:
            SECTIONS[name](bench, Path(folder))
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

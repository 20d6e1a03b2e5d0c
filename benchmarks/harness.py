"""Runs measurements in alternating pairs, prints a table, writes JSON. Knows figures; servers.py knows the servers."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any, NoReturn

import psutil
from prompts import PromptSource, Vocabulary, read_vocabulary
from servers import RESULTS, ROOT, RunningServer, ServerSpec, peer_spec, running
from settings import Settings

from millpond.bench.pairs import Comparison, Figure, Target, alternate

Measured = dict[str, float]
Measure = Callable[[RunningServer, PromptSource], Coroutine[Any, Any, Measured]]


class Bench:
    """One script's run: settings, prompts and what was found."""

    def __init__(self, title: str, settings: Settings, vocabulary: Vocabulary) -> None:
        self.settings = settings
        self._title = title
        self._vocabulary = vocabulary
        self._figures: list[Figure] = []
        self._notes: list[str] = []
        self._commands: dict[str, str] = {}

    def prompts(self, label: str) -> PromptSource:
        """The same label gives the same prompts, in this run and in the next."""
        return PromptSource(self._vocabulary, f"{self._title}/{label}")

    @contextmanager
    def server(self, spec: ServerSpec) -> Generator[RunningServer]:
        """Starts it and warms it up."""
        with running(spec) as server:
            self.warm_up(server)
            yield server

    def warm_up(self, server: RunningServer) -> None:
        """First requests page weights in and are not measured. The server's command goes into the JSON."""
        self._commands[server.spec.name] = " ".join(server.spec.command)
        asyncio.run(_warm_up(server, self.prompts(f"warm-up {server.port}")))

    def single(self, label: str, server: RunningServer, measure: Measure) -> Measured:
        """One run of one server, where there is nothing to alternate with."""
        values = asyncio.run(measure(server, self.prompts(label)))
        _show(label, server, values)
        return values

    def pairs(
        self, label: str, count: int, ours: RunningServer, other: RunningServer, measure: Measure
    ) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
        """Measures in alternation; per quantity the values of ours and of the other, in order of pairs."""
        found: dict[bool, list[Measured]] = {True: [], False: []}
        for pair, is_ours in alternate(count):
            server = ours if is_ours else other
            values = asyncio.run(measure(server, self.prompts(f"{label} {pair}")))
            found[is_ours].append(values)
            _show(f"{label} {pair + 1}/{count}", server, values)
        names = found[True][0]
        return {name: (_column(found[True], name), _column(found[False], name)) for name in names}

    def add(
        self,
        name: str,
        unit: str,
        ours: Sequence[float],
        other: Sequence[float] = (),
        target: Target | None = None,
    ) -> Figure:
        figure = Figure(name, unit, tuple(ours), tuple(other), target)
        self._figures.append(figure)
        return figure

    def note(self, text: str) -> None:
        self._notes.append(text)
        print(f"  {text}", flush=True)

    def finish(self) -> bool:
        """Prints the table, writes the JSON; True if no target was missed."""
        print(f"\n{self._title}: {len(os.sched_getaffinity(0))} cores, {self.settings.threads} threads")
        print(table(self._figures))
        for note in self._notes:
            print(f"- {note}")
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        path = RESULTS / f"{self._title}-{stamp}.json"
        path.write_text(json.dumps(self._document(stamp), indent=1))
        print(f"written to results/{path.name}")
        return all(figure.is_met is not False for figure in self._figures)

    def _document(self, stamp: str) -> dict[str, Any]:
        return {
            "title": self._title,
            "time": stamp,
            "machine": machine(),
            "threads": self.settings.threads,
            "self_test": self.settings.self_test,
            "commands": self._commands,
            "figures": [_figure_document(figure) for figure in self._figures],
            "notes": self._notes,
        }


async def _warm_up(server: RunningServer, source: PromptSource) -> None:
    await server.complete(source.ids(64), 8)
    await asyncio.gather(*(server.complete(source.ids(8), 8) for _ in range(4)))


def _show(label: str, server: RunningServer, values: Measured) -> None:
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    print(f"  {label} {server.spec.name}: {shown}", flush=True)


def _column(rows: Sequence[Measured], name: str) -> tuple[float, ...]:
    return tuple(row[name] for row in rows)


def table(figures: Sequence[Figure]) -> str:
    """Markdown; `compared` is formed inside each pair, then median [lowest, highest] over the pairs."""
    lines = [
        "| figure | millpond | other | pairs | compared: median [low, high] | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure in figures:
        result = figure.result
        other = _median_text(figure.other, figure.unit)
        verdict = {True: "yes", False: "NO", None: ""}[figure.is_met]
        lines.append(
            f"| {figure.name} | {_median_text(figure.ours, figure.unit)} | {other} | {len(figure.ours)} "
            f"| {result.median:.4g} [{result.low:.4g}, {result.high:.4g}] | {figure.target or ''} | {verdict} |"
        )
    return "\n".join(lines)


def _median_text(values: Sequence[float], unit: str) -> str:
    return f"{statistics.median(values):.4g} {unit}".strip() if values else ""


def _figure_document(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "ours": figure.ours,
        "other": figure.other,
        "compared": figure.compared,
        "result": asdict(figure.result),
        "target": str(figure.target) if figure.target else None,
        "met": figure.is_met,
    }


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "memory_mib": psutil.virtual_memory().total // 2**20,
        "python": platform.python_version(),
        "xllamacpp": _version("xllamacpp"),
        "commit": commit.stdout.strip(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Raises SystemExit in the main thread, so that the servers are stopped."""
    sys.exit(128 + number)


@contextmanager
def peer_beside(settings: Settings, cells: int) -> Generator[tuple[RunningServer, Vocabulary]]:
    """The peer, and the words it tokenizes for the prompts of both. SIGTERM ends the script, servers included."""
    signal.signal(signal.SIGTERM, _terminate)
    with running(peer_spec(settings, cells)) as peer:
        yield peer, read_vocabulary(peer.port)


def at_least(bound: float) -> Target:
    return Target(Comparison.RATIO, bound, at_most=False)


def at_most(bound: float, comparison: Comparison = Comparison.RATIO) -> Target:
    return Target(comparison, bound, at_most=True)

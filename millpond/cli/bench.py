"""`millpond bench simulate`: flags to a load and a grid, figures to a table. Knows no engine; millpond.bench has it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from millpond.bench.simulate import Figures

_HEADINGS = (
    *("SPILL", "VICTIM", "WATERMARK", "DONE", "TOK/S", "TTFT P50", "P99 S", "GAP P50", "P99 MS", "LONGEST S"),
    *("PARKED/1K", "RECOMPUTED", "RESTORED"),
)
_WATERMARKS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25)
_LEFT = 2
"""Columns of text; the others are numbers."""


def simulate(
    watermark: Annotated[
        list[float] | None,
        typer.Option(
            "--watermark", help="growth_watermark to try; may be given more than once.", show_default="0 to 0.25"
        ),
    ] = None,
    victim: Annotated[
        list[str] | None,
        typer.Option(
            "--victim", help="Rule that chooses who is parked; may be given more than once.", show_default="all"
        ),
    ] = None,
    spill: Annotated[
        bool | None,
        typer.Option("--spill/--no-spill", help="With or without a RAM tier for the parked.", show_default="both"),
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests of the load.")] = 1000,
    rate: Annotated[float, typer.Option("--rate", min=1e-6, help="Arrivals a second.")] = 0.6,
    prompt: Annotated[float, typer.Option("--prompt", min=1, help="Median of a prompt's own tokens.")] = 90.0,
    output: Annotated[float, typer.Option("--output", min=1, help="Median of an output's tokens.")] = 120.0,
    longest: Annotated[int, typer.Option("--longest", min=3, help="Most tokens of prompt and output.")] = 1024,
    shared: Annotated[
        float, typer.Option("--shared", min=0, max=1, help="Share of prompts with one of four 200-token prefixes.")
    ] = 0.5,
    cells: Annotated[int, typer.Option("--cells", min=16, help="KV cells of the pool.")] = 2048,
    running: Annotated[int, typer.Option("--running", min=1, max=119, help="max_running.")] = 16,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same load.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON line for each case, not a table.")] = False,
) -> None:
    """Play a day of requests to the scheduler under many settings, on a simulated machine.

    The engine is the one that ships; the model and the clock are simulated (a 135M model on two cores), so a thousand
    requests take some seconds a case and the same seed gives the same figures on any machine.
    """
    from millpond.bench.simulate import Load, Machine, cases, play_all
    from millpond.scheduler.preemption import VICTIM_RULES

    spills = [True, False] if spill is None else [spill]
    grid = cases(watermark or _WATERMARKS, victim or list(VICTIM_RULES), spills)
    load = Load(
        requests=requests,
        rate=rate,
        prompt_median=prompt,
        output_median=output,
        longest=longest,
        shared_share=shared,
        seed=seed,
    )
    widths = [max(len(heading), 6) for heading in _HEADINGS]
    widths[1] = max(map(len, VICTIM_RULES))
    if not as_json:
        typer.echo(_line(_HEADINGS, widths))
    for figures in play_all(grid, load, Machine(cells, running)):
        record = {"rate": rate, "seed": seed, **asdict(figures)}
        typer.echo(json.dumps(record) if as_json else _line(_cells(figures), widths))
        sys.stdout.flush()


def _cells(figures: Figures) -> tuple[str, ...]:
    case = figures.case
    return (
        "on" if case.spill else "off",
        case.victim,
        f"{case.watermark:g}",
        str(figures.completed),
        f"{figures.goodput:.1f}",
        f"{figures.ttft_p50:.1f}",
        f"{figures.ttft_p99:.1f}",
        f"{figures.gap_p50_ms:.0f}",
        f"{figures.gap_p99_ms:.0f}",
        f"{figures.longest_gap:.1f}",
        f"{figures.preemptions_per_1k:.2f}",
        str(figures.recomputed_tokens),
        str(figures.restored_tokens),
    )


def _line(texts: tuple[str, ...], widths: list[int]) -> str:
    padded = [
        text.ljust(width) if place < _LEFT else text.rjust(width)
        for place, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()

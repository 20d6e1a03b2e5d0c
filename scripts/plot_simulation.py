"""Draws what `millpond bench simulate --json` printed: figures over the watermark, as one SVG. Knows no engine.

python scripts/plot_simulation.py docs/scheduling.jsonl docs/scheduling.svg
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Points = list[tuple[float, float]]

COLOURS = {"least-generated": "#1f6feb", "newest": "#2da44e", "most-generated": "#d1242f"}
WIDTH, HEIGHT = 250, 190
LEFT, TOP, GAP = 46, 46, 70


@dataclass(frozen=True)
class Panel:
    title: str
    value: Callable[[Record], float]


PANELS = (
    Panel("tokens/s of completed requests", lambda record: record["goodput"]),
    Panel("time to first token, median, s", lambda record: record["ttft_p50"]),
    Panel("preemptions per 1000 tokens", lambda record: record["preemptions_per_1k"]),
)


def main(source: str, target: str) -> None:
    records = [json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines()]
    rates = sorted({record["rate"] for record in records}, reverse=True)
    rows = [_row([record for record in records if record["rate"] == rate], rate, row) for row, rate in enumerate(rates)]
    width = LEFT + len(PANELS) * (WIDTH + GAP)
    height = TOP + len(rates) * (HEIGHT + GAP)
    body = "\n".join([_legend(), *rows])
    Path(target).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="{width}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )


def _row(records: Sequence[Record], rate: float, row: int) -> str:
    top = TOP + row * (HEIGHT + GAP) + 20
    panels = [
        _panel(panel, records, LEFT + column * (WIDTH + GAP), top, f"{panel.title}, {rate:g} requests/s")
        for column, panel in enumerate(PANELS)
    ]
    return "\n".join(panels)


def _panel(panel: Panel, records: Sequence[Record], left: float, top: float, title: str) -> str:
    lines: dict[tuple[str, bool], Points] = defaultdict(list)
    for record in records:
        case = record["case"]
        lines[case["victim"], case["spill"]].append((case["watermark"], panel.value(record)))
    highest = 1.1 * max(value for points in lines.values() for _, value in points) or 1.0
    widest = max(mark for points in lines.values() for mark, _ in points) or 1.0

    def place(mark: float, value: float) -> tuple[float, float]:
        return left + WIDTH * mark / widest, top + HEIGHT * (1 - value / highest)

    parts = [f'<text x="{left}" y="{top - 8}">{title}</text>', *_axes(place, widest, highest)]
    for (victim, spill), points in sorted(lines.items()):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in sorted(points)))
        dash = "" if spill else ' stroke-dasharray="5 4"'
        parts.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[victim]}" stroke-width="1.6"{dash}/>')
    return "\n".join(parts)


def _axes(place: Callable[[float, float], tuple[float, float]], widest: float, highest: float) -> list[str]:
    parts: list[str] = []
    for step in range(5):
        value = highest * step / 4
        (x, y), (end, _) = place(0, value), place(widest, value)
        label = f"{value:.0f}" if highest >= 20 else f"{value:.1f}"
        parts.append(f'<line x1="{x}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}" stroke="#d0d7de"/>')
        parts.append(f'<text x="{x - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for step in range(6):
        x, y = place(widest * step / 5, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{widest * step / 5:.2f}</text>')
    return parts


def _legend() -> str:
    parts = [f'<text x="{LEFT}" y="18">over growth_watermark; solid: with a RAM tier, dashed: without</text>']
    for place, (victim, colour) in enumerate(COLOURS.items()):
        x = LEFT + 390 + 150 * place
        parts.append(f'<line x1="{x}" y1="14" x2="{x + 24}" y2="14" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{x + 30}" y="18">{victim}</text>')
    return "\n".join(parts)


if __name__ == "__main__":
    main(*sys.argv[1:])

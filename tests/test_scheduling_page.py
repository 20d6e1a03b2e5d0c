"""docs/scheduling.md, its figure and its tables are what docs/scheduling.jsonl says."""

from __future__ import annotations

import json
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from millpond.config import EngineConfig
from millpond.engine.build import growth_watermark

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE = (DOCS / "scheduling.md").read_text(encoding="utf-8")
RECORDS = [json.loads(line) for line in (DOCS / "scheduling.jsonl").read_text(encoding="utf-8").splitlines()]


def test_the_figure_is_drawn_from_the_records(tmp_path: Path) -> None:
    drawn = tmp_path / "drawn.svg"
    runpy.run_path(str(ROOT / "scripts" / "plot_simulation.py"))["main"](str(DOCS / "scheduling.jsonl"), str(drawn))
    assert drawn.read_text() == (DOCS / "scheduling.svg").read_text()
    lines = [entry for entry in ElementTree.fromstring(drawn.read_text()).iter() if entry.tag.endswith("polyline")]
    assert len(lines) == 2 * 3 * 6, "two rates, three panels, three rules with and without a tier"


def record(rate: float, victim: str, spill: bool, watermark: float) -> dict:
    case = {"watermark": watermark, "victim": victim, "spill": spill}
    (found,) = [entry for entry in RECORDS if entry["rate"] == rate and entry["case"] == case]
    return found


@pytest.mark.parametrize("spill", [True, False])
@pytest.mark.parametrize("watermark", [0.0, 0.05, 0.1, 0.15, 0.2, 0.25])
def test_the_table_has_the_figures(spill: bool, watermark: float) -> None:
    entry = record(0.6, "least-generated", spill, watermark)
    cells = [
        f"{entry['goodput']:.1f}",
        f"{entry['ttft_p50']:.1f} / {entry['ttft_p99']:.0f}",
        f"{entry['gap_p50_ms']:.0f} / {entry['gap_p99_ms']:.0f}",
        f"{entry['longest_gap']:.1f}",
        f"{entry['preemptions_per_1k']:.2f}",
        f"{entry['recomputed_tokens']:,}",
        f"{entry['restored_tokens']:,}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize(("rate", "spill"), [(0.6, True), (0.6, False), (0.4, True)])
@pytest.mark.parametrize("victim", ["least-generated", "newest", "most-generated"])
def test_the_table_of_rules_has_the_figures(rate: float, spill: bool, victim: str) -> None:
    entry = record(rate, victim, spill, 0.1 if spill else 0.25)
    name = f"**{victim}**" if victim == "least-generated" else victim
    cells = [
        *(f"{rate:g}", "RAM" if spill else "none", name, f"{entry['goodput']:.1f}"),
        f"{entry['ttft_p50']:.1f} / {entry['ttft_p99']:.0f}",
        f"{entry['longest_gap']:.1f}",
        f"{entry['preemptions_per_1k']:.2f}",
    ]
    assert f"| {' | '.join(cells)} |" in PAGE


def test_auto_is_what_the_page_says() -> None:
    assert growth_watermark(EngineConfig()) == 0.1
    assert growth_watermark(EngineConfig(spill_ram=0)) == 0.25
    assert "`auto`: 0.1 where a RAM or disk tier takes what is parked, else 0.25" in PAGE

"""Writes the pages that are generated from the code. tests/test_docs.py fails when one of them is out of date."""

from __future__ import annotations

from pathlib import Path

from millpond.cli.reference import configuration_page
from millpond.telemetry.reference import metrics_page

PAGES = {"docs/configuration.md": configuration_page, "docs/metrics.md": metrics_page}


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    for name, render in PAGES.items():
        (root / name).write_text(render(), encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()

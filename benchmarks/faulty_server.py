"""`millpond serve` with planned faults: python benchmarks/faulty_server.py PLAN MODEL FLAGS... The plan's grammar is in
millpond/runtime/faults.py; it is no setting of the ordinary command, so that no server has faults by accident.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from millpond import wiring
from millpond.cli.settings import load_config
from millpond.config import Config
from millpond.models import SilentProgress, resolve_model


def config_of(model: str, flags: Sequence[str]) -> Config:
    """As `millpond serve MODEL FLAGS...` would have it; every flag with its value. Raises ConfigError."""
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }
    return load_config({"model": model, **given}, os.environ, folder=Path.cwd())


def main() -> int:
    plan, model, *flags = sys.argv[1:]
    config = config_of(model, flags)
    faulty = replace(config, engine=replace(config.engine, fault_plan=plan))
    return wiring.serve(faulty, resolve_model(config.model, progress=SilentProgress()))


if __name__ == "__main__":
    sys.exit(main())

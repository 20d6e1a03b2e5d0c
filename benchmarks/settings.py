"""The command line that all benchmark scripts share. Knows options and defaults; starts nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """What every script takes from its command line."""

    model: Path
    threads: int
    pairs: int | None
    only: tuple[str, ...]
    millpond_arguments: tuple[str, ...]
    peer_arguments: tuple[str, ...]
    self_test: bool

    def pairs_or(self, default: int) -> int:
        return self.pairs if self.pairs is not None else default


def parse_settings(description: str, sections: Sequence[str]) -> Settings:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="GGUF file; default: the registry's smollm2-135m, pulled once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, help="instead of each section's own number")
    parser.add_argument("--only", default="", help=f"sections, comma separated: {', '.join(sections)}")
    parser.add_argument("--millpond-arguments", default="", help="further flags of `millpond serve`, one string")
    parser.add_argument("--peer-arguments", default="", help="further flags of peer_server.py, one string")
    parser.add_argument(
        "--self-test", action="store_true", help="the peer on both sides: shows the method's own error around 1"
    )
    given = parser.parse_args()
    only = tuple(name for name in given.only.split(",") if name)
    unknown = set(only) - set(sections)
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}")
    return Settings(
        model=given.model or default_model(os.environ),
        threads=given.threads,
        pairs=given.pairs,
        only=only or tuple(sections),
        millpond_arguments=tuple(given.millpond_arguments.split()),
        peer_arguments=tuple(given.peer_arguments.split()),
        self_test=given.self_test,
    )


def default_model(environment: Mapping[str, str]) -> Path:
    named = environment.get("MILLPOND_TEST_MODEL")
    if named:
        return Path(named)
    from millpond.models import resolve_model

    return resolve_model("smollm2-135m").path

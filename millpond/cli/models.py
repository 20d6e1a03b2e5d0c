"""`millpond models list | pull | rm`. Knows how they look in a terminal; millpond.models does the work."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from millpond.models import (
    REGISTRY,
    SilentProgress,
    TerminalProgress,
    cached_models,
    default_home,
    remove_model,
    resolve_model,
)


def complete_model(incomplete: str) -> list[str]:
    """Names for shell completion: those known and those pulled."""
    names = dict.fromkeys([*REGISTRY, *(model.name for model in cached_models())])
    return [name for name in names if name.startswith(incomplete)]


_NAME = typer.Argument(
    help="Registry name or hf:org/repo/file.gguf.", show_default=False, autocompletion=complete_model
)


def list_models() -> None:
    """List the models that can be pulled by name and those that are here."""
    here = {model.name: model for model in cached_models()}
    rows = [("NAME", "SIZE", "STATE", "FROM")]
    for name, model in REGISTRY.items():
        state = "pulled" if name in here else "not pulled"
        rows.append((name, _megabytes(model.size_bytes), state, f"{model.source} ({model.licence}): {model.about}"))
    rows += [(name, _megabytes(m.size_bytes), "pulled", "hub") for name, m in here.items() if name not in REGISTRY]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        typer.echo("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]))
    typer.echo(f"folder: {default_home(os.environ)}", err=True)


def pull(
    name: Annotated[str, _NAME],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print only the path.")] = False,
) -> None:
    """Fetch a model, verify it, and print the path of its file."""
    progress = SilentProgress() if quiet else TerminalProgress(sys.stderr)
    typer.echo(resolve_model(name, progress=progress).path)


def remove(name: Annotated[str, _NAME]) -> None:
    """Delete a pulled model."""
    removed = remove_model(name)
    typer.echo(f"removed {removed.path} ({_megabytes(removed.size_bytes)})", err=True)


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"

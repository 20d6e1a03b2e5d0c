"""`millpond cache status | verify | clear`. Knows the terminal; millpond.spill looks after the disk tier's folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from millpond.cli.settings import load_config
from millpond.errors import ConfigError

if TYPE_CHECKING:
    from millpond.spill.files import Files
    from millpond.spill.inventory import FileCount, Inventory

T = TypeVar("T")

SPILL_DIR = Annotated[
    str | None,
    typer.Option("--spill-dir", help="Folder of the disk tier.", show_default="the configured one", metavar="TEXT"),
]
CONFIG = Annotated[
    Path | None, typer.Option("--config", help="TOML file to read.", show_default="./millpond.toml, if there")
]


def status(spill_dir: SPILL_DIR = None, config: CONFIG = None) -> None:
    """Show what the folder holds: prefixes by model and settings, parked state of servers, quarantined files.

    Read from the files' names and headers; payloads are checked by `verify`.
    """
    from millpond.spill.inventory import take_inventory

    root = _root(spill_dir, config)
    typer.echo("\n".join(_lines(root, _with_files(take_inventory, root))))


def verify(spill_dir: SPILL_DIR = None, config: CONFIG = None) -> None:
    """Check every prefix file against its checksums; damaged ones go to the folder's quarantine.

    The exit code is 1 when a damaged file could not be moved.
    """
    from millpond.spill.inventory import verify as verify_files

    found = _with_files(verify_files, _root(spill_dir, config))
    typer.echo(f"intact       {_count(found.intact)}")
    typer.echo(f"quarantined  {_count(found.quarantined)}")
    if found.stuck.files:
        typer.echo(f"damaged, and could not be moved: {_count(found.stuck)}", err=True)
        raise typer.Exit(1)


def clear(
    spill_dir: SPILL_DIR = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    config: CONFIG = None,
) -> None:
    """Remove prefixes, quarantined files and what dead servers left; parked state of live servers stays.

    The exit code is 1 when a file could not be removed.
    """
    from millpond.spill.inventory import clear as clear_files
    from millpond.spill.inventory import take_inventory

    root = _root(spill_dir, config)
    if not yes:
        typer.echo("\n".join(_lines(root, _with_files(take_inventory, root))))
        typer.confirm("Remove all but the parked state of live servers?", abort=True)
    gone = _with_files(clear_files, root)
    left = f", and the parked state of {gone.stale_instances} dead servers" if gone.stale_instances else ""
    typer.echo(f"removed      {_count(gone.removed)}{left}")
    if gone.stuck.files:
        typer.echo(f"could not be removed: {_count(gone.stuck)}", err=True)
        raise typer.Exit(1)


def _root(spill_dir: str | None, config: Path | None) -> Path:
    settings = load_config({"spill_dir": spill_dir}, os.environ, config_file=config, folder=Path.cwd())
    if not settings.engine.spill_dir:
        raise ConfigError("spill_dir", "is not set: name the folder with --spill-dir")
    root = Path(settings.engine.spill_dir)
    if not root.is_dir():
        raise ConfigError("spill_dir", f"{root} is no folder")
    return root


def _with_files(work: Callable[[Path, Files], T], root: Path) -> T:
    from millpond.spill.files import Files

    try:
        return work(root, Files())
    except OSError as error:
        raise ConfigError("spill_dir", f"{root} cannot be used: {error.strerror}") from error


def _lines(root: Path, found: Inventory) -> Iterable[str]:
    yield f"{root}"
    for group in found.prefixes:
        identity = group.identity
        adapter = f", adapter {identity.adapter}" if identity.adapter else ""
        used = datetime.fromtimestamp(group.newest_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M UTC")
        yield f"prefixes     {_count(group.count)}, up to {group.longest_tokens} tokens, last used {used}"
        yield f"             model {identity.model_digest[:16] or 'unknown'}, {identity.layout}{adapter}"
        yield f"             K/V {identity.kv_type_k}/{identity.kv_type_v}, {identity.library}"
    if not found.prefixes:
        yield "prefixes     none"
    for group in found.parked:
        state = "its server runs" if group.live else "its server is gone"
        yield f"parked       {_count(group.count)}, {group.instance}: {state}"
    for count, what in (
        (found.other_version, "prefixes of another format version"),
        (found.damaged, "damaged: `millpond cache verify` moves them aside"),
        (found.quarantined, "quarantined"),
    ):
        if count.files:
            yield f"also         {_count(count)}, {what}"


def _count(count: FileCount) -> str:
    return f"{count.files} files, {count.n_bytes / 1e6:.1f} MB"

"""`millpond keys new NAME`: makes an API key. Knows how it is shown; millpond.server.keys knows what one is."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from millpond.server.keys import KEY_PREFIX, key_entry


def new(name: Annotated[str, typer.Argument(help="Name of the key's holder.", show_default=False)]) -> None:
    """Make an API key: print it once, and its entry for the keys file (serve --keys-file)."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    entry = key_entry(name, key)
    typer.echo(f"# The key, shown only here: {key}")
    typer.echo(entry, nl=False)

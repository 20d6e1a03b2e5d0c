"""How a command ends on an error: one line on stderr, exit code 1. The terminal's edge for every MillpondError."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec

import typer

from millpond.errors import MillpondError

P = ParamSpec("P")


def one_line_errors(command: Callable[P, None]) -> Callable[P, None]:
    """The command, with a MillpondError printed as `error: ...` instead of a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except MillpondError as error:
            typer.echo("error: " + " ".join(str(error).split()), err=True)
            raise typer.Exit(1) from None

    return run

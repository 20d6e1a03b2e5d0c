"""`millpond serve`: reads the settings, finds the model, hands both to the wiring. Knows nothing of what then runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from millpond.cli.models import complete_model
from millpond.cli.reference import sample_config as render_sample
from millpond.cli.settings import Value, load_config, shown_values
from millpond.config import DEFAULT_MODEL
from millpond.models import SilentProgress, TerminalProgress, resolve_model


def serve(
    flags: Mapping[str, Value],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Registry name, path of a GGUF file, or hf:org/repo/file.gguf.",
            show_default=DEFAULT_MODEL,
            autocompletion=complete_model,
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file to read.", show_default="./millpond.toml, if there")
    ] = None,
    sample_config: Annotated[
        bool, typer.Option("--sample-config", help="Print a TOML file with every setting, commented out, and exit.")
    ] = False,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Print the value of every setting, from all sources, and exit.")
    ] = False,
) -> None:
    """Serve MODEL over HTTP with the OpenAI API.

    The model is pulled first if it is not here yet. Ctrl-C or SIGTERM stops accepting requests and lets the running
    ones finish; a second one stops at once.

    Every option is also a variable (--kv-cells: MILLPOND_KV_CELLS) and a line of millpond.toml (kv_cells).
    """
    if sample_config:
        typer.echo(render_sample(), nl=False)
        return
    settings = load_config({"model": model, **flags}, os.environ, config_file=config, folder=Path.cwd())
    if show_config:
        typer.echo("\n".join(f"{name} = {value}" for name, value in shown_values(settings)))
        return
    progress = TerminalProgress(sys.stderr) if settings.server.log_format == "text" else SilentProgress()
    resolved = resolve_model(settings.model, progress=progress)
    # Imported late: --help, --sample-config and a wrong setting must not wait for the server's imports.
    from millpond import wiring

    raise typer.Exit(wiring.serve(settings, resolved))

"""The command tree. Knows which commands exist; each one's work is in its own module."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from millpond import __version__
from millpond.cli import bench, cache, chat, doctor, generate, keys, models, receipts, serve
from millpond.cli.errors import one_line_errors
from millpond.cli.options import with_settings
from millpond.cli.sampling import with_sampling


def build_app() -> typer.Typer:
    """A fresh application: commands, groups and shell completion."""
    app = typer.Typer(
        name="millpond",
        help="An LLM server over llama.cpp that loses no accepted request.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    serve_command = with_settings(one_line_errors(serve.serve), "engine", "queue", "server")
    app.command(name="serve", rich_help_panel="Run")(serve_command)
    generate_command = with_settings(with_sampling(one_line_errors(generate.generate)), "engine")
    app.command(name="generate", rich_help_panel="Run")(generate_command)
    chat_command = with_settings(with_sampling(one_line_errors(chat.chat)), "engine")
    app.command(name="chat", rich_help_panel="Run")(chat_command)
    doctor_command = with_settings(one_line_errors(doctor.doctor), "engine")
    app.command(name="doctor", rich_help_panel="Manage")(doctor_command)
    pulled = typer.Typer(help="List, pull and remove model files.", no_args_is_help=True)
    pulled.command("list")(one_line_errors(models.list_models))
    pulled.command("pull")(one_line_errors(models.pull))
    pulled.command("rm")(one_line_errors(models.remove))
    app.add_typer(pulled, name="models", rich_help_panel="Manage")
    spilled = typer.Typer(help="Look after the folder of the disk tier.", no_args_is_help=True)
    spilled.command("status")(one_line_errors(cache.status))
    spilled.command("verify")(one_line_errors(cache.verify))
    spilled.command("clear")(one_line_errors(cache.clear))
    app.add_typer(spilled, name="cache", rich_help_panel="Manage")
    benches = typer.Typer(
        help="Measure; the benchmarks beside another server are in benchmarks/.", no_args_is_help=True
    )
    benches.callback()(_no_work)
    benches.command("simulate")(one_line_errors(bench.simulate))
    app.add_typer(benches, name="bench", rich_help_panel="Manage")
    key_commands = typer.Typer(help="Make API keys.", no_args_is_help=True)
    key_commands.callback()(_no_work)
    key_commands.command("new")(one_line_errors(keys.new))
    app.add_typer(key_commands, name="keys", rich_help_panel="Manage")
    kept = typer.Typer(help="List, show, verify and replay the receipts of a server.", no_args_is_help=True)
    kept.command("list")(one_line_errors(receipts.list_receipts))
    kept.command("show")(one_line_errors(receipts.show))
    kept.command("verify")(one_line_errors(receipts.verify))
    kept.command("replay")(one_line_errors(receipts.replay))
    app.add_typer(kept, name="receipts", rich_help_panel="Manage")
    app.command("version", rich_help_panel="Manage")(version)
    return app


def main() -> None:
    """Entry point of the `millpond` command."""
    build_app()()


def version() -> None:
    """Print the versions of millpond, its llama.cpp library and Python."""
    import importlib.metadata

    typer.echo(f"millpond {__version__}")
    typer.echo(f"xllamacpp {importlib.metadata.version('xllamacpp')}")
    typer.echo(f"python {platform.python_version()}")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"millpond {__version__}")
        raise typer.Exit


def _no_work() -> None:
    """Keeps a group with one command a group."""


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass

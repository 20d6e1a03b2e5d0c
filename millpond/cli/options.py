"""Turns settings into command-line options. Knows typer's way of describing a command; reads no value."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Optional

import typer

from millpond.cli.settings import AUTO, Setting, Value, public_settings, shown_value

FLAGS = "flags"
"""Name of the parameter that takes {setting name: value given, or None}."""

_PANELS = {"engine": "Engine", "queue": "Queue", "server": "Server"}


def with_settings(command: Callable[..., None], *groups: str) -> Callable[..., None]:
    """`command(flags=..., its own parameters)` with one option for each public setting of the groups."""
    settings = [setting for setting in public_settings() if setting.group in groups and not setting.env_only]
    own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != FLAGS]

    def run(**given: Any) -> None:
        flags: Mapping[str, Value] = {setting.name: given.pop(setting.name) for setting in settings}
        command(flags=flags, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [_parameter(s) for s in settings]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    return run


def _parameter(setting: Setting) -> inspect.Parameter:
    kind = bool if setting.kind is bool else str
    annotation = Annotated[Optional[kind], _option(setting)]  # noqa: UP045
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option(setting: Setting) -> Any:
    names = [setting.flag]
    if setting.kind is bool:
        names = [f"{setting.flag}/{setting.flag.replace('--', '--no-', 1)}"]
    return typer.Option(
        *names,
        help=f"{setting.help} ({', '.join(setting.choices)})" if setting.choices else setting.help,
        metavar=_short_metavar(setting),
        show_default=shown_value(setting, setting.default) or "none",
        rich_help_panel=_PANELS.get(setting.group or ""),
        autocompletion=(lambda: list(setting.choices)) if setting.choices else None,
    )


def _short_metavar(setting: Setting) -> str | None:
    if setting.kind is bool:
        return None
    return "CHOICE" if setting.choices else metavar(setting)


def metavar(setting: Setting) -> str:
    """How the value of a setting is written, in short."""
    if setting.choices:
        return "|".join(setting.choices)
    name = {int: "INT", float: "NUMBER", str: "TEXT", bool: "true|false"}[setting.kind]
    return f"{name}|{AUTO}" if setting.optional else name

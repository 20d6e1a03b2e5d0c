"""Finds plugins and reads which hooks they have. Knows pluggy and entry points; calls no hook.

One of the places where every Exception is caught: importing a plugin runs code that is not ours.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pluggy

from millpond.hooks.spec import GROUP, PROJECT, Hooks

logger = logging.getLogger(__name__)

HOOKS = ("on_request", "after_prefill", "on_token", "mid_generation", "on_finish")


@dataclass(frozen=True, slots=True)
class Plugin:
    name: str
    functions: Mapping[str, Callable[[Any], Any]]
    """By hook; each takes the hook's one argument."""


def installed_plugins() -> list[Plugin]:
    """Those of the entry point group. One that cannot be imported is named in the log and left out."""
    found: list[tuple[str, object]] = []
    for entry in entry_points(group=GROUP):
        try:
            found.append((entry.name, entry.load()))
        except Exception:
            logger.exception("plugin %s cannot be imported; it is left out", entry.name)
    return plugins_of(found)


def plugins_of(objects: Iterable[tuple[str, object]]) -> list[Plugin]:
    """By name: modules, objects, or classes, which are made. In the order in which pluggy calls them."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Hooks)
    for name, given in objects:
        try:
            manager.register(given() if inspect.isclass(given) else given, name)
        except Exception:
            logger.exception("plugin %s is not one; it is left out", name)
            manager.unregister(name=name) if manager.has_plugin(name) else None
    functions: dict[str, dict[str, Callable[[Any], Any]]] = {}
    for hook in HOOKS:
        for implementation in reversed(getattr(manager.hook, hook).get_hookimpls()):
            takes_argument = bool(implementation.argnames)
            function = implementation.function if takes_argument else _without_argument(implementation.function)
            functions.setdefault(implementation.plugin_name, {})[hook] = function
    return [Plugin(name, hooks) for name, hooks in functions.items()]


def _without_argument(function: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda argument: function()

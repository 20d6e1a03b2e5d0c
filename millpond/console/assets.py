"""The page's files, read from the package once. Knows their names and types; nothing of what they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "pool.js": "text/javascript; charset=utf-8",
    "requests.js": "text/javascript; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "uplot/uPlot.iife.min.js": "text/javascript; charset=utf-8",
    "uplot/uPlot.min.css": "text/css; charset=utf-8",
    "uplot/LICENSE": "text/plain; charset=utf-8",
}
PAGE_PATH = "/console"
PATHS = frozenset({PAGE_PATH, *(f"{PAGE_PATH}/{name}" for name in _TYPES)})
"""Where the files are served; they hold nothing that needs a key."""


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str


def load_assets() -> Mapping[str, Asset]:
    """By path; the page itself is at PAGE_PATH, too."""
    folder = files("millpond.console").joinpath("static")
    found = {f"{PAGE_PATH}/{name}": Asset(folder.joinpath(name).read_bytes(), kind) for name, kind in _TYPES.items()}
    return MappingProxyType(found | {PAGE_PATH: found[f"{PAGE_PATH}/index.html"]})

"""A plugin that ends outputs which repeat themselves. Package it with this line in its pyproject.toml:

[project.entry-points."millpond.plugins"]
stop-loops = "plugin_stop_loops"
"""

from __future__ import annotations

from millpond.hooks.spec import Progress, Stop, hookimpl

LIMIT = 0.8
"""Share of the recent tokens' groups of four that had been there before."""


@hookimpl
def mid_generation(progress: Progress) -> Stop | None:
    """The client sees a normal end, with what was generated."""
    return Stop() if progress.length >= 64 and progress.repetition > LIMIT else None

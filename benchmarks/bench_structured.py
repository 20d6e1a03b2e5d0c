"""What constraints cost: python benchmarks/bench_structured.py [--only objects,...] [--pairs N]

Two Millponds; the requests to one are constrained by a JSON schema, those to the other are free. Sections: objects
(keys are forced) and strings (nearly every token is the model's own), greedy; drawn (strings at temperature 0.8). Four
streams of 128 tokens; CPU time of server and engine a token beside the rate.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from harness import Bench, Measure, Measured, at_least, peer_beside
from prompts import PromptSource
from servers import RunningServer, millpond_spec
from settings import parse_settings

CELLS = 4096
STREAMS = 4
PROMPT = 20
OUTPUT = 128
CONSTRAINED, FREE = "millpond constrained", "millpond free"


def _listing(item: dict[str, Any]) -> dict[str, Any]:
    """A list too long to end within OUTPUT tokens."""
    return {
        "type": "object",
        "properties": {"items": {"type": "array", "items": item, "minItems": 100}},
        "required": ["items"],
        "additionalProperties": False,
    }


_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "count": {"type": "integer", "minimum": 0, "maximum": 1000},
        "kind": {"enum": ["tool", "toy", "book"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
_STRINGS = _listing({"type": "string", "maxLength": 80})
SECTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "objects": (_listing(_OBJECT), 0.0),
    "strings": (_STRINGS, 0.0),
    "drawn": (_STRINGS, 0.8),
}
"""Schema and temperature."""


def streams_under(schema: dict[str, Any], temperature: float) -> Measure:
    """Tokens by usage, over the time from the first request to the last token."""

    async def measure(server: RunningServer, prompts: PromptSource) -> Measured:
        extra: dict[str, Any] = {"json_schema": schema} if server.spec.name == CONSTRAINED else {}
        extra |= {"temperature": temperature, "seed": 1}
        texts = [prompts.text(PROMPT) for _ in range(STREAMS)]
        before = server.cpu_seconds()
        results = await asyncio.gather(*(server.complete(text, OUTPUT, **extra) for text in texts))
        spent = server.cpu_seconds() - before
        seconds = max(result.last_at for result in results) - min(result.started for result in results)
        tokens = sum(result.completion_tokens for result in results)
        return {"tok/s": tokens / seconds, "ms": spent * 1000 / tokens}

    return measure


def main() -> int:
    settings = parse_settings(str(__doc__), tuple(SECTIONS))
    with peer_beside(settings, CELLS) as (_, vocabulary):
        bench = Bench("bench_structured", settings, vocabulary)
        constrained, free = (millpond_spec(settings, CELLS, name=name) for name in (CONSTRAINED, FREE))
        with bench.server(constrained) as ours, bench.server(free) as other:
            for name in settings.only:
                measure = streams_under(*SECTIONS[name])
                # The first compiles the grammar, which a client waits for once.
                bench.single(f"{name}, first", ours, measure)
                found = bench.pairs(name, settings.pairs_or(7), ours, other, measure)
                bench.add(f"{name}, {STREAMS} streams (other: free)", "tok/s", *found["tok/s"], target=at_least(0.85))
                bench.add(f"{name}, CPU a token (other: free)", "ms", *found["ms"])
    return 0 if bench.finish() else 1


if __name__ == "__main__":
    sys.exit(main())

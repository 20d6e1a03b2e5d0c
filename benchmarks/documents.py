"""100 documents by JSON schema out of a pool a quarter of what they want: python benchmarks/documents.py [--model FILE]

All requests are sent at once, streamed, with different seeds. Every answer is validated by the package jsonschema,
which shares no code with the compiler of grammars; preemptions are those that the answers report. Nothing is timed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from typing import Any

from harness import Bench
from jsonschema import Draft202012Validator
from prompts import read_vocabulary
from servers import RunningServer, millpond_spec, running
from settings import parse_settings

from millpond.bench.pairs import Comparison, Target
from millpond.bench.stream_client import StreamResult

COUNT, RUNNING, CELLS, MODEL_LENGTH, OUTPUT = 100, 28, 512, 448, 300
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "maps", "ducks"]}, "minItems": 1, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Oslo", "Lima", "Accra"]},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "likes", "address"],
    "additionalProperties": False,
}


async def ask(server: RunningServer, number: int) -> StreamResult:
    asked = f"<|im_start|>user\nDescribe person {number} of the club in JSON.<|im_end|>\n<|im_start|>assistant\n"
    extra = {"json_schema": SCHEMA, "temperature": 0.8, "seed": number}
    return await server.try_complete(asked * (1 + number % 4), OUTPUT, **extra)


async def ask_all(server: RunningServer) -> list[StreamResult]:
    return await asyncio.gather(*(ask(server, number) for number in range(COUNT)))


def verdict(result: StreamResult) -> str:
    if not result.completed or result.finish_reason != "stop":
        return f"status {result.status}, finish {result.finish_reason}, error {result.error}"
    try:
        document = json.loads(result.text)
    except ValueError:
        return "no JSON"
    return "valid" if Draft202012Validator(SCHEMA).is_valid(document) else "invalid"


def main() -> int:
    settings = parse_settings(str(__doc__), ())
    flags = ("--max-running", str(RUNNING), "--max-model-len", str(MODEL_LENGTH), "--queue-requests", str(COUNT))
    with running(millpond_spec(settings, CELLS, *flags, name="millpond documents")) as server:
        bench = Bench("documents", settings, read_vocabulary(server.port))
        results = asyncio.run(ask_all(server))
        verdicts = Counter(map(verdict, results))
        used = sum(result.prompt_tokens + result.completion_tokens for result in results) / COUNT
        values = {
            "valid documents": (float(verdicts["valid"]), COUNT),
            "different documents": (float(len({result.text for result in results})), COUNT // 2),
            "preemptions": (float(sum(int(result.extension.get("preemptions", 0)) for result in results)), 1),
            f"cells that {RUNNING} of them want, of the pool's": (used * RUNNING / CELLS, 4),
        }
        for name, (value, bound) in values.items():
            bench.add(name, "", [value], (), Target(Comparison.VALUE, bound, at_most=False))
        for wrong in verdicts.keys() - {"valid"}:
            bench.note(f"{verdicts[wrong]} answers: {wrong}")
        is_ready = server.is_ready()
    return 0 if bench.finish() and is_ready else 1


if __name__ == "__main__":
    sys.exit(main())

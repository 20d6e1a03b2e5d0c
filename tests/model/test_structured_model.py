"""The real model under grammars: documents out of a pool that is four times too small.

The short form of benchmarks/documents.py, which asks a server for a hundred.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.outputs import FinishEvent
from millpond.request import Request
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from millpond.types import FinishReason, RequestId, SequenceId
from millpond.wiring import load_llamacpp

pytestmark = [pytest.mark.model, pytest.mark.slow]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "maps", "ducks"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
SPEC = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
COUNT, RUNNING, CELLS = 20, 20, 320


def test_documents_are_valid_under_fourfold_overcommit(smollm2_path: Path):
    config = EngineConfig(model_path=str(smollm2_path), max_running=RUNNING, kv_cells=CELLS, max_model_len=320)
    runtime = load_llamacpp(config, lambda fraction: True)
    core = build_core(runtime, config, time.monotonic)
    vocab = runtime.vocab
    texts: dict[int, bytes] = {}
    ends: dict[int, FinishEvent] = {}
    for number in range(COUNT):
        asked = f"<|im_start|>user\nDescribe person {number} of the club in JSON.<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(vocab.tokenize(asked * (1 + number % 4), parse_special=True))
        params = SamplingParams(grammar=SPEC, temperature=0.8)
        core.add(SequenceId(number), Request(RequestId(str(number)), ids, params, 200, seed=number, arrival=0.0))
    while len(ends) < COUNT:
        result = core.step()
        for token in result.tokens:
            texts[token.sequence_id] = texts.get(token.sequence_id, b"") + vocab.piece(token.token_id)
        ends |= {event.sequence_id: event for event in result.finished}
    runtime.close()
    used = sum(end.usage.prompt_tokens + end.output_length for end in ends.values())
    assert core.scheduler.preemptions > 0 and used / COUNT * RUNNING > 4 * CELLS
    assert {end.reason for end in ends.values()} == {FinishReason.STOP}
    documents = [json.loads(texts[number]) for number in range(COUNT)]
    assert [document for document in documents if not Draft202012Validator(SCHEMA).is_valid(document)] == []
    assert len({str(document) for document in documents}) > COUNT // 2

"""The real model under grammars: a hundred documents out of a pool that is four times too small, and forced calls."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

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
COUNT, RUNNING, CELLS = 100, 28, 512


def test_a_hundred_documents_are_valid_under_fourfold_overcommit(smollm2_path: Path):
    config = EngineConfig(model_path=str(smollm2_path), max_running=RUNNING, kv_cells=CELLS, max_model_len=160)
    runtime = load_llamacpp(config, lambda fraction: True)
    core = build_core(runtime, config, time.monotonic)
    vocab = runtime.vocab
    texts: dict[int, bytes] = {}
    ends: dict[int, FinishEvent] = {}
    demand = 0
    for number in range(COUNT):
        asked = f"<|im_start|>user\nDescribe person {number} of the club in JSON.<|im_end|>\n<|im_start|>assistant\n"
        ids = tuple(vocab.tokenize(asked * (1 + number % 4), parse_special=True))
        params = SamplingParams(grammar=SPEC, temperature=0.8)
        demand += len(ids) + 30
        core.add(SequenceId(number), Request(RequestId(str(number)), ids, params, 60, seed=number, arrival=0.0))
    while len(ends) < COUNT:
        result = core.step()
        for token in result.tokens:
            texts[token.sequence_id] = texts.get(token.sequence_id, b"") + vocab.piece(token.token_id)
        ends |= {event.sequence_id: event for event in result.finished}
    runtime.close()
    assert core.scheduler.preemptions > 0 and demand / COUNT * RUNNING > 4 * CELLS
    for number in range(COUNT):
        if ends[number].reason is FinishReason.LENGTH:
            continue  # 60 tokens were not enough for its name
        document = json.loads(texts[number])
        assert list(document) == ["name", "age", "likes"] and 0 <= document["age"] <= 120
        assert set(document["likes"]) <= {"tea", "rain", "maps", "ducks"} and 1 <= len(document["name"]) <= 20
    assert sum(end.reason is FinishReason.STOP for end in ends.values()) >= COUNT - 2

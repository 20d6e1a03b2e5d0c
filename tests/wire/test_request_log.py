"""What log lines say of a request: its id and figures; texts only where the operator asked for them."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from fake_stack import whole_stack
from raw_http import TEXT, exchange, post

from millpond.telemetry.json_logs import JsonFormatter

PROMPT = "a very private question"


async def lines_of(caplog: pytest.LogCaptureFixture, **server: Any) -> tuple[dict[str, Any], list[str], dict[str, Any]]:
    """The line of one output that ended, all lines, and the answer."""
    with caplog.at_level(logging.DEBUG):
        async with whole_stack(server=server) as stack:
            body = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True, "seed": 3}
            answer = (await exchange(stack.port, post(TEXT, body))).json
    made = [(record.name, JsonFormatter().format(record)) for record in caplog.records]
    [line] = [text for name, text in made if name == "millpond.requests"]
    return json.loads(line), [text for _, text in made], answer


async def test_a_line_has_the_id_and_figures_and_no_text(caplog: pytest.LogCaptureFixture):
    line, lines, answer = await lines_of(caplog)
    usage = answer["usage"]
    assert line["request_id"] == answer["id"]
    assert (line["reason"], line["prompt_tokens"], line["output_tokens"]) == (
        "length",
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )
    assert line["total_ms"] >= line["first_token_ms"] >= line["queue_ms"] >= 0.0
    text = json.dumps(answer["choices"][0]["text"])[1:-1]
    assert not [one for one in lines if PROMPT in one or text in one]


async def test_texts_are_there_when_asked_for(caplog: pytest.LogCaptureFixture):
    line, lines, answer = await lines_of(caplog, log_prompts=True)
    assert PROMPT in line["prompt"]
    assert line["output"] == answer["choices"][0]["text"]
    assert sum(PROMPT in one for one in lines) == 1

"""Receipts of a whole server under preemption: all there, chained, replayed by the command; and its log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_stack import Stack, whole_stack
from raw_http import CHAT, TEXT, exchange, post
from typer.testing import CliRunner, Result

from millpond import llm
from millpond.cli.main import build_app
from millpond.config import EngineConfig
from millpond.engine.build import build_core
from millpond.receipts.receipt import Receipt, decode_receipt, encode_receipt
from millpond.receipts.store import opened
from millpond.runtime.base import ContextParams
from millpond.runtime.fake import FakeRuntime
from millpond.telemetry.json_logs import JsonFormatter

SECRET = "xyzzy"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["receipts", *map(str, arguments)])


async def ask(stack: Stack, number: int) -> dict:
    body = {
        "prompt": f"{SECRET} {number} " + "words of a prompt " * 3,
        "max_tokens": 80 + number,
        "ignore_eos": True,
        "seed": number,
        "temperature": 0.7,
        "return_token_ids": True,
    }
    reply = await exchange(stack.port, post(TEXT, body, {"x-request-id": f"job-{number}"}))
    assert reply.status == 200
    return reply.json


def receipts_in(path: Path) -> list[Receipt]:
    with opened(path) as store:
        return [decode_receipt(row.body) for row in store.ends()]


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """In place of the model that replay would load; the settings it is asked for."""
    asked = []

    def load_engine(config, progress=None):
        asked.append(config)
        runtime = FakeRuntime(ContextParams(n_cells=config.engine.kv_cells, n_slots=24))
        core = build_core(runtime, EngineConfig(max_running=4, prefix_cache=False), time.monotonic)
        return SimpleNamespace(core=core, clock=time.monotonic, close=runtime.close)

    monkeypatch.setattr(llm, "load_engine", load_engine)
    return asked


@pytest.mark.slow
async def test_twenty_generations_under_preemption_are_replayed_identically(tmp_path: Path, fake_engine: list):
    path = tmp_path / "receipts.db"
    async with whole_stack(kv_cells=512, max_running=8, server={"receipts": str(path)}) as stack:
        answers = await asyncio.gather(*(ask(stack, number) for number in range(20)))
    receipts = receipts_in(path)
    assert sum(receipt.preemptions for receipt in receipts) > 0, "nothing was parked: the test shows nothing"
    by_seed = {receipt.seed: receipt for receipt in receipts}
    for number, answer in enumerate(answers):
        receipt = by_seed[number]
        assert receipt.output_ids == answer["choices"][0]["token_ids"]
        assert receipt.delivered == receipt.generated == answer["usage"]["completion_tokens"]
        assert receipt.cached_tokens + receipt.computed_tokens == answer["usage"]["prompt_tokens"]
        assert f"job-{number}" in receipt.request_id and receipt.complete
        assert (receipt.told, receipt.params["temperature"]) == ("length", 0.7)
    assert SECRET.encode() not in path.read_bytes(), "ids only, no text"
    replayed = run("replay", path)
    assert replayed.exit_code == 0, replayed.output
    assert replayed.output.count("identical (") == 20 and "20 of 20 identical" in replayed.output
    assert [config.engine.prefix_cache for config in fake_engine] == [False]
    assert run("verify", path).exit_code == 0


@pytest.mark.slow
async def test_a_tampered_receipt_is_found_and_its_replay_names_the_token(tmp_path: Path, fake_engine: list):
    path = tmp_path / "receipts.db"
    async with whole_stack(server={"receipts": str(path)}) as stack:
        for number in range(3):
            await ask(stack, number)
    receipt = receipts_in(path)[1]
    receipt.output_ids[5] = receipt.output_ids[5] + 1
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE ends SET body = ? WHERE number = 2", (encode_receipt(receipt),))
        db.commit()
    verified = run("verify", path)
    assert verified.exit_code == 1 and "receipt 2 was changed" in verified.output
    replayed = run("replay", path, "2", "3")
    assert replayed.exit_code == 1
    assert f"2: token 5 was {receipt.output_ids[5]} and is now {receipt.output_ids[5] - 1}" in replayed.output
    assert "3: identical" in replayed.output and "1 of 2 identical" in replayed.output


@pytest.mark.slow
async def test_stop_strings_cancels_and_lists(tmp_path: Path):
    path = tmp_path / "receipts.db"
    async with whole_stack(server={"receipts": str(path)}) as stack:
        whole = await ask(stack, 1)
        text = whole["choices"][0]["text"]
        body = {"prompt": "hi", "max_tokens": 50, "stop": text[10:12]}
        await exchange(stack.port, post(TEXT, body))
        _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(post(CHAT, {"messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True}))
        while len(stack.llm.client._book.live) == 0:
            await asyncio.sleep(0.005)
        writer.close()
        while stack.llm.client._book.live:
            await asyncio.sleep(0.005)
    receipts = receipts_in(path)
    assert [receipt.reason for receipt in receipts][-1] == "cancelled"
    assert receipts[-1].told is None
    listed = run("list", path)
    assert listed.exit_code == 0 and len(listed.output.splitlines()) == 4
    shown = json.loads(run("show", path, "1").output)
    assert shown["number"] == 1 and shown["output_ids"] == receipts[0].output_ids
    assert run("show", path, "nobody").exit_code == 1
    assert run("list", tmp_path / "none.db").exit_code == 1


async def test_log_lines_are_json_with_the_request_id_and_without_the_prompt(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    async with whole_stack() as stack:
        await ask(stack, 7)
        too_long = await exchange(stack.port, post(TEXT, {"prompt": SECRET * 3000}))
        assert too_long.status == 400
    formatter = JsonFormatter()
    lines = [json.loads(formatter.format(record)) for record in caplog.records]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    ends = [line for line in lines if line["logger"] == "millpond.requests"]
    ended, refused = ends
    assert "job-7" in ended["request_id"]
    assert (ended["reason"], ended["output_tokens"], ended["level"]) == ("length", 87, "info")
    assert ended["total_ms"] >= ended["first_token_ms"] > 0.0
    assert refused["reason"] == "context_length_exceeded"
    assert SECRET not in json.dumps(lines)

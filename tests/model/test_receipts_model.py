"""Receipts of the real model under preemption with --exact: every replay is identical, to the last token."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from millpond.receipts.receipt import decode_receipt
from millpond.receipts.store import opened

pytestmark = [pytest.mark.model, pytest.mark.slow]
FLAGS = [
    "--port",
    "0",
    "--exact",
    "--max-running",
    "2",
    "--max-model-len",
    "256",
    "--quantum",
    "8",
    "--log-format",
    "json",
]


def ask(url: str, number: int) -> None:
    body = {
        "prompt": f"Question {number}: what is the capital of France? Answer:",
        "max_tokens": 16 + number // 2,
        "temperature": 0.8 if number % 2 else 0.0,
        "ignore_eos": True,
    }
    asked = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(asked) as reply:
        assert reply.status == 200


async def serve_twenty(model: Path, receipts: Path) -> str:
    """What the server and its engine logged."""
    command = [sys.executable, "-m", "millpond", "serve", str(model), *FLAGS, "--receipts", str(receipts)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    logged = asyncio.ensure_future(process.stderr.read())
    try:
        line = (await process.stdout.readline()).decode()
        url = line.removeprefix("listening on ").strip()
        await asyncio.gather(*(asyncio.to_thread(ask, url, number) for number in range(20)))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        return (await logged).decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_twenty_exact_generations_under_preemption_are_replayed_identically(smollm2_path: Path, tmp_path: Path):
    path = tmp_path / "receipts.db"
    lines = [json.loads(line) for line in (await serve_twenty(smollm2_path, path)).splitlines()]
    assert sum(line["logger"] == "millpond.requests" for line in lines) == 20
    with opened(path) as store:
        receipts = [decode_receipt(row.body) for row in store.ends()]
    assert len(receipts) == 20
    assert sum(receipt.preemptions for receipt in receipts) >= 10, "too little was parked to show anything"
    assert all(receipt.engine is not None and receipt.engine.exact for receipt in receipts)
    command = [sys.executable, "-m", "millpond", "receipts", "replay", str(path)]
    replayed = subprocess.run(command, capture_output=True, text=True)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    assert "20 of 20 identical" in replayed.stdout

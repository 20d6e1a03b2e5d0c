"""`millpond serve` with a disk tier, ended by SIGTERM and started again: the next turn of a chat is warm."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from raw_http import CHAT, exchange, post

pytestmark = [pytest.mark.model, pytest.mark.slow]
EXTRA_TOKENS = 8
"""Prompt tokens that may be computed beyond those that are new."""


@asynccontextmanager
async def served(model: Path, folder: Path) -> AsyncGenerator[int]:
    """The port of a server that must end well."""
    flags = ["--port", "0", "--kv-cells", "2048", "--max-running", "2", "--spill-dir", str(folder)]
    command = [sys.executable, "-m", "millpond", "serve", str(model), *flags]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(120.0):
            line = (await process.stdout.readline()).decode()
        yield int(line.rsplit(":", 1)[1])
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60.0):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def ask(port: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "", "messages": messages, "max_tokens": 8, "temperature": 0}
    async with asyncio.timeout(120.0):
        reply = await exchange(port, post(CHAT, body))
    assert reply.status == 200, reply.body
    return reply.json


async def test_a_chat_goes_on_after_the_server_was_restarted(smollm2_path: Path, tmp_path: Path) -> None:
    words = " ".join(f"The mill number {number} has a wheel." for number in range(40))
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Read this. {words}"}]
    async with served(smollm2_path, tmp_path) as port:
        first = await ask(port, messages)
    assert not list((tmp_path / "parked").iterdir()), "parked state goes with the server"
    answer = first["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And now?"}]
    async with served(smollm2_path, tmp_path) as port:
        second = await ask(port, messages)
    held = first["usage"]["total_tokens"] - 1
    assert held > 350
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= held - EXTRA_TOKENS

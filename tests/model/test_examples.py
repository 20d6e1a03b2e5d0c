"""The examples run as they stand, on the real model, and say what their first lines promise."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent


def run(name: str, argument: str) -> list[str]:
    command = [sys.executable, str(ROOT / "examples" / name), argument]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def server_url(smollm2_path: Path, unused_tcp_port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    command = [sys.executable, "-m", "millpond", "serve", str(smollm2_path), "--port", str(unused_tcp_port)]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "MILLPOND_CONFIG": os.devnull})
    try:
        wait_ready(url, server)
        yield url
    finally:
        server.terminate()
        assert server.wait(60) == 0


def wait_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except urllib.error.URLError:
            time.sleep(0.05)
    raise AssertionError(f"the server ended with {server.returncode}")


def test_batch_generate(smollm2_path: Path) -> None:
    lines = run("batch_generate.py", str(smollm2_path))
    assert [line.split(":")[0] for line in lines[:8]] == [
        *("duck", "otter", "heron", "frog", "pike", "beaver", "newt", "swan")
    ]
    assert all(len(line.split()) > 4 for line in lines[:8])
    assert lines[8].startswith("8 answers, ")


def test_async_stream(smollm2_path: Path) -> None:
    lines = run("async_stream.py", str(smollm2_path))
    assert "early ended: cancelled, " in "\n".join(lines)
    whole = [line for line in lines if line.startswith("whole ")]
    assert len(whole) > 20
    assert whole[-1].startswith(("whole ended: length, 40 tokens", "whole ended: stop, "))
    first_early = next(place for place, line in enumerate(lines) if line.startswith("early"))
    assert first_early < len(lines) - 15, "both streams run at the same time"


def test_openai_client(server_url: str) -> None:
    lines = run("openai_client.py", server_url)
    assert len(lines[0].removeprefix("answer:").split()) > 3
    text = "\n".join(lines)
    assert len(text.split("stream:")[1].split()) > 10
    cached, prompt = (int(word) for word in lines[-1].split() if word.isdigit())
    assert prompt > cached > 20


def test_score_choices(server_url: str) -> None:
    lines = run("score_choices.py", server_url)
    right, of = int(lines[-1].split()[0]), int(lines[-1].split()[2])
    assert of == len(lines) - 1 == 40
    assert right >= 16, f"{lines[-1]}, wanted 16"
    assert sum(line.startswith("ok ") for line in lines) == right

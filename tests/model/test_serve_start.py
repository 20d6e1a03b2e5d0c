"""How `millpond serve` starts: what it says of every "auto", its progress in a terminal, and a start that fails."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]


def serve(model: Path, port: int, *flags: str, **streams: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "millpond", "serve", str(model), "--port", str(port), *flags]
    return subprocess.Popen(command, env={**os.environ, "MILLPOND_CONFIG": os.devnull}, **streams)


def test_a_setting_that_cannot_be_ends_the_start(smollm2_path: Path, unused_tcp_port: int) -> None:
    server = serve(smollm2_path, unused_tcp_port, "--kv-cells", "512", "--max-model-len", "900", stderr=subprocess.PIPE)
    _, errors = server.communicate(timeout=60)
    assert server.returncode == 1
    last = errors.decode().splitlines()[-1]
    assert last == "error: max_model_len: 900 do not fit: a sequence can have 512 cells; lower it, or raise kv_cells"


def test_a_terminal_sees_the_progress_and_every_auto(smollm2_path: Path, unused_tcp_port: int) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    server = serve(smollm2_path, unused_tcp_port, "--threads", "2", stderr=theirs)
    os.close(theirs)
    try:
        seen = shown_until(ours, "growth_watermark")
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()
        os.close(ours)
    assert f"loading {smollm2_path.stem}" in seen
    assert "100%" in seen
    assert re.search(r"kv_cells +8192 +auto: the model's context", seen)
    assert re.search(r"cache_cells +at most 2048 +auto: a quarter of the pool", seen)
    assert "threads  " not in seen.split("ready in")[1]


def shown_until(terminal: int, last: str) -> str:
    """What a terminal saw, up to the piece with `last` in it, or all that its programs wrote before they ended."""
    seen = ""
    with suppress(OSError):
        while last not in seen:
            seen += os.read(terminal, 4096).decode(errors="replace")
    return seen

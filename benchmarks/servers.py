"""Both servers as child processes on free loopback ports, equal threads and cells. Knows their commands and routes.

Greedy, end ids banned, usage asked for: every request is the same JSON for both.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from settings import Settings

from millpond.bench.stream_client import LiveStream, StreamResult, open_stream
from millpond.errors import InternalError, SetupError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
START_TIMEOUT = 120.0
STOP_TIMEOUT = 20.0
REQUEST_TIMEOUT = 600.0

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ServerSpec:
    name: str
    command: tuple[str, ...]
    """Without the port, which is appended."""
    ready_path: str


class RunningServer:
    """One server process that answers requests."""

    def __init__(self, spec: ServerSpec, port: int, process: psutil.Process, model: str) -> None:
        self.spec = spec
        self.port = port
        self._process = process
        self._model = model

    @property
    def process(self) -> psutil.Process:
        return self._process

    def engine(self) -> psutil.Process | None:
        """Millpond's engine process; None while there is none."""
        children = self._process.children()
        return children[0] if children else None

    def is_ready(self) -> bool:
        """Asks; blocks for a moment."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.spec.ready_path}", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def cpu_seconds(self) -> float:
        """User + system time so far, of the process and its children."""
        family = [self._process, *self._process.children(recursive=True)]
        times = [process.cpu_times() for process in family]
        return sum(spent.user + spent.system for spent in times)

    def resident_mib(self) -> float:
        """Resident memory now, of the process and its children, in MiB."""
        family = [self._process, *self._process.children(recursive=True)]
        return sum(process.memory_info().rss for process in family) / 2**20

    async def stream(self, prompt: Prompt, max_tokens: int, **extra: Any) -> LiveStream:
        """Starts a greedy completion that only its limit ends."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **extra,
        }
        return await open_stream(self.port, "/v1/completions", body)

    async def try_complete(self, prompt: Prompt, max_tokens: int, **extra: Any) -> StreamResult:
        """The result, whatever it is."""
        return await (await self.stream(prompt, max_tokens, **extra)).result(REQUEST_TIMEOUT)

    async def complete(self, prompt: Prompt, max_tokens: int, **extra: Any) -> StreamResult:
        """Raises InternalError unless it ended with every token."""
        return completed(await self.try_complete(prompt, max_tokens, **extra), max_tokens)


def completed(result: StreamResult, max_tokens: int) -> StreamResult:
    if not result.completed or result.completion_tokens != max_tokens:
        raise InternalError(
            f"{result.completion_tokens} of {max_tokens} tokens, status {result.status}, "
            f"finish {result.finish_reason}, error {result.error}"
        )
    return result


def millpond_spec(settings: Settings, cells: int, *arguments: str, name: str = "millpond") -> ServerSpec:
    if settings.self_test:
        return peer_spec(settings, cells, name=name)
    command = (sys.executable, "-m", "millpond", "serve", str(settings.model))
    options = ("--kv-cells", str(cells), "--threads", str(settings.threads))
    return ServerSpec(name, (*command, *options, *settings.millpond_arguments, *arguments, "--port"), "/ready")


def peer_spec(settings: Settings, cells: int, *arguments: str, name: str = "peer") -> ServerSpec:
    command = (sys.executable, str(ROOT / "benchmarks" / "peer_server.py"), "--model", str(settings.model))
    options = ("--ctx", str(cells), "--threads", str(settings.threads))
    return ServerSpec(name, (*command, *options, *settings.peer_arguments, *arguments, "--port"), "/health")


@contextmanager
def running(spec: ServerSpec) -> Generator[RunningServer]:
    """Raises SetupError, with the end of its log, if the server does not become ready."""
    port = free_port()
    RESULTS.mkdir(exist_ok=True)
    log_path = RESULTS / f"{spec.name.replace(' ', '-')}-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*spec.command, str(port)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        _wait_ready(process, port, spec, log_path)
        yield RunningServer(spec, port, psutil.Process(process.pid), _served_model(port))
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], port: int, spec: ServerSpec, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{spec.ready_path}", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    tail = log_path.read_text(errors="replace")[-2000:]
    raise SetupError(f"{spec.name} is not ready (exit code {process.poll()}):\n{tail}")


def _served_model(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return json.load(answer)["data"][0]["id"]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

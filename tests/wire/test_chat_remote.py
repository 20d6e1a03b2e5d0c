"""`millpond chat --url` against the real server: streaming, keys, refusals, broken answers, leaving early."""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from fake_text_engine import FakeTextEngine, Script
from wire_server import MODEL, eventually, running

from millpond.cli.chat_remote import RemoteBackend, wire_params
from millpond.errors import (
    CallerError,
    CapacityError,
    ConfigError,
    InternalError,
    InvalidParameter,
    MillpondError,
    NotReady,
    SetupError,
)
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from millpond.types import FinishReason

HI = [{"role": "user", "content": "hi"}]
PARAMS = SamplingParams(temperature=0.5, top_k=3, max_tokens=30)


async def answered(url: str, **options: Any) -> tuple[list[str], str]:
    """(parts, finish reason) of one answer, asked from a thread as the command would."""
    parts, thoughts = list[str](), list[str]()

    def work() -> str:
        backend = RemoteBackend(url, options.get("key", ""), options.get("model"))
        return backend.answer(HI, options.get("params", PARAMS), options.get("stop", ()), parts.append, thoughts.append)

    reason = await asyncio.to_thread(work)
    assert not thoughts
    return parts, reason


@pytest.mark.parametrize("form", ["{url}", "{url}/", "{url}/v1", "{bare}"])
async def test_an_answer_is_streamed(form: str) -> None:
    async with running() as server:
        url = form.format(url=server.url, bare=server.url.removeprefix("http://"))
        parts, reason = await answered(url, stop=("Z",))
        assert "".join(parts) == "Hello, world!"
        assert len(parts) > 1
        assert reason == "stop"
        _, params, options = server.engine.submitted[0]
        assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 3, 30)
        assert list(options.stop) == ["Z"]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{"a":{"type":"integer"}}}'),
        (GrammarKind.REGEX, "[0-9]+"),
        (GrammarKind.GRAMMAR, 'start: "yes" | "no"'),
    ],
)
async def test_what_an_answer_must_match_goes_with_the_request(kind: GrammarKind, text: str) -> None:
    async with running() as server:
        await answered(server.url, params=replace(PARAMS, grammar=GrammarSpec(kind, text)))
        _, params, _ = server.engine.submitted[0]
        assert params.grammar is not None
        assert (params.grammar.kind, params.grammar.text) == (kind, text)


async def test_the_first_model_is_asked_for_unless_one_is_named() -> None:
    async with running() as server:
        assert (await asyncio.to_thread(RemoteBackend, server.url)).model == MODEL
        with pytest.raises(CallerError, match="'other' does not exist"):
            await answered(server.url, model="other")


async def test_the_limit_is_told() -> None:
    async with running() as server:
        parts, reason = await answered(server.url, params=SamplingParams(max_tokens=3))
        assert ("".join(parts), reason) == ("Hel", "length")


async def test_a_key_is_sent_and_a_missing_one_explained() -> None:
    async with running(api_key="k") as server:
        assert (await answered(server.url, key="k"))[1] == "stop"
        with pytest.raises(CallerError, match="--api-key, or MILLPOND_API_KEY"):
            await answered(server.url)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (Script(submit_error=NotReady("the model is still loading", retry_after=7)), CapacityError, "again in 7 s"),
        (Script(submit_error=InvalidParameter("messages", "no good")), CallerError, "messages: no good"),
        (Script(submit_error=InternalError("secret")), InternalError, "failed to answer"),
        (Script(reason=FinishReason.SHUTDOWN), InternalError, "shutting down"),
        (Script(reason=FinishReason.ERROR, message="it broke"), InternalError, "it broke"),
    ],
)
async def test_what_the_server_says_reaches_the_user(script: Script, kind: type[MillpondError], words: str) -> None:
    async with running(FakeTextEngine(script)) as server:
        with pytest.raises(kind, match=words):
            await answered(server.url)


async def test_leaving_an_answer_cancels_it_on_the_server() -> None:
    async with running(FakeTextEngine(Script(endless=True, delay=0.001))) as server:

        def interrupt(text: str) -> None:
            raise KeyboardInterrupt

        def work() -> None:
            with pytest.raises(KeyboardInterrupt):
                RemoteBackend(server.url).answer(HI, SamplingParams(), (), interrupt, interrupt)

        await asyncio.to_thread(work)
        await eventually(lambda: server.engine.streams[0].cancelled.is_set())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "::", "http://x:99999999"])
def test_a_wrong_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a server's address, like http"):
        RemoteBackend(url)


def test_nobody_there_says_what_to_do(unused_tcp_port: int) -> None:
    with pytest.raises(SetupError, match=r"cannot reach .*: Connection refused; start a server with: millpond serve"):
        RemoteBackend(f"127.0.0.1:{unused_tcp_port}")


def test_what_cannot_be_sent_is_refused() -> None:
    assert wire_params(SamplingParams()) == {}
    with pytest.raises(InvalidParameter, match="penalty_window: cannot be sent"):
        wire_params(SamplingParams(penalty_window=5))


@contextmanager
def canned(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """A server that answers each request with these bytes and closes."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            first = self.rfile.readline()
            length = 0
            while (line := self.rfile.readline().strip()) != b"":
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.rfile.read(length)
            self.wfile.write(answer(first))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def event(text: str, name: str = "content") -> str:
    return "data: " + json.dumps({"choices": [{"delta": {name: text}}]}) + "\n\n"


OK = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "kind", "words", "shown"),
    [
        (OK + event("a"), InternalError, "ended too early", "a"),
        (OK + ": ping\n\n" + event("a") + 'data: {"error": "plain"}\n\n', InternalError, "plain", "a"),
        ("HTTP/1.1 500 Broken\r\nConnection: close\r\n\r\n<html>", InternalError, "answered 500 Broken", ""),
        ("HTTP/1.1 429 Slow\r\nConnection: close\r\n\r\n", CapacityError, "answered 429 Slow; try again in 1 s", ""),
        ("rubbish\r\n\r\n", InternalError, "lost the connection", ""),
        ("", InternalError, "lost the connection", ""),
    ],
)
def test_broken_servers_are_named(answer: str, kind: type[MillpondError], words: str, shown: str) -> None:
    parts: list[str] = []
    with canned(lambda request: answer.encode()) as url, pytest.raises(kind, match=words):
        RemoteBackend(url, model="m").answer(HI, SamplingParams(), (), parts.append, parts.append)
    assert "".join(parts) == shown


def test_another_kind_of_server_is_named() -> None:
    with canned(lambda request: OK.encode() + b"<html>") as url, pytest.raises(SetupError, match="lists no model"):
        RemoteBackend(url)


def test_thoughts_come_apart_and_a_server_that_says_no_end_reason_has_stopped() -> None:
    parts, thoughts = list[str](), list[str]()
    told = event("hm", "reasoning_content") + event("m", "reasoning") + event("a") + "data: [DONE]\n\n"
    with canned(lambda request: (OK + told).encode()) as url:
        assert RemoteBackend(url, model="m").answer(HI, SamplingParams(), (), parts.append, thoughts.append) == "stop"
    assert (parts, thoughts) == (["a"], ["hm", "m"])

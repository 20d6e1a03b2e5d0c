"""schemathesis drives every documented operation; the document and the server must agree on every answer."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest
import schemathesis
import uvloop
from hypothesis import HealthCheck, given, settings
from raw_http import exchange, head
from schemathesis import GenerationMode, openapi
from schemathesis.specs.openapi.checks import positive_data_acceptance
from wire_server import running

CHECKS = list(HealthCheck)


@contextlib.contextmanager
def server_in_thread() -> Iterator[str]:
    """URL of a server with a loop of its own."""
    ready: list[str] = []
    started, done = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        async with running() as server:
            ready.append(server.url)
            loops.append(asyncio.get_running_loop())
            started.set()
            await done.wait()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    started.wait()
    try:
        yield ready[0]
    finally:
        loops[0].call_soon_threadsafe(done.set)
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_every_operation_answers_as_documented(mode: GenerationMode) -> None:
    """Driven by hand: schemathesis' own pytest plugin does not know this pytest.

    A body that fits the schema may still be refused: an id beyond this model's vocabulary, what is not supported yet.
    """
    with server_in_thread() as url:
        for found in openapi.from_url(f"{url}/openapi.json").get_all_operations():
            operation = found.ok()
            if mode is GenerationMode.NEGATIVE and operation.method.upper() == "GET":
                continue

            @settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
            @given(case=operation.as_strategy(generation_mode=mode))
            def drive(case: schemathesis.Case) -> None:
                case.call_and_validate(timeout=20, excluded_checks=[positive_data_acceptance])

            drive()


async def test_the_document_names_every_route_and_its_bodies():
    async with running() as server:
        document = (await exchange(server.port, head("GET", "/openapi.json"))).json
    assert set(document["paths"]) == {
        "/",
        "/health",
        "/ready",
        "/metrics",
        "/props",
        "/version",
        "/v1/models",
        "/v1/models/{model_id}",
        "/v1/chat/completions",
        "/v1/completions",
        "/tokenize",
        "/detokenize",
    }
    chat_body = document["components"]["schemas"]["ChatRequest"]
    assert chat_body["required"] == ["messages"]
    assert {"max_tokens", "max_completion_tokens", "top_logprobs", "return_token_ids"} <= set(chat_body["properties"])

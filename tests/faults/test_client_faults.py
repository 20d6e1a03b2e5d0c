"""Clients that misbehave against a whole server: HTTP down to a fake model, every id checked."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import schemathesis
from fault_engine import eventually
from fault_server import (
    CHAT,
    LONG_PROMPT,
    PATIENCE,
    RSS_SLACK,
    SLOTS,
    TEXT,
    FaultServer,
    completion,
    connect,
    prompt_of,
    raw,
    reset,
    served,
    undisturbed,
)
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode, openapi
from schemathesis.schemas import APIOperation

pytestmark = [pytest.mark.faults, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared() -> AsyncIterator[FaultServer]:
    """One server for all that only clients do; that it ends well is part of each test before."""
    async with served(engine=SLOTS, server={"header_timeout": 2.0, "client_timeout": 2.0}) as server:
        yield server


SENT: dict[str, bytes] = {
    "connected": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: te",
    "half a body": raw(TEXT, completion(prompt_of(1), 900))[:-40],
    "prefill, streamed": raw(TEXT, completion(LONG_PROMPT, 100)),
    "prefill, not streamed": raw(TEXT, completion(LONG_PROMPT, 100, stream=False, stream_options=None)),
    "decode, not streamed": raw(TEXT, completion(prompt_of(2), 900, stream=False, stream_options=None)),
}


@pytest.mark.parametrize("phase", [*SENT, "decode, streamed", "queued", "parked"])
async def test_clients_that_reset_in_any_phase_leave_nothing_behind(shared: FaultServer, phase: str):
    """900 tokens each: those that stayed would hold the next requests up far beyond any patience."""
    for _ in range(4):
        writers: list[asyncio.StreamWriter] = []
        if phase in SENT:
            _, writer = await connect(shared)
            writer.write(SENT[phase])
            await writer.drain()
            await asyncio.sleep(0.03)
            writers.append(writer)
        else:
            count = {"decode, streamed": 1, "queued": 12, "parked": 4}[phase]
            for number in range(count):
                reader, writer = await connect(shared)
                writer.write(raw(TEXT, completion(prompt_of(number, 200 if phase == "parked" else 30), 800)))
                if phase != "queued":
                    await reader.readuntil(b"data: ")
                writers.append(writer)
            await asyncio.sleep(0.3 if phase == "parked" else 0.02)
        for writer in writers:
            reset(writer)
    await shared.recovered()


MALFORMED: dict[str, bytes] = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n",
    "negative length": raw(TEXT, b"{}", "content-length: -1"),
    "length in words": raw(TEXT, b"{}", "content-length: two"),
    "two lengths": raw(TEXT, b"{}", "content-length: 2", "content-length: 3"),
    "length beyond any": raw(TEXT, b"{}", "content-length: 99999999999999999999999"),
    "length beyond the limit": raw(TEXT, b"{}", "content-length: 9999999999"),
    "length and chunks": raw(TEXT, b"0\r\n\r\n", "content-length: 5", "transfer-encoding: chunked"),
    "broken chunk size": raw(TEXT, b"zz\r\n{}\r\n0\r\n\r\n", "transfer-encoding: chunked"),
    "endless chunk": raw(TEXT, b"fffffff\r\n{", "transfer-encoding: chunked"),
    "unknown coding": raw(TEXT, b"{}", "transfer-encoding: rot13"),
    "NUL in a header": b"GET /health HTTP/1.1\r\nhost: te\0st\r\n\r\n",
    "garbage behind a request": b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n\x00\xff\xfe garbage\r\n\r\n",
    "100 requests at once": b"GET /health HTTP/1.1\r\nhost: test\r\n\r\n" * 100,
    "head of a megabyte": b"GET /health HTTP/1.1\r\nhost: test\r\nx: " + b"y" * 2**20 + b"\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("sent", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_http_harms_nobody(shared: FaultServer, sent: bytes):
    async def send() -> None:
        reader, writer = await connect(shared)
        try:
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                answer = await reader.read(4096)
            assert b" 500 " not in answer.split(b"\r\n")[0]
        except ConnectionError:
            pass
        finally:
            writer.close()

    bystander = await shared.open(prompt_of(3), 60)
    await asyncio.gather(*(send() for _ in range(5)))
    undisturbed(await bystander.result(PATIENCE), prompt_of(3), 60)
    await shared.recovered()


async def test_expect_100_continue_and_pipelines_are_served(shared: FaultServer):
    body = completion(prompt_of(4), 5)
    reader, writer = await connect(shared)
    request = raw(TEXT, body, "expect: 100-continue")
    head, _, content = request.partition(b"\r\n\r\n")
    writer.write(head + b"\r\n\r\n")
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(content + raw(TEXT, body, "connection: close"))
    async with asyncio.timeout(PATIENCE):
        answered = await reader.read()
    writer.close()
    assert answered.count(b"HTTP/1.1 200 OK") == 2 and answered.count(b"data: [DONE]") == 2
    await shared.recovered()


async def test_a_body_in_chunks_of_any_size_is_one_request(shared: FaultServer):
    content = json.dumps(completion(prompt_of(4), 5)).encode()
    for size in (1, 7, len(content)):
        reader, writer = await connect(shared)
        head, _, _ = raw(TEXT, b"", "transfer-encoding: chunked", "connection: close").partition(b"\r\n\r\n")
        chunks = b"".join(
            b"%x;note=x\r\n%b\r\n" % (len(content[at : at + size]), content[at : at + size])
            for at in range(0, len(content), size)
        )
        for byte in head + b"\r\n\r\n":
            writer.write(bytes([byte]))
        await writer.drain()
        writer.write(chunks + b"0\r\nafter: all\r\n\r\n")
        async with asyncio.timeout(PATIENCE):
            answered = await reader.read()
        writer.close()
        assert answered.startswith(b"HTTP/1.1 200 OK") and answered.count(b"data: [DONE]") == 1
    await shared.recovered()


async def test_random_bodies_are_answered_and_harm_nobody(shared: FaultServer, fault_seed: int):
    """Whatever schemathesis makes of the OpenAPI document, valid or not: no 5xx, no closed connection, no loss."""
    url = f"http://127.0.0.1:{shared.port}"

    def drive(operation: APIOperation[Any, Any, Any, Any], mode: GenerationMode) -> None:
        @seed(fault_seed)
        @settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def answered(case: schemathesis.Case) -> None:
            response = case.call(timeout=PATIENCE)
            assert response.status_code < 500, response.text

        answered()

    def drive_all() -> None:
        for found in openapi.from_url(f"{url}/openapi.json").get_all_operations():
            operation = found.ok()
            if operation.method.upper() == "POST":
                drive(operation, GenerationMode.NEGATIVE)

    bystander = await shared.open(prompt_of(3), 200)
    await asyncio.to_thread(drive_all)
    undisturbed(await bystander.result(PATIENCE), prompt_of(3), 200)
    await shared.recovered()


NESTED = b"[" * 60_000 + b"]" * 60_000
HOSTILE: list[bytes] = [
    NESTED,
    b'{"prompt": ' + NESTED + b"}",
    b'{"messages": ' + NESTED + b"}",
    b'{"messages": [{"role": "user", "content": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}]}",
    b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": '
    + b'{"not":' * 3000
    + b"{}"
    + b"}" * 3000
    + b"}}}",
    b'{"messages": [{"role": "user", "content": "' + b"(" * 60_000 + b'"}], "stop": ["' + b"(" * 3000 + b'"]}',
    b'{"prompt": "\xff\xfe"}',
    '{"prompt": "磨坊"}'.encode("gbk"),
    b'{"prompt": "\\ud83d"}',
    b"\xef\xbb\xbf{}",
    b'{"prompt": "a\x00b"}',
    b'{"prompt": NaN}',
    b'{"logit_bias": {"1": 1e999}, "prompt": "x"}',
    b'{"prompt": [1e308]}',
    b'{"prompt": [99999999999]}',
    b"",
    b"null",
]


async def assert_all_refused(server: FaultServer, path: str, bodies: Sequence[bytes]) -> None:
    for body in bodies:
        reader, writer = await connect(server)
        writer.write(raw(path, body, "connection: close"))
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
        status = int(answer.split()[1])
        assert 400 <= status < 500, (body[:60], answer[:300])
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2])
    await server.recovered()


@pytest.mark.parametrize("path", [TEXT, CHAT, "/tokenize", "/detokenize"])
async def test_hostile_bodies_are_4xx_and_harm_nobody(shared: FaultServer, path: str):
    await assert_all_refused(shared, path, HOSTILE)


HOSTILE_SCHEMAS: list[bytes] = [
    b'{"type": "string", "pattern": "' + b"(" * 5000 + b")" * 5000 + b'"}',
    b'{"type": "string", "pattern": "^+[a-z]$"}',
    b'{"type": "string", "pattern": "(?<=x)a"}',
    b'{"items": ' * 3000 + b"{}" + b"}" * 3000,
    b'{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}',
]


@pytest.mark.parametrize(
    ("path", "asked"),
    [(TEXT, b'{"prompt": "x", '), (CHAT, b'{"messages": [{"role": "user", "content": "x"}], ')],
    ids=["text", "chat"],
)
async def test_hostile_schemas_are_4xx_and_harm_nobody(shared: FaultServer, path: str, asked: bytes):
    field = b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": '
    await assert_all_refused(shared, path, [asked + field + schema + b"}}}" for schema in HOSTILE_SCHEMAS])


async def test_cancelling_and_asking_again_at_once_never_confuses_two_requests(shared: FaultServer):
    for turn in range(40):
        first = await shared.open(prompt_of(turn), 800)
        await first.wait_events(turn % 3)
        first.close()
        second = await shared.open(prompt_of(turn), 10)
        undisturbed(await second.result(PATIENCE), prompt_of(turn), 10)
    await shared.recovered()


@pytest.mark.parametrize("shared_prefix", [0, 150])
async def test_16_at_once_each_get_their_own_answer(shared: FaultServer, shared_prefix: int):
    prefix = prompt_of(50, shared_prefix)
    prompts = [[*prefix, *prompt_of(number, 25)] for number in range(16)]
    results = await asyncio.gather(*(shared.check(prompt, 40) for prompt in prompts))
    assert len({result.token_ids for result in results}) == 16
    await shared.recovered()


async def read_to_end(sock: socket.socket) -> bytes:
    """What still comes before the connection ends, by whatever way."""
    received = bytearray()
    try:
        while data := await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
            received += data
    except ConnectionError:
        pass
    return bytes(received)


async def test_a_reader_that_stops_is_ended_and_one_that_is_slow_gets_everything(shared: FaultServer):
    def small_socket() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.setblocking(False)
        return made

    loop = asyncio.get_running_loop()
    slow, dead = small_socket(), small_socket()
    for sock, n in ((slow, 300), (dead, 900)):
        await loop.sock_connect(sock, ("127.0.0.1", shared.port))
        await loop.sock_sendall(sock, raw(TEXT, completion(prompt_of(8), n, logprobs=20), "connection: close"))
    received = bytearray()
    others = [asyncio.ensure_future(shared.check(prompt_of(number), 100)) for number in range(3)]
    while data := await loop.sock_recv(slow, 16384):
        received += data
        await asyncio.sleep(0.02)
    await asyncio.gather(*others)
    assert received.count(b"data: [DONE]") == 1
    slow.close()
    await eventually(lambda: shared.vitals().fds <= shared.baseline.fds)
    assert b"[DONE]" not in await read_to_end(dead)
    dead.close()
    await shared.recovered()


async def test_health_answers_in_the_midst_of_a_burst(shared: FaultServer):
    """300 requests and then a health check, all there before the server takes the first: it does not wait for them."""
    os.kill(shared.pid, signal.SIGSTOP)
    burst = [socket.create_connection(("127.0.0.1", shared.port)) for _ in range(300)]
    for sock in burst:
        sock.sendall(raw("/tokenize", {"content": "a word"}))
    health = asyncio.ensure_future(shared.status("/health"))
    await asyncio.sleep(0.05)
    os.kill(shared.pid, signal.SIGCONT)
    assert (await health)[0] == 200
    answered = len(select.select(burst, (), (), 0.0)[0])
    for sock in burst:
        assert (await asyncio.to_thread(sock.recv, 64)).startswith(b"HTTP/1.1 200 OK")
        sock.close()
    assert answered < 150
    await shared.recovered()


async def test_memory_is_flat_over_many_requests_and_cancels(shared: FaultServer):
    async def one(number: int) -> None:
        stream = await shared.open(prompt_of(number % 40), 12)
        if number % 3 == 0:
            await stream.wait_events(number % 5)
            stream.close()
        else:
            undisturbed(await stream.result(PATIENCE), prompt_of(number % 40), 12)

    for wave in range(12):
        await asyncio.gather(*(one(wave * 20 + number) for number in range(20)))
    assert shared.vitals().rss <= shared.baseline.rss + RSS_SLACK
    await shared.recovered()

"""What a client may not do to the server: huge or slow bodies, malformed HTTP, not reading, not being known."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from fake_text_engine import INFO, FakeTextEngine, Script
from raw_http import CHAT, TEXT, chat, exchange, head, parse_sse, post, read_chunked, read_head, read_reply
from wire_server import eventually, running


async def test_an_announced_huge_body_is_413_before_it_is_read():
    async with running(max_body_bytes=1000) as server:
        reply = await exchange(server.port, head("POST", CHAT, {"content-length": "5000000000"}))
    assert reply.status == 413 and reply.error["code"] == "payload_too_large"
    assert "1000" in reply.error["message"]


async def test_a_chunked_body_is_413_as_soon_as_it_is_too_large():
    async with running(max_body_bytes=1000) as server:
        chunk = b"200\r\n" + b" " * 512 + b"\r\n"
        request = head("POST", CHAT, {"transfer-encoding": "chunked"}) + chunk * 3
        reply = await exchange(server.port, request)
    assert reply.status == 413


async def test_a_large_body_within_the_limit_is_read():
    text = "x" * 300_000
    async with running() as server:
        reply = await exchange(server.port, post(TEXT, {"prompt": text}))
    assert reply.status == 200 and reply.json["usage"]["prompt_tokens"] == len(text)


async def test_a_refused_body_leaves_the_connection_in_order():
    async with running(max_body_bytes=1000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, b" " * 100_000) + post(CHAT, chat()))
        assert (await read_reply(reader)).status == 413
        assert (await read_reply(reader)).status == 200
        writer.close()


async def test_a_body_that_stops_arriving_is_408():
    async with running(client_timeout=0.05) as server:
        reply = await exchange(server.port, head("POST", CHAT, {"content-length": "100"}) + b"{")
    assert reply.status == 408 and reply.error["code"] == "request_timeout"


async def test_a_client_that_leaves_while_sending_its_body_is_no_request():
    async with running() as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("POST", CHAT, {"content-length": "100"}) + b"{")
        await writer.drain()
        writer.close()
        assert (await exchange(server.port, head("GET", "/health"))).status == 200
    assert not server.engine.submitted


async def test_a_head_that_never_ends_is_cut():
    async with running(header_timeout=0.05) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        writer.close()


async def test_a_head_that_is_too_large_is_431():
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        line = b"x-long: " + b"y" * 8000 + b"\r\n"
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n")
        for _ in range(200):
            writer.write(line)
            await writer.drain()
        reply = await read_head(reader)
        assert reply.status == 431
        writer.close()
        assert (await exchange(server.port, head("GET", "/health"))).status == 200


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: abc\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    ],
    ids=lambda raw: str(raw[:70]),
)
async def test_malformed_http_is_400_in_the_error_shape(request_bytes: bytes):
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request_bytes)
        reply = await read_reply(reader)
        assert reply.status == 400 and reply.error["type"] == "invalid_request_error"
        writer.close()
        assert (await exchange(server.port, head("GET", "/health"))).status == 200


@pytest.mark.parametrize("headers", [{"upgrade": "websocket", "connection": "upgrade"}, {"upgrade": "h2c"}])
async def test_upgrades_are_ignored(headers: dict[str, str]):
    async with running() as server:
        assert (await exchange(server.port, head("GET", "/health", headers))).status == 200


def slow_connection(port: int) -> socket.socket:
    """A client with a tiny receive buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    return sock


async def until_stuck(engine: FakeTextEngine) -> int:
    """Deltas taken from the engine once the server waits for its client."""
    await eventually(lambda: bool(engine.streams) and engine.streams[0].produced > 1)
    before = -1
    while engine.streams[0].produced != before:
        before = engine.streams[0].produced
        await asyncio.sleep(0.05)
    return before


async def test_a_reader_that_stops_is_waited_for_without_buffering_and_disturbs_nobody():
    engine = FakeTextEngine(Script(pieces=("x" * 4096,), endless=True))
    async with running(engine) as server:
        loop = asyncio.get_running_loop()
        sock = slow_connection(server.port)
        await loop.sock_sendall(sock, post(CHAT, chat(stream=True)))
        stuck_at = await until_stuck(engine)
        assert stuck_at * 4096 < 4 * 1024 * 1024
        engine.script = Script()
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200
        taken = 0
        while engine.streams[0].produced < stuck_at + 10:
            taken += len(await loop.sock_recv(sock, 65536))
        assert taken
        assert not engine.streams[0].cancelled.is_set()
        sock.close()
        await engine.streams[0].cancelled.wait()


async def test_a_slow_reader_gets_everything():
    pieces = tuple(f"{i:04d}" * 512 for i in range(500))
    async with running(FakeTextEngine(Script(pieces=pieces))) as server:
        loop = asyncio.get_running_loop()
        sock = slow_connection(server.port)
        await loop.sock_sendall(sock, post(CHAT, chat(stream=True)))
        await until_stuck(server.engine)
        reader, writer = await asyncio.open_connection(sock=sock)
        await read_head(reader)
        events = parse_sse(await read_chunked(reader))
        writer.close()
    assert events.done
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events.data) == "".join(pieces)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_takes_nothing_is_ended(stream: bool):
    pieces = ("x" * 4096,) * 1000
    engine = FakeTextEngine(Script(pieces=pieces, endless=stream))
    async with running(engine, client_timeout=0.2) as server:
        sock = slow_connection(server.port)
        await asyncio.get_running_loop().sock_sendall(sock, post(CHAT, chat(stream=stream)))
        await eventually(lambda: bool(engine.streams))
        connections = server.lifecycle._server.server_state.connections
        await eventually(lambda: server.open_exchanges() == 0 and not connections)
        assert engine.streams[0].cancelled.is_set() == stream
        sock.close()


async def test_health_answers_among_300_idle_streams():
    gate = asyncio.Event()
    engine = FakeTextEngine(Script(start_gate=gate))
    async with running(engine) as server:
        writers = []
        for _ in range(300):
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(CHAT, chat(stream=True)))
            writers.append(writer)
        await eventually(lambda: len(engine.streams) == 300)
        for path in ("/health", "/ready", "/v1/models"):
            assert (await exchange(server.port, head("GET", path))).status == 200
        for writer in writers:
            writer.close()
        await eventually(lambda: server.open_exchanges() == 0)


KEY = "s3cret-key"


@pytest.mark.parametrize(
    ("headers", "passes"),
    [
        ({"authorization": f"Bearer {KEY}"}, True),
        ({"authorization": f"bearer  {KEY} "}, True),
        ({"x-api-key": KEY}, True),
        ({"authorization": "Bearer wrong", "x-api-key": KEY}, True),
        ({}, False),
        ({"authorization": KEY}, False),
        ({"authorization": f"Basic {KEY}"}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": f"Bearer {KEY}x"}, False),
        ({"x-api-key": "é"}, False),
    ],
    ids=str,
)
async def test_the_key_opens_every_route(headers: dict[str, str], passes: bool):
    async with running(api_key=KEY) as server:
        for method, path in (("GET", "/v1/models"), ("GET", "/"), ("GET", "/version"), ("GET", "/openapi.json")):
            reply = await exchange(server.port, head(method, path, headers))
            assert reply.status == (200 if passes else 401), path
        reply = await exchange(server.port, post(CHAT, chat(), headers))
        assert reply.status == (200 if passes else 401)
        if not passes:
            assert reply.error["code"] == "invalid_api_key"
            assert not server.engine.submitted
            assert (await exchange(server.port, head("GET", "/nothing", headers))).status == 401


async def test_health_and_ready_need_no_key():
    async with running(api_key=KEY) as server:
        for path in ("/health", "/ready"):
            assert (await exchange(server.port, head("GET", path))).status == 200


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "a"}, {"prompt_cache_key": "a"}),
        ({"cache_salt": "a", "prompt_cache_key": "b"}, {"cache_salt": 'a","b'}),
        ({"cache_salt": "default"}, {}),
    ],
    ids=str,
)
async def test_namespaces_never_meet(one: dict[str, str], other: dict[str, str]):
    async with running() as open_server, running(api_key=KEY) as keyed_server:
        for fields in (one, other, one):
            await exchange(open_server.port, post(CHAT, chat(**fields)))
            await exchange(keyed_server.port, post(CHAT, chat(**fields), {"x-api-key": KEY}))
    names = [[options.namespace for _, _, options in s.engine.submitted] for s in (open_server, keyed_server)]
    for first, second, again in names:
        assert first == again != second
    assert len({name for found in names for name in found}) == 4
    assert KEY not in str(names)


async def test_ready_tells_the_state_and_health_does_not_care():
    async with running() as server:
        for state in ("loading", "restarting", "stalled", "draining", "failed"):
            server.engine.state = state
            ready = await exchange(server.port, head("GET", "/ready"))
            assert (ready.status, ready.json["status"]) == (503, state) and ready.json["reason"]
            assert (await exchange(server.port, head("GET", "/health"))).status == 200
        server.engine.state = "ready"
        assert (await exchange(server.port, head("GET", "/ready"))).status == 200


async def test_before_the_model_is_loaded_routes_answer():
    gate = asyncio.Event()
    engine = FakeTextEngine(Script(submit_gate=gate), info=None, state="loading")
    async with running(engine) as server:
        models = await exchange(server.port, head("GET", "/v1/models"))
        assert models.json["data"][0]["meta"] is None
        assert (await exchange(server.port, post("/detokenize", {"tokens": [65]}))).json["content"] == "A"
        assert (await exchange(server.port, head("GET", "/version"))).json["library"] is None
        waiting = asyncio.ensure_future(exchange(server.port, post(CHAT, chat())))
        await eventually(lambda: bool(engine.submitted))
        engine.info = INFO
        gate.set()
        early = (await waiting).json["system_fingerprint"]
        late = (await exchange(server.port, post(CHAT, chat()))).json["system_fingerprint"]
        assert early == late


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/version", "/v1/models"])
async def test_head_has_no_body(path: str):
    async with running() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head("HEAD", path) + head("GET", path))
        empty = await read_reply(reader, method="HEAD")
        full = await read_reply(reader)
        writer.close()
    assert empty.status == full.status == 200
    assert empty.headers["content-length"] == full.headers["content-length"] == str(len(full.body))
    assert json.loads(full.body)


async def test_models_suit_both_sdks():
    async with running() as server:
        listing = (await exchange(server.port, head("GET", "/v1/models"))).json
    entry = listing["data"][0]
    assert {"id", "object", "created", "owned_by", "type", "display_name", "created_at", "meta"} == set(entry)
    assert listing["first_id"] == listing["last_id"] == entry["id"] and listing["has_more"] is False


@pytest.mark.parametrize(
    ("sent", "kept"),
    [("abc-1.2:3_4", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False), ("", False)],
)
async def test_request_ids_are_echoed_when_they_are_sane(sent: str, kept: bool):
    async with running() as server:
        replies = [await exchange(server.port, post(CHAT, chat(), {"x-request-id": sent})) for _ in range(2)]
        refused = await exchange(server.port, post(CHAT, b"x", {"x-request-id": sent}))
    assert (replies[0].headers["x-request-id"] == sent) == kept
    assert (refused.headers["x-request-id"] == sent) == kept
    ids = [reply.json["id"] for reply in replies]
    assert ids[0] != ids[1] and all(one.startswith("chatcmpl-") for one in ids)
    assert all(one.startswith(f"chatcmpl-{sent}-") for one in ids) or not kept
    assert [options.request_id for _, _, options in server.engine.submitted] == ids


async def test_cors_for_the_origins_of_the_settings():
    asks = {"origin": "https://a.test", "access-control-request-method": "POST"}
    async with running(api_key=KEY) as everyone, running(cors_origins="https://b.test") as one:
        preflight = await exchange(everyone.port, head("OPTIONS", CHAT, asks))
        refused = await exchange(everyone.port, post(CHAT, chat(), {"origin": "https://a.test"}))
        other = await exchange(one.port, head("GET", "/v1/models", {"origin": "https://a.test"}))
        named = await exchange(one.port, head("GET", "/v1/models", {"origin": "https://b.test"}))
    async with running(cors_origins="") as nobody:
        none = await exchange(nobody.port, head("GET", "/v1/models", {"origin": "https://a.test"}))
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == "*"
    assert refused.status == 401 and refused.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in other.headers
    assert named.headers["access-control-allow-origin"] == "https://b.test"
    assert "access-control-allow-origin" not in none.headers


@pytest.mark.parametrize(("asked", "expected"), [(None, None), (5.0, 5.0), (10_000.0, 600.0)])
async def test_a_client_may_ask_for_less_time_not_for_more(asked: float | None, expected: float | None):
    async with running() as server:
        await exchange(server.port, post(CHAT, chat(timeout=asked)))
    assert server.engine.submitted[0][2].timeout == expected


async def test_every_parameter_reaches_the_engine():
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.6,
        "min_p": 0.1,
        "seed": 2**64 - 1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repeat_penalty": 1.25,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 9,
        "stop_token_ids": [3],
        "logit_bias": {"5": -100, "6": 1.5},
    }
    async with running() as server:
        await exchange(server.port, post(CHAT, chat(**fields, stop="END", priority=-3)))
        await exchange(server.port, post(CHAT, chat(stop=["a", "b"])))
    _, params, options = server.engine.submitted[0]
    expected = fields | {"repetition_penalty": 1.25, "stop_token_ids": (3,), "logit_bias": ((5, -100.0), (6, 1.5))}
    expected.pop("repeat_penalty")
    assert {name: getattr(params, name) for name in expected} == expected
    assert (list(options.stop), options.priority, options.n) == (["END"], -3, 1)
    assert list(server.engine.submitted[1][2].stop) == ["a", "b"]

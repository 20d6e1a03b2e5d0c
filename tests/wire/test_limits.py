"""Limits over HTTP: connections, requests in flight by key, and what of a key reaches the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_text_engine import FakeTextEngine, Script
from raw_http import CHAT, chat, exchange, head, post, read_chunk, read_head, read_reply, reset
from wire_server import eventually, running

from millpond.server.keys import digest_of
from millpond.server.limits import SPARE_CONNECTIONS

ENDLESS = Script(endless=True, delay=0.005)


def keys_file(tmp_path: Path, *entries: str) -> str:
    path = tmp_path / "keys.toml"
    path.write_text("".join(_entry(*entry.split(None, 1)) for entry in entries))
    return str(path)


def _entry(key: str, fields: str) -> str:
    return f'[[key]]\nsha256="{digest_of(key.encode()).hex()}"\n{fields}\n'


async def test_each_key_has_its_namespace_and_its_highest_priority(tmp_path: Path):
    path = keys_file(tmp_path, 'ka name="a"\npriority=2', 'kb name="b"\nnamespace="a"', 'kc name="c"')
    async with running(keys_file=path, api_key="own") as server:
        for key, fields in (
            ("ka", {"priority": 9}),
            ("ka", {}),
            ("kb", {"priority": 9}),
            ("kc", {"priority": -3}),
            ("own", {"priority": 9}),
        ):
            assert (await exchange(server.port, post(CHAT, chat(**fields), {"x-api-key": key}))).status == 200
        assert (await exchange(server.port, post(CHAT, chat(), {"x-api-key": "kd"}))).status == 401
    options = [given for _, _, given in server.engine.submitted]
    assert [given.priority for given in options] == [2, 2, 0, -3, 9]
    names = [given.namespace for given in options]
    assert names[0] == names[1] == names[2] and len(set(names)) == 3


@pytest.mark.parametrize("by_reset", [True, False])
async def test_one_request_too_many_of_a_key_is_429_and_others_do_not_notice(tmp_path: Path, by_reset: bool):
    path = keys_file(tmp_path, 'ka name="a"\nmax_in_flight=2', 'kb name="b"')
    async with running(FakeTextEngine(ENDLESS), keys_file=path, max_in_flight=1) as server:
        streams = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(post(CHAT, chat(stream=True), {"x-api-key": "ka"}))
            assert (await read_head(reader)).status == 200
            await read_chunk(reader)
            streams.append((reader, writer))
        refused = await exchange(server.port, post(CHAT, chat(), {"x-api-key": "ka"}))
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
        assert (await exchange(server.port, head("GET", "/v1/models", {"x-api-key": "ka"}))).status == 200
        server.engine.script = Script()
        assert (await exchange(server.port, post(CHAT, chat(), {"x-api-key": "kb"}))).status == 200
        reset(streams[0][1]) if by_reset else streams[0][1].close()
        await eventually(lambda: server.open_exchanges() == 1)
        assert (await exchange(server.port, post(CHAT, chat(), {"x-api-key": "ka"}))).status == 200
        streams[1][1].close()


async def test_bad_bodies_do_not_use_up_the_limit():
    async with running(max_in_flight=1) as server:
        for _ in range(3):
            assert (await exchange(server.port, post(CHAT, b"{"))).status == 400
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200


async def test_beyond_the_connections_only_health_answers():
    async with running(max_connections=2) as server:
        first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
        for reader, writer in first:
            writer.write(head("GET", "/health"))
            assert (await read_reply(reader)).status == 200
        for path in ("/health", "/ready"):
            assert (await exchange(server.port, head("GET", path))).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(post(CHAT, chat()))
        refused = await read_reply(reader)
        assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (503, "not_ready", "1")
        assert await reader.read() == b"", "it was not closed"
        writer.close()
        assert not server.engine.submitted
        first[0][1].close()
        await eventually(lambda: server.lifecycle.connections == 1)
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200
        first[1][1].close()


async def test_far_beyond_the_connections_nobody_is_heard():
    async with running(max_connections=1) as server:
        held = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(1 + SPARE_CONNECTIONS)]
        for reader, writer in held:
            writer.write(head("GET", "/health"))
            assert (await read_reply(reader)).status == 200
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        for _, other in [*held, (reader, writer)]:
            other.close()
        await eventually(lambda: not server.lifecycle.connections)
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200

"""From a token to the socket past the request's task: taken while nothing waits, and nothing is lost when it does."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fake_stack import whole_stack
from raw_http import TEXT, exchange, parse_sse, post, read_chunked, read_head
from wire_server import eventually

from millpond.server.adapters.completions import CompletionChunkEncoder
from millpond.server.protocol import DirectBody

ASKED = {"prompt": "once upon", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


def text_of(body: bytes, index: int = 0) -> str:
    choices = [choice for event in parse_sse(body).data for choice in event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was written directly."""
    written: list[bytes] = []
    write = DirectBody.write

    def noted(self: DirectBody, data: bytes) -> None:
        written.append(data)
        write(self, data)

    monkeypatch.setattr(DirectBody, "write", noted)
    return written


@pytest.mark.parametrize("n", [1, 3])
async def test_parts_go_directly_and_the_whole_is_the_same(direct: list[bytes], n: int):
    async with whole_stack(kv_cells=1024, max_running=4) as stack:
        asked = ASKED | {"n": n, "seed": 5, "temperature": 1}
        whole = await exchange(stack.port, post(TEXT, asked))
        assert direct == []
        streamed = await exchange(stack.port, post(TEXT, asked | {"stream": True}))
    events = parse_sse(streamed.body)
    assert events.done
    for index in range(n):
        assert text_of(streamed.body, index) == whole.json["choices"][index]["text"]
    assert len(direct) > len(events.data) / 2


async def test_prompts_that_are_merged_go_through_their_task(direct: list[bytes]):
    async with whole_stack(kv_cells=1024, max_running=4) as stack:
        streamed = await exchange(stack.port, post(TEXT, ASKED | {"prompt": ["once", "upon"], "stream": True}))
    assert parse_sse(streamed.body).done
    assert direct == []


@pytest.mark.slow
async def test_a_client_that_does_not_read_gets_everything_later(direct: list[bytes]):
    asked = ASKED | {"max_tokens": 700, "logprobs": 5, "return_token_ids": True}
    async with whole_stack(kv_cells=1024, max_running=2) as stack:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, ("127.0.0.1", stack.port))
        await loop.sock_sendall(sock, post(TEXT, asked | {"stream": True}))
        await eventually(lambda: len(direct) > 5 and stack.llm.client.live_sequences == 0)
        reader, writer = await asyncio.open_connection(sock=sock)
        await read_head(reader)
        body = await read_chunked(reader)
        writer.close()
        whole = await exchange(stack.port, post(TEXT, asked))
    assert parse_sse(body).done
    assert text_of(body) == whole.json["choices"][0]["text"]
    ids = [token for event in parse_sse(body).data for c in event["choices"] for token in c.get("token_ids", [])]
    assert ids == whole.json["choices"][0]["token_ids"]


async def test_a_fault_on_the_way_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch, direct: list[bytes]):
    encode = CompletionChunkEncoder.delta

    def failing(self: CompletionChunkEncoder, delta):
        if len(direct) >= 3:
            monkeypatch.undo()
            raise ValueError("a bug")
        return encode(self, delta)

    async with whole_stack(kv_cells=1024, max_running=4) as stack:
        monkeypatch.setattr(CompletionChunkEncoder, "delta", failing)
        streamed = await exchange(stack.port, post(TEXT, ASKED | {"stream": True}))
        events = parse_sse(streamed.body)
        assert not events.done and "bug" not in streamed.body.decode()
        assert "error" in events.data[-1]
        await eventually(lambda: stack.llm.client.live_sequences == 0)
        assert stack.llm.status.restarts == 0
        assert (await exchange(stack.port, post(TEXT, ASKED))).status == 200

"""CPU per streamed chunk in the server process: encoding alone, and the whole path down to a loopback socket.

Knows the server package only; no model. What it measures is taken from the engine's cores, so it has a budget: 30 us.
Run: python benchmarks/sse_chunk_cost.py
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "wire"))
from fake_text_engine import FakeTextEngine, Script
from raw_http import CHAT, chat, post
from wire_server import running

from millpond.async_llm import OutputDelta
from millpond.outputs import TokenLogprobs
from millpond.server.adapters.chat import ChatChunkEncoder, chat_plan
from millpond.server.adapters.plan import Caller
from millpond.server.adapters.reply import ReplyHead
from millpond.server.schemas.chat import ChatRequest

N_CHUNKS = 20_000
ROUNDS = 5


def encode_cost(fields: dict, delta: OutputDelta) -> float:
    """Microseconds to encode one chunk."""
    body = ChatRequest.model_validate(chat(**fields))
    plan = chat_plan(body, Caller("chatcmpl-x", "", 0.0, "model"))
    encoder = ChatChunkEncoder(ReplyHead("chatcmpl-x", 1, "model", "fp_x"), plan, lambda token_id: b" word")
    return best(lambda: [encoder.delta(delta) for _ in range(N_CHUNKS)]) / N_CHUNKS * 1e6


def best(run: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


class Ready(FakeTextEngine):
    """Deltas that cost nothing to make, each after a turn of the loop as when they come from a channel."""

    async def submit(self, prompt, params, options):
        stream = await super().submit(prompt, params, options)
        stream_class = type("Fast", (type(stream),), {"__aiter__": _deltas})
        stream.__class__ = stream_class
        return stream


async def _deltas(self) -> AsyncIterator[OutputDelta]:
    delta = OutputDelta(0, " word", (5,))
    for _ in range(N_CHUNKS):
        await asyncio.sleep(0)
        yield delta
    yield self._end(0, N_CHUNKS, self._script.reason)


async def bare_cost() -> float:
    """Process CPU of the loop turns alone, a chunk, in us: subtracted from the whole path."""
    start = time.process_time()
    for _ in range(N_CHUNKS):
        await asyncio.sleep(0)
    return (time.process_time() - start) / N_CHUNKS * 1e6


async def path_cost() -> list[float]:
    """Thread CPU of this loop a chunk, in us; the reader is another process."""
    found = []
    async with running(Ready(Script())) as server:
        for _ in range(ROUNDS):
            reader = await asyncio.create_subprocess_exec(
                sys.executable, "-c", READER, str(server.port), stdin=asyncio.subprocess.PIPE
            )
            start = time.process_time()
            await reader.communicate(post(CHAT, chat(stream=True)))
            found.append((time.process_time() - start) / N_CHUNKS * 1e6)
    return found


READER = """
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
s.sendall(sys.stdin.buffer.read())
tail = b""
while b"[DONE]" not in tail:
    got = s.recv(1 << 20)
    if not got: break
    tail = (tail + got)[-64:]
"""


def main() -> None:
    word = OutputDelta(0, " word", (5,), (TokenLogprobs(-0.5, tuple((i, -1.0 * i) for i in range(5))),))
    print(f"encode, text only:      {encode_cost({}, word):6.2f} us")
    print(f"encode, non-ASCII text: {encode_cost({}, OutputDelta(0, ' wörd', (5,))):6.2f} us")
    print(f"encode, token ids:      {encode_cost({'return_token_ids': True}, word):6.2f} us")
    print(f"encode, 5 logprobs:     {encode_cost({'logprobs': True, 'top_logprobs': 5}, word):6.2f} us")
    whole, turns = uvloop.run(path_cost()), uvloop.run(bare_cost())
    print(
        f"engine stream -> socket: {min(whole):6.2f} us (median {statistics.median(whole):.2f}), loop turn {turns:.2f}"
    )


if __name__ == "__main__":
    main()

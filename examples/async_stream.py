"""Two answers streamed at the same time in asyncio, one of them left early. The engine is a process of its own.

python examples/async_stream.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from millpond import AsyncLLM, ChatInput, RequestOptions, SamplingParams, open_async_llm
from millpond.types import RequestId


async def ask(llm: AsyncLLM, name: str, question: str, limit: int) -> None:
    """Prints the answer's parts as they come, and leaves after `limit` of them."""
    prompt = ChatInput([{"role": "user", "content": question}])
    stream = await llm.submit(prompt, SamplingParams(temperature=0.0, max_tokens=40), RequestOptions(RequestId(name)))
    parts = 0
    async for delta in stream:
        parts += 1
        print(f"{name} {delta.text!r}")
        if delta.finish is not None:
            print(f"{name} ended: {delta.finish.reason.value}, {delta.finish.completion_tokens} tokens")
        elif parts == limit:
            stream.cancel()


async def main(model: str = "smollm2-135m") -> None:
    # stream_interval_ms=0: a part for every token, however fast they come
    async with open_async_llm(model, max_running=4, stream_interval_ms=0) as llm:
        await asyncio.gather(
            ask(llm, "whole", "Why do ducks float?", limit=1000),
            ask(llm, "early", "Tell me a long story.", limit=5),
        )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))

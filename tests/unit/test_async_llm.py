"""AsyncLLM and its streams over a scripted engine process and the fake vocabulary."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import N_VOCAB, undisturbed

from millpond.async_llm import (
    AsyncLLM,
    ChatInput,
    OutputDelta,
    RequestOptions,
    RequestStream,
    TextInput,
    TextTools,
    TokenInput,
    output_seed,
)
from millpond.config import EngineConfig, QueueConfig
from millpond.engine_client.client import EngineClient
from millpond.engine_client.supervisor import EngineCommand, SupervisorTiming
from millpond.errors import ContextLengthExceeded, EngineFailed, InvalidParameter, NotReady, QueueFull
from millpond.outputs import TokenLogprobs
from millpond.request import Request
from millpond.runtime.fake_vocab import FakeVocab
from millpond.sampling_params import SamplingParams
from millpond.text.input_processor import InputProcessor
from millpond.types import FinishReason, RequestId

SCRIPT = Path(__file__).with_name("scripted_engine.py")
ROOT = Path(__file__).parents[2]
FAST = SupervisorTiming(stall_timeout=5.0, first_backoff=0.01, max_failed_loads=2, stop_grace=0.25, tick=0.02)
VOCAB = FakeVocab(N_VOCAB)
PROMPT = TokenInput((300, 301, 302))


@asynccontextmanager
async def serving(plan: dict[str, Any], **queue: Any) -> AsyncIterator[AsyncLLM]:
    client = EngineClient(
        EngineConfig(max_running=4),
        QueueConfig(**queue),
        eog_ids=frozenset({2}),
        clock=time.monotonic,
        command=EngineCommand((sys.executable, str(SCRIPT), json.dumps(plan)), {**os.environ, "PYTHONPATH": str(ROOT)}),
        timing=FAST,
    )
    tools = TextTools(
        lambda limit: InputProcessor(VOCAB, VOCAB.chat_template, limit, lambda: datetime(2026, 1, 1, tzinfo=UTC)),
        VOCAB.piece,
        frozenset({2}),
    )
    seeds = itertools.count(1000)
    llm = AsyncLLM(client, tools, clock=time.monotonic, draw_seed=lambda: next(seeds), request_timeout=600.0)
    llm.start()
    try:
        async with asyncio.timeout(20.0):
            yield llm
    finally:
        await llm.close()


def options(**fields: Any) -> RequestOptions:
    return RequestOptions(RequestId("r"), **fields)


def expected(n: int, seed: int, prompt: tuple[int, ...] = (300, 301, 302)) -> list[int]:
    return undisturbed(Request(RequestId("r"), prompt, SamplingParams(), n, seed, 0.0))


def text_of(ids: list[int]) -> str:
    return b"".join(map(VOCAB.piece, ids)).decode("utf-8", "replace")


async def read(stream: RequestStream, n: int = 1) -> list[list[OutputDelta]]:
    outputs: list[list[OutputDelta]] = [[] for _ in range(n)]
    async for delta in stream:
        outputs[delta.index].append(delta)
    return outputs


def joined(deltas: list[OutputDelta]) -> tuple[list[int], str]:
    return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)


async def test_a_stream_brings_every_id_and_its_text_and_one_finish():
    async with serving({}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=50, seed=7), options())
        [deltas] = await read(stream)
        assert joined(deltas) == (expected(50, 7), text_of(expected(50, 7)))
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.completion_tokens, finish.stop_string) == (FinishReason.LENGTH, 50, None)
        assert finish.usage.cached_tokens == 1
        assert stream.prompt_tokens == 3
        with pytest.raises(StopAsyncIteration):
            await anext(aiter(stream))


async def test_text_and_chat_prompts_are_rendered_and_an_omitted_seed_is_drawn():
    async with serving({}) as llm:
        chat = ChatInput([{"role": "user", "content": "hello"}])
        for prompt, seed in ((TextInput("hello there"), 1000), (chat, 1001)):
            ids = tuple(await llm.tokenize(prompt))
            [deltas] = await read(await llm.submit(prompt, SamplingParams(max_tokens=5), options()))
            assert joined(deltas)[0] == expected(5, seed, ids)


async def test_n_outputs_differ_and_the_first_has_the_requests_seed():
    async with serving({}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=20, seed=7), options(n=3))
        outputs = await read(stream, 3)
        assert [joined(deltas)[0] for deltas in outputs] == [expected(20, output_seed(7, index)) for index in range(3)]
        assert output_seed(7, 0) == 7
        assert len({output_seed(seed, index) for seed in (7, 8) for index in range(3)}) == 6


async def test_a_slow_reader_gets_larger_deltas_and_loses_nothing():
    async with serving({}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=300, seed=7), options())
        first = await anext(aiter(stream))
        while llm.client.live_sequences:
            await asyncio.sleep(0.01)
        rest = [delta async for delta in stream]
        assert len(rest) == 1
        assert joined([first, *rest])[0] == expected(300, 7)


async def test_a_cancelled_anext_loses_nothing():
    async with serving({"step_seconds": 0.01}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=20, seed=7), options())
        deltas: list[OutputDelta] = []
        while not deltas or deltas[-1].finish is None:
            try:
                async with asyncio.timeout(0.004):
                    deltas.append(await anext(stream))
            except TimeoutError:
                continue
        assert joined(deltas)[0] == expected(20, 7)


async def test_a_stop_string_ends_the_sequence_where_it_is_complete():
    ids = expected(40, 7)
    before, stop, length = stop_inside(ids)
    async with serving({"step_seconds": 0.002}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=40, seed=7), options(stop=[stop]))
        [deltas] = await read(stream)
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.completion_tokens, finish.stop_string) == (FinishReason.STOP, length, stop)
        assert joined(deltas) == (ids[:length], before)
        assert llm.client.live_sequences == 0


async def test_a_stop_string_read_after_the_end_still_cuts():
    ids = expected(40, 7)
    before, stop, length = stop_inside(ids)
    async with serving({}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=40, seed=7), options(stop=[stop]))
        while llm.client.live_sequences:
            await asyncio.sleep(0.01)
        [deltas] = await read(stream)
        finish = deltas[-1].finish
        assert finish is not None
        assert (finish.reason, finish.completion_tokens) == (FinishReason.STOP, length)
        assert joined(deltas) == (ids[:length], before)


def stop_inside(ids: list[int]) -> tuple[str, str, int]:
    """(text before it, a stop string, tokens up to its completion): the text of two neighbours from token 10 on."""
    for start in range(10, len(ids) - 2):
        stop = text_of(ids[start : start + 2])
        before = text_of(ids[:start])
        if stop.isascii() and len(stop) > 1 and text_of(ids).find(stop) == len(before):
            length = next(n for n in range(1, len(ids)) if stop in text_of(ids[:n]))
            return before, stop, length
    raise AssertionError("the scripted output has no text to stop at")


async def test_logprobs_go_with_their_tokens():
    async with serving({}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=30, seed=7, logprobs=0), options())
        [deltas] = await read(stream)
        logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
        assert logprobs == [TokenLogprobs(-float(index)) for index in range(30)]
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.SHUTDOWN])
async def test_cancel_ends_every_output(reason: FinishReason):
    async with serving({"step_seconds": 0.002}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=1000), options(n=2))
        await anext(aiter(stream))
        stream.cancel(reason)
        stream.cancel()
        outputs = await read(stream, 2)
        finishes = [deltas[-1].finish for deltas in outputs]
        assert [finish.reason for finish in finishes if finish is not None] == [reason, reason]
        stream.cancel()
        assert llm.client.losses == 0


async def test_a_dropped_stream_cancels_its_request():
    async with serving({"step_seconds": 0.002}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=1000), options())
        await anext(aiter(stream))
        del stream
        gc.collect()
        while llm.client.live_sequences:
            await asyncio.sleep(0.01)


async def test_an_engine_death_is_only_a_pause():
    async with serving({"faults": {"1": [[10, "crash"]]}}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=30, seed=7), options())
        [deltas] = await read(stream)
        assert joined(deltas) == (expected(30, 7), text_of(expected(30, 7)))
        assert llm.status.restarts == 1


async def test_a_lost_engine_is_a_finish_in_a_stream_and_an_error_before_it():
    gone = {str(epoch): "setup_error" for epoch in range(2, 9)}
    async with serving({"faults": {"1": [[5, "crash"]]}, "load": gone}) as llm:
        [deltas] = await read(await llm.submit(PROMPT, SamplingParams(max_tokens=30, seed=7), options()))
        finish = deltas[-1].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert finish.message != ""
        assert joined(deltas)[0] == expected(30, 7)[:4]
        assert llm.status.state == "failed"
        with pytest.raises(EngineFailed):
            await llm.submit(PROMPT, SamplingParams(), options())


async def test_max_tokens_is_what_fits():
    async with serving({}) as llm:
        prompt = TokenInput((300,) * 2040)
        for asked in (None, 5000):
            [deltas] = await read(await llm.submit(prompt, SamplingParams(max_tokens=asked), options()))
            assert len(joined(deltas)[0]) == 8
        [deltas] = await read(await llm.submit(TokenInput((300,) * 2047), SamplingParams(), options()))
        assert len(joined(deltas)[0]) == 1
        with pytest.raises(ContextLengthExceeded) as exceeded:
            await llm.submit(TokenInput((300,) * 2048), SamplingParams(), options())
        assert (exceeded.value.prompt_tokens, exceeded.value.limit) == (2048, 2048)


@pytest.mark.parametrize(
    ("prompt", "params", "stop"),
    [
        (PROMPT, SamplingParams(stop_token_ids=(N_VOCAB,)), ()),
        (PROMPT, SamplingParams(logit_bias=((N_VOCAB, 1.0),)), ()),
        (PROMPT, SamplingParams(), ("",)),
        (TokenInput((N_VOCAB,)), SamplingParams(), ()),
        (TokenInput(()), SamplingParams(), ()),
        (TextInput("\ud83d"), SamplingParams(), ()),
    ],
)
async def test_bad_requests_are_refused_before_anything_is_accepted(
    prompt: TextInput | TokenInput, params: SamplingParams, stop: tuple[str, ...]
):
    async with serving({}) as llm:
        with pytest.raises(InvalidParameter):
            await llm.submit(prompt, params, options(stop=stop))
        assert llm.client.live_sequences == 0


async def test_requests_wait_for_the_first_load_and_only_so_many():
    async with serving({"load": {"1": "wait"}}, queue_requests=1) as llm:
        assert llm.status.state == "loading"
        tasks = [
            asyncio.create_task(llm.submit(PROMPT, SamplingParams(max_tokens=5, seed=7), options())) for _ in range(6)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [RequestStream] * 5 + [QueueFull]
        for stream in results[:5]:
            assert isinstance(stream, RequestStream)
            assert joined((await read(stream))[0])[0] == expected(5, 7)


async def test_a_load_longer_than_the_request_may_take_is_not_ready():
    async with serving({"load": {"1": "hang"}}) as llm:
        with pytest.raises(NotReady):
            await llm.submit(PROMPT, SamplingParams(), options(timeout=0.05))


async def test_n_outputs_are_accepted_together_or_not_at_all():
    async with serving({"step_seconds": 0.005}, queue_requests=1) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=1000), options(n=4))
        await anext(aiter(stream))
        with pytest.raises(QueueFull):
            await llm.submit(PROMPT, SamplingParams(), options(n=2))
        assert llm.client.live_sequences == 4
        stream.cancel()


async def test_a_deadline_ends_a_stream():
    async with serving({"load": {"2": "hang"}, "faults": {"1": [[5, "crash"]]}}) as llm:
        [deltas] = await read(await llm.submit(PROMPT, SamplingParams(max_tokens=50), options(timeout=0.3)))
        finish = deltas[-1].finish
        assert finish is not None
        assert finish.reason is FinishReason.DEADLINE
        assert llm.client.losses == 0


async def test_drain_lets_streams_finish_and_refuses_new_ones():
    async with serving({"step_seconds": 0.002}) as llm:
        stream = await llm.submit(PROMPT, SamplingParams(max_tokens=40, seed=7), options())
        drained = asyncio.create_task(llm.drain(10.0))
        await asyncio.sleep(0)
        assert llm.status.state == "draining"
        with pytest.raises(NotReady):
            await llm.submit(PROMPT, SamplingParams(), options())
        [deltas] = await read(stream)
        await drained
        assert joined(deltas)[0] == expected(40, 7)


async def test_tokenize_and_detokenize_round_trip_and_check_ids():
    async with serving({}) as llm:
        ids = await llm.tokenize(TextInput("hello there"))
        assert await llm.detokenize(ids) == "hello there"
        assert b"".join(map(llm.piece, ids)) == b"hello there"
        with pytest.raises(InvalidParameter):
            await llm.detokenize([N_VOCAB])

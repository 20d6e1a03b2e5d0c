"""During and after 100 mixed requests that do not fit at once the metrics agree with each other and every usage.

Idle for ten seconds after them, no figure moves. Case 72 of the public reports: formats that break, counters that fall,
gauges that vanish.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Sequence

import pytest
from fake_stack import Stack, whole_stack
from prometheus_client.parser import text_string_to_metric_families
from raw_http import CHAT, TEXT, exchange, head, parse_sse, post

pytestmark = pytest.mark.slow
IDLE_SECONDS = 10
Values = dict[str, float]


async def scrape(stack: Stack) -> Values:
    reply = await exchange(stack.port, head("GET", "/metrics"))
    values: Values = {}
    for family in text_string_to_metric_families(reply.body.decode()):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items())]
            values[",".join([sample.name, *labels])] = sample.value
    return values


async def scrape_all_along(stack: Stack, pages: list[Values]) -> None:
    """Until it is cancelled."""
    while True:
        pages.append(await scrape(stack))
        await asyncio.sleep(0.02)


def only_grows(name: str) -> bool:
    return name.split(",")[0].endswith(("_total", "_count", "_sum", "_bucket"))


def check_series(pages: Sequence[Values]) -> None:
    """What grows never falls, and each page by itself makes sense (case 72 of the public reports)."""
    for before, after in itertools.pairwise(pages):
        assert not [name for name, value in before.items() if only_grows(name) and after[name] < value]
        assert set(before) <= set(after), "a series may come, and none may go"
    for page in pages:
        cells = {name: value for name, value in page.items() if name.startswith("millpond_kv_cells,")}
        assert len(cells) == 4 and min(cells.values()) >= 0.0
        assert sum(cells.values()) == page["millpond_kv_pool_cells"]
        accepted, finished = page["millpond_requests_accepted_total"], total(page, "millpond_requests_finished_total")
        assert accepted == finished + total(page, "millpond_requests")
        prompt = page["millpond_prompt_tokens_total"]
        assert prompt == page["millpond_prompt_tokens_computed_total"] + page["millpond_prompt_tokens_cached_total"]
        assert total(page, "millpond_preemptions_over_total") <= total(page, "millpond_preemptions_total")
        assert total(page, "millpond_parked_seconds_total") >= 0.0


def total(values: Values, name: str) -> float:
    return sum(value for key, value in values.items() if key.split(",")[0] == name)


async def ask(stack: Stack, number: int, rng: random.Random) -> dict[str, int]:
    """One request of some kind; the sums of its usage, the prompt counted for each of its outputs."""
    prompt = f"{number % 5} shared beginning of a prompt " * rng.randint(1, 2) + str(number)
    body = {"max_tokens": rng.randint(1, 120), "ignore_eos": True, "stream": number % 2 == 0}
    if number % 3 == 0:
        body |= {"messages": [{"role": "user", "content": prompt}]}
        path = CHAT
    else:
        body |= {"prompt": prompt, "n": rng.randint(1, 2)}
        path = TEXT
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if number % 7 == 0:
        body["stop"] = "e"
    await asyncio.sleep(rng.random() * 0.5)
    reply = await exchange(stack.port, post(path, body))
    assert reply.status == 200, reply.body
    answer = parse_sse(reply.body).data[-1] if body["stream"] else reply.json
    usage, outputs = answer["usage"], body.get("n", 1)
    return {"prompt": usage["prompt_tokens"] * outputs, "completion": usage["completion_tokens"]}


@pytest.mark.parametrize("death", [False, True], ids=["", "the engine is killed"])
async def test_the_books_balance(death: bool):
    rng = random.Random(11)
    async with whole_stack(kv_cells=512, max_running=8) as stack:
        pages: list[Values] = []
        scraping = asyncio.ensure_future(scrape_all_along(stack, pages))
        asked = [asyncio.ensure_future(ask(stack, number, rng)) for number in range(100)]
        if death:
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            pid = stack.llm.client.engine_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        usages = await asyncio.gather(*asked)
        await asyncio.sleep(0.1)
        scraping.cancel()
        values = await scrape(stack)
        check_series([*pages, values])
        assert len(pages) > 10 and any(page["millpond_kv_cells,state=live"] > 0.0 for page in pages)
        assert values["millpond_prompt_tokens_total"] == sum(usage["prompt"] for usage in usages)
        assert values["millpond_delivered_tokens_total"] == sum(usage["completion"] for usage in usages)
        assert values["millpond_generated_tokens_total"] >= values["millpond_delivered_tokens_total"]
        assert values["millpond_requests_accepted_total"] == total(values, "millpond_requests_finished_total")
        assert total(values, "millpond_requests") == values["millpond_requests_lost_total"] == 0.0
        assert values["millpond_http_responses_total,status=200"] == 100.0
        for histogram in ("request_seconds", "queue_seconds", "time_to_first_token_seconds"):
            assert values[f"millpond_{histogram}_count"] >= values["millpond_requests_accepted_total"]
        assert values["millpond_engine_restarts_total"] == death
        assert values["millpond_kv_pool_cells"] > 0
        assert values["millpond_kv_cells,state=live"] == values["millpond_kv_cells,state=pinned"] == 0.0
        if not death:
            parks = total(values, "millpond_preemptions_total")
            assert parks == total(values, "millpond_preemptions_over_total") > 0
            # The server may find a stop string in what an output made before it was parked: that one does not resume.
            stopped = values["millpond_requests_finished_total,reason=stop"]
            assert parks - stopped <= values["millpond_resumes_total"] <= parks
            assert values["millpond_parked_seconds_total"] > 0.0
            hits = total(values, "millpond_prefix_hit_tokens_total")
            assert hits == values["millpond_prompt_tokens_cached_total"]
        for _ in range(1 if death else IDLE_SECONDS):
            await asyncio.sleep(1.0)
            assert await scrape(stack) == values, "idle, nothing may move"


async def test_refusals_and_cancelled_streams_are_counted_as_what_they_are():
    async with whole_stack(kv_cells=512, max_running=1) as stack:
        too_long = {"prompt": "word " * 2000, "max_tokens": 1}
        assert (await exchange(stack.port, post(TEXT, too_long))).status == 400
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
        writer.write(post(TEXT, {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "stream": True}))
        await reader.readuntil(b"data: ")
        writer.close()
        values = await scrape(stack)
        while values["millpond_requests_finished_total,reason=cancelled"] < 1.0:
            values = await scrape(stack)
        assert values["millpond_requests_refused_total,reason=context_length_exceeded"] == 1.0
        assert values["millpond_requests_accepted_total"] == 1.0
        assert values["millpond_requests_lost_total"] == 0.0
        assert 0.0 < values["millpond_delivered_tokens_total"] <= values["millpond_generated_tokens_total"]

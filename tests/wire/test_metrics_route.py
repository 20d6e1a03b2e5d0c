"""GET /metrics over the wire: the key it wants, what the server counts itself, and its absence."""

from __future__ import annotations

import time

from fake_text_engine import FakeTextEngine
from prometheus_client.parser import text_string_to_metric_families
from raw_http import CHAT, Reply, chat, exchange, head, post
from wire_server import RunningServer, running

from millpond.telemetry.exposition import MetricsPage
from millpond.telemetry.ledger import Ledger


def page() -> MetricsPage:
    return MetricsPage(Ledger(), model="m", version="1", compat="none", clock=time.monotonic, info=lambda: None)


async def scrape(server: RunningServer, **headers: str) -> Reply:
    return await exchange(server.port, head("GET", "/metrics", headers))


def responses(reply: Reply) -> dict[str, float]:
    return {
        sample.labels["status"]: sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
        if sample.name == "millpond_http_responses_total"
    }


async def test_answers_are_counted_by_status_and_scrapes_and_probes_are_not():
    async with running(FakeTextEngine(), source=page()) as server:
        assert responses(await scrape(server)) == {}
        await exchange(server.port, post(CHAT, chat()))
        await exchange(server.port, post(CHAT, chat(stream=True)))
        await exchange(server.port, post(CHAT, {"messages": 5}))
        await exchange(server.port, head("GET", "/nowhere"))
        await exchange(server.port, head("GET", "/health"))
        await exchange(server.port, head("GET", "/ready"))
        first = await scrape(server)
        assert responses(first) == {"200": 2.0, "400": 1.0, "404": 1.0}
        assert (await scrape(server)).body == first.body


async def test_the_page_is_plain_text_and_answers_head():
    async with running(FakeTextEngine(), source=page()) as server:
        reply = await scrape(server)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        bare = await exchange(server.port, head("HEAD", "/metrics"), method="HEAD")
        assert (bare.status, bare.headers["content-length"]) == (200, str(len(reply.body)))


async def test_a_scrape_needs_the_key():
    async with running(FakeTextEngine(), source=page(), api_key="secret") as server:
        assert (await scrape(server)).status == 401
        assert (await scrape(server, authorization="Bearer secret")).status == 200


async def test_without_metrics_there_is_no_page():
    async with running(FakeTextEngine()) as server:
        reply = await scrape(server)
        assert (reply.status, reply.error["code"]) == (404, "not_found")
        assert (await exchange(server.port, post(CHAT, chat()))).status == 200

"""GET /console and its events over the wire: who may see what, what a snapshot holds, and that nobody looks unasked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_stack import whole_stack
from fake_text_engine import FakeTextEngine
from raw_http import CHAT, Reply, chat, exchange, head, post, read_chunk, read_head
from wire_server import RunningServer, eventually, running

from millpond.async_llm import EngineView, RequestView
from millpond.console.assets import PATHS
from millpond.console.feed import ENDED_KEPT
from millpond.outputs import PoolRun
from millpond.server.keys import digest_of, key_entry
from millpond.types import FinishReason, RequestId, SequenceId, SlotId

EVENTS = "/console/events"
SECRET_SALT = "only-for-me"


def request(sequence: int, namespace: str = "", state: str = "running", **fields: Any) -> RequestView:
    values: dict[str, Any] = {
        "sequence_id": SequenceId(sequence),
        "request_id": RequestId(f"chatcmpl-{sequence}"),
        "namespace": namespace,
        "priority": 3,
        "state": state,
        "parked_for": None,
        "prompt_tokens": 20,
        "cached_tokens": 8,
        "computed_tokens": 25,
        "generated_tokens": 5,
        "max_tokens": 50,
        "accepted_at": 100.0,
        "started_at": 100.5,
        "first_token_at": 101.0,
        "ended_at": None,
        "pauses": (),
        "finish": None,
    }
    return RequestView(**(values | fields))


class CountingWindow:
    """A window onto nothing, which counts who looks."""

    def __init__(self, *requests: RequestView, pool: tuple[PoolRun, ...] | None = None) -> None:
        self.requests = requests
        self.pool = pool
        self.asked = self.looked = 0
        self.listeners: list[Callable[[RequestView], None]] = []

    def ask(self) -> None:
        self.asked += 1

    def look(self) -> EngineView:
        self.looked += 1
        return EngineView(110.0, self.requests, 1234, 0, self.pool)

    def watch_ends(self, listener: Callable[[RequestView], None]) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)


@contextlib.asynccontextmanager
async def watching(port: int, **headers: str) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
    """Snapshots as they come; the connection ends with the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head("GET", EVENTS, headers))
        reply = await read_head(reader)
        assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        yield _snapshots(reader)
    finally:
        writer.close()


async def _snapshots(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    while data := await read_chunk(reader):
        if not data.startswith(b":"):
            yield json.loads(data.removeprefix(b"data: "))


async def first(server: RunningServer, **headers: str) -> dict[str, Any]:
    async with watching(server.port, **headers) as snapshots:
        return await anext(snapshots)


async def get(server: RunningServer, path: str, **headers: str) -> Reply:
    return await exchange(server.port, head("GET", path, headers))


# -- the page ------------------------------------------------------------------------------------------------------


async def test_the_page_needs_no_key_and_its_data_does():
    async with running(console=CountingWindow(), api_key="secret") as server:
        for path in PATHS:
            reply = await get(server, path)
            assert (reply.status, reply.headers["x-content-type-options"]) == (200, "nosniff"), path
            assert reply.body
        assert (await get(server, EVENTS)).status == 401
        assert (await get(server, EVENTS, authorization="Bearer wrong")).status == 401
        assert (await first(server, authorization="Bearer secret"))["tokens"] == 1234


async def test_the_page_loads_nothing_from_elsewhere():
    async with running(console=CountingWindow()) as server:
        page = await get(server, "/console")
        policy = page.headers["content-security-policy"]
        texts = [(await get(server, path)).body.decode() for path in PATHS if not path.endswith("LICENSE")]
    assert policy.startswith("default-src 'self';")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for text in texts:
        assert "<script>" not in text and "innerHTML =" not in text.replace(".innerHTML = null", "")
        assert "//cdn" not in text and "@import" not in text


async def test_every_file_of_the_page_is_served_and_no_other():
    folder = Path(__file__).parents[2] / "millpond" / "console" / "static"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {f"/console/{name}" for name in files} | {"/console"} == PATHS
    async with running(console=CountingWindow()) as server:
        assert (await get(server, "/console/../app.py")).status == 404
        assert (await get(server, "/console/nothing.js")).status == 404
        assert (await exchange(server.port, head("HEAD", "/console"), method="HEAD")).status == 200
        assert (await exchange(server.port, post("/console", {}))).status == 405


async def test_without_a_console_there_is_no_page():
    async with running() as server:
        assert (await get(server, "/console")).status == 404
        assert (await get(server, EVENTS)).status == 404


# -- nobody looks unasked ------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_nobody_looks_while_nobody_watches():
    window = CountingWindow()
    async with running(console=window) as server:
        await get(server, "/console")
        await exchange(server.port, post(CHAT, chat()))
        assert (window.asked, window.looked, window.listeners) == (0, 0, [])
        async with watching(server.port) as snapshots:
            await anext(snapshots)
            await anext(snapshots)
            assert len(window.listeners) == 1
        await eventually(lambda: not window.listeners)
        asked, looked = window.asked, window.looked
        await asyncio.sleep(0.7)
        assert (window.asked, window.looked) == (asked, looked)


@pytest.mark.slow
async def test_a_second_viewer_costs_the_engine_nothing_and_sees_the_same():
    window = CountingWindow()
    async with running(console=window) as server, watching(server.port) as one, watching(server.port) as two:
        for _ in range(3):
            assert await anext(one) == await anext(two)
        assert window.looked <= 4
        assert len(window.listeners) == 1


async def test_one_may_come_back():
    window = CountingWindow()
    async with running(console=window) as server:
        for _ in range(3):
            assert (await first(server))["tokens"] == 1234
            await eventually(lambda: not window.listeners)
        assert window.asked == window.looked == 3


class BrokenWindow(CountingWindow):
    def look(self) -> EngineView:
        if self.looked:
            return super().look()
        self.looked += 1
        raise RuntimeError("a bug in a look")


async def test_a_look_that_fails_is_an_error_for_who_watches_and_no_more():
    window = BrokenWindow()
    async with running(console=window) as server:
        reply = await get(server, EVENTS)
        assert (reply.status, reply.error["code"]) == (500, "internal_error")
        await eventually(lambda: not window.listeners)
        assert (await first(server))["tokens"] == 1234


async def test_a_shutdown_does_not_wait_for_those_who_watch():
    async with running(console=CountingWindow(), drain_timeout=30.0) as server:
        async with watching(server.port) as snapshots:
            await anext(snapshots)
            server.lifecycle.stop()
            assert [snapshot async for snapshot in snapshots]
        assert await server.serving is True


# -- whose requests ------------------------------------------------------------------------------------------------


def keys_file(folder: Path) -> str:
    path = folder / "keys.toml"
    path.write_text(key_entry("ann", "mp-ann") + key_entry("bob", "mp-bob") + key_entry("default", "mp-default"))
    return str(path)


def two_owners() -> CountingWindow:
    anns = f'["ann","{SECRET_SALT}",""]'
    return CountingWindow(
        request(1, anns),
        request(2, '["bob","",""]', "parked", parked_for="cells", pauses=((102.0, 103.5), (108.0, None))),
        pool=(PoolRun([SlotId(0)], [SequenceId(1)], 0, 25), PoolRun([SlotId(1)], [SequenceId(2)], 0, 9)),
    )


async def test_a_key_sees_its_own_namespace_and_bars_of_others(tmp_path: Path):
    assert digest_of(b"mp-ann") != digest_of(b"mp-bob")
    async with running(console=two_owners(), keys_file=keys_file(tmp_path)) as server:
        anns, bobs = [await first(server, authorization=f"Bearer mp-{name}") for name in ("ann", "bob")]
    assert [(row["sequence"], row["own"], row.get("id")) for row in anns["requests"]] == [
        (1, True, "chatcmpl-1"),
        (2, False, None),
    ]
    assert [(row["sequence"], row["own"], row.get("id")) for row in bobs["requests"]] == [
        (1, False, None),
        (2, True, "chatcmpl-2"),
    ]
    assert not anns["sees_all"]
    assert set(anns["requests"][1]) == {
        "sequence",
        "own",
        "state",
        "prompt",
        "generated",
        "accepted_at",
        "started_at",
        "first_token_at",
        "ended_at",
        "pauses",
        "parked_for",
    }


async def test_the_key_of_the_server_sees_all_and_one_of_the_same_name_does_not(tmp_path: Path):
    async with running(console=two_owners(), api_key="root") as server:
        seen = await first(server, **{"x-api-key": "root"})
    assert seen["sees_all"]
    assert all(row["own"] for row in seen["requests"])
    async with running(console=two_owners(), keys_file=keys_file(tmp_path)) as server:
        seen = await first(server, **{"x-api-key": "mp-default"})
    assert not seen["sees_all"]
    assert not any(row["own"] for row in seen["requests"])


async def test_no_namespace_salt_or_key_is_in_a_snapshot():
    async with running(console=two_owners(), api_key="root-key") as server:
        text = json.dumps(await first(server, authorization="Bearer root-key"))
    assert not any(word in text for word in (SECRET_SALT, "root-key", '"ann"', "namespace"))


# -- what a snapshot holds -----------------------------------------------------------------------------------------


async def test_a_snapshot_has_cells_pool_and_requests_in_their_order():
    window = CountingWindow(
        request(1, state="waiting", started_at=None, first_token_at=None, cached_tokens=None, computed_tokens=None),
        request(2),
        request(3, state="parked", parked_for="slots", pauses=((102.0, 103.5), (108.0, None))),
        pool=(
            PoolRun([SlotId(0), SlotId(1)], [SequenceId(2), SequenceId(3)], 0, 16),
            PoolRun([SlotId(0)], [SequenceId(2)], 16, 9),
            PoolRun([SlotId(4)], [], 0, 7),
        ),
    )
    async with running(FakeTextEngine(), console=window) as server:
        seen = await first(server)
    assert seen["counts"] == {"running": 1, "parked": 1, "waiting": 1}
    assert [row["sequence"] for row in seen["requests"]] == [2, 3, 1]
    assert seen["cells"] == {"total": 8192, "used": 32, "cached": 7, "free": 8160}
    assert seen["pool"] == [[[2, 3], 2, 0, 16], [[2], 1, 16, 9], [[], 1, 0, 7]]
    parked = seen["requests"][1]
    assert (parked["parked_for"], parked["pauses"]) == ("slots", [[102.0, 103.5], [108.0, None]])
    assert (parked["priority"], parked["cached"], parked["computed"], parked["max_tokens"]) == (3, 8, 25, 50)
    assert seen["engine"]["info"]["cells"] == 8192
    assert (seen["now"], seen["not_shown"], seen["totals"]) == (110.0, 0, None)


async def test_very_many_requests_are_counted_and_not_all_shown():
    window = CountingWindow(*(request(number, state="waiting") for number in range(500)), request(501))
    async with running(console=window) as server:
        seen = await first(server)
    assert (len(seen["requests"]), seen["not_shown"], seen["counts"]["waiting"]) == (128, 373, 500)
    assert seen["requests"][0]["sequence"] == 501


async def test_the_latest_to_end_are_kept_while_somebody_watches():
    window = CountingWindow()
    async with running(console=window) as server:
        async with watching(server.port) as snapshots:
            await anext(snapshots)
            for number in range(ENDED_KEPT + 5):
                window.listeners[0](request(number, state="ended", ended_at=109.0, finish=FinishReason.LENGTH))
            seen = await anext(snapshots)
            while not seen["requests"]:
                seen = await anext(snapshots)
        assert [row["sequence"] for row in seen["requests"]] == list(range(5, ENDED_KEPT + 5))
        assert seen["requests"][0]["finish"] == "length"
        await eventually(lambda: not window.listeners)
        assert (await first(server))["requests"] == []


# -- on a real engine process --------------------------------------------------------------------------------------


def parked_rows(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in snapshot["requests"] if row["state"] == "parked" and row["parked_for"]]


async def keep_asking(port: int, seed: int, enough: asyncio.Event) -> int:
    """Asks again and again, once at least and not for ever; how often."""
    asked = 0
    while True:
        reply = await exchange(port, post(CHAT, chat(max_tokens=120, ignore_eos=True, seed=seed)))
        assert reply.status == 200
        asked += 1
        if enough.is_set() or asked == 20:
            return asked


@pytest.mark.slow
async def test_an_overcommitted_pool_shows_the_parked_and_what_they_hold():
    """The load goes on until a look, two a second, has found somebody parked: no machine is too fast for it."""
    async with whole_stack(kv_cells=256, max_running=4) as stack:
        seen: list[dict[str, Any]] = []
        enough = asyncio.Event()
        async with watching(stack.port) as snapshots:
            askers = [asyncio.ensure_future(keep_asking(stack.port, seed, enough)) for seed in range(4)]
            async for snapshot in snapshots:
                seen.append(snapshot)
                if parked_rows(snapshot):
                    enough.set()
                if all(asker.done() for asker in askers) and not any(snapshot["counts"].values()):
                    break
        asked = sum([await asker for asker in askers])
    for snapshot in seen:
        if snapshot["pool"] is not None:
            assert sum(run[3] for run in snapshot["pool"]) == snapshot["cells"]["used"] <= 256
    parked = [row for snapshot in seen for row in parked_rows(snapshot)]
    assert {row["parked_for"] for row in parked} == {"cells"}
    assert all(0 <= row["computed"] < row["prompt"] + row["generated"] for row in parked)
    ends = [row for row in seen[-1]["requests"] if row["state"] == "ended"]
    assert len(ends) == min(asked, ENDED_KEPT)
    assert {(row["generated"], row["finish"]) for row in ends} == {(120, "length")}
    assert any(row["pauses"] for row in ends)
    for row in ends:
        times = [row["accepted_at"], row["started_at"], *(time for pause in row["pauses"] for time in pause)]
        assert None not in times and times == sorted(times) and row["ended_at"] >= times[-1]
    assert seen[-1]["tokens"] == 120 * asked
    assert [snapshot["tokens"] for snapshot in seen] == sorted(snapshot["tokens"] for snapshot in seen)


async def test_an_idle_engine_answers_too():
    async with whole_stack(kv_cells=256, max_running=4) as stack, watching(stack.port) as snapshots:
        seen = await anext(snapshots)
        while seen["pool"] is None:
            seen = await anext(snapshots)
    assert (seen["pool"], seen["cells"]["used"]) == ([], 0)

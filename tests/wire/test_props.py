"""GET /props: facts of the served model and its memory, without its path; 503 before it is loaded."""

from __future__ import annotations

from dataclasses import replace

from fake_text_engine import INFO, FakeTextEngine
from raw_http import exchange, head
from wire_server import MODEL, running

from millpond.outputs import MemoryAbilities
from millpond.types import MemoryKind

HYBRID = replace(
    INFO,
    model=replace(INFO.model, memory_kind=MemoryKind.HYBRID),
    abilities=MemoryAbilities(trims=False, batches=False, tested=True, findings=("rows disturb each other",)),
    chat_template="{{ messages }}",
)


async def test_it_says_what_is_served_and_what_its_memory_can_do():
    async with running(FakeTextEngine(info=HYBRID)) as server:
        reply = await exchange(server.port, head("GET", "/props"))
    assert reply.status == 200
    shown = reply.json
    assert shown["model_alias"] == MODEL and shown["total_slots"] == INFO.max_running
    assert shown["n_ctx"] == shown["default_generation_settings"]["n_ctx"] == INFO.max_model_len
    assert shown["chat_template"] == "{{ messages }}"
    memory = shown["memory"]
    assert (memory["kind"], memory["cells"], memory["sliding_window"]) == ("hybrid", INFO.n_cells, None)
    assert (memory["restores"], memory["trims"], memory["batches"], memory["tested"]) == (True, False, False, True)
    assert memory["findings"] == ["rows disturb each other"]
    assert "path" not in reply.body.decode() and ".gguf" not in reply.body.decode()


async def test_it_waits_for_the_model():
    async with running(FakeTextEngine(state="loading", info=None)) as server:
        reply = await exchange(server.port, head("GET", "/props"))
    assert (reply.status, reply.json["error"]["code"]) == (503, "not_ready")

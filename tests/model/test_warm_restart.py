"""A core that ends writes its prefixes to disk, and the next one on the folder goes on where it was.

Two cores after each other on one folder, in this process; tests/wire/test_warm_restart_serve.py restarts the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
from tiny_chats import NOISE, WRITERS, Answer, Tiny, cached, computed, distance, message, run

from millpond.types import MemoryKind

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

FLUSH_SECONDS = 20.0
HISTORY_TOKENS = 450
"""Over three pages; benchmarks/bench_hybrid.py has 1,500."""
PAGED_EXTRA, WHOLE_EXTRA = 8, 128
"""Prompt tokens that may be computed beyond those of the new turn."""


@pytest.fixture(scope="module", params=["smollm2", *WRITERS])
def model(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiny]:
    if request.param == "smollm2":
        made = Tiny(smollm2_path, MemoryKind.ATTENTION)
    else:
        writer, kind, settings = WRITERS[request.param]
        path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
        writer(path, tiny_gguf.Tokenizer.read(smollm2_path))
        made = Tiny(path, kind, settings)
    yield made
    for runtime in made.cores:
        runtime.close()


def extra_of(model: Tiny) -> int:
    return PAGED_EXTRA if model.kind is MemoryKind.ATTENTION else WHOLE_EXTRA


def first_turn(model: Tiny, folder: Path, **settings: Any) -> tuple[list[int], Answer]:
    """The history after one turn of a chat, its core shut down."""
    core = model.core(spill_dir=str(folder), instance="first", **settings)
    prompt = [*message(0, 150), *message(1, 200), *message(2, HISTORY_TOKENS - 350 - 50)]
    answer = run(core, {0: prompt}, namespace="tenant")[0]
    core.shutdown(FLUSH_SECONDS)
    return [*prompt, *answer.ids, 2, 198], answer


@pytest.mark.parametrize("spill_ram", [0, 64])
def test_the_next_turn_after_a_restart_computes_little_more_than_itself(
    model: Tiny, tmp_path: Path, spill_ram: int
) -> None:
    history, _ = first_turn(model, tmp_path, spill_ram=spill_ram)
    turn = message(3, 30)
    assert len(history) > HISTORY_TOKENS - 50
    again = model.core(spill_dir=str(tmp_path), instance="second", spill_ram=spill_ram)
    prompt = [*history, *turn]
    stranger = run(again, {0: prompt}, n_tokens=1, namespace="other tenant")[0]
    assert cached(stranger) == 0, "the namespace is part of every key, on disk too"
    warm = run(again, {0: prompt}, namespace="tenant")[0]
    again.shutdown(0.0)
    assert computed(warm) <= len(turn) + extra_of(model)
    if model.kind is not MemoryKind.ATTENTION:
        cold = run(model.core(prefix_cache=False), {0: prompt})[0]
        assert distance(warm, cold) <= NOISE


def test_a_damaged_file_costs_its_own_tokens_only(model: Tiny, tmp_path: Path) -> None:
    history, _ = first_turn(model, tmp_path)
    files = sorted((tmp_path / "prefix").glob("*.kv"), key=lambda path: int(path.stem.split("-")[2]))
    raw = bytearray(files[-1].read_bytes())
    raw[-1] ^= 1
    files[-1].write_bytes(raw)
    again = model.core(spill_dir=str(tmp_path), instance="second")
    prompt = [*history, *message(3, 30)]
    answer = run(again, {0: prompt}, namespace="tenant")[0]
    again.shutdown(0.0)
    assert cached(answer) + computed(answer) == len(prompt)
    if model.kind is not MemoryKind.ATTENTION:
        assert distance(answer, run(model.core(prefix_cache=False), {0: prompt})[0]) <= NOISE
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == [files[-1].name]

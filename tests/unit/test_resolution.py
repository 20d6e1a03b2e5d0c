"""The lines at start: each "auto" with its value and the reason, and nothing that was set by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millpond.config import EngineConfig
from millpond.engine.resolution import resolutions, table
from millpond.outputs import EngineInfo, ModelInfo
from millpond.types import MemoryKind


def info(n_cells: int = 8192, max_model_len: int = 8192, n_ctx_train: int = 8192) -> EngineInfo:
    model = ModelInfo(
        **dict.fromkeys(("name", "architecture", "description", "digest", "library"), "x"),
        **dict.fromkeys(("n_vocab", "n_layer", "n_params", "size_bytes", "n_swa", "kv_bytes_per_token"), 1),
        n_ctx_train=n_ctx_train,
        memory_kind=MemoryKind.ATTENTION,
    )
    return EngineInfo(model, n_cells, n_slots=32, max_running=8, max_model_len=max_model_len, unified=True)


def said(about: EngineInfo, used: EngineConfig | None = None, **settings: Any) -> dict[str, tuple[str, str]]:
    asked = EngineConfig(**settings)
    return {row.name: (row.value, row.reason) for row in resolutions(asked, used or asked, about, threads=2)}


def test_every_auto_of_the_defaults_is_told() -> None:
    autos = {name for name in EngineConfig.__dataclass_fields__ if getattr(EngineConfig(), name) is None}
    internal = {name for name, entry in EngineConfig.__dataclass_fields__.items() if entry.metadata.get("internal")}
    assert set(said(info())) == autos - internal


@pytest.mark.parametrize(
    ("about", "settings", "name", "value", "words"),
    [
        (info(), {}, "kv_cells", "8192", "auto: the model's context"),
        (info(n_ctx_train=131072), {}, "kv_cells", "8192", "context is 131072, and auto takes at most 8192"),
        (info(n_cells=1024), {"kv_cells": 1000}, "kv_cells", "1024", "1000 asked, rounded up"),
        (info(n_cells=8192), {"exact": True}, "kv_cells", "8192", "max_running 8 x max_model_len"),
        (info(max_model_len=1024), {}, "max_model_len", "1024", "auto: the pool"),
        (info(max_model_len=1024), {"exact": True}, "max_model_len", "1024", "share of the pool"),
        (info(), {}, "threads", "2", "auto: the physical cores"),
        (info(), {}, "kv_type_k", "f16", "auto: the default"),
        (info(), {}, "growth_watermark", "0.1", "a tier takes"),
        (info(), {"spill_ram": 0}, "growth_watermark", "0.25", "no tier takes"),
        (info(), {"spill_ram": 0, "spill_dir": "/x"}, "growth_watermark", "0.1", "a tier takes"),
        (info(), {}, "max_step_ms", "100 to 200", "48 prompt rows"),
        (info(n_cells=4096), {}, "cache_cells", "at most 1024", "a quarter of the pool"),
    ],
)
def test_values_and_reasons(about: EngineInfo, settings: dict[str, Any], name: str, value: str, words: str) -> None:
    found = said(about, **settings)[name]
    assert found[0] == value
    assert words in found[1]


def test_what_exact_picked_is_told() -> None:
    asked = EngineConfig(exact=True)
    found = said(info(), replace(asked, kv_type_k="f16", kv_type_v="bf16"), exact=True)
    assert found["kv_type_v"] == ("bf16", "auto: qualified for --exact with this model here")


def test_what_was_set_is_not_told() -> None:
    found = said(
        info(n_cells=4096),
        kv_cells=4096,
        max_model_len=100,
        threads=1,
        kv_type_k="q8_0",
        kv_type_v="q8_0",
        cache_cells=0,
        growth_watermark=0.05,
        max_step_ms=150.0,
    )
    assert found == {}
    assert "cache_cells" not in said(info(), prefix_cache=False)


def test_the_table_is_aligned() -> None:
    lines = table(resolutions(EngineConfig(), EngineConfig(), info(), 2))
    assert len({line.index("auto:") for line in lines}) == 1
    assert table([]) == []

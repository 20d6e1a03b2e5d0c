"""What each "auto" became and why, for the lines at start. Knows settings and a ready engine; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass

from millpond.config import EngineConfig
from millpond.engine.build import DEFAULT_CELLS, DEFAULT_KV_TYPE, growth_watermark
from millpond.outputs import EngineInfo
from millpond.scheduler.budget import AUTO_STEP_MS, AUTO_STEP_ROWS


@dataclass(frozen=True, slots=True)
class Resolution:
    name: str
    """Of the setting."""
    value: str
    reason: str


def resolutions(asked: EngineConfig, used: EngineConfig, info: EngineInfo, threads: int) -> list[Resolution]:
    """Every setting that was "auto", or that the library made another value of.

    `asked`: as configured; `used`: what the engine process got (with --exact: the KV types that qualified);
    `threads`: what auto means on this machine.
    """
    found = [_kv_cells(asked, info), _max_model_len(asked, info)]
    if asked.threads is None:
        found.append(Resolution("threads", str(threads), "auto: the physical cores this process may use"))
    if asked.max_step_ms is None:
        low, high = AUTO_STEP_MS
        why = f"auto: what {AUTO_STEP_ROWS} prompt rows take, as measured while it runs"
        found.append(Resolution("max_step_ms", f"{low:.0f} to {high:.0f}", why))
    for name, before, now in (
        ("kv_type_k", asked.kv_type_k, used.kv_type_k),
        ("kv_type_v", asked.kv_type_v, used.kv_type_v),
    ):
        if before is None:
            why = "auto: qualified for --exact with this model here" if used.exact else "auto: the default"
            found.append(Resolution(name, now or DEFAULT_KV_TYPE, why))
    if asked.cache_cells is None and asked.prefix_cache:
        limit = f"at most {info.n_cells // 4}"
        why = "auto: a quarter of the pool, less when moving costs less than what idle cells cost the others"
        found.append(Resolution("cache_cells", limit, why))
    if asked.growth_watermark is None:
        tier = "a tier takes what is parked" if used.spill_ram or used.spill_dir else "no tier takes what is parked"
        found.append(Resolution("growth_watermark", f"{growth_watermark(used):g}", f"auto: {tier}"))
    return [entry for entry in found if entry is not None]


def _kv_cells(asked: EngineConfig, info: EngineInfo) -> Resolution | None:
    trained = info.model.n_ctx_train
    if asked.exact:
        why = f"--exact: max_running {info.max_running} x max_model_len, rounded up by llama.cpp"
    elif asked.kv_cells is not None:
        if asked.kv_cells == info.n_cells:
            return None
        why = f"{asked.kv_cells} asked, rounded up by llama.cpp"
    elif trained > DEFAULT_CELLS:
        why = f"auto: the model's context is {trained}, and auto takes at most {DEFAULT_CELLS}"
    else:
        why = "auto: the model's context"
    return Resolution("kv_cells", str(info.n_cells), why)


def _max_model_len(asked: EngineConfig, info: EngineInfo) -> Resolution | None:
    if asked.max_model_len is not None:
        return None
    room = "a sequence's share of the pool" if asked.exact else "the pool"
    why = "auto: the model's context" if info.max_model_len == info.model.n_ctx_train else f"auto: {room}"
    return Resolution("max_model_len", str(info.max_model_len), why)


def table(rows: list[Resolution]) -> list[str]:
    """Aligned lines."""
    if not rows:
        return []
    name, value = (max(len(getattr(row, part)) for row in rows) for part in ("name", "value"))
    return [f"  {row.name.ljust(name)}  {row.value.ljust(value)}  {row.reason}" for row in rows]

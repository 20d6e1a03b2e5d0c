"""From settings to a ready EngineCore: the pool's size, its layout, its tiers. Knows every engine class; no channel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from millpond.config import EngineConfig
from millpond.engine.core import EngineCore
from millpond.engine.grammars import CompileGrammar, PendingGrammars
from millpond.engine.kv_executor import KVExecutor
from millpond.engine.model_runner import ModelRunner
from millpond.engine.selftest import probe_memory
from millpond.errors import ConfigError
from millpond.kvcache.manager import KVCacheManager
from millpond.kvcache.naive import NaiveIndex
from millpond.kvcache.payload import StateIdentity
from millpond.kvcache.radix_tree import RadixTree
from millpond.kvcache.spans import PagedSpans, WholeSpans
from millpond.kvcache.stored import StoredIndex
from millpond.outputs import EngineInfo, MemoryAbilities
from millpond.runtime.base import ContextLimits, ContextParams, Runtime
from millpond.runtime.one_by_one import OneByOneRuntime
from millpond.sampling.sampler import SamplerFactory
from millpond.sampling.structured import CompileThread, GrammarCompiler
from millpond.scheduler.preemption import VictimRule, least_generated
from millpond.scheduler.scheduler import Scheduler, SchedulerConfig
from millpond.spill.disk import DiskTier
from millpond.spill.ram import RamTier
from millpond.spill.store import SpillStore
from millpond.types import MemoryKind

logger = logging.getLogger(__name__)

DEFAULT_CELLS = 8192
DEFAULT_KV_TYPE = "f16"
MAX_SLOTS = 255
"""llama.cpp takes 256 sequence ids in all; one is the runtime's scratch."""
EXTRA_SLOTS = 16
"""Slots for idle prefixes beside the running and the parked."""
WATERMARK_WITH_TIER = 0.1
WATERMARK_WITHOUT_TIER = 0.25
MIB = 1024 * 1024


def context_params(config: EngineConfig, *, n_ctx_train: int, memory_kind: MemoryKind) -> ContextParams:
    """Resolves "auto" for the context. Raises ConfigError for settings that contradict each other."""
    if config.exact:
        max_len = config.max_model_len or min(n_ctx_train, (config.kv_cells or DEFAULT_CELLS) // config.max_running)
        n_slots, n_cells = config.max_running, max_len * config.max_running
    elif memory_kind is MemoryKind.ATTENTION:
        n_slots = min(MAX_SLOTS, 2 * config.max_running + EXTRA_SLOTS)
        n_cells = config.kv_cells or min(n_ctx_train, DEFAULT_CELLS)
    else:
        n_slots, n_cells = config.max_running, config.kv_cells or min(n_ctx_train, DEFAULT_CELLS)
    params = ContextParams(
        n_cells=n_cells,
        n_slots=n_slots,
        threads=config.threads or 0,
        unified=not config.exact,
        kv_type_k=config.kv_type_k or DEFAULT_KV_TYPE,
        kv_type_v=config.kv_type_v or DEFAULT_KV_TYPE,
        # As it was when the model was qualified.
        swa_full=config.swa_full or config.exact,
    )
    return params if config.pass_rows is None else replace(params, n_ubatch=pass_width(config.pass_rows))


def pass_width(pass_rows: int) -> int:
    """The n_ubatch that keeps every pass within `pass_rows`: llama.cpp lets n_ubatch + 1 sequences into one.

    One row needs in_passes() as well.
    """
    return max(1, pass_rows - 1)


def in_passes(runtime: Runtime, pass_rows: int | None) -> Runtime:
    return OneByOneRuntime(runtime) if pass_rows == 1 else runtime


def build_core(
    runtime: Runtime,
    config: EngineConfig,
    clock: Callable[[], float],
    victim_rule: VictimRule = least_generated,
    compile_grammar: CompileGrammar | None = None,
) -> EngineCore:
    """`clock`: monotonic seconds. `compile_grammar`: None for a thread of its own.

    Raises ConfigError when max_model_len does not fit the pool."""
    runtime = in_passes(runtime, config.pass_rows)
    limits = runtime.limits
    abilities = _proven(runtime)
    info = _engine_info(runtime, config, abilities)
    identity = _identity(runtime, config)
    store = _spill_store(config, identity) if abilities.restores else SpillStore([])
    stored = StoredIndex()
    for key in store.held_keys():
        stored.add(key)
    shares = config.prefix_cache and abilities.restores
    # A saved state keeps only the last window of a sliding-window sequence: it is of use at its own length alone.
    whole = WholeSpans(can_cut=runtime.model.memory_kind is MemoryKind.ATTENTION)
    layout = PagedSpans() if limits.can_copy_ranges else whole
    index = RadixTree() if limits.can_copy_ranges and shares else NaiveIndex()
    n_cells = _ledger_cells(runtime, info)
    manager = KVCacheManager(n_cells, limits.n_slots, index, layout, stored, reuse=shares)
    scheduler_config = _scheduler_config(
        config, info, limits, identity, n_cells=n_cells, shares=shares, saves=store.has_tiers
    )
    scheduler = Scheduler(replace(scheduler_config, victim_rule=victim_rule), manager, runtime.vocab.eog_ids)
    pieces = partial(runtime.vocab.piece, special=True)
    samplers = SamplerFactory(runtime.model.n_vocab, runtime.vocab.eog_ids, runtime.candidates, pieces)
    executor = KVExecutor(runtime, store, clock)
    runner = ModelRunner(runtime, samplers, clock)
    grammars = PendingGrammars(compile_grammar or CompileThread(GrammarCompiler(runtime.vocab)).submit)
    return EngineCore(info, scheduler, executor, runner, grammars, clock)


def _proven(runtime: Runtime) -> MemoryAbilities:
    """Attention memory is what the contract suite holds; of any other kind, each model is tried."""
    if runtime.model.memory_kind is MemoryKind.ATTENTION:
        return MemoryAbilities(trims=runtime.limits.can_trim)
    abilities = probe_memory(runtime)
    for finding in abilities.findings:
        logger.warning("%s model: %s", runtime.model.memory_kind.value, finding)
    return abilities


def _ledger_cells(runtime: Runtime, info: EngineInfo) -> int:
    """Recurrent state takes a slot, whatever its length: there cells are no limit."""
    if runtime.model.memory_kind is MemoryKind.RECURRENT:
        return info.n_slots * info.max_model_len
    return runtime.limits.n_cells


def _engine_info(runtime: Runtime, config: EngineConfig, abilities: MemoryAbilities) -> EngineInfo:
    limits = runtime.limits
    longest = limits.cells_per_slot
    wanted = config.max_model_len or min(longest, runtime.model.n_ctx_train or longest)
    if wanted > longest:
        raise ConfigError(
            "max_model_len", f"{wanted} do not fit: a sequence can have {longest} cells; lower it, or raise kv_cells"
        )
    return EngineInfo(
        model=runtime.model,
        n_cells=limits.n_cells,
        n_slots=limits.n_slots,
        max_running=min(config.max_running, limits.n_slots) if abilities.batches else 1,
        max_model_len=wanted,
        unified=limits.unified,
        abilities=abilities,
        chat_template=runtime.vocab.chat_template or "",
    )


def _identity(runtime: Runtime, config: EngineConfig) -> StateIdentity:
    parts = ["unified" if runtime.limits.unified else "streams", runtime.model.memory_kind.value]
    if config.exact:
        # What other settings computed differs in the last bits, and must not come back from disk.
        parts += [f"{runtime.limits.n_ubatch} rows", "repacked" if config.use_extra_bufts else "as stored"]
    return StateIdentity(
        model_digest=runtime.model.digest,
        library=runtime.model.library,
        kv_type_k=config.kv_type_k or DEFAULT_KV_TYPE,
        kv_type_v=config.kv_type_v or DEFAULT_KV_TYPE,
        layout="/".join(parts),
    )


def _spill_store(config: EngineConfig, identity: StateIdentity) -> SpillStore:
    tiers: list[RamTier | DiskTier] = []
    if config.spill_ram:
        tiers.append(RamTier(config.spill_ram * MIB))
    if config.spill_dir:
        tiers.append(DiskTier(Path(config.spill_dir), config.spill_disk * MIB, identity, config.instance))
    return SpillStore(tiers)


def growth_watermark(config: EngineConfig) -> float:
    """Parking costs little where a tier takes what is parked; docs/scheduling.md has the figures."""
    if config.growth_watermark is not None:
        return config.growth_watermark
    return WATERMARK_WITH_TIER if config.spill_ram or config.spill_dir else WATERMARK_WITHOUT_TIER


def _scheduler_config(
    config: EngineConfig,
    info: EngineInfo,
    limits: ContextLimits,
    identity: StateIdentity,
    *,
    n_cells: int,
    shares: bool,
    saves: bool,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_running=info.max_running,
        max_rows=limits.n_batch,
        max_step_ms=config.max_step_ms,
        growth_cells=int(n_cells * growth_watermark(config)),
        cache_cells=config.cache_cells,
        quantum=config.quantum,
        identity=identity,
        share_prefixes=shares,
        can_cut=info.abilities.trims,
        can_save=saves,
        always_save=config.always_save,
    )

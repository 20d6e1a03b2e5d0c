"""--exact on the real model: outputs equal their solo runs, in ids and log probabilities, whatever the load.

A small trial of each case; benchmarks/exactness.py runs the full ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.bench.core_runs import Outcome
from millpond.bench.exact_cases import CASES, exact_requests, run_case, solo_outcomes
from millpond.config import EngineConfig
from millpond.doctor.checks import plain_tokens
from millpond.doctor.exact import exact_config, store_of, subject_of
from millpond.doctor.exact_settings import FULL_ROWS
from millpond.engine.build import pass_width
from millpond.errors import ConfigError
from millpond.models import resolve_model
from millpond.request import Request
from millpond.runtime.base import Runtime
from millpond.wiring import load_llamacpp

pytestmark = [pytest.mark.model, pytest.mark.slow]

STREAMS = 5
LONGEST = 530
OUTPUT = (10, 18)
SEED = 20


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> EngineConfig:
    """Exact, not yet qualified."""
    model = resolve_model(str(smollm2_path))
    return EngineConfig(
        model_path=str(model.path),
        model_digest=model.sha256,
        exact=True,
        threads=2,
        max_running=STREAMS,
        max_model_len=LONGEST + OUTPUT[1],
    )


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache folder without results, so that the model is qualified here."""
    return {"MILLPOND_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="module")
def qualified(plain: EngineConfig, environ: dict[str, str]) -> EngineConfig:
    return exact_config(plain, subject_of(plain, environ), store_of(environ), lambda line: None)


@pytest.fixture(scope="module")
def runtime(qualified: EngineConfig) -> Iterator[Runtime]:
    loaded = load_llamacpp(qualified, lambda fraction: True)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def requests(runtime: Runtime) -> list[Request]:
    return exact_requests(SEED, STREAMS, plain_tokens(runtime, 2000), longest=LONGEST, output=OUTPUT)


@pytest.fixture(scope="module")
def solo(runtime: Runtime, qualified: EngineConfig, requests: list[Request]) -> list[Outcome]:
    return solo_outcomes(runtime, qualified, requests)


def test_smollm2_qualifies_at_full_speed(qualified: EngineConfig) -> None:
    chosen = (qualified.kv_type_k, qualified.kv_type_v, qualified.use_extra_bufts, qualified.pass_rows)
    assert chosen in [("f16", "bf16", True, FULL_ROWS), ("q8_0", "q8_0", True, FULL_ROWS)]
    assert not qualified.always_save


def test_equal_types_are_refused_where_attention_takes_another_kernel_alone(
    plain: EngineConfig, qualified: EngineConfig, environ: dict[str, str]
) -> None:
    named = replace(plain, kv_type_k="f16", kv_type_v="f16")
    with pytest.raises(ConfigError, match="nearest: --kv-type-k f16 --kv-type-v bf16"):
        exact_config(named, subject_of(named, environ), store_of(environ), lambda line: None)


def test_the_prompts_reach_over_the_border_of_512_cells(requests: list[Request]) -> None:
    lengths = sorted(len(request.prompt_ids) for request in requests)
    assert lengths[0] == 20 and lengths[-1] == LONGEST


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_their_solo_runs(
    runtime: Runtime, qualified: EngineConfig, requests: list[Request], solo: list[Outcome], case: str
) -> None:
    result = run_case(case, runtime, qualified, requests, solo, SEED)
    assert result.wrong == ()
    assert len(result.chunks) > 3
    if case in ("turns", "requeued", "priority"):
        assert result.preemptions > 0
    assert (result.restored_bytes > 0) == (case in ("turns", "priority", "cached"))
    assert (result.recomputed_tokens > 0) == (case == "requeued")


def test_the_comparison_sees_inexact_settings(
    plain: EngineConfig, requests: list[Request], solo: list[Outcome]
) -> None:
    """The control: with f16/f16 the same load changes outputs."""
    inexact = replace(plain, kv_type_k="f16", kv_type_v="f16")
    loaded = load_llamacpp(inexact, lambda fraction: True)
    try:
        by_length = sorted(requests, key=lambda request: len(request.prompt_ids))
        extremes = [by_length[0], by_length[-1]]
        alone = solo_outcomes(loaded, inexact, extremes)
        assert run_case("together", loaded, inexact, extremes, alone, SEED).wrong
    finally:
        loaded.close()


def test_the_context_has_what_was_qualified(qualified: EngineConfig, runtime: Runtime) -> None:
    assert runtime.limits.n_ubatch == pass_width(qualified.pass_rows or 0)
    assert not runtime.limits.unified and runtime.limits.cells_per_slot >= LONGEST + OUTPUT[1]

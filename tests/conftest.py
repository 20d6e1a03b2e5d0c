"""What every suite shares: the real model file (pulled once), and runs that repeat.

Examples that hypothesis makes are the same in every run; `--hypothesis-profile=search` looks for new ones.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# No limit of time: how long an example takes depends on what else the machine does.
settings.register_profile(
    "repeat", max_examples=50, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("repeat"), derandomize=False, max_examples=1000)
settings.load_profile("repeat")
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
# A runner in the background hands down an ignored SIGINT; tests send it, to themselves and to children.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file; MILLPOND_TEST_MODEL names another copy, else it is pulled (offline once pulled)."""
    named = os.environ.get("MILLPOND_TEST_MODEL")
    if named:
        return Path(named)
    from millpond.models import resolve_model

    return resolve_model("smollm2-135m").path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-seeds", type=int, default=1, help="random runs of each test that takes a fault_seed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--fault-seeds")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and thousands of tests stay to the end: no collection of garbage looks through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()

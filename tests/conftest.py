"""Fixtures of every suite: the real model file (pulled once) and where the tests may write."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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

"""Both runtimes behind one fixture: every contract test runs on the fake and on llama.cpp with a real model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract_driver import Driver, FakeMaker, LlamaCppMaker, Maker, driver_builder

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))

BOTH = [pytest.param("fake"), pytest.param("llamacpp", marks=[pytest.mark.model, pytest.mark.narrow, pytest.mark.slow])]


@pytest.fixture(scope="session", params=BOTH)
def maker(request: pytest.FixtureRequest) -> Iterator[Maker]:
    if request.param == "fake":
        yield FakeMaker()
        return
    path: Path = request.getfixturevalue("smollm2_path")
    llamacpp = LlamaCppMaker(path)
    yield llamacpp
    llamacpp.close()


@pytest.fixture
def make(maker: Maker) -> Iterator[Callable[..., Driver]]:
    yield from driver_builder(maker)

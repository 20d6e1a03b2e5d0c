"""Both runtimes behind one fixture: every contract test runs on the fake and on llama.cpp with a real model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract_driver import Driver, FakeMaker, LlamaCppMaker, Maker

from millpond.runtime.base import ContextParams

BOTH = [pytest.param("fake"), pytest.param("llamacpp", marks=[pytest.mark.model, pytest.mark.slow])]


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
    """make(n_cells=256, n_slots=4, unified=True, ...) -> a Driver with empty slots."""
    made: list[Driver] = []

    def build(*, n_cells: int = 256, n_slots: int = 4, unified: bool = True, **more: int) -> Driver:
        params = ContextParams(n_cells=n_cells, n_slots=n_slots, unified=unified, threads=1, **more)
        made.append(maker.make(params))
        return made[-1]

    yield build
    for driver in made:
        maker.take_back(driver)

"""The real engine process over FakeRuntime, whose tokens are a function of the history: python fake_engine.py FD.

After every step the scheduler's and the ledger's invariants are checked: a breach is a death that no test expects.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from millpond.config import EngineConfig
from millpond.engine.build import context_params
from millpond.engine.core import EngineCore, StepResult
from millpond.runtime.base import Runtime
from millpond.runtime.fake import CostModel, FakeRuntime
from millpond.types import MemoryKind
from millpond.wiring import engine_main

N_CTX_TRAIN = 2048
COST = CostModel(step=0.001, row=0.001, cell=0.0, moved=1e-6)
"""Real seconds: a kill finds the engine in the middle, and saving pays."""


def load(config: EngineConfig, progress: Callable[[float], bool]) -> Runtime:
    progress(1.0)
    params = context_params(config, n_ctx_train=N_CTX_TRAIN, memory_kind=MemoryKind.ATTENTION)
    return FakeRuntime(params, n_ctx_train=N_CTX_TRAIN, cost=COST, on_cost=time.sleep)


class CheckedCore(EngineCore):
    def step(self, *arguments: Any) -> StepResult:
        result = super().step(*arguments)
        self.scheduler.check()
        return result


if __name__ == "__main__":
    sys.modules["millpond.engine.build"].EngineCore = CheckedCore
    sys.exit(engine_main(int(sys.argv[1]), load))

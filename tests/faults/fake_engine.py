"""The real engine process over FakeRuntime, whose tokens are a function of the history: python fake_engine.py FD.

After every step the scheduler's and the ledger's invariants are checked: a breach is a death that no test expects.
FAKE_FILE_LIMIT: bytes that one file of this process may have; a write beyond fails, as on a full disk.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millpond.config import EngineConfig
from millpond.engine.build import context_params
from millpond.engine.core import EngineCore, StepResult
from millpond.errors import SetupError
from millpond.runtime.base import Runtime
from millpond.runtime.fake import CostModel, FakeRuntime
from millpond.types import MemoryKind
from millpond.wiring import engine_main

N_CTX_TRAIN = 2048
COST = CostModel(step=0.001, row=0.001, cell=0.0, moved=1e-6)
"""Real seconds: a kill finds the engine in the middle, and saving pays."""


def load(config: EngineConfig, progress: Callable[[float], bool]) -> Runtime:
    progress(1.0)
    if config.model_path and not Path(config.model_path).exists():
        raise SetupError(f"there is no model file at {config.model_path}")
    params = context_params(config, n_ctx_train=N_CTX_TRAIN, memory_kind=MemoryKind.ATTENTION)
    return FakeRuntime(params, n_ctx_train=N_CTX_TRAIN, cost=COST, on_cost=time.sleep)


class CheckedCore(EngineCore):
    def step(self, *arguments: Any) -> StepResult:
        result = super().step(*arguments)
        self.scheduler.check()
        return result


if __name__ == "__main__":
    limit = os.environ.get("FAKE_FILE_LIMIT")
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    sys.modules["millpond.engine.build"].EngineCore = CheckedCore
    sys.exit(engine_main(int(sys.argv[1]), load))

"""The real engine process over FakeRuntime, whose tokens are a function of the history: python fake_engine.py FD."""

from __future__ import annotations

import sys
from collections.abc import Callable

from millpond.config import EngineConfig
from millpond.engine.build import context_params
from millpond.runtime.base import Runtime
from millpond.runtime.fake import FakeRuntime
from millpond.types import MemoryKind
from millpond.wiring import engine_main

N_CTX_TRAIN = 2048


def load(config: EngineConfig, progress: Callable[[float], bool]) -> Runtime:
    progress(1.0)
    params = context_params(config, n_ctx_train=N_CTX_TRAIN, memory_kind=MemoryKind.ATTENTION)
    return FakeRuntime(params, n_ctx_train=N_CTX_TRAIN)


if __name__ == "__main__":
    sys.exit(engine_main(int(sys.argv[1]), load))

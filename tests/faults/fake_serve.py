"""`millpond serve` over FakeRuntime: python fake_serve.py '{"engine": {...}, "queue": {...}, "server": {...}}'."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fault_engine import ORACLE, engine_command

from millpond import wiring
from millpond.config import Config, EngineConfig, QueueConfig, ServerConfig
from millpond.models import ResolvedModel

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    config = Config(
        engine=EngineConfig(**asked["engine"]),
        queue=QueueConfig(**asked["queue"]),
        server=ServerConfig(**{"port": 0} | asked["server"]),
    )
    model = ResolvedModel("fake-model", Path(__file__), "0" * 64, "a test")
    sys.exit(wiring.serve(config, model, command=engine_command(), vocab=ORACLE.vocab))

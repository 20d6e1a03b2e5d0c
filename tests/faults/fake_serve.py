"""`millpond serve` over FakeRuntime: python fake_serve.py '{"engine": {...}, "queue": {}, "server": {}, "fakes": {}}'.

fakes: `model`, a file that must exist whenever an engine loads; `file_limit`, see fake_engine.py. Restarts wait for
milliseconds, not seconds.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from fault_engine import ORACLE, TIMING, engine_command

from millpond import wiring
from millpond.config import Config, EngineConfig, QueueConfig, ServerConfig
from millpond.engine_client.supervisor import SupervisorTiming
from millpond.models import ResolvedModel

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    config = Config(
        engine=EngineConfig(**asked["engine"]),
        queue=QueueConfig(**asked["queue"]),
        server=ServerConfig(**{"port": 0} | asked["server"]),
    )
    import millpond.engine_client.client as client

    client.SupervisorTiming = partial(  # type: ignore[misc]
        SupervisorTiming, first_backoff=TIMING.first_backoff, max_backoff=TIMING.max_backoff
    )
    fakes = asked["fakes"]
    model = ResolvedModel("fake-model", Path(fakes.get("model", __file__)), "0" * 64, "a test")
    command = engine_command(fakes.get("file_limit"))
    sys.exit(wiring.serve(config, model, command=command, vocab=ORACLE.vocab))

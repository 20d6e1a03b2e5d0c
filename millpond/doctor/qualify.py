"""Which settings make outputs exact: tries candidates, cheapest first, and remembers what came of them.

Knows candidates, trials and the folder of results; not what a check does, and no engine.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from millpond.doctor.exact_settings import FULL_ROWS, ExactSettings, Qualification, Trial, candidates
from millpond.doctor.trial import Report, Subject

RunTrial = Callable[[Subject, ExactSettings, Report], Trial]


class QualificationStore:
    """JSON files in one folder, one for each model file, library build and thread count."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path_of(self, subject: Subject) -> Path:
        build = hashlib.sha256(subject.library.encode()).hexdigest()[:12]
        offload = f"-gpu{subject.gpu_layers}" if subject.gpu_layers else ""
        return self._folder / f"{subject.model_digest}-{build}-{subject.threads}{offload}.json"

    def load(self, subject: Subject) -> Qualification:
        """What is known so far; nothing where the file is missing, unreadable or of another build."""
        empty = Qualification(subject.model_digest, subject.library, subject.threads)
        try:
            known = msgspec.json.decode(self.path_of(subject).read_bytes(), type=Qualification)
        except (OSError, msgspec.MsgspecError):
            return empty
        return known if replace(known, trials=()) == empty else empty

    def save(self, subject: Subject, qualification: Qualification) -> None:
        """In one step. A folder that cannot be written only costs the next run its time."""
        text = msgspec.json.format(msgspec.json.encode(qualification), indent=1)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, fresh = tempfile.mkstemp(dir=self._folder, suffix=".new")
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(text)
            Path(fresh).replace(self.path_of(subject))


def qualify(
    subject: Subject,
    store: QualificationStore,
    run_trial: RunTrial,
    note: Callable[[str], None],
    *,
    kv_type_k: str | None = None,
    kv_type_v: str | None = None,
) -> Qualification:
    """Tries what is not known yet until the cheapest exact settings are. `note` takes lines for people.

    KV types that are named narrow the candidates to themselves.
    """
    known = store.load(subject)
    for settings in candidates(kv_type_k, kv_type_v):
        chosen = known.choose(kv_type_k, kv_type_v)
        if chosen is not None and not (chosen.restore_only and settings.pass_rows == FULL_ROWS):
            break
        if known.trial_of(settings) is not None:
            continue
        note(f"exactness: trying {settings.describe()} ...")
        trial = run_trial(subject, settings, _ignore)
        verdict = "exact" if trial.is_exact() else trial.reason
        note(f"exactness: {settings.describe()}: {verdict}")
        known = replace(known, trials=(*known.trials, trial))
        store.save(subject, known)
    return known


def _ignore(doing: str) -> None:
    pass

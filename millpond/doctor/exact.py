"""`--exact`: puts qualified settings into the engine's configuration, or says why there are none.

Knows engine settings, qualifications and the cache folder; runs no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from millpond.config import EngineConfig
from millpond.doctor.exact_settings import FULL_ROWS, ExactSettings, Qualification, Trial, candidates
from millpond.doctor.qualify import QualificationStore, RunTrial, qualify
from millpond.doctor.trial import Subject, try_in_child
from millpond.errors import ConfigError
from millpond.models import default_home
from millpond.runtime.llamacpp.context import physical_cores
from millpond.runtime.llamacpp.library import load_library

FOLDER = "qualifications"


def subject_of(config: EngineConfig, environ: Mapping[str, str]) -> Subject:
    """`config` names a model file and its digest. Raises LibraryMismatch or SetupError."""
    return Subject(
        model_path=config.model_path,
        model_digest=config.model_digest,
        library=load_library(environ).build,
        threads=config.threads or physical_cores(),
        gpu_layers=config.gpu_layers,
    )


def store_of(environ: Mapping[str, str]) -> QualificationStore:
    return QualificationStore(default_home(environ) / FOLDER)


def exact_config(
    config: EngineConfig,
    subject: Subject,
    store: QualificationStore,
    note: Callable[[str], None],
    run_trial: RunTrial = try_in_child,
) -> EngineConfig:
    """The same configuration with exact settings in it, measured now unless the store knows them.

    Raises ConfigError, with the reason and the nearest setting, when the model or the KV types asked for do not
    qualify, or when parked sequences must be saved and there is no room for any.
    """
    named = (config.kv_type_k, config.kv_type_v)
    known = qualify(subject, store, run_trial, note, kv_type_k=named[0], kv_type_v=named[1])
    chosen = known.choose(*named)
    if chosen is None and named != (None, None):
        nearest = qualify(subject, store, run_trial, note).chosen
        raise ConfigError("exact", _types_refused(named, known, nearest))
    if chosen is None:
        raise ConfigError("exact", _model_refused(subject, known))
    if chosen.restore_only and not config.spill_ram and not config.spill_dir:
        raise ConfigError(
            "exact",
            "of this model only saved states are exact, re-prefilled ones are not: it needs --spill-ram or --spill-dir",
        )
    note(f"exactness: serving with {chosen.describe()}")
    return with_settings(config, chosen)


def with_settings(config: EngineConfig, chosen: ExactSettings) -> EngineConfig:
    return replace(
        config,
        kv_type_k=chosen.kv_type_k,
        kv_type_v=chosen.kv_type_v,
        use_extra_bufts=chosen.use_extra_bufts,
        pass_rows=chosen.pass_rows,
        always_save=chosen.restore_only,
    )


def _types_refused(named: tuple[str | None, str | None], known: Qualification, nearest: ExactSettings | None) -> str:
    tried = [trial for trial in known.trials if trial.settings in candidates(*named)]
    why = nearest_of(tried)
    asked = f"K/V types {named[0] or 'any'}/{named[1] or 'any'}"
    reason = f" ({why.settings.describe()}: {why.reason})" if why is not None else ""
    if nearest is None:
        return f"{asked} are not exact for this model on this machine{reason}, and no other setting is"
    advice = f"leave both out, for {nearest.describe()}"
    if nearest.pass_rows == FULL_ROWS:
        advice = f"--kv-type-k {nearest.kv_type_k} --kv-type-v {nearest.kv_type_v}, or leave both out"
    return f"{asked} are not exact for this model on this machine{reason}; nearest: {advice}"


def _model_refused(subject: Subject, known: Qualification) -> str:
    nearest = nearest_of(known.trials)
    name = Path(subject.model_path).name
    if nearest is None:
        return f"{name}: nothing could be tried"
    return (
        f"no setting makes {name} exact on this machine; nearest: {nearest.settings.describe()} ({nearest.reason}). "
        "See: millpond doctor MODEL"
    )


def nearest_of(trials: list[Trial] | tuple[Trial, ...]) -> Trial | None:
    """The trial that got furthest; among equals the smallest difference."""
    return min(trials, key=_distance, default=None)


def _distance(trial: Trial) -> tuple[bool, int, float]:
    right = sum(verdict.exact for verdict in trial.verdicts)
    return (bool(trial.failure), -right, max((v.largest_difference for v in trial.verdicts), default=0.0))

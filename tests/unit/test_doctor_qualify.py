"""Which candidates are tried, what is chosen of them, what is remembered, and how --exact says no."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.config import EngineConfig
from millpond.doctor.exact import exact_config, nearest_of
from millpond.doctor.exact_settings import Check, ExactSettings, Qualification, Trial, Verdict, candidates
from millpond.doctor.qualify import QualificationStore, qualify
from millpond.doctor.trial import Report, Subject, try_in_child
from millpond.errors import ConfigError

SUBJECT = Subject("model.gguf", "ab" * 32, "library 1 (AVX2)", threads=2)
FULL = ExactSettings("f16", "bf16", use_extra_bufts=True)


def verdicts(*wrong: Check) -> tuple[Verdict, ...]:
    """Of a trial that ends at the first wrong one."""
    found: list[Verdict] = []
    for check in Check:
        found.append(Verdict(check, check not in wrong, 0.5 if check in wrong else 0.0, 4))
        if check in wrong:
            break
    return tuple(found)


class Lab:
    """Runs trials by a table: settings -> the check that fails; what is not in it is exact."""

    def __init__(self, wrong: dict[ExactSettings, Check] | None = None, *, all_wrong: Check | None = None) -> None:
        self._wrong = wrong or {}
        self._all_wrong = all_wrong
        self.tried: list[ExactSettings] = []

    def __call__(self, subject: Subject, settings: ExactSettings, report: Report) -> Trial:
        assert subject == SUBJECT
        self.tried.append(settings)
        failing = self._wrong.get(settings, self._all_wrong)
        return Trial(settings, verdicts(failing) if failing else verdicts())


@pytest.fixture
def store(tmp_path: Path) -> QualificationStore:
    return QualificationStore(tmp_path / "qualifications")


def quiet(line: str) -> None:
    pass


def test_candidates_go_from_cheap_to_dear() -> None:
    shown = [settings.describe() for settings in candidates()]
    assert shown == [
        "f16/f16",
        "f16/bf16",
        "q8_0/q8_0",
        "f16/f16, no repacking",
        "f16/bf16, no repacking",
        "q8_0/q8_0, no repacking",
        "f16/bf16, no repacking, 7 rows a pass",
        "f16/bf16, no repacking, 4 rows a pass",
        "f16/f16, 1 row a pass",
    ]


@pytest.mark.parametrize(
    ("key", "value", "pairs"),
    [
        ("f16", None, [("f16", "f16"), ("f16", "bf16")]),
        (None, "q8_0", [("q8_0", "q8_0")]),
        ("f16", "f16", [("f16", "f16")]),
        ("q4_0", "q8_0", [("q4_0", "q8_0")]),
        ("bf16", None, [("bf16", "bf16")]),
        (None, "q4_0", [("f16", "q4_0")]),
    ],
)
def test_named_types_narrow_the_candidates(key: str | None, value: str | None, pairs: list[tuple[str, str]]) -> None:
    found = candidates(key, value)
    assert [settings.kv_types for settings in found] == pairs * 2
    assert {settings.use_extra_bufts for settings in found} == {True, False}


def test_trials_stop_at_the_first_exact_settings(store: QualificationStore) -> None:
    lab = Lab({ExactSettings("f16", "f16", True): Check.BATCH})
    notes: list[str] = []
    known = qualify(SUBJECT, store, lab, notes.append)
    assert [settings.kv_types for settings in lab.tried] == [("f16", "f16"), ("f16", "bf16")]
    assert known.chosen == FULL
    assert "exactness: f16/f16: batch differs by 0.5" in notes and "exactness: f16/bf16: exact" in notes


def test_what_is_known_is_not_tried_again(store: QualificationStore) -> None:
    first = qualify(SUBJECT, store, Lab({ExactSettings("f16", "f16", True): Check.BATCH}), quiet)
    lab = Lab()
    assert qualify(SUBJECT, store, lab, quiet) == first
    assert lab.tried == []
    assert [path.name for path in store.path_of(SUBJECT).parent.iterdir()] == [store.path_of(SUBJECT).name]


def test_settings_that_need_saves_are_taken_before_narrow_passes_but_after_full_ones(
    store: QualificationStore,
) -> None:
    wide = [settings for settings in candidates() if settings.pass_rows > 7]
    lab = Lab(dict.fromkeys(wide, Check.CHUNK) | {FULL: Check.REPREFILL})
    known = qualify(SUBJECT, store, lab, quiet)
    assert lab.tried == wide
    assert known.chosen == replace(FULL, restore_only=True)
    assert known.chosen.describe() == "f16/bf16, parked sequences saved"


def test_narrow_passes_are_tried_when_nothing_else_is_exact(store: QualificationStore) -> None:
    lab = Lab(dict.fromkeys([s for s in candidates() if s.pass_rows > 4], Check.CHUNK))
    known = qualify(SUBJECT, store, lab, quiet)
    assert known.chosen == ExactSettings("f16", "bf16", False, 4)
    assert lab.tried == [settings for settings in candidates() if settings.pass_rows > 1]


@pytest.mark.parametrize(
    "other",
    [
        replace(SUBJECT, model_digest="cd" * 32),
        replace(SUBJECT, library="library 2 (AVX2)"),
        replace(SUBJECT, threads=4),
        replace(SUBJECT, gpu_layers=3),
    ],
)
def test_a_result_is_of_one_file_library_and_thread_count(store: QualificationStore, other: Subject) -> None:
    qualify(SUBJECT, store, Lab(), quiet)
    assert store.path_of(other) != store.path_of(SUBJECT)
    assert store.load(other).trials == ()


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"model_digest": 3}'])
def test_an_unreadable_result_is_measured_again(store: QualificationStore, text: bytes) -> None:
    qualify(SUBJECT, store, Lab(), quiet)
    store.path_of(SUBJECT).write_bytes(text)
    lab = Lab()
    assert qualify(SUBJECT, store, lab, quiet).chosen is not None
    assert lab.tried


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    known = qualify(SUBJECT, QualificationStore(tmp_path / "file" / "below"), Lab(), quiet)
    assert known.chosen == ExactSettings("f16", "f16", True)


def test_every_field_survives_the_file(store: QualificationStore) -> None:
    trial = Trial(replace(FULL, pass_rows=4), verdicts(Check.MIXED), None, 600, "failed \u00fc")
    known = Qualification(SUBJECT.model_digest, SUBJECT.library, SUBJECT.threads, (trial, Trial(FULL, verdicts())))
    store.save(SUBJECT, known)
    assert store.load(SUBJECT) == known


# -- --exact -----------------------------------------------------------------------------------------------------------

CONFIG = EngineConfig(model_path="model.gguf", model_digest=SUBJECT.model_digest, exact=True)


def test_exact_puts_the_chosen_settings_into_the_configuration(store: QualificationStore) -> None:
    lab = Lab(dict.fromkeys([s for s in candidates() if s.pass_rows > 4], Check.CHUNK))
    found = exact_config(CONFIG, SUBJECT, store, quiet, lab)
    changed = {
        field.name: getattr(found, field.name)
        for field in dataclasses.fields(found)
        if getattr(found, field.name) != getattr(CONFIG, field.name)
    }
    assert changed == {"kv_type_k": "f16", "kv_type_v": "bf16", "use_extra_bufts": False, "pass_rows": 4}


def test_types_that_are_named_and_exact_are_kept(store: QualificationStore) -> None:
    found = exact_config(replace(CONFIG, kv_type_v="q8_0"), SUBJECT, store, quiet, Lab())
    assert (found.kv_type_k, found.kv_type_v) == ("q8_0", "q8_0")


def test_types_that_are_not_exact_are_refused_with_the_nearest(store: QualificationStore) -> None:
    lab = Lab({s: Check.BATCH for s in candidates() if s.kv_types == ("f16", "f16")})
    with pytest.raises(ConfigError) as refused:
        exact_config(replace(CONFIG, kv_type_k="f16", kv_type_v="f16"), SUBJECT, store, quiet, lab)
    assert refused.value.setting == "exact"
    assert str(refused.value) == (
        "exact: K/V types f16/f16 are not exact for this model on this machine (f16/f16: batch differs by 0.5); "
        "nearest: --kv-type-k f16 --kv-type-v bf16, or leave both out"
    )


def test_named_types_mean_full_width_whatever_is_known_already(store: QualificationStore) -> None:
    lab = Lab(dict.fromkeys([s for s in candidates() if s.pass_rows > 1], Check.BATCH))
    assert exact_config(CONFIG, SUBJECT, store, quiet, lab).kv_type_v == "f16"
    with pytest.raises(ConfigError, match="nearest: leave both out, for f16/f16, 1 row a pass"):
        exact_config(replace(CONFIG, kv_type_k="f16", kv_type_v="f16"), SUBJECT, store, quiet, lab)


def test_a_model_without_exact_settings_is_refused_with_the_one_that_came_nearest(store: QualificationStore) -> None:
    lab = Lab({ExactSettings("q8_0", "q8_0", False): Check.MIXED}, all_wrong=Check.BATCH)
    with pytest.raises(ConfigError, match=r"nearest: q8_0/q8_0, no repacking \(mixed differs by 0\.5\)"):
        exact_config(CONFIG, SUBJECT, store, quiet, lab)


def test_exact_by_saves_alone_needs_a_tier(store: QualificationStore) -> None:
    lab = Lab(all_wrong=Check.REPREFILL)
    with pytest.raises(ConfigError, match="--spill-ram or --spill-dir"):
        exact_config(replace(CONFIG, spill_ram=0), SUBJECT, store, quiet, lab)
    assert exact_config(CONFIG, SUBJECT, store, quiet, lab).always_save


def test_a_failed_trial_is_the_last_to_be_near() -> None:
    failed = Trial(FULL, failure="no room")
    wrong = Trial(FULL, verdicts(Check.BATCH))
    assert nearest_of([failed, wrong]) is wrong
    assert nearest_of([failed]) is failed and nearest_of([]) is None
    assert failed.qualified is None and failed.reason == "no room"


# -- the process of a trial --------------------------------------------------------------------------------------------


def test_a_file_that_is_no_model_fails_its_trial(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"not a model")
    doing: list[str] = []
    trial = try_in_child(replace(SUBJECT, model_path=str(path)), FULL, doing.append)
    assert "is not a GGUF file" in trial.failure and trial.qualified is None
    assert doing == ["load"]


def test_a_library_that_ends_the_process_fails_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = tmp_path / "python"
    dying.write_text("#!/bin/sh\necho 'GGML_ASSERT(false) failed' >&2\nkill -ABRT $$\n")
    dying.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dying))
    trial = try_in_child(SUBJECT, FULL, quiet)
    assert trial.failure == "the process of the checks ended with code -6: GGML_ASSERT(false) failed"

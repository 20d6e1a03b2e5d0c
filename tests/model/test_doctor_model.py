"""Doctor on real files: right verdicts for each kind of memory, and the command's report in both forms."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny_gguf
from typer.testing import CliRunner, Result

from millpond.bench.exact_cases import exact_requests, run_case, solo_outcomes
from millpond.cli.main import build_app
from millpond.config import EngineConfig
from millpond.doctor.checks import plain_tokens
from millpond.doctor.exact import exact_config, store_of, subject_of
from millpond.doctor.exact_settings import Check, ExactSettings
from millpond.doctor.trial import Subject, try_settings
from millpond.models import resolve_model
from millpond.wiring import load_llamacpp

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]

WRITERS = {
    "hybrid": tiny_gguf.write_tiny_lfm2,
    "recurrent": tiny_gguf.write_tiny_mamba,
    "sliding_window": tiny_gguf.write_tiny_gemma3,
}


@pytest.fixture(scope="module")
def tiny(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """F16 files: their products of one row and of several take different kernels."""
    tokenizer = tiny_gguf.Tokenizer.read(smollm2_path)
    folder = tmp_path_factory.mktemp("tiny")
    paths = {kind: folder / f"{kind}.gguf" for kind in WRITERS}
    for kind, write in WRITERS.items():
        write(paths[kind], tokenizer)
    return paths


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache folder for the whole file: each model is qualified once."""
    return tmp_path_factory.mktemp("home")


def config_of(path: Path, home: Path) -> EngineConfig:
    model = resolve_model(str(path), home=home)
    return EngineConfig(model_path=str(model.path), model_digest=model.sha256, exact=True, threads=1, max_running=4)


@pytest.mark.parametrize("kind", WRITERS)
def test_tiny_models_are_exact_one_row_at_a_time_and_serve_so(
    tiny: dict[str, Path], kind: str, shared_home: Path
) -> None:
    environ = {"MILLPOND_HOME": str(shared_home)}
    plain = config_of(tiny[kind], shared_home)
    subject = subject_of(plain, environ)
    config = exact_config(plain, subject, store_of(environ), lambda line: None)
    trials = store_of(environ).load(subject).trials
    assert [trial.failure for trial in trials] == [""] * len(trials)
    assert [trial.verdicts[-1].check for trial in trials[:-1]] == [Check.BATCH] * 8
    assert all(0.0 < trial.verdicts[-1].largest_difference < 0.1 for trial in trials[:-1])
    assert config.pass_rows == 1 and not config.always_save
    runtime = load_llamacpp(config, lambda fraction: True)
    try:
        requests = exact_requests(3, 5, plain_tokens(runtime, 500), longest=150, output=(10, 20))
        solo = solo_outcomes(runtime, config, requests)
        for case in ("together", "turns", "requeued"):
            assert run_case(case, runtime, config, requests, solo, 3).wrong == ()
    finally:
        runtime.close()


def test_a_trial_in_this_process_says_the_same_as_one_in_its_own(tiny: dict[str, Path], shared_home: Path) -> None:
    environ = {"MILLPOND_HOME": str(shared_home)}
    plain = config_of(tiny["hybrid"], shared_home)
    subject = subject_of(plain, environ)
    exact_config(plain, subject, store_of(environ), lambda line: None)
    for known in store_of(environ).load(subject).trials[-2:]:
        here = try_settings(subject, known.settings, lambda doing: None, os.environ)
        assert (here.verdicts, here.longest_view) == (known.verdicts, known.longest_view)


def test_types_that_the_model_cannot_have_fail_their_trial(tiny: dict[str, Path]) -> None:
    subject = Subject(str(tiny["hybrid"]), "", "", threads=1)
    trial = try_settings(subject, ExactSettings("f8", "f8", True), lambda doing: None, os.environ)
    assert "kv_type_k" in trial.failure and trial.verdicts == ()


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["doctor", *arguments])


@pytest.fixture
def home(shared_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MILLPOND_HOME", str(shared_home))
    monkeypatch.chdir(tmp_path)
    return shared_home


def test_doctor_prints_what_it_found(tiny: dict[str, Path], home: Path) -> None:
    result = doctor(str(tiny["recurrent"]), "--threads", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert "memory kind    recurrent" in result.stdout
    assert any(line.startswith("  --exact        picks f16/f16, 1 row a pass") for line in lines)
    table = [line for line in lines if line.strip().startswith("f16/bf16, no repacking, 7 rows a pass")]
    assert len(table) == 1 and "off " in table[0]
    assert "libgomp" in result.stdout or "no system runtime" in result.stdout
    assert {path.suffix for path in (home / "qualifications").iterdir()} == {".json"}


def test_doctor_as_json_has_the_same(tiny: dict[str, Path], home: Path) -> None:
    result = doctor(str(tiny["hybrid"]), "--threads", "1", "--json", "--max-running", "4")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["model"]["info"]["memory_kind"] == "hybrid"
    assert report["generation"]["output_tokens"] == 32
    assert report["exactness"]["chosen"]["pass_rows"] == 1
    assert report["exactness"]["cost"]["exact"]["sequences"] == 4
    assert {end["piece"] for end in report["model"]["end_tokens"]} >= {"<|im_end|>"}


def test_doctor_can_leave_exactness_out(
    tiny: dict[str, Path], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPOND_HOME", str(tmp_path / "other"))
    result = doctor(str(tiny["hybrid"]), "--no-exactness", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["exactness"] is None
    assert not (tmp_path / "other" / "qualifications").exists()


def test_doctor_fails_when_exact_is_asked_for_and_the_types_do_not_qualify(tiny: dict[str, Path], home: Path) -> None:
    named = ("--kv-type-k", "f16", "--kv-type-v", "f16")
    assert doctor(str(tiny["hybrid"]), *named).exit_code == 0
    result = doctor(str(tiny["hybrid"]), *named, "--exact")
    assert result.exit_code == 1
    assert "no setting qualifies" in result.stdout


def test_doctor_fails_in_one_line_on_a_broken_file(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(60))
    result = doctor(str(broken))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def generate(path: Path, *more: str) -> Result:
    arguments = ["generate", "The mill", "--raw", "--model", str(path), "--threads", "1", "--max-tokens", "8"]
    return CliRunner().invoke(build_app(), [*arguments, "--exact", *more])


def test_generate_exact_qualifies_first(tiny: dict[str, Path], home: Path) -> None:
    result = generate(tiny["hybrid"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_generate_exact_refuses_types_in_one_line(tiny: dict[str, Path], home: Path) -> None:
    result = generate(tiny["hybrid"], "--kv-type-k", "f16", "--kv-type-v", "bf16")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: exact: K/V types f16/bf16 are not exact for this model")
    assert "nearest: leave both out, for f16/f16, 1 row a pass" in result.stderr

"""The command line: help, settings handed to the wiring, errors in one line, models listed, pulled and removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_model_file import gguf_bytes
from typer.testing import CliRunner, Result

import millpond
from millpond.cli.main import build_app
from millpond.cli.settings import public_settings
from millpond.config import Config
from millpond.errors import EngineFailed
from millpond.models import ResolvedModel


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder with its own cache; wide output so that no word is broken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLPOND_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("MILLPOND_CONFIG", raising=False)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), list(arguments))


class Wiring:
    """Stands for millpond.wiring: remembers what it was given."""

    def __init__(self, answer: int | BaseException = 0) -> None:
        self._answer = answer
        self.calls: list[tuple[Config, ResolvedModel]] = []

    def serve(self, config: Config, model: ResolvedModel) -> int:
        self.calls.append((config, model))
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer


def use_wiring(monkeypatch: pytest.MonkeyPatch, wiring: Wiring) -> None:
    stand_in = SimpleNamespace(serve=wiring.serve)
    monkeypatch.setitem(sys.modules, "millpond.wiring", stand_in)
    monkeypatch.setattr(millpond, "wiring", stand_in, raising=False)


def model_file(folder: Path) -> Path:
    path = folder / "mine.gguf"
    path.write_bytes(gguf_bytes())
    return path


def test_serve_hands_the_settings_and_the_model_to_the_wiring(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = Wiring(answer=3)
    use_wiring(monkeypatch, wiring)
    path = model_file(folder)
    (folder / "millpond.toml").write_text("port = 1\nmax_running = 5\n")
    monkeypatch.setenv("MILLPOND_API_KEY", "k")
    result = run("serve", str(path), "--port", "9000", "--kv-cells", "auto", "--no-prefix-cache", "--exact")
    assert result.exit_code == 3, result.output
    ((config, model),) = wiring.calls
    assert config.model == str(path)
    assert (config.server.port, config.server.api_key) == (9000, "k")
    assert (config.engine.max_running, config.engine.kv_cells) == (5, None)
    assert (config.engine.prefix_cache, config.engine.exact) == (False, True)
    assert (model.name, model.path) == ("mine", path)


def test_the_model_can_come_from_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wiring = Wiring()
    use_wiring(monkeypatch, wiring)
    (folder / "millpond.toml").write_text(f"model = '{model_file(folder)}'\n")
    assert run("serve").exit_code == 0
    assert wiring.calls[0][1].name == "mine"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "nowhere.gguf"], "error: {folder}/nowhere.gguf: no such file; check the path"),
        (["serve", "--port", "x"], "error: port: 'x' is not a whole number from 0 to 65535 (from --port)"),
        (["serve", "--config", "none.toml"], "error: config: cannot read none.toml: No such file or directory"),
        (["models", "rm", "smollm2-135m"], "error: smollm2-135m is not pulled; see: millpond models list"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(folder: Path, arguments: list[str], line: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [line.format(folder=folder)]
    assert result.stdout == ""


def test_an_error_of_the_running_server_is_one_line_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wiring(monkeypatch, Wiring(answer=EngineFailed("the engine\nis gone")))
    result = run("serve", str(model_file(folder)))
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == "error: the engine is gone"


def test_ctrl_c_is_quiet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_wiring(monkeypatch, Wiring(answer=KeyboardInterrupt()))
    result = run("serve", str(model_file(folder)))
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    assert "Interrupt" not in result.output


def test_an_unknown_flag_is_a_usage_error(folder: Path) -> None:
    result = run("serve", "--kv-cels", "5")
    assert result.exit_code == 2
    assert "--kv-cells" in result.stderr


def test_serve_help_has_every_setting(folder: Path) -> None:
    text = run("serve", "--help").output
    for setting in public_settings():
        assert (setting.flag if setting.group else "model") in text
    assert "--no-prefix-cache" in text
    assert "fault-plan" not in text


def test_the_sample_is_printed(folder: Path) -> None:
    result = run("serve", "--sample-config")
    assert result.exit_code == 0
    assert "#kv_cells = " in result.stdout


def test_the_values_of_all_sources_are_printed_without_secrets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "millpond.toml").write_text("max_running = 5\n")
    monkeypatch.setenv("MILLPOND_API_KEY", "sk-very-secret")
    lines = run("serve", "x.gguf", "--show-config", "--port", "9").stdout.splitlines()
    assert {"model = x.gguf", "max_running = 5", "port = 9", "kv_cells = auto", "api_key = (hidden)"} <= set(lines)


def test_models_are_listed_and_removed(folder: Path) -> None:
    assert "not pulled" in run("models", "list").stdout
    path = folder / "home" / "models" / "hf" / "org" / "repo" / "x.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(gguf_bytes())
    listed = run("models", "list")
    assert "hf:org/repo/x.gguf" in listed.stdout
    assert str(folder / "home") in listed.stderr
    assert run("models", "rm", "hf:org/repo/x.gguf").exit_code == 0
    assert not path.exists()


def test_pull_prints_the_path_alone_on_stdout(folder: Path) -> None:
    path = model_file(folder)
    assert run("models", "pull", str(path)).stdout == f"{path}\n"


def test_version_names_the_library(folder: Path) -> None:
    text = run("version").stdout
    assert f"millpond {millpond.__version__}" in text
    assert "xllamacpp 20" in text
    assert run("--version").stdout == f"millpond {millpond.__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("millpond serve --kv-type-k ", {"f16", "q8_0"}),
        ("millpond serve --kv-c", {"--kv-cells"}),
        ("millpond serve smo", {"smollm2-135m"}),
        ("millpond models ", {"list", "pull", "rm"}),
    ],
)
def test_the_shell_completes(folder: Path, line: str, words: set[str]) -> None:
    environ = {"_MILLPOND_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    result = CliRunner().invoke(build_app(), [], env=environ, prog_name="millpond")
    assert words <= set(result.stdout.split())


@pytest.mark.slow
def test_the_package_runs_as_a_module_and_help_imports_no_server(folder: Path) -> None:
    program = (
        "import sys, runpy; sys.argv = ['millpond', 'serve', '--help']\n"
        "try: runpy.run_module('millpond', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(sorted({'fastapi', 'uvicorn', 'numpy', 'jinja2'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(millpond.__file__).parents[1])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--kv-cells" in done.stdout

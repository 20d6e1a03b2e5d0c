"""Settings: which source wins, one name everywhere, and errors that name setting and source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from millpond.cli.reference import configuration_page, sample_config
from millpond.cli.settings import Setting, Value, all_settings, load_config, public_settings, shown_values
from millpond.config import Config, EngineConfig, ServerConfig
from millpond.errors import ConfigError

SECRET = "sk-very-secret"


def load(
    folder: Path,
    toml: str | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Value] | None = None,
) -> Config:
    if toml is not None:
        (folder / "millpond.toml").write_text(toml)
    return load_config(flags or {}, environ or {}, folder=folder)


def test_with_nothing_given_the_defaults_hold(tmp_path: Path) -> None:
    assert load(tmp_path) == Config()


def test_a_later_source_wins(tmp_path: Path) -> None:
    toml = "port = 1\nmax_running = 2\nkv_cells = 3\nqueue_requests = 4\n"
    environ = {"MILLPOND_PORT": "11", "MILLPOND_MAX_RUNNING": "12", "MILLPOND_KV_CELLS": "13", "HOME": "/"}
    config = load(tmp_path, toml, environ, {"port": "21", "max_running": None, "kv_cells": None})
    assert config.server.port == 21
    assert config.engine.max_running == 12
    assert config.engine.kv_cells == 13
    assert config.queue.queue_requests == 4
    assert config.server.host == ServerConfig().host


@pytest.mark.parametrize("setting", public_settings(), ids=lambda setting: setting.name)
def test_every_setting_has_one_name_in_every_source(setting: Setting, tmp_path: Path) -> None:
    text, value = _other_value(setting)
    toml = f"{setting.name} = {text if setting.kind is not str else repr(text)}\n"
    from_file = load(tmp_path, toml)
    (tmp_path / "millpond.toml").unlink()
    from_environment = load(tmp_path, environ={setting.variable: text})
    from_flag = load(tmp_path, flags={setting.name: text})
    owner = getattr(from_file, setting.group) if setting.group else from_file
    assert getattr(owner, setting.name) == value != setting.default
    assert from_file == from_environment == from_flag


def _other_value(setting: Setting) -> tuple[str, Value]:
    """A valid value that is not the default: as text and as it should arrive."""
    if setting.choices:
        other = next(choice for choice in setting.choices if choice != setting.default)
        return other, other
    if setting.kind is bool:
        return str(not setting.default).lower(), not setting.default
    if setting.kind is str:
        return "elsewhere", "elsewhere"
    number = 0.25 if setting.kind is float and setting.maximum is not None else setting.kind(77)
    return str(number), number


def test_auto_can_be_said_in_every_source(tmp_path: Path) -> None:
    assert load(tmp_path, 'kv_cells = "auto"').engine.kv_cells is None
    assert load(tmp_path, "kv_cells = 512", {"MILLPOND_KV_CELLS": "auto"}).engine.kv_cells is None
    assert load(tmp_path, "kv_cells = 512", {}, {"kv_cells": "auto"}).engine.kv_cells is None


@pytest.mark.parametrize(("text", "value"), [("1", True), ("ON", True), ("false", False), ("no", False)])
def test_switches_in_the_environment(text: str, value: bool, tmp_path: Path) -> None:
    assert load(tmp_path, environ={"MILLPOND_EXACT": text}).engine.exact is value


def test_a_switch_given_as_a_flag_wins_both_ways(tmp_path: Path) -> None:
    assert load(tmp_path, "prefix_cache = true", {}, {"prefix_cache": False}).engine.prefix_cache is False
    assert load(tmp_path, "prefix_cache = false", {}, {"prefix_cache": None}).engine.prefix_cache is False


def test_a_whole_number_stands_for_a_float(tmp_path: Path) -> None:
    value = load(tmp_path, "request_timeout = 5").queue.request_timeout
    assert (value, type(value)) == (5.0, float)


def test_the_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "millpond.toml").write_text("port = 1")
    other, flagged = tmp_path / "other.toml", tmp_path / "flagged.toml"
    other.write_text("port = 2")
    flagged.write_text("port = 3")
    environ = {"MILLPOND_CONFIG": str(other)}
    assert load_config({}, environ, folder=tmp_path).server.port == 2
    assert load_config({}, environ, config_file=flagged, folder=tmp_path).server.port == 3
    with pytest.raises(ConfigError, match=r"config: cannot read .*missing\.toml: No such file"):
        load_config({}, {}, config_file=tmp_path / "missing.toml", folder=tmp_path)


def test_variables_of_other_parts_are_not_settings(tmp_path: Path) -> None:
    names = ("MILLPOND_HOME", "MILLPOND_LIBLLAMA", "MILLPOND_TEST_MODEL")
    assert load(tmp_path, environ=dict.fromkeys(names, "/x")) == Config()


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("kv_cell = 5", r"kv_cell: is not a setting \(in .*millpond\.toml\); did you mean kv_cells\?"),
        ("[engine]\nkv_cells = 5", r"engine: is not a setting"),
        ("model_path = 'x'", r"model_path: is not a setting"),
        ("port = 'x'", r"port: 'x' is not a whole number from 0 to 65535 \(from .*millpond\.toml\)"),
        ("port = true", r"port: True is not a whole number"),
        ("port = 8000.0", r"port: 8000\.0 is not a whole number"),
        ("port = 70000", r"port: 70000 is not a whole number from 0 to 65535"),
        ("threads = 0", r"threads: 0 is not a whole number of at least 1, or auto"),
        ("exact = 1", r"exact: 1 is not true or false"),
        ("request_timeout = nan", r"request_timeout: nan is not a number of at least 0"),
        ("request_timeout = inf", r"request_timeout: inf is not a number"),
        ("kv_type_k = 'f8'", r"kv_type_k: 'f8' is not one of f16, bf16"),
        ("host = 5", r"host: 5 is not text"),
        ("port = ", r"config: .*millpond\.toml is not valid TOML: "),
    ],
)
def test_a_wrong_line_of_the_file_is_named(toml: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, toml)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MILLPOND_KV_CELS", "5", r"MILLPOND_KV_CELS: is not a setting; did you mean MILLPOND_KV_CELLS\?; unset it"),
        ("MILLPOND_FAULT_PLAN", "x", r"MILLPOND_FAULT_PLAN: is not a setting"),
        ("MILLPOND_PORT", "80.5", r"port: '80\.5' is not a whole number .* \(from MILLPOND_PORT\)"),
        ("MILLPOND_PORT", "", r"port: '' is not a whole number"),
        ("MILLPOND_PORT", "auto", r"port: 'auto' is not a whole number"),
        ("MILLPOND_EXACT", "maybe", r"exact: 'maybe' is not true or false \(from MILLPOND_EXACT\)"),
        ("MILLPOND_MAX_STEP_MS", "nan", r"max_step_ms: nan is not a number"),
        ("MILLPOND_LOG_LEVEL", "loud", r"log_level: 'loud' is not one of debug, info, warning, error"),
    ],
)
def test_a_wrong_variable_is_named(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, environ={name: text})


def test_a_wrong_flag_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cells: 'many' is not a whole number .* \(from --kv-cells\)"):
        load(tmp_path, flags={"kv_cells": "many"})


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    config = load(tmp_path, environ={"MILLPOND_API_KEY": SECRET})
    shown = dict(shown_values(config))
    assert config.server.api_key == SECRET
    assert SECRET not in str(shown)
    assert shown["api_key"] == "(hidden)"
    with pytest.raises(ConfigError, match="api_key: the value is not text") as caught:
        load(tmp_path, "api_key = 12345678")
    assert "12345678" not in str(caught.value)


def test_internal_settings_are_shown_nowhere() -> None:
    internal = {setting.name for setting in all_settings() if setting.internal}
    assert {"model_path", "model_digest", "fault_plan"} <= internal
    for name in internal:
        assert name not in sample_config()
        assert name not in configuration_page()
        assert name not in dict(shown_values(Config()))


def test_shown_values_use_the_words_of_the_file() -> None:
    shown = dict(shown_values(Config(engine=EngineConfig(kv_cells=None, exact=True))))
    assert (shown["kv_cells"], shown["exact"], shown["port"]) == ("auto", "true", "8000")


def test_the_sample_sets_nothing_and_uncommented_it_gives_the_defaults(tmp_path: Path) -> None:
    sample = sample_config()
    assert tomllib.loads(sample) == {}
    lines = [line.removeprefix("#") for line in sample.splitlines() if not line.startswith("# ")]
    assert set(tomllib.loads("\n".join(lines))) == {setting.name for setting in public_settings()}
    assert load(tmp_path, "\n".join(lines)) == Config()


def test_every_setting_has_help_in_one_line() -> None:
    for setting in public_settings():
        assert setting.help
        assert "\n" not in setting.help
        assert "|" not in setting.help, "it would break the table of docs/configuration.md"

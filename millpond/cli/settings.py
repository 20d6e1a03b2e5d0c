"""Reads settings: defaults < TOML file < MILLPOND_* environment < flags, under one name each. Knows no command.

Names, help, choices and bounds come from the fields of millpond.config; nothing is listed twice.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from millpond.config import Config
from millpond.errors import ConfigError

PREFIX = "MILLPOND_"
DEFAULT_FILE = "millpond.toml"
CONFIG_VARIABLE = "MILLPOND_CONFIG"
OTHER_VARIABLES = frozenset({"MILLPOND_HOME", CONFIG_VARIABLE, "MILLPOND_LIBLLAMA", "MILLPOND_TEST_MODEL"})
"""MILLPOND_* names that are no settings of a server."""
AUTO = "auto"
"""How None is written in a file, in the environment and as a flag."""

Value: TypeAlias = bool | int | float | str | None
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_KINDS: Mapping[type, str] = types.MappingProxyType(
    {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of Config or of one of its groups."""

    name: str
    group: str | None
    """Field of Config that holds it; None: Config itself."""
    kind: type
    """bool, int, float or str."""
    optional: bool
    """It may be "auto" (None)."""
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    secret: bool = False
    env_only: bool = False
    internal: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def expects(self) -> str:
        """What a value must be, in words."""
        words = f"one of {', '.join(self.choices)}" if self.choices else _KINDS[self.kind]
        if self.minimum is not None and self.maximum is not None:
            words += f" from {self.minimum} to {self.maximum}"
        elif self.minimum is not None:
            words += f" of at least {self.minimum}"
        return f"{words}, or {AUTO}" if self.optional else words


def all_settings() -> tuple[Setting, ...]:
    """Every setting in the order of the fields, internal ones included."""
    found: list[Setting] = []
    for entry, hint in _typed_fields(Config):
        if is_dataclass(hint):
            found += [_setting(inner, kind, entry.name) for inner, kind in _typed_fields(cast(type, hint))]
        else:
            found.append(_setting(entry, hint, None))
    return tuple(found)


def public_settings() -> tuple[Setting, ...]:
    """Those that can be set and shown."""
    return tuple(setting for setting in all_settings() if not setting.internal)


def load_config(
    flags: Mapping[str, Value], environ: Mapping[str, str], *, config_file: Path | None = None, folder: Path
) -> Config:
    """The configuration from all sources. A flag of value None was not given.

    `config_file`: the TOML file; None: MILLPOND_CONFIG, or millpond.toml in `folder` if it is there.
    Raises ConfigError, which names the setting and the source, for unknown names and wrong values.
    """
    path = _find_file(config_file, environ, folder)
    values = {
        **(_from_file(path) if path else {}),
        **_from_environment(environ),
        **_from_flags(flags),
    }
    return _build(values)


def config_of(values: Mapping[str, Value]) -> Config:
    """The configuration of a script: defaults and these values, by setting name; no file, no environment.

    Raises ConfigError, which names the setting, for unknown names and wrong values.
    """
    known = {setting.name: setting for setting in public_settings()}
    for name in values:
        if name not in known:
            raise ConfigError(name, f"is not a setting{_did_you_mean(name, known)}")
    return _build({name: _checked_type(known[name], value, "the call") for name, value in values.items()})


def shown_values(config: Config) -> list[tuple[str, str]]:
    """(name, value as text) of every public setting, secrets hidden."""
    return [(setting.name, shown_value(setting, _value_in(config, setting))) for setting in public_settings()]


def shown_value(setting: Setting, value: Value) -> str:
    """The value as a file or flag writes it; a secret that is set is not shown."""
    if setting.secret and value:
        return "(hidden)"
    if value is None:
        return AUTO
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _typed_fields(owner: type) -> list[tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(owner)
    return [(entry, hints[entry.name]) for entry in fields(owner)]


def _setting(entry: Field[Any], hint: Any, group: str | None) -> Setting:
    parts = typing.get_args(hint) or (hint,)
    kinds = [part for part in parts if part is not type(None)]
    if len(kinds) != 1 or kinds[0] not in _KINDS or entry.default is MISSING:
        raise TypeError(f"config field {entry.name}: a setting is bool, int, float or str, or None, with a default")
    metadata: dict[str, Any] = dict(entry.metadata)
    return Setting(entry.name, group, kinds[0], len(parts) > 1, entry.default, **metadata)


def _find_file(named: Path | None, environ: Mapping[str, str], folder: Path) -> Path | None:
    if named is not None:
        return named
    if environ.get(CONFIG_VARIABLE):
        return Path(environ[CONFIG_VARIABLE])
    default = folder / DEFAULT_FILE
    return default if default.is_file() else None


def _from_file(path: Path) -> dict[str, Value]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("config", f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not valid TOML: {error}") from None
    known = {setting.name: setting for setting in public_settings()}
    for name in table:
        if name not in known:
            raise ConfigError(name, f"is not a setting (in {path}){_did_you_mean(name, known)}")
    return {name: _checked_type(known[name], value, str(path)) for name, value in table.items()}


def _from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    known = {setting.variable: setting for setting in public_settings()}
    values: dict[str, Value] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in known:
            raise ConfigError(name, f"is not a setting{_did_you_mean(name, (*known, *OTHER_VARIABLES))}; unset it")
        values[known[name].name] = _parsed(known[name], text, name)
    return values


def _from_flags(flags: Mapping[str, Value]) -> dict[str, Value]:
    known = {setting.name: setting for setting in public_settings()}
    values: dict[str, Value] = {}
    for name, value in flags.items():
        if isinstance(value, str):
            source = known[name].flag if known[name].group else "the command line"
            values[name] = _parsed(known[name], value, source)
        elif value is not None:
            values[name] = _checked_type(known[name], value, known[name].flag)
    return values


def _parsed(setting: Setting, text: str, source: str) -> Value:
    """The value that a piece of text stands for."""
    if setting.optional and text == AUTO:
        return None
    if setting.kind is str:
        return _checked_type(setting, text, source)
    if setting.kind is bool:
        lowered = text.strip().lower()
        if lowered not in _TRUE + _FALSE:
            raise _wrong(setting, text, source)
        return lowered in _TRUE
    try:
        number = setting.kind(text)
    except ValueError:
        raise _wrong(setting, text, source) from None
    return _checked_type(setting, number, source)


def _checked_type(setting: Setting, value: Any, source: str) -> Value:
    """The value itself if its type, choice and bounds are right; whole numbers stand for floats too."""
    if setting.optional and (value is None or value == AUTO):
        return None
    if setting.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not setting.kind:
        raise _wrong(setting, value, source)
    if setting.choices and value not in setting.choices:
        raise _wrong(setting, value, source)
    if isinstance(value, int | float) and not _within(setting, value):
        raise _wrong(setting, value, source)
    return cast(Value, value)


def _within(setting: Setting, number: float) -> bool:
    low = -math.inf if setting.minimum is None else setting.minimum
    high = math.inf if setting.maximum is None else setting.maximum
    return math.isfinite(number) and low <= number <= high


def _wrong(setting: Setting, value: Any, source: str) -> ConfigError:
    shown = "the value" if setting.secret else repr(value)
    return ConfigError(setting.name, f"{shown} is not {setting.expects} (from {source})")


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _build(values: Mapping[str, Value]) -> Config:
    grouped: dict[str | None, dict[str, Any]] = {}
    for setting in all_settings():
        if setting.name in values:
            grouped.setdefault(setting.group, {})[setting.name] = values[setting.name]
    own: dict[str, Any] = grouped.pop(None, {})
    groups = {entry.name: hint for entry, hint in _typed_fields(Config) if is_dataclass(hint)}
    parts: dict[str, Any] = {name: cast(type, hint)(**grouped.get(name, {})) for name, hint in groups.items()}
    return Config(**own, **parts)


def _value_in(config: Config, setting: Setting) -> Value:
    owner = getattr(config, setting.group) if setting.group else config
    return cast(Value, getattr(owner, setting.name))

"""API keys: who holds one, by which checksum, with what limits; and the file that lists them. Knows TOML; no HTTP.

A key is 256 random bits, so its plain sha256 in a file tells nobody the key. A key's text is never kept.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from millpond.errors import ConfigError

SETTING = "keys_file"
DEFAULT_NAME = "default"
"""Name of the key of --api-key; names, never keys, go into prefix-cache namespaces."""
KEY_PREFIX = "mp-"
MAX_PRIORITY = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = frozenset({"name", "sha256", "max_in_flight", "priority", "namespace"})


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key. Prefixes are shared between keys of one `namespace`."""

    name: str
    sha256: bytes
    namespace: str
    max_in_flight: int | None = None
    """Requests at once; None: the server's default, 0: no limit."""
    max_priority: int | None = None
    """What a client that says nothing gets and one that says more is cut to; None: the client's own, or 0."""

    def priority(self, asked: int | None) -> int:
        if self.max_priority is None:
            return asked or 0
        return self.max_priority if asked is None else min(asked, self.max_priority)


ANONYMOUS = ApiKey("", b"", "")
"""Everybody, where no key is configured."""


def digest_of(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def configured_keys(api_key: str, keys_file: str) -> tuple[ApiKey, ...]:
    """Of --api-key and --keys-file together; none: nobody needs a key. Raises ConfigError."""
    keys = [ApiKey(DEFAULT_NAME, digest_of(api_key.encode()), DEFAULT_NAME)] if api_key else []
    if keys_file:
        keys += read_keys(Path(keys_file))
    for place, key in enumerate(keys):
        for earlier in keys[:place]:
            if key.name == earlier.name or key.sha256 == earlier.sha256:
                raise ConfigError(SETTING, f"the key {key.name!r} is there twice")
    return tuple(keys)


def read_keys(path: Path) -> list[ApiKey]:
    """The [[key]] tables of a keys file. Raises ConfigError, which names the entry, and never shows a checksum."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(SETTING, f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(SETTING, f"{path} is not valid TOML: {error}") from None
    tables: Any = document.pop("key", [])
    if document or not isinstance(tables, list) or not tables:
        raise ConfigError(SETTING, f"{path} must hold [[key]] tables and nothing else")
    return [_key_of(table, place) for place, table in enumerate(cast(list[Any], tables), 1)]


def key_entry(name: str, key: str) -> str:
    """The TOML table for a new key. Raises ConfigError for a name that cannot be one."""
    if not _NAME.fullmatch(name):
        raise ConfigError(SETTING, f"{name!r} is no name: letters, digits, dot, dash and underscore, at most 64")
    return (
        f'[[key]]\nname = "{name}"\nsha256 = "{digest_of(key.encode()).hex()}"\n'
        f"# max_in_flight = 8       # requests at once; 0: no limit; default: --max-in-flight\n"
        f"# priority = 0            # the highest its clients may ask for, and what they get by default\n"
        f'# namespace = "{name}"    # keys with the same one share cached prompt prefixes\n'
    )


def _key_of(table: Any, place: int) -> ApiKey:
    if not isinstance(table, dict):
        raise ConfigError(SETTING, f"entry {place} is not a table")
    fields = cast(Mapping[str, Any], table)
    unknown = sorted(fields.keys() - _FIELDS)
    if unknown:
        raise ConfigError(
            SETTING, f"entry {place}: {unknown[0]} is not a field; there are {', '.join(sorted(_FIELDS))}"
        )
    name, sha256 = fields.get("name"), fields.get("sha256")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(SETTING, f"entry {place}: name must be 1 to 64 letters, digits, dots, dashes, underscores")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ConfigError(SETTING, f"key {name!r}: sha256 must be 64 hex digits; `millpond keys new` makes one")
    namespace = fields.get("namespace", name)
    if not isinstance(namespace, str) or not _NAME.fullmatch(namespace):
        raise ConfigError(SETTING, f"key {name!r}: namespace must be like a name")
    return ApiKey(
        name,
        bytes.fromhex(sha256),
        namespace,
        max_in_flight=_number(fields, "max_in_flight", name, low=0) if "max_in_flight" in fields else None,
        max_priority=_number(fields, "priority", name, low=-MAX_PRIORITY) if "priority" in fields else 0,
    )


def _number(fields: Mapping[str, Any], field: str, name: str, *, low: int) -> int:
    value = fields[field]
    if type(value) is not int or not low <= value <= MAX_PRIORITY:
        raise ConfigError(SETTING, f"key {name!r}: {field} must be a whole number from {low} to {MAX_PRIORITY}")
    return value

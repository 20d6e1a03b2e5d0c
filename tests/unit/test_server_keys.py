"""The keys file: what is read, what is refused and with which words; keys compare by checksum, all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from millpond.cli.main import build_app
from millpond.errors import ConfigError
from millpond.server.auth import Authenticator
from millpond.server.keys import ANONYMOUS, ApiKey, configured_keys, digest_of, key_entry, read_keys

HEX = "ab" * 32


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_new_key_and_its_entry_fit(tmp_path: Path):
    printed = CliRunner().invoke(build_app(), ["keys", "new", "alice"])
    assert printed.exit_code == 0
    key = printed.stdout.splitlines()[0].split()[-1]
    [entry] = configured_keys("", str(written(tmp_path, printed.stdout)))
    assert (entry.name, entry.namespace, entry.max_in_flight, entry.max_priority) == ("alice", "alice", None, 0)
    keys = Authenticator([entry])
    assert keys.authenticate([(b"authorization", f"bearer  {key} ".encode())]) is entry
    assert keys.authenticate([(b"x-api-key", key[:-1].encode())]) is None
    assert keys.authenticate([]) is None
    assert key not in printed.stdout.split("\n", 1)[1]


def test_two_new_keys_differ():
    first, second = (CliRunner().invoke(build_app(), ["keys", "new", "a"]).stdout for _ in range(2))
    assert first != second


def test_every_field_is_read(tmp_path: Path):
    text = f'[[key]]\nname="a"\nsha256="{HEX}"\nmax_in_flight=3\npriority=-2\nnamespace="t"\n'
    assert read_keys(written(tmp_path, text)) == [ApiKey("a", bytes.fromhex(HEX), "t", 3, -2)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "\\[\\[key\\]\\]"),
        ("x = 1", "\\[\\[key\\]\\]"),
        ("key = 1", "\\[\\[key\\]\\]"),
        ("key = [1]", "entry 1 is not a table"),
        ("[[key", "not valid TOML"),
        ("[[key]]\nsha256='x'", "entry 1: name"),
        ("[[key]]\nname='a b'", "entry 1: name"),
        ("[[key]]\nname='a'\nsha256='abc'", "key 'a': sha256"),
        (f"[[key]]\nname='a'\nsha256='{HEX}'\nlimit=3", "limit is not a field"),
        (f"[[key]]\nname='a'\nsha256='{HEX}'\nmax_in_flight=-1", "max_in_flight"),
        (f"[[key]]\nname='a'\nsha256='{HEX}'\npriority=true", "priority"),
        (f"[[key]]\nname='a'\nsha256='{HEX}'\nnamespace=''", "namespace"),
        (f"[[key]]\nname='a'\nsha256='{HEX}'\n[[key]]\nname='b'\nsha256='{HEX}'", "'b' is there twice"),
        (f"[[key]]\nname='default'\nsha256='{HEX}'", "'default' is there twice"),
    ],
)
def test_what_is_wrong_is_named_and_no_checksum_shown(tmp_path: Path, text: str, said: str):
    with pytest.raises(ConfigError, match=said) as error:
        configured_keys("secret", str(written(tmp_path, text)))
    assert HEX not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none\.toml"):
        configured_keys("", str(tmp_path / "none.toml"))


def test_names_with_quotes_cannot_write_other_toml():
    with pytest.raises(ConfigError, match="is no name"):
        key_entry('a"\npriority = 9', "k")


def test_without_keys_everybody_is_anonymous():
    assert configured_keys("", "") == ()
    assert Authenticator(()).authenticate([(b"x-api-key", b"any")]) is ANONYMOUS


@pytest.mark.parametrize(
    ("cap", "asked", "given"),
    [(None, None, 0), (None, 7, 7), (None, -7, -7), (3, None, 3), (3, 7, 3), (3, 1, 1), (-1, None, -1), (-1, 0, -1)],
)
def test_a_priority_is_a_cap_and_a_default(cap: int | None, asked: int | None, given: int):
    assert ApiKey("a", digest_of(b"k"), "a", max_priority=cap).priority(asked) == given

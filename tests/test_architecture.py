"""The rules of docs/architecture.md hold in every file, and each checker finds a violation planted in a small tree."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import architecture_rules as rules
import pytest

ROOT = Path(__file__).parent.parent
Rule = Callable[[list[rules.Module]], list[str]]

PACKAGE_RULES: list[Rule] = [
    rules.rank_violations,
    rules.cycle_violations,
    rules.purity_violations,
    rules.name_violations,
    rules.docstring_violations,
    rules.length_violations,
    rules.nesting_violations,
    rules.broad_except_violations,
]
OTHER_RULES: list[Rule] = [
    rules.name_violations,
    rules.docstring_violations,
    rules.length_violations,
]


@cache
def modules(*folders: str) -> list[rules.Module]:
    return [module for folder in folders for module in rules.read_modules(ROOT / folder)]


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps(rule: Rule) -> None:
    assert rule(modules("millpond")) == []


@pytest.mark.parametrize("rule", OTHER_RULES, ids=lambda rule: rule.__name__)
def test_tests_and_scripts_keep(rule: Rule) -> None:
    assert rule(modules("tests", "scripts", "benchmarks", "examples")) == []


def test_every_part_is_in_the_documents_table_of_ranks() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| rank | package | may import |")[1].split("\n\n")[0]
    named = set(re.findall(r"\w+", table))
    parts = {part for part in rules.MAY_IMPORT if not part.startswith("__")} - rules.NOUNS
    assert parts - named == set()


DOC = '"""A module."""\n'
LONG = "def long() -> None:\n" + "    print()\n" * 60
DEEP = (
    "def deep() -> None:\n    if a:\n        for b in c:\n            with d:\n"
    "                if e:\n                    pass\n"
)
FLAT = (
    "def flat() -> None:\n    if a:\n        pass\n    elif b:\n        pass\n    elif c:\n        pass\n"
    "    elif d:\n        for x in y:\n            with z:\n                pass\n"
)


@pytest.mark.parametrize(
    ("rule", "path", "source", "words"),
    [
        (rules.rank_violations, "text/bad.py", "from millpond.server import app", "text may not import server.app"),
        (rules.rank_violations, "text/bad.py", "import millpond.runtime.fake", "text may not import runtime.fake"),
        (rules.rank_violations, "text/bad.py", "from millpond.runtime import fake", "may not import runtime.fake"),
        (rules.rank_violations, "text/bad.py", "from millpond import server", "text may not import server"),
        (rules.rank_violations, "text/bad.py", "from ..server import app", "text may not import server.app"),
        (rules.rank_violations, "text/bad.py", "def f():\n    import millpond.server", "may not import server"),
        (rules.rank_violations, "engine/bad.py", "from millpond.text import bad", "engine may not import text.bad"),
        (rules.rank_violations, "engine_client/bad.py", "from millpond.engine.core import x", "import engine.core"),
        (rules.rank_violations, "types.py", "from millpond.runtime import base", "types may not import runtime"),
        (rules.rank_violations, "novel/bad.py", "x = 1", "novel: has no rank"),
        (rules.purity_violations, "scheduler/bad.py", "import time", "may not import time"),
        (rules.purity_violations, "kvcache/bad.py", "from os import path", "may not import os.path"),
        (rules.purity_violations, "speculative/verifier.py", "from numpy.random import rand", "numpy.random"),
        (rules.name_violations, "text/utils.py", "x = 1", "is called utils"),
        (rules.name_violations, "text/common/x.py", "x = 1", "is called common"),
        (rules.length_violations, "text/bad.py", LONG, "long has 61 lines"),
        (rules.nesting_violations, "text/bad.py", DEEP, "deep is nested 4 deep"),
        (rules.broad_except_violations, "text/bad.py", "try:\n    x\nexcept Exception:\n    pass", "catches everyth"),
        (rules.broad_except_violations, "text/bad.py", "try:\n    x\nexcept:\n    pass", "catches everything"),
        (rules.cycle_violations, "text/bad.py", "from millpond.text.worse import x", "import cycle: "),
    ],
)
def test_a_planted_violation_is_found(rule: Rule, path: str, source: str, words: str, tmp_path: Path) -> None:
    plant(tmp_path, "text/worse.py", DOC + "from millpond.text import bad\n")
    plant(tmp_path, "server/app.py", DOC)
    plant(tmp_path, "runtime/fake.py", DOC)
    plant(tmp_path, "engine/core.py", DOC)
    plant(tmp_path, path, DOC + source)
    found = rule(rules.read_modules(tmp_path))
    assert len(found) == 1
    assert words in found[0]


def test_a_missing_docstring_is_found(tmp_path: Path) -> None:
    plant(tmp_path, "text/bad.py", "x = 1")
    plant(tmp_path, "text/__init__.py", "")
    found = rules.docstring_violations(rules.read_modules(tmp_path))
    assert found == ["text/__init__.py: no module docstring", "text/bad.py: no module docstring"]


def test_what_is_allowed_is_not_reported(tmp_path: Path) -> None:
    plant(tmp_path, "engine/messages.py", DOC + "from millpond.types import TokenId\nimport os\n")
    plant(tmp_path, "engine/worker.py", DOC + "try:\n    x\nexcept Exception:\n    pass\n")
    plant(tmp_path, "engine_client/client.py", DOC + "from millpond.engine.messages import AddRequest\nimport time\n")
    plant(tmp_path, "runtime/base.py", DOC)
    plant(
        tmp_path, "text/tokenizer.py", DOC + "from millpond.runtime.base import Vocab\nfrom millpond import __version__"
    )
    plant(
        tmp_path,
        "wiring.py",
        DOC + "from millpond.engine.worker import x\nfrom millpond.text import tokenizer\n" + FLAT,
    )
    plant(tmp_path, "types.py", DOC)
    modules = rules.read_modules(tmp_path)
    assert [line for rule in PACKAGE_RULES for line in rule(modules)] == []


def plant(root: Path, path: str, source: str) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(source)

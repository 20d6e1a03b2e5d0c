"""canitoolcall's recorded outputs through our parsers: no hard failure in a family that the docs claim."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Status

from millpond.text.channels import MarkerTokens
from millpond.text.tool_formats.stream import Markers

ROOT = Path(__file__).resolve().parents[2]
CLAIMED = ("deepseek", "gemma4", "glm", "gpt-oss", "kimi", "llama", "mistral", "qwen3-hermes", "qwen3-xml")
"""Families with every fixture passed, whitespace aside."""


def _scores() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_scores", ROOT / "scripts" / "tool_scores.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tool_scores"] = module
    spec.loader.exec_module(module)
    return module


tool_scores = _scores()
FAMILIES: Mapping[str, Family] = load_families()
FIXTURES = load_fixtures(None, families=list(CLAIMED))
TRUNCATED = [fixture for fixture in FIXTURES if "truncated" in fixture.tags]


GOOD = (Status.PASS, Status.SOFT_PASS)


@cache
def verdicts(mode: Any) -> Mapping[str, Any]:
    return {verdict.fixture.id: verdict for verdict in tool_scores.score(mode)}


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_recordings_are_read_as_expected(fixture: Fixture) -> None:
    """With the defaults, whole and in pieces."""
    verdict = verdicts(tool_scores.READ)[fixture.id]
    assert verdict.status in GOOD, verdict.details


@pytest.mark.slow
@pytest.mark.parametrize("fixture", TRUNCATED, ids=lambda fixture: fixture.id)
def test_of_a_text_that_a_limit_cut_the_client_gets_the_call_or_with_drop_nothing(fixture: Fixture) -> None:
    """The package wants nothing; a server that says `length` hands out what there is."""
    served = verdicts(tool_scores.SERVED)[fixture.id]
    assert served.status in GOOD or served.is_cut_call, served.details
    strict = verdicts(tool_scores.STRICT)[fixture.id]
    assert strict.status in GOOD, strict.details


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_markers_as_control_tokens_read_the_same(fixture: Fixture) -> None:
    """As in a vocabulary where they are control tokens; in what is no call after all, those are invisible."""
    plan = tool_scores.plan_of(fixture, FAMILIES[fixture.family], whole_calls=True)
    names = [*plan.form.markers, *(plan.turn.think.markers if plan.turn.think and not plan.form.think else ())]
    markers = Markers(names)
    text = fixture.raw_output
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, markers.of(name))
    as_text = tool_scores.replay(plan, [fixture.raw_output])
    plan = replace(plan, tokens=MarkerTokens(markers, {}, {}))
    for pieces in ([text], list(text)):
        found = tool_scores.replay(plan, pieces)
        assert (found.tool_calls, found.reasoning_content) == (as_text.tool_calls, as_text.reasoning_content)
        assert found.content == as_text.content or "malformed" in fixture.tags


@pytest.mark.slow
def test_the_page_has_the_scores() -> None:
    found = {mode: list(verdicts(mode).values()) for mode in tool_scores.MODES}
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    assert tool_scores.page_with(page, tool_scores.table(found)) == page
    read = found[tool_scores.READ]
    assert {v.fixture.family for v in read} == set(CLAIMED) and all(v.status in GOOD for v in read)

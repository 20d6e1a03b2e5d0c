"""canitoolcall's recorded outputs through our parsers: no hard failure in a family that the docs claim."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_whole_calls_conform(fixture: Fixture) -> None:
    verdict = tool_scores.judge(fixture, FAMILIES[fixture.family], whole_calls=True)
    assert verdict.status in (Status.PASS, Status.SOFT_PASS), verdict.details


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda fixture: fixture.id)
def test_streamed_arguments_conform_but_for_unfinished_calls(fixture: Fixture) -> None:
    """A call that the model did not finish, or that stops being JSON, is handed out as far as it went."""
    verdict = tool_scores.judge(fixture, FAMILIES[fixture.family], whole_calls=False)
    assert verdict.status in (Status.PASS, Status.SOFT_PASS) or verdict.is_unfinished_call, verdict.details


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


def test_the_page_has_the_scores() -> None:
    verdicts = {whole: list(tool_scores.score(whole_calls=whole)) for whole in (True, False)}
    page = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")
    assert tool_scores.page_with(page, tool_scores.table(verdicts)) == page
    clean = {v.fixture.family for v in verdicts[True]} - {
        v.fixture.family for v in verdicts[True] if v.status not in (Status.PASS, Status.SOFT_PASS)
    }
    assert clean == set(CLAIMED)

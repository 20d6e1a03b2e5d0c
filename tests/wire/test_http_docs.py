"""docs/http.md names every route, field and error code that the server has, and no route that it has not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_text_engine import FakeTextEngine
from raw_http import exchange, head
from wire_server import running

from millpond.server.schemas.chat import ChatRequest
from millpond.server.schemas.completions import CompletionRequest
from millpond.server.schemas.tokenize import DetokenizeRequest, TokenizeRequest

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")


async def test_every_route_is_documented():
    async with running(FakeTextEngine()) as server:
        document = (await exchange(server.port, head("GET", "/openapi.json"))).json
    served = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert set(re.findall(r"^\| `((?:GET|POST) [^`]+)`", PAGE, re.MULTILINE)) == served


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest])
def test_every_field_is_documented(model):
    missing = [name for name in model.model_fields if f"`{name}`" not in PAGE and f"`{name}:" not in PAGE]
    assert not missing


def test_every_error_code_is_documented():
    source = Path(__file__).parents[2] / "millpond" / "server"
    used = set()
    for file in source.rglob("*.py"):
        used |= set(re.findall(r'code="(\w+)"', file.read_text(encoding="utf-8")))
    used |= {"queue_full", "not_ready", "internal_error", "invalid_api_key", "timeout", "shutting_down"}
    assert {code for code in used if f"`{code}`" not in PAGE} == set()

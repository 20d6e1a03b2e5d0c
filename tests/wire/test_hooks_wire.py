"""Plugins on a whole server: the two examples do what they say, and a broken one changes no answer."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from fake_stack import VOCAB, whole_stack
from prometheus_client.parser import text_string_to_metric_families
from raw_http import TEXT, exchange, head, parse_sse, post

from millpond.hooks.spec import Change, FirstToken, Progress, Stop, hookimpl

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plugin_metrics(page: bytes) -> dict[str, float]:
    return {
        sample.name.removeprefix("millpond_plugin"): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name.startswith("millpond_plugin")
    }


def looping_id() -> int:
    return next(token for token in range(3, 200) if VOCAB.piece(token) == b"a")


async def test_the_example_ends_an_output_that_repeats_itself():
    loop = {"logit_bias": {str(looping_id()): 100.0}, "temperature": 0.0}
    body = {"prompt": "tell me", "max_tokens": 400, "ignore_eos": True}
    async with whole_stack(plugins=[("stop-loops", example("plugin_stop_loops"))]) as stack:
        looping = (await exchange(stack.port, post(TEXT, body | loop))).json
        varied = (await exchange(stack.port, post(TEXT, body | {"max_tokens": 120}))).json
    assert looping["choices"][0]["finish_reason"] == "stop"
    assert set(looping["choices"][0]["text"]) == {"a"}
    assert 64 <= looping["usage"]["completion_tokens"] < 400
    assert (varied["choices"][0]["finish_reason"], varied["usage"]["completion_tokens"]) == ("length", 120)


async def test_the_example_policy_refuses_caps_and_counts():
    module = example("plugin_policy")
    policy = module.Policy()
    async with whole_stack(plugins=[("policy", policy)]) as stack:
        refused = await exchange(stack.port, post(TEXT, {"prompt": [5] * (module.MAX_PROMPT_TOKENS + 1)}))
        capped = await exchange(stack.port, post(TEXT, {"prompt": "x", "max_tokens": 300, "ignore_eos": True}))
        metrics = (await exchange(stack.port, head("GET", "/metrics"))).body
    assert (refused.status, refused.error["code"]) == (403, "refused_by_plugin")
    assert "more than 1000 tokens" in refused.error["message"]
    assert capped.json["usage"]["completion_tokens"] == module.MAX_OUTPUT_TOKENS
    assert policy.ends == {"length": 1}
    assert b'millpond_requests_refused_total{reason="refused_by_plugin"} 1.0' in metrics


class Broken:
    """Fails in everything."""

    @hookimpl
    def on_request(self, request):
        raise RuntimeError

    @hookimpl
    def on_token(self, tokens):
        tokens.clear()
        raise RuntimeError

    @hookimpl
    def mid_generation(self, progress):
        raise SystemError

    @hookimpl
    def on_finish(self, ending):
        raise RuntimeError


@pytest.mark.slow
async def test_a_broken_plugin_changes_no_answer_and_is_switched_off():
    body = {"prompt": "tell me", "max_tokens": 60, "ignore_eos": True, "seed": 5, "return_token_ids": True}
    async with whole_stack() as stack:
        undisturbed = (await exchange(stack.port, post(TEXT, body))).json["choices"]
    async with whole_stack(plugins=[("broken", Broken())]) as stack:
        answers = await asyncio.gather(*(exchange(stack.port, post(TEXT, body)) for _ in range(3)))
        counts = plugin_metrics((await exchange(stack.port, head("GET", "/metrics"))).body)
    assert all(answer.json["choices"] == undisturbed for answer in answers)
    assert counts["s_disabled"] == 1.0 and counts["_failures_total"] >= 10.0


class Asks:
    """Asks for log-probabilities itself."""

    def __init__(self) -> None:
        self.first: list[FirstToken] = []
        self.progress: list[Progress] = []

    @hookimpl
    def on_request(self, request):
        return Change(replace(request.params, logprobs=5))

    @hookimpl
    def after_prefill(self, first):
        self.first.append(first)

    @hookimpl
    def mid_generation(self, progress):
        self.progress.append(progress)


@pytest.mark.slow
async def test_a_plugin_may_ask_for_entropy_and_the_client_sees_nothing_of_it():
    body = {"prompt": "tell me", "max_tokens": 40, "ignore_eos": True, "seed": 5, "temperature": 1.0}
    plugin = Asks()
    async with whole_stack() as stack:
        undisturbed = (await exchange(stack.port, post(TEXT, body))).json["choices"]
    async with whole_stack(plugins=[("asks", plugin)]) as stack:
        whole = (await exchange(stack.port, post(TEXT, body))).json["choices"]
        streamed = parse_sse((await exchange(stack.port, post(TEXT, body | {"stream": True}))).body).data
    assert whole == undisturbed
    choices = [choice for chunk in streamed if isinstance(chunk, dict) for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == undisturbed[0]["text"]
    assert {choice["logprobs"] for choice in choices} == {None}
    assert len(plugin.first) == len(plugin.progress) == 2
    assert all(first.margin is not None and first.margin >= 0.0 for first in plugin.first)
    assert all(seen.entropy is not None and seen.entropy > 0.0 for seen in (*plugin.first, *plugin.progress))


async def test_a_stop_of_one_output_leaves_the_others_alone():
    class StopsOne:
        @hookimpl
        def mid_generation(self, progress):
            return Stop() if progress.sequence_id == 1 else None

    body = {"prompt": "tell me", "max_tokens": 90, "ignore_eos": True, "n": 2}
    async with whole_stack(plugins=[("stops", StopsOne())]) as stack:
        choices = (await exchange(stack.port, post(TEXT, body))).json["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["stop", "length"]

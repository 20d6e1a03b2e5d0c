"""Plugins found, run apart, timed and counted; and nothing at all where there is none."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from test_engine_client_logbook import Clock, SimulatedEngine, request

from millpond.config import Config, ServerConfig
from millpond.engine.messages import StepFrame
from millpond.engine_client.logbook import LogBook
from millpond.engine_client.observer import NullObserver
from millpond.errors import CallerError
from millpond.hooks import loading
from millpond.hooks.loading import Plugin, installed_plugins, plugins_of
from millpond.hooks.observer import HookObserver
from millpond.hooks.runner import MAX_STRIKES, PluginRunner
from millpond.hooks.spec import (
    MID_GENERATION_EVERY,
    Change,
    FirstToken,
    IncomingRequest,
    Refusal,
    Stop,
    hookimpl,
    repetition,
)
from millpond.outputs import StepStats, TokenEvent, TokenLogprobs
from millpond.sampling_params import SamplingParams
from millpond.types import EngineEpoch, FinishReason, RequestId, SequenceId
from millpond.watching import Watch

LONG = 60.0


def runner_of(hook: str, function: Callable, *, budget: float = LONG, **options) -> PluginRunner:
    return PluginRunner("p", {hook: function}, budget=budget, clock=options.pop("clock", time.monotonic), **options)


class Everything:
    """Implements every hook and remembers what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, object]] = []
        self.answers: dict[str, object] = {}

    def _take(self, hook: str, argument: object):
        self.seen.append((hook, argument))
        return self.answers.get(hook)

    @hookimpl
    def on_request(self, request):
        return self._take("on_request", request)

    @hookimpl
    def after_prefill(self, first):
        return self._take("after_prefill", first)

    @hookimpl
    def on_token(self, tokens):
        return self._take("on_token", tokens)

    @hookimpl
    def mid_generation(self, progress):
        return self._take("mid_generation", progress)

    @hookimpl
    def on_finish(self, ending):
        return self._take("on_finish", ending)

    def of(self, hook: str) -> list:
        return [argument for name, argument in self.seen if name == hook]


def observer_of(*plugins: object, budget: float = LONG) -> HookObserver:
    named = [(f"p{number}", plugin) for number, plugin in enumerate(plugins)]
    return HookObserver(plugins_of(named), budget=budget, clock=time.monotonic)


# -- found -------------------------------------------------------------------------------------------------------------


def test_modules_objects_and_classes_are_plugins():
    found = plugins_of([("object", Everything()), ("class", Everything), ("module", module())])
    assert {plugin.name: sorted(plugin.functions) for plugin in found} == {
        "object": sorted(loading.HOOKS),
        "class": sorted(loading.HOOKS),
        "module": ["on_finish"],
    }


def module() -> SimpleNamespace:
    @hookimpl
    def on_finish():
        return "called"

    return SimpleNamespace(on_finish=on_finish, on_token="not marked", __name__="module")


def test_a_function_may_leave_its_argument_out():
    [plugin] = plugins_of([("module", module())])
    assert plugin.functions["on_finish"](object()) == "called"


class WrongArgument:
    @hookimpl
    def on_finish(self, ending, surprise):
        pass


class CannotBeMade:
    def __init__(self) -> None:
        raise RuntimeError("no")


def test_what_is_no_plugin_is_left_out_and_named(caplog: pytest.LogCaptureFixture):
    found = plugins_of([("wrong", WrongArgument), ("dead", CannotBeMade), ("good", Everything)])
    assert [plugin.name for plugin in found] == ["good"]
    assert "plugin wrong" in caplog.text and "plugin dead" in caplog.text


def test_installed_ones_come_from_the_entry_point_group(monkeypatch: pytest.MonkeyPatch):
    entries = {
        "millpond.plugins": [
            EntryPoint("missing", "no_such_module_of_ours", "millpond.plugins"),
            EntryPoint("here", f"{__name__}:Everything", "millpond.plugins"),
        ]
    }
    monkeypatch.setattr(loading, "entry_points", lambda group: entries[group])
    assert [plugin.name for plugin in installed_plugins()] == ["here"]


# -- run apart ---------------------------------------------------------------------------------------------------------


def test_calls_run_on_another_thread_in_order():
    threads, seen = set(), []

    def note(argument: int) -> int:
        threads.add(threading.get_ident())
        seen.append(argument)
        return argument * 2

    runner = runner_of("on_token", note)
    answers = [runner.call("on_token", number) for number in range(5)]
    runner.close(LONG)
    assert [answer.result() for answer in answers] == [0, 2, 4, 6, 8]
    assert seen == list(range(5)) and threads == {runner._thread.ident} != {threading.get_ident()}


def test_a_failing_plugin_is_counted_and_switched_off():
    def fail(argument: object) -> None:
        raise RuntimeError("broken")

    runner = runner_of("on_token", fail)
    answers = [runner.call("on_token", 0) for _ in range(MAX_STRIKES)]
    runner.close(LONG)
    assert [answer.result() for answer in answers] == [None] * MAX_STRIKES
    assert (runner.counts.calls, runner.counts.failures, runner.is_disabled) == (MAX_STRIKES, MAX_STRIKES, True)
    assert runner.call("on_token", 0) is None and not runner.has("on_token")


def test_one_good_call_forgives_the_bad_ones():
    def fail_at_nine(argument: int) -> None:
        if argument % MAX_STRIKES:
            raise RuntimeError

    runner = runner_of("on_token", fail_at_nine)
    for number in range(3 * MAX_STRIKES):
        runner.call("on_token", number)
    runner.close(LONG)
    assert not runner.is_disabled
    assert runner.counts.failures == 3 * (MAX_STRIKES - 1)


def test_a_slow_call_is_an_overrun():
    clock = Clock()

    def slow(seconds: float) -> None:
        clock.now += seconds

    runner = runner_of("on_token", slow, budget=0.05, clock=clock)
    for seconds in (0.01, 0.06, 0.04, 1.0):
        runner.call("on_token", seconds)
    runner.close(LONG)
    assert (runner.counts.overruns, runner.counts.failures, runner.is_disabled) == (2, 0, False)


def test_a_hanging_plugin_loses_events_and_the_server_goes_on():
    let_go, entered = threading.Event(), threading.Event()

    def hang(argument: object) -> None:
        entered.set()
        let_go.wait()

    runner = runner_of("on_token", hang, queue_calls=2)
    runner.call("on_token", 0)
    entered.wait()
    answers = [runner.call("on_token", number) for number in range(5)]
    assert [answer is None for answer in answers] == [False, False, True, True, True]
    assert runner.counts.dropped == 3
    let_go.set()
    runner.close(LONG)
    assert runner.counts.calls == 3


# -- requests ----------------------------------------------------------------------------------------------------------


async def admitted(observer: HookObserver, **fields) -> tuple[SamplingParams, int]:
    return await observer.admit(RequestId("r"), (1, 2), SamplingParams(**fields), 0)


async def test_each_plugin_sees_what_the_one_before_it_changed():
    first, second = Everything(), Everything()
    first.answers["on_request"] = Change(SamplingParams(top_k=1))
    second.answers["on_request"] = Change(priority=5)
    with closing(observer_of(second, first)) as observer:
        assert await admitted(observer, top_k=9) == (SamplingParams(top_k=1), 5)
    assert first.of("on_request") == [IncomingRequest(RequestId("r"), (1, 2), SamplingParams(top_k=9), 0)]
    assert second.of("on_request") == [IncomingRequest(RequestId("r"), (1, 2), SamplingParams(top_k=1), 0)]


async def test_a_refusal_is_the_callers_error_and_later_plugins_are_not_asked():
    first, second = Everything(), Everything()
    first.answers["on_request"] = Refusal("not today")
    with closing(observer_of(second, first)) as observer, pytest.raises(CallerError, match="not today") as caught:
        await admitted(observer)
    assert caught.value.code == "refused_by_plugin"
    assert second.seen == []


@pytest.mark.parametrize("answer", [None, 17, "yes", SamplingParams(top_k=3)])
async def test_any_other_answer_changes_nothing(answer: object):
    plugin = Everything()
    plugin.answers["on_request"] = answer
    with closing(observer_of(plugin)) as observer:
        assert await admitted(observer, top_k=9) == (SamplingParams(top_k=9), 0)


async def test_a_request_waits_for_a_hanging_plugin_no_longer_than_the_budget():
    let_go = threading.Event()

    class Hanging:
        @hookimpl
        def on_request(self, request):
            let_go.wait()
            return Refusal("too late")

    observer = observer_of(Hanging(), budget=0.01)
    try:
        for _ in range(MAX_STRIKES):
            assert await admitted(observer) == (SamplingParams(), 0)
        assert observer.counts()["millpond_plugins_disabled"] == 1
        assert observer.counts()["millpond_plugin_overruns"] == MAX_STRIKES
    finally:
        let_go.set()
        observer.close()


# -- events ------------------------------------------------------------------------------------------------------------


def watched(observer: HookObserver, *lengths: int) -> list:
    """Runs outputs of these lengths over a simulated engine."""
    book = LogBook(frozenset({2}), Clock(), observer)
    engine = SimulatedEngine()
    book.attach(engine.send)
    logs = [book.open(request(length, seed=length)) for length in lengths]
    while book.live:
        engine.announce()
        assert book.apply(engine.step()) is None
    return logs


def test_a_plugin_sees_every_token_each_frame_once_and_every_end():
    plugin = Everything()
    with closing(observer_of(plugin)) as observer:
        logs = watched(observer, 3, 70)
    batches = plugin.of("on_token")
    assert len(batches) == 70
    for log in logs:
        seen = [token.token_id for batch in batches for token in batch if token.sequence_id == log.sequence_id]
        assert seen == log.ids
    assert [(first.sequence_id, first.token_id) for first in plugin.of("after_prefill")] == [
        (log.sequence_id, log.ids[0]) for log in logs
    ]
    assert [progress.length for progress in plugin.of("mid_generation")] == [33, 65]
    assert [ending.output_ids for ending in plugin.of("on_finish")] == [tuple(log.ids) for log in logs]
    assert observer.counts()["millpond_plugin_calls"] == 70 + 2 + 2 + 2


async def test_a_stop_ends_the_sequence_on_the_loop():
    plugin, ended = Everything(), asyncio.Event()
    plugin.answers["mid_generation"] = Stop()
    calls = []

    def end(sequence_id: SequenceId, reason: FinishReason) -> None:
        calls.append((sequence_id, reason, threading.get_ident()))
        ended.set()

    with closing(observer_of(plugin)) as observer:
        observer.attach(end)
        watched(observer, 40)
        await ended.wait()
    assert calls == [(1, FinishReason.STOP, threading.get_ident())]


def test_margin_and_entropy_come_from_the_logprobs_that_were_asked_for():
    plugin = Everything()
    with closing(observer_of(plugin)) as observer:
        book = LogBook(frozenset({2}), Clock(), observer)
        book.attach(lambda command: None)
        logs = [book.open(request(5)) for _ in range(2)]
        halves = TokenLogprobs(math.log(0.5), ((7, math.log(0.5)), (8, math.log(0.25))))
        tokens = [TokenEvent(logs[0].sequence_id, 0, 7, halves), TokenEvent(logs[1].sequence_id, 0, 7)]
        book.apply(StepFrame(EngineEpoch(1), 1, tokens, [], [], StepStats()))
    with_logprobs, without = plugin.of("after_prefill")
    assert with_logprobs.margin == pytest.approx(math.log(2.0))
    assert with_logprobs.entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))
    assert without == FirstToken(RequestId("r"), logs[1].sequence_id, 2, 7, None, None)


def test_the_rolling_entropy_is_the_mean_of_the_recent_tokens():
    plugin = Everything()
    with closing(observer_of(plugin)) as observer:
        book = LogBook(frozenset({2}), Clock(), observer)
        book.attach(lambda command: None)
        logs = [book.open(request(MID_GENERATION_EVERY + 1)) for _ in range(2)]
        sure = TokenLogprobs(0.0, ((7, 0.0),))
        coin = TokenLogprobs(math.log(0.5), ((7, math.log(0.5)), (8, math.log(0.5))))
        for index in range(MID_GENERATION_EVERY + 1):
            tokens = [
                TokenEvent(logs[0].sequence_id, index, 7, coin if index else sure),
                TokenEvent(logs[1].sequence_id, index, 7),
            ]
            book.apply(StepFrame(EngineEpoch(1), index + 1, tokens, [], [], None))
    with_logprobs, without = plugin.of("mid_generation")
    share = MID_GENERATION_EVERY / (MID_GENERATION_EVERY + 1)
    assert with_logprobs.entropy == pytest.approx(share * math.log(2.0))
    assert without.entropy is None and without.repetition > 0.9


@pytest.mark.parametrize(
    ("ids", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), (list(range(100)), 0.0), ([5] * 104, 0.99), ([1, 2, 3, 4] * 26, 0.96)],
)
def test_repetition(ids: list[int], share: float):
    assert repetition(ids) == pytest.approx(share, abs=0.005)


# -- none --------------------------------------------------------------------------------------------------------------


class Counting(HookObserver):
    """Counts everything that is asked of it."""

    calls = 0

    def __getattribute__(self, name: str):
        if name.startswith(("on_", "admit", "_")) and name != "_hooks":
            Counting.calls += 1
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("plugins", "setting"), [([], True), ([Plugin("p", {"on_token": print})], False)], ids=["none installed", "off"]
)
def test_without_plugins_nothing_is_called(plugins: list, setting: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.watching.HookObserver", Counting)
    Counting.calls = 0
    config = Config("m", server=ServerConfig(plugins=setting, metrics=False))
    with closing(Watch(config, "m", plugins)) as watch:
        watched(watch.observer, 40, 3)
        assert watch.hooks is None
    assert Counting.calls == 0


def test_with_a_plugin_the_counting_fake_is_called(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.watching.HookObserver", Counting)
    Counting.calls = 0
    with closing(Watch(Config("m"), "m", [Plugin("p", {"on_token": lambda tokens: None})])) as watch:
        watched(watch.observer, 40, 3)
    assert Counting.calls > 40


def test_all_watching_off_leaves_the_request_log_alone():
    with closing(Watch(Config("m", server=ServerConfig(metrics=False, plugins=False)), "m")) as watch:
        assert isinstance(watch.observer, NullObserver) and watch.hooks is None

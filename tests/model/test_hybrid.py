"""Chats on tiny hybrid, recurrent and sliding-window models: reuse grows, and every logit is that of a cold run.

A planted wrong token in the history shows how far off the compared log probabilities would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import tiny_gguf
from tiny_chats import NOISE, WRITERS, Tiny, cached, chat, distance, message, run

from millpond.request import Request
from millpond.sampling_params import SamplingParams
from millpond.types import FinishReason, MemoryKind, RequestId, SequenceId

pytestmark = [pytest.mark.model, pytest.mark.narrow, pytest.mark.slow]


@pytest.fixture(scope="module", params=list(WRITERS))
def tiny(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tiny]:
    writer, kind, settings = WRITERS[request.param]
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    writer(path, tiny_gguf.Tokenizer.read(smollm2_path))
    made = Tiny(path, kind, settings)
    yield made
    for runtime in made.cores:
        runtime.close()


def test_each_turn_reuses_more_and_equals_a_cold_run(tiny: Tiny) -> None:
    core = tiny.core()
    cold = tiny.core(prefix_cache=False)
    reused: list[int] = []
    for prompt, answer in chat(core, 6):
        usage = answer.finish.usage
        assert usage.cached_tokens + usage.computed_prompt_tokens == len(prompt)
        reused.append(usage.cached_tokens)
        reference = run(cold, {0: prompt})[0]
        assert reference.finish.usage.cached_tokens == 0
        assert distance(answer, reference) <= NOISE
    assert reused[0] == 0 and all(later > earlier for earlier, later in pairwise(reused)), reused


def test_a_state_wrong_by_one_token_would_be_seen(tiny: Tiny) -> None:
    cold = tiny.core(prefix_cache=False)
    prompt = [*message(0, 60), *message(1, 20)]
    right = run(cold, {0: prompt})[0]
    for place in (len(prompt) - 2, len(prompt) - 8):
        wrong = [*prompt[:place], 777, *prompt[place + 1 :]]
        assert distance(run(cold, {0: wrong})[0], right) > 2 * NOISE


def test_an_edited_turn_reuses_what_came_before_it(tiny: Tiny) -> None:
    core = tiny.core()
    said = chat(core, 4)
    before = said[1][0]
    edited = [*before, *said[1][1].ids, 2, 198, *message(77)]
    answer = run(core, {0: edited})[0]
    assert answer.finish.usage.cached_tokens >= len(before), "up to the end of turn 2"
    assert distance(answer, run(tiny.core(prefix_cache=False), {0: edited})[0]) <= NOISE


def test_four_chats_in_a_pool_for_one_all_complete_and_equal(tiny: Tiny) -> None:
    cold = tiny.core(prefix_cache=False)
    prompts = {number: [*message(number, 90), *message(number + 20, 60)] for number in range(4)}
    tight = 256 if tiny.kind is not MemoryKind.RECURRENT else 2048
    core = tiny.core(n_cells=tight, growth_watermark=0.0)
    answers = run(core, prompts, n_tokens=60)
    for number, prompt in prompts.items():
        assert len(answers[number].ids) == 60
        assert distance(answers[number], run(cold, {0: prompt}, n_tokens=60)[0]) <= NOISE
    if tiny.kind is not MemoryKind.RECURRENT:
        assert core.scheduler.preemptions >= 1


def test_a_cancelled_turn_leaves_its_state(tiny: Tiny) -> None:
    core = tiny.core()
    prompt = message(5, 100)
    request = Request(
        RequestId("c"), tuple(prompt), SamplingParams(temperature=0.0, ignore_eos=True), 100, seed=1, arrival=0.0
    )
    core.add(SequenceId(999_999), request)
    ids: list[int] = []
    while len(ids) < 20:
        ids += [event.token_id for event in core.step().tokens]
    core.end(SequenceId(999_999), FinishReason.CANCELLED)
    while core.has_work:
        core.step()
    follow_up = [*prompt, *ids, 2, 198, *message(6)]
    answer = run(core, {0: follow_up})[0]
    assert answer.finish.usage.cached_tokens >= len(prompt) + len(ids) - 1


def test_six_at_once_answer_as_alone_and_equal_prompts_alike(tiny: Tiny) -> None:
    cold = tiny.core(prefix_cache=False)
    alone = {number: run(cold, {0: message(number, 30)})[0] for number in range(6)}
    core = tiny.core(max_running=6, prefix_cache=False)
    together = run(core, {number: message(number, 30) for number in range(6)})
    assert all(distance(together[number], alone[number]) <= NOISE for number in range(6))
    assert all(distance(first, second) > 2 * NOISE for first, second in combinations(alone.values(), 2)), "no witness"
    same = run(core, {number: message(3, 30) for number in range(6)})
    assert all(distance(answer, alone[3]) <= NOISE for answer in same.values())


def test_six_prompts_of_half_a_pool_each_all_complete(tiny: Tiny) -> None:
    sizes = (65, 90, 120, 60, 140, 110)
    core = tiny.core(n_cells=256, growth_watermark=0.0, max_running=6)
    prompts = {number: message(40 + number, size) for number, size in enumerate(sizes)}
    answers = run(core, prompts, n_tokens=30)
    cold = tiny.core(prefix_cache=False)
    for number, prompt in prompts.items():
        assert len(answers[number].ids) == 30
        assert distance(answers[number], run(cold, {0: prompt}, n_tokens=30)[0]) <= NOISE


def test_reuse_begins_with_the_second_sighting_of_a_short_prompt(tiny: Tiny) -> None:
    core = tiny.core()
    first = message(50, 60)
    assert cached(run(core, {0: first})[0]) == 0
    again = run(core, {0: [*first, *message(51, 10)]})[0]
    assert cached(again) >= 64


def test_the_same_prompt_three_times_then_a_shorter_one(tiny: Tiny) -> None:
    core, cold = tiny.core(), tiny.core(prefix_cache=False)
    prompt = [*message(60, 80), *message(61, 60)]
    reference = run(cold, {0: prompt})[0]
    for _ in range(3):
        assert distance(run(core, {0: prompt})[0], reference) <= NOISE
    shorter = prompt[: len(prompt) - 25]
    assert distance(run(core, {0: shorter})[0], run(cold, {0: shorter})[0]) <= NOISE


def test_a_state_that_went_to_disk_and_back_goes_on_as_before(tiny: Tiny, tmp_path: Path) -> None:
    core = tiny.core(spill_ram=1, spill_dir=str(tmp_path), instance="test")
    (prompt, answer), *_ = chat(core, 1, salt=7)
    history = [*prompt, *answer.ids, 2, 198]
    demoted: list[Path] = []
    for number in range(60):
        run(core, {0: message(100 + number, 100)}, n_tokens=1)
        demoted = list((tmp_path / "prefix").glob("*.kv"))
        if len(demoted) > 20:
            break
    assert len(demoted) > 20, "the RAM tier never ran over"
    follow_up = [*history, *message(99)]
    warm = run(core, {0: follow_up})[0]
    assert cached(warm) == len(prompt) + len(answer.ids) - 1
    assert distance(warm, run(tiny.core(prefix_cache=False), {0: follow_up})[0]) <= NOISE


def test_a_sliding_window_prefix_cut_behind_its_window_is_computed_again(tiny: Tiny) -> None:
    """A long state shares only its head with a new prompt; the head's window is not in a state of windows only."""
    core, cold = tiny.core(), tiny.core(prefix_cache=False)
    head = message(70, 90)
    long = [*head, *message(71, 300)]
    answer = run(core, {0: long})[0]
    other = [*head[:80], *message(72, 50)]
    assert distance(run(core, {0: other})[0], run(cold, {0: other})[0]) <= NOISE
    follow_up = [*long, *answer.ids, 2, 198, *message(73)]
    warm = run(core, {0: follow_up})[0]
    assert cached(warm) == len(long) + len(answer.ids) - 1, "the long state is still there"
    assert distance(warm, run(cold, {0: follow_up})[0]) <= NOISE

"""The blocking LLM on FakeRuntime: right outputs in the right order, one batch for all calls, clean interruption."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from fake_local_engine import fake_llm, fake_local_engine, fake_runtime

from millpond.errors import CallerError, ConfigError, ContextLengthExceeded, InternalError, InvalidParameter
from millpond.llm import LLM, Completion, Job, open_async_llm
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams
from millpond.text.inputs import TextInput
from millpond.types import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [f"the duck number {number} is on the pond" for number in range(20)]


def expected(prompt: str, n_tokens: int = 12) -> list[int]:
    runtime = fake_runtime()
    ids = runtime.vocab.tokenize(prompt, parse_special=False)
    return runtime.expected_greedy(ids, n_tokens, ignore_eos=True)


def text_of(ids: list[int]) -> str:
    vocab = fake_runtime().vocab
    return b"".join(vocab.piece(token_id) for token_id in ids).decode(errors="replace")


def test_each_prompt_gets_its_own_output_in_the_given_order() -> None:
    found = fake_llm(max_running=3).generate(PROMPTS, GREEDY)
    assert [list(one.token_ids) for one in found] == [expected(prompt) for prompt in PROMPTS]
    assert [one.text for one in found] == [text_of(expected(prompt)) for prompt in PROMPTS]
    assert {one.finish_reason for one in found} == {FinishReason.LENGTH}


def test_prompts_run_in_one_batch() -> None:
    alone, together = fake_runtime(), fake_runtime()
    fake_llm(alone).generate(PROMPTS[0], GREEDY)
    fake_llm(together, max_running=8).generate(PROMPTS[:8], GREEDY)
    assert together.rows_computed > 4 * alone.rows_computed
    llm = fake_llm(max_running=8)
    llm.generate(PROMPTS[:8], GREEDY)
    assert llm._alive.core.scheduler.steps < 40, "eight outputs of 12 tokens in steps of their own would be 96"


def test_one_prompt_may_be_text_or_ids() -> None:
    llm = fake_llm()
    ids = fake_runtime().vocab.tokenize(PROMPTS[0], parse_special=False)
    assert llm.generate(PROMPTS[0], GREEDY)[0].token_ids == llm.generate(ids, GREEDY)[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_params_may_differ_by_prompt() -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (1, 5, 9)]
    found = fake_llm().generate(PROMPTS[:3], params)
    assert [len(one.token_ids) for one in found] == [1, 5, 9]
    with pytest.raises(InvalidParameter, match="2 given for 3 prompts"):
        fake_llm().generate(PROMPTS[:3], params[:2])


def test_seeds_are_drawn_and_can_be_given() -> None:
    drawn = SamplingParams(temperature=1.5, top_p=1.0, min_p=0.0, top_k=0, max_tokens=20, ignore_eos=True)
    first, second = fake_llm().generate([PROMPTS[0]] * 2, drawn)
    assert first.token_ids != second.token_ids
    seeded = SamplingParams(temperature=1.5, top_p=1.0, min_p=0.0, top_k=0, max_tokens=20, ignore_eos=True, seed=1)
    assert fake_llm().generate(PROMPTS[0], seeded)[0].token_ids == first.token_ids


def test_chat_renders_the_template() -> None:
    question = [{"role": "user", "content": "is the pond on the mill?"}]
    rendered = "<|im_start|>user\nis the pond on the mill?<|im_end|>\n<|im_start|>assistant\n"
    ids = fake_runtime().vocab.tokenize(rendered, parse_special=True)
    llm = fake_llm()
    one = llm.chat(question, GREEDY)
    assert list(one[0].token_ids) == fake_runtime().expected_greedy(ids, 12, ignore_eos=True)
    assert [two.token_ids for two in llm.chat([question, question], GREEDY)] == [one[0].token_ids] * 2


def test_a_stop_string_ends_the_output_before_it() -> None:
    whole = fake_llm().generate(PROMPTS[0], GREEDY)[0].text
    stop = whole[4:6]
    (found,) = fake_llm().generate(PROMPTS[0], GREEDY, stop=stop)
    assert found.text == whole[: whole.index(stop)]
    assert (found.finish_reason, found.stop_string) == (FinishReason.STOP, stop)
    assert len(found.token_ids) < 12


def test_logprobs_come_one_a_token() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
    (found,) = fake_llm().generate(PROMPTS[0], params)
    assert len(found.logprobs) == 5
    assert [entry.top[0][0] for entry in found.logprobs] == list(found.token_ids)


def test_a_stream_gives_the_same_text_in_parts() -> None:
    llm = fake_llm()
    whole = llm.generate(PROMPTS[0], GREEDY)[0]
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert stream.completion is None
    parts = list(stream)
    assert len(parts) > 3
    assert "".join(parts) == whole.text
    assert stream.completion is not None
    assert stream.completion.token_ids == whole.token_ids


def test_streams_and_batches_can_interleave() -> None:
    llm = fake_llm(max_running=4)
    outer, inner = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    shown = [next(outer), next(inner)]
    batch = llm.generate(PROMPTS[2:9], GREEDY)
    assert shown[0] + "".join(outer) == text_of(expected(PROMPTS[0]))
    assert shown[1] + "".join(inner) == text_of(expected(PROMPTS[1]))
    assert [list(one.token_ids) for one in batch] == [expected(prompt) for prompt in PROMPTS[2:9]]


def test_a_dropped_stream_ends_its_output() -> None:
    llm = fake_llm()
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
    next(stream)
    del stream
    gc.collect()
    llm.generate(PROMPTS[1], GREEDY)
    assert llm._outputs == {}
    core = llm._alive.core
    if core.has_work:
        core.step()
        assert core.stats().running == 0


def test_threads_share_the_batch() -> None:
    llm = fake_llm(max_running=8)
    found: dict[int, list[Completion]] = {}

    def work(number: int) -> None:
        found[number] = llm.generate(PROMPTS[number : number + 2], GREEDY)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(6):
        assert [list(one.token_ids) for one in found[number]] == [expected(p) for p in PROMPTS[number : number + 2]]


def test_results_take_jobs_only_as_they_run() -> None:
    taken = 0

    def jobs() -> Iterator[Job]:
        nonlocal taken
        for prompt in PROMPTS * 20:
            taken += 1
            yield Job(TextInput(prompt), GREEDY)

    llm = fake_llm(max_running=2)
    results = llm.results(jobs())
    next(results)
    assert taken < 60
    results.close()
    llm.generate(PROMPTS[0], GREEDY)
    assert llm._outputs == {}


def test_a_job_that_is_not_valid_gives_its_error_alone() -> None:
    jobs = [Job(TextInput("the duck"), GREEDY), Job(TextInput(""), GREEDY), Job(TextInput("x" * 4000), GREEDY)]
    found = dict(fake_llm(max_model_len=100).results(jobs))
    assert isinstance(found[0], Completion)
    assert isinstance(found[1], InvalidParameter)
    assert isinstance(found[2], ContextLengthExceeded)


def test_generate_refuses_before_anything_runs() -> None:
    runtime = fake_runtime()
    with pytest.raises(CallerError, match="prompt 1: prompt: must not be empty"):
        fake_llm(runtime).generate(["the duck", ""], GREEDY)
    assert runtime.rows_computed == 0
    with pytest.raises(CallerError, match="prompt 0: stop_token_ids"):
        fake_llm(runtime).generate("the duck", SamplingParams(stop_token_ids=(9999,)))


def test_an_interrupt_comes_after_the_step_and_the_engine_goes_on() -> None:
    runtime = fake_runtime()
    engine = fake_local_engine(runtime)
    llm = LLM(engine=engine)
    step, steps = engine.core.step, 0

    def interrupted_step():
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
            assert steps == 3, "the handler must wait"
        return step()

    engine.core.step = interrupted_step
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[:4], GREEDY)
    engine.core.step = step
    engine.core.scheduler.check()
    assert list(llm.generate(PROMPTS[0], GREEDY)[0].token_ids) == expected(PROMPTS[0])
    assert llm._outputs == {}


def test_closing_frees_the_engine_and_says_so() -> None:
    with fake_llm() as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
    llm.close()
    with pytest.raises(InternalError, match="closed"):
        llm.generate("x")
    with pytest.raises(InternalError, match="closed"):
        next(stream)


@pytest.mark.parametrize(
    ("settings", "words"), [({"kv_cels": 5}, "did you mean kv_cells"), ({"port": "x"}, "port: 'x'")]
)
def test_a_wrong_setting_is_named(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM("nowhere.gguf", **settings)


async def test_the_async_one_checks_settings_too() -> None:
    with pytest.raises(ConfigError, match="max_running"):
        async with open_async_llm("nowhere.gguf", max_running=0):
            raise AssertionError("it must not open")


@pytest.mark.slow
def test_the_package_imports_its_names_late() -> None:
    program = (
        "import sys, millpond; heavy = {'numpy', 'jinja2', 'asyncio', 'millpond.llm', 'dataclasses'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "from millpond import LLM, AsyncLLM, SamplingParams, open_async_llm, Completion\n"
        "known = set(millpond.__all__) <= set(dir(millpond))\n"
        "print(LLM.__module__, AsyncLLM.__module__, 'fastapi' in sys.modules, known)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[]", "millpond.llm millpond.async_llm False True"]


def test_constrained_outputs_and_prompt_logprobs_in_this_process() -> None:
    with fake_llm() as llm:
        yes = SamplingParams(grammar=GrammarSpec(GrammarKind.CHOICE, '["yes","no"]'), prompt_logprobs=1)
        (found,) = llm.generate("is it?", yes)
        assert found.text in ("yes", "no") and found.finish_reason is FinishReason.STOP
        assert len(found.prompt_logprobs) == found.usage.prompt_tokens - 1
        with pytest.raises(CallerError, match="not GBNF"):
            llm.generate("is it?", SamplingParams(grammar=GrammarSpec(GrammarKind.GBNF, "root ::= (")))
        assert llm.generate("is it?", SamplingParams(max_tokens=3, ignore_eos=True))[0].usage.prompt_tokens > 0


THINKS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""As Qwen3's; the fake model never closes a thought by itself."""


def thinking_llm() -> LLM:
    return LLM(engine=fake_local_engine(fake_runtime(), template=THINKS))


def test_a_thought_comes_apart_from_the_answer_and_keeps_to_its_budget() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    why = [{"role": "user", "content": "why"}]
    free = thinking_llm().chat(why, params)[0]
    assert (free.text, bool(free.reasoning), len(free.token_ids)) == ("", True, 100)
    held = thinking_llm().chat([why, why], params, thinking_budget=10)
    for one in held:
        assert one.reasoning and one.text
        assert "think>" not in one.reasoning + one.text
        assert len(one.reasoning) < len(free.reasoning)
    assert thinking_llm().chat(why, params, thinking_budget=0)[0].reasoning == ""
    thoughts = list[str]()
    stream = thinking_llm().stream(why, params, thinking_budget=10, on_reasoning=thoughts.append)
    assert "".join(stream) == held[0].text
    assert "".join(thoughts) == held[0].reasoning
    assert len(thoughts) > 1
    assert stream.completion is not None and stream.completion.token_ids == held[0].token_ids


def test_a_grammar_is_of_the_answer_and_lets_the_model_think_first() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=100, grammar=GrammarSpec(GrammarKind.REGEX, "[0-9]{3}"))
    answer = thinking_llm().chat([{"role": "user", "content": "why"}], params, thinking_budget=10)[0]
    assert answer.reasoning
    assert answer.text.strip().isdigit() and len(answer.text.strip()) == 3


def test_text_that_is_continued_has_no_thoughts() -> None:
    found = thinking_llm().generate(PROMPTS[0], GREEDY, stop=())[0]
    assert (found.text, found.reasoning) == (text_of(expected(PROMPTS[0])), "")

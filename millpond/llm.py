"""The engine in a script, without a server: LLM, which blocks, and AsyncLLM by a model's name. Knows no HTTP.

LLM steps an EngineCore in the caller's own process and thread. All calls share its batch: a generate() of a thousand
prompts, a stream() beside it, and those of other threads.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from millpond import wiring
from millpond.cli.settings import Value, config_of
from millpond.config import DEFAULT_MODEL, Config
from millpond.errors import CallerError, InternalError, InvalidParameter
from millpond.models import Progress, SilentProgress, TerminalProgress, resolve_model
from millpond.outputs import EngineInfo, FinishEvent, SequenceUsage, TokenEvent, TokenLogprobs
from millpond.request import Request, output_limit
from millpond.sampling_params import SamplingParams
from millpond.text.constraints import output_grammar, thinking_budget
from millpond.text.input_processor import PreparedPrompt
from millpond.text.inputs import ChatInput, PromptInput, TextInput, TokenInput
from millpond.text.output_processor import HiddenTokens, OutputProcessor, StopMatch, TextDelta
from millpond.text.stop import StopStrings
from millpond.types import FinishReason, RequestId, SequenceId, TokenId

if TYPE_CHECKING:
    from millpond.async_llm import AsyncLLM

Message = Mapping[str, Any]
Conversation = Sequence[Message]
Prompt = str | Sequence[TokenId]

_WAITING_JOBS = 32
"""Jobs queued beside those that can run: enough for the scheduler to find shared prefixes."""
_IDLE_SECONDS = 0.005
_YIELD_SECONDS = 0.0002
"""Lets a thread in that has waited for the lock: a lock that is taken again at once is taken by the same thread."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished output."""

    text: str
    """Of a conversation the answer alone."""
    token_ids: tuple[TokenId, ...]
    """With the one that ended the output, if one did."""
    finish_reason: FinishReason
    """STOP and LENGTH: as asked. ERROR: `message` says why; `text` is what came before."""
    usage: SequenceUsage
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token when SamplingParams.logprobs is set."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each prompt token but the first when SamplingParams.prompt_logprobs is set."""
    stop_string: str | None = None
    message: str = ""
    reasoning: str = ""
    """What the model thought before it answered, where its template has tags for that."""


@dataclass(frozen=True, slots=True)
class Job:
    """One output to generate."""

    prompt: PromptInput | PreparedPrompt
    params: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    thinking_budget: int | None = None
    """Most tokens of reasoning; None: no limit of its own."""


class LLM:
    """One model in this process. `with LLM("smollm2-135m", kv_cells=4096) as llm: ...`; usable from several threads.

    Ctrl-C is taken between two steps, so that the model stays usable after a KeyboardInterrupt.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        engine: wiring.LocalEngine | None = None,
        **settings: Value,
    ) -> None:
        """`model`: registry name, path of a GGUF file, or hf:org/repo/file.gguf; pulled if it is not here.

        `settings`: those of docs/configuration.md by name (kv_cells=..., exact=True); no file and no MILLPOND_*
        setting is read. `progress`: where slow work shows; by default a terminal's stderr. `engine`: parts that are
        already built, in place of a model. Raises SetupError.
        """
        self._lock = threading.RLock()
        self._arriving = 0
        if engine is None:
            engine = load_engine(config_of({"model": model, **settings}), progress)
        self._engine: wiring.LocalEngine | None = engine
        self._outputs: dict[SequenceId, _Output] = {}
        self._next_id = 0

    @property
    def info(self) -> EngineInfo:
        """What was loaded, with every "auto" resolved."""
        return self._alive.core.info

    @property
    def has_chat_template(self) -> bool:
        """False: the model only continues text; `chat` raises CallerError."""
        return self._alive.has_chat_template

    def piece(self, token_id: TokenId) -> bytes:
        """Bytes of one token, possibly part of a character. Raises IndexError for an id outside the vocabulary."""
        return self._alive.vocab.piece(token_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
    ) -> list[Completion]:
        """Continues each prompt (text, or token ids) as it is, without a chat template; results in the given order.

        `params`: for all, or one a prompt. Raises CallerError, which names the prompt, before anything runs.
        """
        inputs = [_plain_input(prompt) for prompt in _prompt_list(prompts)]
        return self._complete(inputs, params, stop, None)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        thinking_budget: int | None = None,
    ) -> list[Completion]:
        """Answers one conversation, or each of a list: messages are {"role": ..., "content": ...}.

        A last message of the assistant is continued. `thinking_budget`: most tokens of reasoning, where the model's
        template has tags for it. Otherwise as `generate`.
        """
        inputs = [_chat_input(conversation) for conversation in _conversation_list(messages)]
        return self._complete(inputs, params, stop, thinking_budget)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        thinking_budget: int | None = None,
        on_reasoning: Callable[[str], object] | None = None,
    ) -> TextStream:
        """One output as text deltas, while it is made; messages are answered, text is continued.

        `on_reasoning` is told what the model thinks, between two deltas of the answer. Raises CallerError at once.
        Leaving the loop early and dropping the stream ends the output.
        """
        job = Job(_any_input(prompt), params or SamplingParams(), _stops(stop), thinking_budget)
        return TextStream(self, self._submit(job), on_reasoning)

    def results(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Completion | CallerError]]:
        """(place in `jobs`, result) as they finish. Jobs are taken only as fast as they run, so there may be millions.

        A job that is not valid gives its CallerError in place of a completion. Stopping early cancels what runs.
        """
        running: dict[int, _Output] = {}
        try:
            yield from self._results(enumerate(jobs), running)
        finally:
            self._cancel(running.values())

    def close(self) -> None:
        """Frees the model; streams that are still open end."""
        with self._lock:
            engine, self._engine = self._engine, None
            if engine is not None:
                engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _alive(self) -> wiring.LocalEngine:
        if self._engine is None:
            raise InternalError("this LLM is closed; make a new one")
        return self._engine

    def _complete(
        self,
        inputs: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None,
        stop: str | Sequence[str],
        thinking_budget: int | None,
    ) -> list[Completion]:
        stops = _stops(stop)
        chosen = zip(inputs, _params_list(params, len(inputs)), strict=True)
        jobs = [self._checked(Job(*each, stops, thinking_budget), place) for place, each in enumerate(chosen)]
        found: dict[int, Completion] = {}
        for place, result in self.results(jobs):
            if isinstance(result, CallerError):
                raise result
            found[place] = result
        return [found[place] for place in range(len(jobs))]

    def _results(
        self, pending: Iterator[tuple[int, Job]], running: dict[int, _Output]
    ) -> Iterator[tuple[int, Completion | CallerError]]:
        room = 2 * self.info.max_running + _WAITING_JOBS
        exhausted = False
        while running or not exhausted:
            while len(running) < room and (entry := next(pending, None)) is not None:
                refused = self._start(entry, running)
                if refused is not None:
                    yield entry[0], refused
            exhausted = len(running) < room
            for place in [place for place, output in running.items() if output.is_finished]:
                yield place, running.pop(place).completion()
            self._step_until(running.values())

    def _checked(self, job: Job, place: int) -> Job:
        """The job with its prompt prepared. Raises CallerError, which names the place."""
        try:
            with self._lock:
                prepared = self._prepared(job)
            job.params.check_vocabulary(self.info.model.n_vocab)
            StopStrings(job.stop)
        except CallerError as error:
            raise CallerError(f"prompt {place}: {error}", param=error.param, code=error.code) from error
        return replace(job, prompt=prepared)

    def _prepared(self, job: Job) -> PreparedPrompt:
        return job.prompt if isinstance(job.prompt, PreparedPrompt) else self._alive.text.prepare_prompt(job.prompt)

    def _constrained(self, job: Job, prepared: PreparedPrompt) -> SamplingParams:
        """The job's parameters with what its prompt makes of grammar and thinking. Raises CallerError."""
        engine, params = self._alive, job.params
        params.check_vocabulary(engine.core.info.model.n_vocab)
        grammar = output_grammar(params.grammar, prepared)
        if grammar is not None:
            engine.core.check_grammar(grammar)
        thinking = params.thinking
        if job.thinking_budget is not None:
            limit = output_limit(params, len(prepared.token_ids), engine.core.info.max_model_len)
            thinking = thinking_budget(job.thinking_budget, prepared, engine.text.tokenizer.encode, limit)
        return replace(params, grammar=grammar, thinking=thinking)

    def _start(self, entry: tuple[int, Job], running: dict[int, _Output]) -> CallerError | None:
        place, job = entry
        try:
            running[place] = self._submit(job)
        except CallerError as error:
            return error
        return None

    def _submit(self, job: Job) -> _Output:
        """Raises CallerError."""
        with self._taken(), _interrupts_held():
            engine = self._alive
            stops = StopStrings(job.stop)
            prepared = self._prepared(job)
            params = self._constrained(job, prepared)
            hidden = HiddenTokens(engine.vocab.eog_ids, frozenset(params.stop_token_ids), params.min_tokens)
            sequence_id = SequenceId(self._next_id)
            self._next_id += 1
            request = Request(
                request_id=RequestId(f"local-{sequence_id}"),
                prompt_ids=prepared.token_ids,
                params=params,
                max_tokens=output_limit(params, len(prepared.token_ids), engine.core.info.max_model_len),
                seed=engine.draw_seed() if params.seed is None else params.seed,
                arrival=engine.clock(),
            )
            machine = None if prepared.channels is None else prepared.channels.machine(request.request_id, 0)
            output = _Output(sequence_id, OutputProcessor(engine.vocab.piece, stops, hidden, machine))
            self._outputs[sequence_id] = output
            engine.core.add(sequence_id, request)
            return output

    @contextmanager
    def _taken(self) -> Generator[None]:
        """The lock for one who brings work, before the thread that is stepping."""
        self._arriving += 1
        with self._lock:
            self._arriving -= 1
            yield

    def _step_until(self, outputs: Iterable[_Output], *, on_news: bool = False) -> None:
        """Steps until one of the outputs has finished, or has something to show; returns at once if one has."""
        watched = list(outputs)
        while watched:
            with self._lock:
                if any(output.is_finished or (on_news and output.has_news) for output in watched):
                    return
                progressed = self._step()
            if self._arriving or not progressed:
                time.sleep(_IDLE_SECONDS if not progressed else _YIELD_SECONDS)

    def _step(self) -> bool:
        core = self._alive.core
        with _interrupts_held():
            result = core.step()
            for event in result.tokens:
                output = self._outputs[event.sequence_id]
                if output.take(event) is not None:
                    core.end(event.sequence_id, FinishReason.STOP)
            for finish in result.finished:
                self._outputs.pop(finish.sequence_id).end(finish)
        return result.progressed

    def _cancel(self, outputs: Iterable[_Output]) -> None:
        with self._lock:
            if self._engine is None:
                return
            for output in outputs:
                if not output.is_finished:
                    self._engine.core.end(output.sequence_id, FinishReason.CANCELLED)


class TextStream(Iterator[str]):
    """Text deltas of one output. `completion` is there once the iteration has ended by itself."""

    def __init__(self, llm: LLM, output: _Output, on_reasoning: Callable[[str], object] | None = None) -> None:
        self._llm = llm
        self._output = output
        self._on_reasoning = on_reasoning
        self._closed = False

    @property
    def completion(self) -> Completion | None:
        return self._output.completion() if self._output.is_finished else None

    def __next__(self) -> str:
        while not self._closed:
            self._llm._step_until([self._output], on_news=True)  # pyright: ignore[reportPrivateUsage]
            thought, text = self._output.take_news()
            if thought and self._on_reasoning is not None:
                self._on_reasoning(thought)
            if text:
                return text
            self._closed = self._output.is_finished
        raise StopIteration

    def close(self) -> None:
        """Ends the output if it still runs."""
        self._closed = True
        self._llm._cancel([self._output])  # pyright: ignore[reportPrivateUsage]

    def __del__(self) -> None:
        if not self._closed:
            self.close()


class _Output:
    """What one sequence has made so far."""

    __slots__ = (
        "_finish",
        "_ids",
        "_logprobs",
        "_parts",
        "_processor",
        "_prompt_logprobs",
        "_shown",
        "_thoughts",
        "sequence_id",
    )

    def __init__(self, sequence_id: SequenceId, processor: OutputProcessor) -> None:
        self.sequence_id = sequence_id
        self._processor = processor
        self._ids: list[TokenId] = []
        self._logprobs: list[TokenLogprobs] = []
        self._parts: list[str] = []
        self._thoughts: list[str] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._shown = (0, 0)
        """Parts and thoughts that take_news() handed out."""
        self._finish: FinishEvent | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def has_news(self) -> bool:
        return self._shown != (len(self._parts), len(self._thoughts))

    def take(self, event: TokenEvent) -> StopMatch | None:
        """The stop string that this token completed. Tokens behind one are not taken."""
        if self._processor.stop is not None:
            return None
        delta = self._processor.feed([event.token_id], event.output_index)
        self._ids.append(event.token_id)
        if event.logprobs is not None:
            self._logprobs.append(event.logprobs)
        self._prompt_logprobs = self._prompt_logprobs or event.prompt_logprobs
        self._add(delta)
        return delta.stop

    def end(self, finish: FinishEvent) -> None:
        self._add(self._processor.finish(was_cut=finish.reason is not FinishReason.STOP))
        self._finish = finish

    def take_news(self) -> tuple[str, str]:
        """Reasoning and text since the last call."""
        parts, thoughts = self._shown
        self._shown = (len(self._parts), len(self._thoughts))
        return "".join(self._thoughts[thoughts:]), "".join(self._parts[parts:])

    def completion(self) -> Completion:
        finish = self._finish
        assert finish is not None
        stop = self._processor.stop
        return Completion(
            text="".join(self._parts),
            token_ids=tuple(self._ids),
            finish_reason=finish.reason if stop is None else FinishReason.STOP,
            usage=finish.usage,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            stop_string=stop.stop if stop is not None else None,
            message=finish.message,
            reasoning="".join(self._thoughts),
        )

    def _add(self, delta: TextDelta) -> None:
        if delta.text:
            self._parts.append(delta.text)
        if delta.reasoning:
            self._thoughts.append(delta.reasoning)


@asynccontextmanager
async def open_async_llm(
    model: str = DEFAULT_MODEL, *, progress: Progress | None = None, **settings: Value
) -> AsyncGenerator[AsyncLLM]:
    """An AsyncLLM over its own engine process, ready; both end with the block. Arguments and errors as LLM has them."""
    config = config_of({"model": model, **settings})
    resolved = resolve_model(model, progress=progress or _default_progress())
    async with wiring.running_async_llm(config, resolved) as llm:
        yield llm


def load_engine(config: Config, progress: Progress | None = None) -> wiring.LocalEngine:
    """The engine of a whole configuration, for `LLM(engine=...)`; the model is pulled first. Raises SetupError."""
    shown = progress or _default_progress()
    resolved = resolve_model(config.model, progress=shown)
    size = resolved.path.stat().st_size
    with _interrupts_held() as interrupted, shown.task(f"loading {resolved.name}", size) as report:

        def loaded(fraction: float) -> bool:
            report(int(fraction * size))
            return not interrupted()

        return wiring.load_local_engine(config, resolved, loaded)


def _default_progress() -> Progress:
    return TerminalProgress(sys.stderr) if sys.stderr.isatty() else SilentProgress()


@contextmanager
def _interrupts_held() -> Generator[Callable[[], bool]]:
    """Ctrl-C takes effect after the block: a step that is cut in its middle would leave wrong books behind.

    Gives a function that says whether one has come.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    held = False

    def remember(_signal: int, _frame: object) -> None:
        nonlocal held
        held = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield lambda: held
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


# -- what callers may hand in ------------------------------------------------------------------------------------------


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [cast(Prompt, prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _conversation_list(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return list(cast("Sequence[Conversation]", messages))


def _plain_input(prompt: Prompt) -> PromptInput:
    return TextInput(prompt) if isinstance(prompt, str) else TokenInput(prompt)


def _chat_input(conversation: Conversation) -> PromptInput:
    return ChatInput([dict(message) for message in conversation])


def _any_input(prompt: Prompt | Conversation) -> PromptInput:
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        return _chat_input(cast(Conversation, prompt))
    return _plain_input(cast(Prompt, prompt))


def _stops(stop: str | Sequence[str]) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidParameter("params", f"{len(params)} given for {count} prompts; give one for all, or one each")
    return list(params)

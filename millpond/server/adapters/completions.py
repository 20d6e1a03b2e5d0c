"""Text completions: wire request -> GenerationPlan, deltas -> chunks or one answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from millpond.async_llm import Finish, OutputDelta, PromptInput, TextInput, TokenInput
from millpond.errors import ContextLengthExceeded, InvalidParameter
from millpond.server.adapters.logprobs import LegacyColumns, Piece, joined_columns
from millpond.server.adapters.plan import Caller, GenerationPlan, build_plan, unsupported
from millpond.server.adapters.reply import CollectedOutput, ReplyHead
from millpond.server.adapters.sampling import sampling_params
from millpond.server.adapters.sse import encode_json, encode_text, event
from millpond.server.adapters.tools import stop_reason, wire_reason
from millpond.server.adapters.usage import PromptFinishes, extension, usage
from millpond.server.limits import MAX_OUTPUTS
from millpond.server.schemas.completions import CompletionRequest
from millpond.types import TokenId


def completion_plan(
    body: CompletionRequest, caller: Caller, *, n_vocab: int | None, max_model_len: int | None
) -> GenerationPlan:
    """Raises InvalidParameter naming the field, ContextLengthExceeded for too many ids, or UnknownModel."""
    if body.suffix:
        raise unsupported("suffix", "is not supported yet; leave the field out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "other values than n are not supported yet; leave the field out")
    prompts = parse_prompts(body.prompt, n_vocab=n_vocab, max_model_len=max_model_len)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidParameter("max_tokens", "must be at least 1, or 0 with echo")
    params = sampling_params(body, max_tokens=max_tokens or None, logprobs=body.logprobs)
    if not body.echo:
        return build_plan(body, prompts, params, caller)
    params = replace(params, prompt_logprobs=body.logprobs)
    if max_tokens == 0:
        params = replace(params, max_tokens=1, min_tokens=0, ignore_eos=True, stop_token_ids=())
    plan = build_plan(body, prompts, params, caller)
    options = [replace(one, echo=True) for one in plan.options]
    return replace(plan, options=options, prompt_only=max_tokens == 0)


def parse_prompts(prompt: Any, *, n_vocab: int | None, max_model_len: int | None) -> list[PromptInput]:
    """A text, ids, or a list of either. Raises InvalidParameter or ContextLengthExceeded."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        items = cast(list[Any], prompt)
        if len(items) > MAX_OUTPUTS:
            raise InvalidParameter("prompt", f"at most {MAX_OUTPUTS} prompts a request, got {len(items)}")
        return [_one_prompt(item, f"prompt[{n}]", n_vocab, max_model_len) for n, item in enumerate(items)]
    return [_one_prompt(prompt, "prompt", n_vocab, max_model_len)]


def _one_prompt(prompt: Any, name: str, n_vocab: int | None, max_model_len: int | None) -> PromptInput:
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidParameter(name, "must not be empty")
        return TextInput(prompt)
    if not isinstance(prompt, list):
        raise InvalidParameter(name, "must be a text, a list of token ids, or a list of these")
    ids = cast(list[Any], prompt)
    if max_model_len is not None and len(ids) >= max_model_len:
        raise ContextLengthExceeded(len(ids), max_model_len)
    return TokenInput(check_token_ids(ids, name, n_vocab, allow_empty=False))


def check_token_ids(ids: list[Any], name: str, n_vocab: int | None, *, allow_empty: bool) -> list[int]:
    """Raises InvalidParameter unless every item is an id of the vocabulary (n_vocab None: not known yet)."""
    if not ids and not allow_empty:
        raise InvalidParameter(name, "must not be empty")
    end = 2**31 if n_vocab is None else n_vocab
    checked: list[int] = []
    for place, given in enumerate(ids):
        token_id: Any = int(given) if isinstance(given, float) and given.is_integer() else given
        if type(token_id) is not int or not 0 <= token_id < end:
            raise InvalidParameter(f"{name}[{place}]", f"must be a token id between 0 and {end - 1}")
        checked.append(token_id)
    return checked


class CompletionDialect:
    def __init__(self, plan: GenerationPlan, piece: Piece) -> None:
        self._plan = plan
        self._piece = piece

    def chunk_encoder(self, head: ReplyHead) -> CompletionChunkEncoder:
        return CompletionChunkEncoder(head, self._plan, self._piece)

    def full(
        self, head: ReplyHead, outputs: Sequence[CollectedOutput], prompts: Sequence[PromptFinishes]
    ) -> dict[str, Any]:
        answer = head.fields("text_completion")
        answer["choices"] = [self._choice(index, output) for index, output in enumerate(outputs)]
        return answer | {"usage": _usage(self._plan, prompts), "millpond": extension(prompts)}

    def _choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        shown = ShownCompletion(self._plan, self._piece)
        delta = OutputDelta(
            index, "".join(output.text), tuple(output.token_ids), tuple(output.logprobs), prompt=output.prompt
        )
        choice: dict[str, Any] = {"index": index, "text": shown.text(delta), "logprobs": None}
        if self._plan.params.logprobs is not None:
            choice["logprobs"] = shown.columns(delta)
        if self._plan.return_token_ids:
            choice["token_ids"] = shown.token_ids(delta)
        if output.finish is None:
            return choice | {"finish_reason": None}
        reason = output.finish.reason
        return choice | {"finish_reason": wire_reason(reason)} | stop_reason(reason)


class ShownCompletion:
    """What a client sees of one output's deltas: with `echo` the prompt first, and perhaps nothing else."""

    def __init__(self, plan: GenerationPlan, piece: Piece) -> None:
        self._prompt_only = plan.prompt_only
        self._piece = piece
        self._columns = LegacyColumns(piece)

    def text(self, delta: OutputDelta) -> str:
        own = "" if self._prompt_only else delta.text
        if delta.prompt is None:
            return own
        return b"".join(map(self._piece, delta.prompt.token_ids)).decode(errors="replace") + own

    def token_ids(self, delta: OutputDelta) -> tuple[TokenId, ...]:
        """Of the output; the prompt's are the client's."""
        return () if self._prompt_only else delta.token_ids

    def columns(self, delta: OutputDelta) -> dict[str, Any]:
        """Call it once a delta, in order."""
        echoed = None if delta.prompt is None else self._columns.take_echo(delta.prompt)
        own = self._columns.take(self.token_ids(delta), delta.logprobs)
        return own if echoed is None else joined_columns(echoed, own)


def _usage(plan: GenerationPlan, prompts: Sequence[PromptFinishes]) -> dict[str, Any]:
    if not plan.prompt_only:
        return usage(prompts)
    unseen = [replace(p, finishes=[replace(f, completion_tokens=0) for f in p.finishes]) for p in prompts]
    return usage(unseen)


class CompletionChunkEncoder:
    """As ChatChunkEncoder: constant bytes are made once a request. Text completions open without an event."""

    def __init__(self, head: ReplyHead, plan: GenerationPlan, piece: Piece) -> None:
        self._fields = head.fields("text_completion")
        self._wants_logprobs = plan.params.logprobs is not None
        self._wants_ids = plan.return_token_ids
        self._plan = plan
        self._shown = [ShownCompletion(plan, piece) for _ in range(plan.n_outputs)]
        start = b"data: " + encode_json(self._fields)[:-1]
        self._heads = [start + b',"choices":[{"index":%d,"text":' % index for index in range(plan.n_outputs)]
        self._end = b'],"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._end

    def opening(self, index: int) -> bytes:
        return b""

    def delta(self, delta: OutputDelta) -> bytes:
        shown = self._shown[delta.index]
        text = shown.text(delta)
        if not self._wants_logprobs and not self._wants_ids:
            return self._heads[delta.index] + encode_text(text) + self._plain_tail if text else b""
        token_ids = shown.token_ids(delta)
        if not text and not token_ids:
            return b""
        tail = b',"logprobs":' + (encode_json(shown.columns(delta)) if self._wants_logprobs else b"null")
        if self._wants_ids:
            tail += b',"token_ids":' + encode_json(token_ids)
        return self._heads[delta.index] + encode_text(text) + tail + b',"finish_reason":null}' + self._end

    def finish(self, index: int, finish: Finish) -> bytes:
        ids = b',"token_ids":[]' if self._wants_ids else b""
        ends = {"finish_reason": wire_reason(finish.reason)} | stop_reason(finish.reason)
        return self._heads[index] + b'"","logprobs":null%b,' % ids + encode_json(ends)[1:] + self._end

    def usage(self, prompts: Sequence[PromptFinishes]) -> bytes:
        return event(
            self._fields | {"choices": [], "usage": _usage(self._plan, prompts), "millpond": extension(prompts)}
        )

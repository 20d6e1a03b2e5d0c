"""Chat completions: wire request -> GenerationPlan, deltas -> chunks or one answer. Pure; no template, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from millpond.async_llm import ChatInput, Finish, OutputDelta
from millpond.errors import InvalidParameter
from millpond.server.adapters.billing import without_billing_lines
from millpond.server.adapters.logprobs import Piece, chat_entries
from millpond.server.adapters.plan import Caller, GenerationPlan, build_plan
from millpond.server.adapters.reply import CollectedOutput, ReplyHead
from millpond.server.adapters.sampling import sampling_params
from millpond.server.adapters.sse import encode_json, encode_text, encode_value, event
from millpond.server.adapters.tools import finish_reason, stop_reason, tool_plan, wire_pieces
from millpond.server.adapters.usage import PromptFinishes, extension, usage
from millpond.server.schemas.chat import ChatMessage, ChatRequest


def chat_plan(body: ChatRequest, caller: Caller) -> GenerationPlan:
    """Raises InvalidParameter naming the field, or UnknownModel."""
    tools = tool_plan(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(body, max_tokens=max_tokens, logprobs=_wanted_logprobs(body))
    if tools.forced and params.grammar is not None and not params.grammar.param.startswith("response_format"):
        raise InvalidParameter(
            "tool_choice", f"a call that must be made cannot be combined with {params.grammar.param}"
        )
    chat = chat_input(body.messages, _template_kwargs(body))
    notes: tuple[str, ...] = ()
    if caller.strip_billing_line:
        messages, notes = without_billing_lines(chat.messages)
        chat = replace(chat, messages=messages)
    chat = replace(
        chat, tools=tools.offered, forced_tools=tools.forced, parallel_tool_calls=tools.parallel or not tools.offered
    )
    plan = build_plan(body, [chat], params, caller)
    options = [replace(one, thinking_budget=_thinking_budget(body, chat.template_kwargs)) for one in plan.options]
    return replace(plan, options=options, notes=notes)


def _thinking_budget(body: ChatRequest, template_kwargs: Mapping[str, Any]) -> int | None:
    """Of vLLM's and llama-server's names (there -1 is none) the first that is there. No thinking is a budget of 0."""
    named = (body.thinking_budget, body.thinking_token_budget, body.thinking_budget_tokens)
    asked = next((budget for budget in named if budget is not None), None)
    if asked is not None:
        return None if asked < 0 else asked
    return 0 if False in (template_kwargs.get("enable_thinking"), template_kwargs.get("thinking")) else None


def _template_kwargs(body: ChatRequest) -> dict[str, Any]:
    """The client's own, which win, and what reasoning_effort means to the templates that know such things."""
    if body.reasoning_effort is None:
        return body.chat_template_kwargs or {}
    thinks = body.reasoning_effort != "none"
    meant = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    return meant | (body.chat_template_kwargs or {})


def chat_input(messages: Sequence[ChatMessage], template_kwargs: dict[str, Any] | None = None) -> ChatInput:
    plain = [_plain_message(message) for message in messages]
    return ChatInput(messages=plain, template_kwargs=dict(template_kwargs or {}))


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Nulls and empty tool_calls left out, but content always there: templates read it unasked."""
    plain = message.model_dump(exclude_none=True)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    return {"role": message.role, "content": plain.pop("content", "")} | plain


def _wanted_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidParameter("top_logprobs", "needs logprobs: true")
    return None


class ChatDialect:
    def __init__(self, plan: GenerationPlan, piece: Piece) -> None:
        self._plan = plan
        self._piece = piece

    def chunk_encoder(self, head: ReplyHead) -> ChatChunkEncoder:
        return ChatChunkEncoder(head, self._plan, self._piece)

    def full(
        self, head: ReplyHead, outputs: Sequence[CollectedOutput], prompts: Sequence[PromptFinishes]
    ) -> dict[str, Any]:
        answer = head.fields("chat.completion")
        answer["choices"] = [self._choice(index, output) for index, output in enumerate(outputs)]
        return answer | {"usage": usage(prompts), "millpond": extension(prompts, self._plan.notes)}

    def _choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "message": _message(output), "logprobs": None}
        if self._plan.params.logprobs is not None:
            choice["logprobs"] = {"content": chat_entries(output.token_ids, output.logprobs, self._piece)}
        if self._plan.return_token_ids:
            choice["message"]["token_ids"] = choice["token_ids"] = output.token_ids
        if output.finish is None:
            return choice | {"finish_reason": None}
        return choice | {"finish_reason": finish_reason(output.finish)} | stop_reason(output.finish.reason)


def _message(output: CollectedOutput) -> dict[str, Any]:
    """Content is null where there are calls and no text; the other two are there when they hold something."""
    text, reasoning, calls = "".join(output.text), "".join(output.reasoning), output.calls.calls
    message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


class ChatChunkEncoder:
    """The constant part of a chunk is encoded once a request; a token costs one JSON string and one join."""

    def __init__(self, head: ReplyHead, plan: GenerationPlan, piece: Piece) -> None:
        self._fields = head.fields("chat.completion.chunk")
        self._wants_logprobs = plan.params.logprobs is not None
        self._wants_ids = plan.return_token_ids
        self._piece = piece
        self._notes = plan.notes
        self._heads = [self._head_bytes(index) for index in range(plan.n_outputs)]
        self._end = b"]," + b'"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self._end

    def _head_bytes(self, index: int) -> bytes:
        return b"data: " + encode_json(self._fields)[:-1] + b',"choices":[{"index":%d,"delta":{' % index

    def opening(self, index: int) -> bytes:
        return self._heads[index] + b'"role":"assistant","content":""' + self._plain_tail

    def delta(self, delta: OutputDelta) -> bytes:
        if self._wants_logprobs or self._wants_ids:
            has_part = delta.text or delta.token_ids or delta.reasoning or delta.tool_calls
            return self._heads[delta.index] + self._parts(delta) + self._rich_tail(delta) if has_part else b""
        if delta.reasoning or delta.tool_calls:
            return self._heads[delta.index] + self._parts(delta) + self._plain_tail
        if not delta.text:
            return b""
        return self._heads[delta.index] + b'"content":' + encode_text(delta.text) + self._plain_tail

    def _parts(self, delta: OutputDelta) -> bytes:
        """The inside of `delta`: reasoning, content and calls, each where it is."""
        parts: list[bytes] = []
        if delta.reasoning:
            parts.append(b'"reasoning_content":' + encode_text(delta.reasoning))
        if delta.text or not (delta.reasoning or delta.tool_calls):
            parts.append(b'"content":' + encode_text(delta.text))
        if delta.tool_calls:
            parts.append(b'"tool_calls":' + encode_value(wire_pieces(delta.tool_calls)))
        return b",".join(parts)

    def _rich_tail(self, delta: OutputDelta) -> bytes:
        tail = b'},"logprobs":'
        if self._wants_logprobs:
            entries = chat_entries(delta.token_ids, delta.logprobs, self._piece)
            tail += encode_json({"content": entries})
        else:
            tail += b"null"
        if self._wants_ids:
            tail += b',"token_ids":' + encode_json(delta.token_ids)
        return tail + b',"finish_reason":null}' + self._end

    def finish(self, index: int, finish: Finish) -> bytes:
        ids = b',"token_ids":[]' if self._wants_ids else b""
        ends = {"finish_reason": finish_reason(finish)} | stop_reason(finish.reason)
        return self._heads[index] + b'},"logprobs":null%b,' % ids + encode_json(ends)[1:] + self._end

    def usage(self, prompts: Sequence[PromptFinishes]) -> bytes:
        return event(
            self._fields | {"choices": [], "usage": usage(prompts), "millpond": extension(prompts, self._notes)}
        )

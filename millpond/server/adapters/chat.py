"""Chat completions: wire request -> GenerationPlan, deltas -> chunks or one answer. Pure; no template, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millpond.async_llm import ChatInput, OutputDelta
from millpond.errors import InvalidParameter
from millpond.server.adapters.logprobs import Piece, chat_entries
from millpond.server.adapters.plan import Caller, GenerationPlan, build_plan, sampling_params, unsupported
from millpond.server.adapters.reply import CollectedOutput, ReplyHead
from millpond.server.adapters.sse import encode_json, encode_text, event
from millpond.server.adapters.usage import PromptFinishes, extension, usage
from millpond.server.schemas.chat import ChatMessage, ChatRequest
from millpond.types import FinishReason


def chat_plan(body: ChatRequest, caller: Caller) -> GenerationPlan:
    """Raises InvalidParameter naming the field, or UnknownModel."""
    refuse_tools(body)
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    params = sampling_params(body, max_tokens=max_tokens, logprobs=_wanted_logprobs(body))
    return build_plan(body, [chat_input(body.messages, body.chat_template_kwargs)], params, caller)


def chat_input(messages: Sequence[ChatMessage], template_kwargs: dict[str, Any] | None = None) -> ChatInput:
    plain = [_plain_message(message) for message in messages]
    return ChatInput(messages=plain, template_kwargs=dict(template_kwargs or {}))


def _plain_message(message: ChatMessage) -> dict[str, Any]:
    """Nulls and empty tool_calls left out, but content always there: templates read it unasked."""
    plain = message.model_dump(exclude_none=True)
    if not plain.get("tool_calls"):
        plain.pop("tool_calls", None)
    return {"role": message.role, "content": plain.pop("content", "")} | plain


def refuse_tools(body: ChatRequest) -> None:
    extras = body.model_extra or {}
    if extras.get("functions"):
        raise unsupported("functions", "tool calls are not supported yet; leave the field out")
    if body.tool_choice not in (None, "auto", "none"):
        raise unsupported("tool_choice", "forced tool calls are not supported yet; leave the field out or send 'none'")
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", "tool calls are not supported yet; leave the field out or send tool_choice 'none'")


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
        return answer | {"usage": usage(prompts), "millpond": extension(prompts)}

    def _choice(self, index: int, output: CollectedOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(output.text), "refusal": None}
        choice: dict[str, Any] = {"index": index, "message": message, "logprobs": None}
        if self._plan.params.logprobs is not None:
            choice["logprobs"] = {"content": chat_entries(output.token_ids, output.logprobs, self._piece)}
        if self._plan.return_token_ids:
            message["token_ids"] = choice["token_ids"] = output.token_ids
        choice["finish_reason"] = output.finish.reason.value if output.finish else None
        return choice


class ChatChunkEncoder:
    """The constant part of a chunk is encoded once a request; a token costs one JSON string and one join."""

    def __init__(self, head: ReplyHead, plan: GenerationPlan, piece: Piece) -> None:
        self._fields = head.fields("chat.completion.chunk")
        self._wants_logprobs = plan.params.logprobs is not None
        self._wants_ids = plan.return_token_ids
        self._piece = piece
        self._include_usage = plan.include_usage
        self._heads = [self._head_bytes(index) for index in range(plan.n_outputs)]
        self._end = b"]," + b'"usage":null}\n\n' if plan.include_usage else b"]}\n\n"
        self._plain_tail = b'},"logprobs":null,"finish_reason":null}' + self._end

    def _head_bytes(self, index: int) -> bytes:
        return b"data: " + encode_json(self._fields)[:-1] + b',"choices":[{"index":%d,"delta":{' % index

    def opening(self, index: int) -> bytes:
        return self._heads[index] + b'"role":"assistant","content":""' + self._plain_tail

    def delta(self, delta: OutputDelta) -> bytes:
        if not self._wants_logprobs and not self._wants_ids:
            if not delta.text:
                return b""
            return self._heads[delta.index] + b'"content":' + encode_text(delta.text) + self._plain_tail
        if not delta.text and not delta.token_ids:
            return b""
        return self._rich(delta)

    def _rich(self, delta: OutputDelta) -> bytes:
        tail = b'},"logprobs":'
        if self._wants_logprobs:
            entries = chat_entries(delta.token_ids, delta.logprobs, self._piece)
            tail += encode_json({"content": entries})
        else:
            tail += b"null"
        if self._wants_ids:
            tail += b',"token_ids":' + encode_json(delta.token_ids)
        tail += b',"finish_reason":null}' + self._end
        return self._heads[delta.index] + b'"content":' + encode_text(delta.text) + tail

    def finish(self, index: int, reason: FinishReason) -> bytes:
        ids = b',"token_ids":[]' if self._wants_ids else b""
        return (
            self._heads[index] + b'},"logprobs":null%b,"finish_reason":"%b"}' % (ids, reason.value.encode()) + self._end
        )

    def usage(self, prompts: Sequence[PromptFinishes]) -> bytes:
        return event(self._fields | {"choices": [], "usage": usage(prompts), "millpond": extension(prompts)})

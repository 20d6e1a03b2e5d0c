"""Body of POST /v1/chat/completions. Knows the message shapes; not how a template renders them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from millpond.sampling_params import MAX_TOP_LOGPROBS
from millpond.server.schemas.generation import INT32_MAX, GenerationFields, Integer, TokenCount, WireModel

MAX_TOOLS = 1024
ToolList = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_TOOLS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ContentPart(WireModel):
    type: Literal["text"]
    text: str


class ChatMessage(WireModel):
    role: Role
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: ToolList | None = None
    tool_call_id: str | None = None


class ChatRequest(GenerationFields):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Integer, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: ToolList | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    thinking_token_budget: Annotated[Integer, Field(ge=0, le=INT32_MAX)] | None = None
    thinking_budget_tokens: Annotated[Integer, Field(ge=-1, le=INT32_MAX)] | None = None

"""Any kind of prompt to ids: template, guard of client text, tokenizer, limits. Knows no request and no sampling.

With the ids of a chat comes how its outputs are to be read: which tool format, which reasoning tags. Runs on worker
threads. An empty prompt ("" or []) is the caller's error, also where the model would add a BOS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, cast

from millpond.errors import CallerError, ContextLengthExceeded, InvalidParameter, TemplateError
from millpond.runtime.base import Vocab
from millpond.text.channels import ChannelPlan, MarkerTokens
from millpond.text.chat_template import RESERVED_NAMES, ChatTemplate, TemplateTokens
from millpond.text.control_text import ClientText, ControlStrings, JsonValue
from millpond.text.inputs import ChatInput, PromptInput, TextInput, TokenInput
from millpond.text.messages import Message, normalise_messages
from millpond.text.tokenizer import Tokenizer, check_text_size
from millpond.text.tool_formats.base import ToolFormat, ToolSet, Turn
from millpond.text.tool_formats.registry import FORMATS, detect_format, detect_think_tags
from millpond.text.tool_prompt import with_tools_as_text
from millpond.types import TokenId

_KWARGS = "chat_template_kwargs"
_TEMPLATE_ALLOWANCE = 65_536
"""Characters a template may add on its own."""


@dataclass(frozen=True, slots=True)
class ToolSettings:
    """`form`: a format's name, or "auto" for what the template shows. `whole_calls`: see ChannelPlan."""

    form: str = "auto"
    whole_calls: bool = False


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    token_ids: tuple[TokenId, ...]
    channels: ChannelPlan | None = None
    """None: outputs are nothing but text."""
    grammar: str | None = None
    """Lark that every output must follow, for calls that are forced. None: the model is free."""


class InputProcessor:
    """One a server. `template` is Jinja source, None where the model has none; `clock` gives templates their date.

    Raises ConfigError when the template does not compile.
    """

    def __init__(
        self,
        vocab: Vocab,
        template: str | None,
        max_model_len: int,
        clock: Callable[[], datetime],
        tools: ToolSettings | None = None,
    ) -> None:
        self._max_model_len = max_model_len
        self._controls = ControlStrings.of(vocab)
        self._template = ChatTemplate(template, _template_tokens(vocab), clock) if template else None
        self.tokenizer = Tokenizer(vocab, max_model_len)
        tools = tools or ToolSettings()
        self._whole_calls = tools.whole_calls
        self._form = _choose_format(self._template, tools.form)
        self._think = self._form.think or detect_think_tags(template or "")
        self._markers = MarkerTokens.find(vocab, self._form, self._think)

    @property
    def tool_format(self) -> str:
        """Name of the format in which calls are read."""
        return self._form.name

    def prepare_prompt(self, prompt: PromptInput) -> PreparedPrompt:
        """Ids of a prompt that leaves room for at least one output token, and how to read the outputs.

        Raises InvalidParameter, TemplateError or ContextLengthExceeded.
        """
        field = "messages" if isinstance(prompt, ChatInput) else "prompt"
        if isinstance(prompt, TokenInput):
            self._check_length(len(prompt.token_ids), field)
        channels = grammar = None
        if isinstance(prompt, ChatInput):
            rendered, ids = self._encode_chat(prompt)
            ids = self.tokenizer.with_bos(ids) if ids else ids
            channels = self._plan_channels(prompt, rendered)
            grammar = self._forced_grammar(prompt, channels)
        else:
            ids = self.tokenize(prompt)
        if not ids:
            raise InvalidParameter(field, "must not be empty")
        self._check_length(len(ids), field)
        return PreparedPrompt(tuple(ids), channels, grammar)

    def tokenize(self, prompt: PromptInput, *, add_special: bool = True) -> list[TokenId]:
        """Ids without the length check (text that could never fit is refused all the same).

        `add_special`: with the model's BOS, if it wants one.
        """
        if isinstance(prompt, TokenInput):
            self.tokenizer.check_ids(prompt.token_ids, "prompt")
            return list(prompt.token_ids)
        if isinstance(prompt, TextInput):
            ids = self.tokenizer.encode(prompt.text, parse_special=prompt.parse_special)
        else:
            _, ids = self._encode_chat(prompt)
        return self.tokenizer.with_bos(ids) if add_special and ids else ids

    def _check_length(self, n_tokens: int, field: str) -> None:
        if n_tokens + 1 > self._max_model_len:
            raise ContextLengthExceeded(n_tokens, self._max_model_len, param=field)

    def _plan_channels(self, chat: ChatInput, rendered: str) -> ChannelPlan | None:
        if not chat.tools and self._think is None:
            return None
        tools = ToolSet.of(chat.tools) if chat.tools else None
        turn = Turn(tools, self._think, self._think is not None and self._is_thinking(chat, rendered))
        return ChannelPlan(self._form, turn, self._markers, chat.parallel_tool_calls, self._whole_calls)

    def _forced_grammar(self, chat: ChatInput, channels: ChannelPlan | None) -> str | None:
        if not chat.forced_tools or channels is None or channels.turn.tools is None:
            return None
        tools = channels.turn.tools.only(chat.forced_tools)
        return self._form.forced_grammar(
            tools, channels.turn, parallel=chat.parallel_tool_calls, markers=self._markers.ids
        )

    def _is_thinking(self, chat: ChatInput, rendered: str) -> bool:
        """Does the prompt end inside reasoning: by the template's hand, or in the message that is to be continued?"""
        think = self._think
        assert think is not None
        last = chat.messages[-1]
        if last.get("role") == "assistant" and not last.get("tool_calls"):
            return rendered.rfind(think.open) > rendered.rfind(think.close)
        return self._form.opens_thinking(rendered, think)

    def _encode_chat(self, chat: ChatInput) -> tuple[str, list[TokenId]]:
        """(rendered text, ids)."""
        if self._template is None:
            raise CallerError(
                "this model has no chat template; start the server with --chat-template FILE, or use /v1/completions",
                param="messages",
            )
        messages = normalise_messages(chat.messages, text_arguments=self._template.wants_text_arguments)
        guard = ClientText(self._controls, template_source=self._template.source)
        self._examine(guard, messages, chat)
        continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        messages = with_tools_as_text(messages, chat.tools, self._template.shows)
        revealed = guard.reveal(self._render(self._template, guard, messages, chat, continues))
        ids: list[TokenId] = []
        for piece in self._controls.pieces(revealed):
            ids += self.tokenizer.encode(piece.text, parse_special=piece.parse_special, field="messages")
        return revealed.text, ids

    def _examine(self, guard: ClientText, messages: Sequence[Message], chat: ChatInput) -> None:
        taken = sorted(RESERVED_NAMES.intersection(chat.template_kwargs))
        if taken:
            raise InvalidParameter(_KWARGS, f"may not set {taken[0]!r}")
        for field, value in (("messages", messages), ("tools", chat.tools), (_KWARGS, chat.template_kwargs)):
            guard.examine(_json(value), field)
        # Twice the limit: a template may leave a part of the messages out.
        limit = 2 * self.tokenizer.max_text_bytes
        check_text_size(guard.total_bytes, limit, self._max_model_len, "messages")

    def _render(
        self, template: ChatTemplate, guard: ClientText, messages: Sequence[Message], chat: ChatInput, continues: bool
    ) -> str:
        """The rendered text, still with placeholders. `continues`: the last message is left open."""
        hidden = [_hide_message(guard, message) for message in messages]
        last = hidden[-1]
        mark = guard.reserve() if continues else None
        if mark is not None:
            last["content"] += mark
        try:
            rendered = template.render(
                hidden,
                tools=cast("list[dict[str, Any]]", guard.hide(_json(chat.tools))),
                add_generation_prompt=mark is None,
                kwargs=cast("dict[str, Any]", guard.hide(_json(chat.template_kwargs))),
                max_characters=2 * self.tokenizer.max_text_bytes + _TEMPLATE_ALLOWANCE,
            )
        except TemplateError as error:
            raise TemplateError(guard.reveal(str(error)).text) from error
        if mark is None:
            return rendered
        if mark not in rendered:
            raise TemplateError("the chat template cannot continue a last message of role 'assistant'")
        return rendered[: rendered.rindex(mark)]


def _choose_format(template: ChatTemplate | None, name: str) -> ToolFormat:
    """Templates that show no tools get them as text, in the Hermes format."""
    if name != "auto":
        return FORMATS[name]
    if template is None or not template.shows.tools:
        return FORMATS["hermes"]
    return detect_format(template.source) or FORMATS["json"]


def _hide_message(guard: ClientText, message: Message) -> Message:
    """Roles are from a fixed list, so they stay: templates build control strings with them."""
    hidden = cast("Message", guard.hide(_json(message)))
    hidden["role"] = message["role"]
    return hidden


def _json(value: object) -> JsonValue:
    """Sequences become lists; the content came from JSON and is checked as it is walked."""
    return cast("JsonValue", list(cast("Sequence[Any]", value)) if isinstance(value, tuple) else value)


def _template_tokens(vocab: Vocab) -> TemplateTokens:
    def text(token: TokenId | None) -> str:
        return "" if token is None else vocab.piece(token, special=True).decode("utf-8", "replace")

    return TemplateTokens(bos=text(vocab.bos_id), eos=text(vocab.eos_id))

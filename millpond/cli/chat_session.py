"""A conversation line by line: messages, /commands, what is kept of an answer. Knows no terminal, no model, no HTTP.

Answers go to `show`, everything else to `note`, so that a piped chat has the answers alone on stdout.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from millpond.cli.sampling import changed_values, params_of, parsed_value, sampling_fields
from millpond.errors import CallerError, ConfigError, MillpondError
from millpond.sampling_params import SamplingParams

Message = dict[str, str]

_LIMIT_NOTE = "(stopped at the limit of tokens; /set max_tokens N changes it)"
_NO_SYSTEM = "none"


Show = Callable[[str], None]


class Backend(Protocol):
    """Who answers."""

    def answer(
        self, messages: list[Message], params: SamplingParams, stop: tuple[str, ...], show: Show, think: Show
    ) -> str:
        """Hands the text to `show` as it comes, reasoning to `think`; returns the finish reason.

        Raises MillpondError. A KeyboardInterrupt passes through it and leaves it ready for the next answer.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[str], None]
    arguments: str
    about: str


class ChatSession:
    """`handle` takes one line of the user; False: leave."""

    def __init__(
        self,
        backend: Backend,
        show: Show,
        note: Show,
        think: Show,
        *,
        params: SamplingParams,
        stop: tuple[str, ...] = (),
        system: str | None = None,
    ) -> None:
        """`show` takes pieces of an answer, `think` pieces of what comes before it, `note` whole lines."""
        self._backend = backend
        self._show = show
        self._note = note
        self._think = think
        self._stop = stop
        self.params = params
        self.system = system
        self.messages: list[Message] = []
        """Of the user and the assistant, in turn; the system message is apart."""
        self._commands: Mapping[str, _Command] = {
            "help": _Command(self._help, "", "show this list"),
            "clear": _Command(self._clear, "", "forget the conversation"),
            "system": _Command(self._set_system, "[TEXT]", f"show or set the system message; {_NO_SYSTEM}: without"),
            "params": _Command(self._show_params, "", "show the sampling parameters"),
            "set": _Command(self._set, "NAME VALUE", "set one of them"),
            "retry": _Command(self._retry, "", "answer the last message again"),
            "save": _Command(self._save, "FILE", "write the conversation to a file"),
            "load": _Command(self._load, "FILE", "go on with a saved one"),
        }
        self.failures = 0
        """Messages and commands that ended in an error."""

    def handle(self, line: str) -> bool:
        text = line.strip()
        if not text:
            return True
        if not text.startswith("/"):
            self._ask(line.rstrip("\n"))
            return True
        if text.startswith("//"):
            self._ask(text[1:])
            return True
        name, _, argument = text[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        try:
            self._command(name, argument.strip())
        except MillpondError as error:
            self._fail(str(error))
        return True

    def _command(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            close = difflib.get_close_matches(name, [*self._commands, "exit"], n=1)
            hint = f"did you mean /{close[0]}?" if close else "/help lists the commands"
            self._fail(f"there is no /{name}; {hint} (//{name} sends it as a message)")
            return
        command.run(argument)

    # -- messages --------------------------------------------------------------------------------------------------

    def _ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        self._answer()

    def _answer(self) -> None:
        """Answers the last message; one that gives nothing is taken out of the conversation again."""
        parts: list[str] = []
        thoughts: list[str] = []

        def show(text: str) -> None:
            if thoughts and not parts:
                self._think("\n")
            parts.append(text)
            self._show(text)

        def think(text: str) -> None:
            thoughts.append(text)
            self._think(text)

        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        try:
            reason = self._backend.answer([*system, *self.messages], self.params, self._stop, show, think)
            self._end_answer("".join(parts), _LIMIT_NOTE if reason == "length" else None)
        except KeyboardInterrupt:
            self._end_answer("".join(parts), "(interrupted)")
        except MillpondError as error:
            self._end_answer("".join(parts), None)
            too_long = isinstance(error, CallerError) and error.code == "context_length_exceeded"
            self._fail(f"{error}{'; /clear starts a new conversation' if too_long else ''}")

    def _end_answer(self, text: str, note: str | None) -> None:
        if text:
            self._show("\n")
            self.messages.append({"role": "assistant", "content": text})
        elif note != _LIMIT_NOTE:
            self.messages.pop()
        if note is not None:
            self._note(note)

    def _fail(self, message: str) -> None:
        self.failures += 1
        self._note(f"error: {' '.join(message.split())}")

    # -- commands --------------------------------------------------------------------------------------------------

    def _help(self, _argument: str) -> None:
        rows = [(f"/{name} {command.arguments}", command.about) for name, command in self._commands.items()]
        rows += [
            ("/exit", "leave; Ctrl-D too"),
            ("//text", "send a message that starts with a slash"),
            ("text\\", "go on in the next line"),
            ("Ctrl-C", "stop the answer"),
        ]
        width = max(len(left) for left, _ in rows)
        for left, about in rows:
            self._note(f"{left.ljust(width)}  {about}")

    def _clear(self, _argument: str) -> None:
        self.messages.clear()
        self._note("a new conversation" + (", the system message stays" if self.system is not None else ""))

    def _set_system(self, argument: str) -> None:
        if argument:
            self.system = None if argument == _NO_SYSTEM else argument
        self._note(f"system: {_NO_SYSTEM if self.system is None else self.system}")

    def _show_params(self, _argument: str) -> None:
        changed = changed_values(self.params)
        for entry in sampling_fields():
            value = getattr(self.params, entry.name)
            shown = "none" if value in (None, ()) else str(changed.get(entry.name, value)).lower()
            self._note(f"{entry.name} = {shown}{'  (set)' if entry.name in changed else ''}")

    def _set(self, argument: str) -> None:
        name, _, text = argument.partition(" ")
        if not name:
            raise ConfigError("set", "it needs a name and a value, like: /set temperature 0.2; /params lists them")
        value = parsed_value(name, text)
        self.params = params_of({name: value}, self.params)
        self._note(f"{name} = {'none' if value is None else str(value).lower()}")

    def _retry(self, _argument: str) -> None:
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()
        if not self.messages:
            raise ConfigError("retry", "there is no message to answer again")
        self._answer()

    def _save(self, argument: str) -> None:
        path = _path("save", argument)
        saved = {"system": self.system, "params": changed_values(self.params), "messages": self.messages}
        try:
            path.write_text(json.dumps(saved, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError("save", f"cannot write {path}: {error.strerror}") from None
        self._note(f"saved {len(self.messages)} messages to {path}")

    def _load(self, argument: str) -> None:
        path = _path("load", argument)
        try:
            saved = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError("load", f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError("load", f"{path} is not a saved chat: {error}") from None
        self.system, params, self.messages = _checked_chat(saved, path)
        self.params = params
        self._note(f"loaded {len(self.messages)} messages from {path}")


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise ConfigError(command, f"it needs a file, like: /{command} chat.json")
    return Path(argument).expanduser()


def _checked_chat(saved: object, path: Path) -> tuple[str | None, SamplingParams, list[Message]]:
    wrong = ConfigError("load", f"{path} is not a saved chat; /save writes one")
    if not isinstance(saved, dict):
        raise wrong
    table = cast("dict[str, Any]", saved)
    system, params, messages = table.get("system"), table.get("params"), table.get("messages")
    if not isinstance(system, str | None) or not isinstance(params, dict) or not isinstance(messages, list):
        raise wrong
    roles = ("user", "assistant")
    checked: list[Message] = []
    for place, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict):
            raise wrong
        entry = cast("dict[str, Any]", message)
        if entry.get("role") != roles[place % 2] or not isinstance(entry.get("content"), str):
            raise wrong
        checked.append({"role": entry["role"], "content": entry["content"]})
    return system, params_of(cast("dict[str, object]", params)), checked

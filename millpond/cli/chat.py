"""`millpond chat`: lines from a terminal or a pipe, answered here or by a server. Knows who asks and who answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.chat_session import Backend, ChatSession, Message, Show
from millpond.cli.generate import (
    CONFIG,
    GRAMMAR,
    JSON_SCHEMA,
    MODEL,
    REGEX,
    STOP,
    SYSTEM,
    constraint,
    show_thought,
)
from millpond.cli.sampling import params_of
from millpond.cli.settings import Value, load_config
from millpond.errors import InternalError
from millpond.models import default_home
from millpond.sampling_params import SamplingParams

if TYPE_CHECKING:
    from millpond.llm import LLM

_HISTORY_LINES = 1000
_PROMPT = "> "
_MORE = ". "


def chat(
    flags: Mapping[str, Value],
    sampling: Mapping[str, object],
    model: Annotated[str | None, MODEL] = None,
    url: Annotated[
        str | None, typer.Option("--url", help="Server to talk to, like http://127.0.0.1:8000; without: no server.")
    ] = None,
    api_key: Annotated[
        str, typer.Option("--api-key", envvar="MILLPOND_API_KEY", help="Key for --url.", show_default=False)
    ] = "",
    system: Annotated[str | None, SYSTEM] = None,
    stop: Annotated[list[str] | None, STOP] = None,
    json_schema: Annotated[Path | None, JSON_SCHEMA] = None,
    grammar: Annotated[Path | None, GRAMMAR] = None,
    regex: Annotated[str | None, REGEX] = None,
    config: Annotated[Path | None, CONFIG] = None,
) -> None:
    """Talk to a model, here or on a server.

    Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. What a model thinks before it answers is shown in
    a terminal and not kept. Lines can be piped in: each is one message, the answers alone go to stdout, and the exit
    code is 1 when one failed.
    """
    params = replace(params_of(sampling), grammar=constraint(json_schema, grammar, regex))
    interactive = sys.stdin.isatty()
    with ExitStack() as stack:
        if url is not None:
            from millpond.cli.chat_remote import RemoteBackend

            remote = RemoteBackend(url, api_key, model)
            backend: Backend = remote
            about = f"{remote.model} at {url}"
        else:
            settings = load_config({"model": model, **flags}, os.environ, config_file=config, folder=Path.cwd())
            from millpond.llm import LLM, load_engine

            llm = stack.enter_context(LLM(engine=load_engine(settings)))
            backend = LocalBackend(llm)
            about = f"{llm.info.model.name}, {llm.info.max_model_len} tokens of context"
        session = ChatSession(backend, _show, _note, show_thought, params=params, stop=tuple(stop or ()), system=system)
        lines = stack.enter_context(_typed_lines()) if interactive else _piped_lines()
        if interactive:
            _note(f"{about}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.")
        _converse(session, lines)
    if session.failures and not interactive:
        raise typer.Exit(1)


class LocalBackend:
    """Answers from an LLM in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def answer(
        self, messages: list[Message], params: SamplingParams, stop: tuple[str, ...], show: Show, think: Show
    ) -> str:
        """See Backend. Raises CallerError or InternalError."""
        stream = self._llm.stream(messages, params, stop=stop, on_reasoning=think)
        try:
            for text in stream:
                show(text)
        finally:
            stream.close()
        result = stream.completion
        if result is None or result.finish_reason.value not in ("stop", "length"):
            raise InternalError((result.message if result else "") or "the answer ended too early")
        return result.finish_reason.value


def _converse(session: ChatSession, lines: Iterator[str]) -> None:
    while True:
        line = next(lines, None)
        if line is None or not session.handle(line):
            return


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(line: str) -> None:
    typer.echo(line, err=True)


def _piped_lines() -> Iterator[str]:
    return joined(sys.stdin)


def joined(lines: Iterator[str] | Generator[str]) -> Iterator[str]:
    """Lines, one that ends with a backslash together with the next."""
    held = ""
    for line in lines:
        text = line.rstrip("\r\n")
        if text.endswith("\\"):
            held += text[:-1] + "\n"
        else:
            yield held + text
            held = ""
    if held:
        yield held


@contextmanager
def _typed_lines() -> Generator[Iterator[str]]:
    """Lines of a terminal, with editing and a history that is kept between chats."""
    history = _history()
    try:
        yield _ask_lines()
    finally:
        if history is not None:
            with suppress(OSError):
                history()


def _ask_lines() -> Iterator[str]:
    held = ""
    while True:
        try:
            text = input(_MORE if held else _PROMPT)
        except EOFError:
            _note("")
            return
        except KeyboardInterrupt:
            held = ""
            _note("\n(Ctrl-D or /exit leaves)")
            continue
        if text.endswith("\\"):
            held += text[:-1] + "\n"
            continue
        yield held + text
        held = ""


def _history() -> Callable[[], None] | None:
    """Reads the kept history in; what is returned writes it back."""
    try:
        import readline
    except ImportError:
        return None
    path = default_home(os.environ) / "chat_history"
    readline.set_history_length(_HISTORY_LINES)
    with suppress(OSError):
        readline.read_history_file(path)

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        readline.write_history_file(path)

    return write

"""`millpond chat`: commands, what is kept of an answer, piped and typed lines, and Ctrl-C in a real terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_local_engine import fake_llm, fake_local_engine, fake_runtime
from typer.testing import CliRunner, Result

import millpond.llm
from millpond.cli.chat import LocalBackend, joined
from millpond.cli.chat_session import ChatSession, Message, Show
from millpond.cli.main import build_app
from millpond.errors import CallerError, CapacityError, ContextLengthExceeded
from millpond.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@dataclass
class ScriptedBackend:
    """Answers with `pieces`, then raises `error` or returns `reason`; remembers what it was asked."""

    pieces: tuple[str, ...] = ("Hel", "lo")
    error: BaseException | None = None
    reason: str = "stop"
    thoughts: tuple[str, ...] = ()
    asked: list[tuple[list[Message], SamplingParams, tuple[str, ...]]] = field(default_factory=list)

    def answer(
        self, messages: list[Message], params: SamplingParams, stop: tuple[str, ...], show: Show, think: Show
    ) -> str:
        self.asked.append(([dict(message) for message in messages], params, stop))
        for thought in self.thoughts:
            think(thought)
        for piece in self.pieces:
            show(piece)
        if self.error is not None:
            raise self.error
        return self.reason


@dataclass
class Screen:
    shown: str = ""
    notes: list[str] = field(default_factory=list)
    thought: str = ""

    def think(self, text: str) -> None:
        self.thought += text

    def show(self, text: str) -> None:
        self.shown += text


def new_session(backend: Any = None, **options: Any) -> tuple[ChatSession, Any, Screen]:
    backend, screen = backend or ScriptedBackend(), Screen()
    options.setdefault("params", SamplingParams())
    return ChatSession(backend, screen.show, screen.notes.append, screen.think, **options), backend, screen


def unheard(text: str) -> None:
    raise AssertionError("this model does not think")


def said(*contents: str) -> list[Message]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(contents)]


def test_a_message_is_answered_with_what_came_before() -> None:
    session, backend, screen = new_session(system="be brief", stop=("X",))
    assert session.handle("hi\n")
    assert session.handle("  again ")
    assert screen.shown == "Hello\nHello\n"
    assert session.messages == said("hi", "Hello", "  again ", "Hello")
    messages, params, stop = backend.asked[1]
    assert messages == [{"role": "system", "content": "be brief"}, *said("hi", "Hello", "  again ")]
    assert (params, stop) == (SamplingParams(), ("X",))
    assert screen.notes == []


def test_empty_lines_are_nothing_and_two_slashes_are_text() -> None:
    session, backend, _ = new_session()
    assert session.handle("  \n")
    assert backend.asked == []
    session.handle("//clear")
    assert session.messages[0]["content"] == "/clear"


@pytest.mark.parametrize("line", ["/exit", "/quit", " /exit "])
def test_leaving(line: str) -> None:
    session, _, _ = new_session()
    assert session.handle(line) is False


def test_help_has_every_command() -> None:
    session, _, screen = new_session()
    session.handle("/help")
    for name in ("help", "clear", "system", "params", "set", "retry", "save", "load", "exit"):
        assert any(line.startswith(f"/{name}") for line in screen.notes)


@pytest.mark.parametrize(("line", "words"), [("/claer", "did you mean /clear?"), ("/zzz", "/help lists the commands")])
def test_an_unknown_command_is_not_sent(line: str, words: str) -> None:
    session, backend, screen = new_session()
    assert session.handle(line)
    assert backend.asked == []
    assert words in screen.notes[0]
    assert session.failures == 1


def test_clear_keeps_the_system_message() -> None:
    session, backend, _ = new_session(system="s")
    session.handle("hi")
    session.handle("/clear")
    session.handle("new")
    assert backend.asked[1][0] == [{"role": "system", "content": "s"}, *said("new")]


def test_system_is_shown_set_and_taken_away() -> None:
    session, backend, screen = new_session()
    for line in ("/system", "/system be a duck", "quack?", "/system none", "hm"):
        session.handle(line)
    assert screen.notes == ["system: none", "system: be a duck", "system: none"]
    assert backend.asked[0][0][0] == {"role": "system", "content": "be a duck"}
    assert backend.asked[1][0][0]["role"] == "user"


def test_params_are_set_and_shown() -> None:
    session, backend, screen = new_session(params=SamplingParams(top_k=7))
    session.handle("/set temperature 0.25")
    session.handle("/set max_tokens 5")
    session.handle("/params")
    session.handle("hi")
    assert backend.asked[0][1] == SamplingParams(temperature=0.25, top_k=7, max_tokens=5)
    assert {"temperature = 0.25  (set)", "top_k = 7  (set)", "min_p = 0.05", "seed = none"} <= set(screen.notes)
    session.handle("/set max_tokens none")
    assert session.params.max_tokens is None


@pytest.mark.parametrize("line", ["/set", "/set temperature", "/set temperature hot", "/set heat 3", "/set top_p 9"])
def test_a_wrong_set_changes_nothing(line: str) -> None:
    session, _, screen = new_session()
    session.handle(line)
    assert session.params == SamplingParams()
    assert screen.notes[0].startswith("error: ")


def test_a_thought_is_shown_apart_and_not_kept() -> None:
    session, backend, screen = new_session(ScriptedBackend(thoughts=("hm", "m")))
    session.handle("hi")
    assert (screen.thought, screen.shown) == ("hmm\n", "Hello\n")
    assert session.messages == said("hi", "Hello")
    backend.thoughts = ()
    session.handle("again")
    assert (screen.thought, screen.shown) == ("hmm\n", "Hello\nHello\n")


def test_retry_asks_again_without_the_old_answer() -> None:
    session, backend, screen = new_session()
    session.handle("/retry")
    assert screen.notes == ["error: retry: there is no message to answer again"]
    session.handle("hi")
    backend.pieces = ("Other",)
    session.handle("/retry")
    assert backend.asked[1][0] == said("hi")
    assert session.messages == said("hi", "Other")


def test_an_interrupted_answer_is_kept_as_far_as_it_came() -> None:
    session, backend, screen = new_session(ScriptedBackend(error=KeyboardInterrupt()))
    assert session.handle("hi")
    assert session.messages == said("hi", "Hello")
    assert (screen.shown, screen.notes, session.failures) == ("Hello\n", ["(interrupted)"], 0)
    backend.pieces = ()
    session.handle("again")
    assert session.messages == said("hi", "Hello"), "a question without an answer would break the turns"


def test_an_error_is_a_note_and_the_question_is_taken_back() -> None:
    backend = ScriptedBackend(pieces=(), error=CapacityError("the queue is full", retry_after=3))
    session, _, screen = new_session(backend)
    assert session.handle("hi")
    assert (session.messages, screen.notes, session.failures) == ([], ["error: the queue is full"], 1)
    backend.error = ContextLengthExceeded(900, 100)
    session.handle("hi")
    assert screen.notes[1].endswith("; /clear starts a new conversation")


def test_the_limit_of_tokens_is_noted() -> None:
    session, _, screen = new_session(ScriptedBackend(reason="length"))
    session.handle("hi")
    assert screen.notes == ["(stopped at the limit of tokens; /set max_tokens N changes it)"]


def test_a_saved_chat_goes_on(tmp_path: Path) -> None:
    first, _, _ = new_session(system="s", params=SamplingParams(top_k=3, logit_bias=((5, 1.0),)))
    first.handle("hi")
    first.handle(f"/save {tmp_path / 'chat.json'}")
    second, backend, screen = new_session()
    second.handle(f"/load {tmp_path / 'chat.json'}")
    second.handle("more")
    assert screen.notes == [f"loaded 2 messages from {tmp_path / 'chat.json'}"]
    assert (second.system, second.params) == (first.system, first.params)
    assert backend.asked[0][0] == [{"role": "system", "content": "s"}, *said("hi", "Hello", "more")]


@pytest.mark.parametrize(
    "saved",
    [
        "no json",
        [],
        {"messages": []},
        {"system": 5, "params": {}, "messages": []},
        {"system": None, "params": {"heat": 1}, "messages": []},
        {"system": None, "params": {}, "messages": said("a", "b")[1:]},
        {"system": None, "params": {}, "messages": [{"role": "user", "content": 5}]},
    ],
)
def test_a_wrong_file_is_refused_and_changes_nothing(saved: Any, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved))
    session, _, screen = new_session(system="s")
    session.handle("hi")
    session.handle(f"/load {path}")
    assert screen.notes[-1].startswith("error: ")
    assert (session.messages, session.system) == (said("hi", "Hello"), "s")


@pytest.mark.parametrize("line", ["/save", "/load", "/save no/such/folder/x", "/load nothing.json"])
def test_save_and_load_say_what_is_wrong(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    session, _, screen = new_session()
    session.handle(line)
    assert screen.notes[0].startswith(("error: save: ", "error: load: "))


def test_a_backslash_goes_on_in_the_next_line() -> None:
    assert list(joined(iter(["one\\\n", "two\r\n", "three"]))) == ["one\ntwo", "three"]
    assert list(joined(iter(["one\\\n"]))) == ["one\n"]


def test_the_local_backend_streams_and_says_why_it_ended() -> None:
    llm = fake_llm(max_model_len=60)
    backend, parts = LocalBackend(llm), list[str]()
    assert backend.answer(said("the duck"), GREEDY, (), parts.append, unheard) == "length"
    assert "".join(parts) == fake_llm().chat(said("the duck"), GREEDY)[0].text
    with pytest.raises(CallerError):
        backend.answer(said("the duck " * 100), GREEDY, (), parts.append, unheard)


def test_the_local_backend_survives_an_interrupt() -> None:
    llm = fake_llm()
    backend, parts = LocalBackend(llm), list[str]()

    def interrupt(text: str) -> None:
        parts.append(text)
        if len(parts) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backend.answer(said("the duck"), SamplingParams(temperature=0.0, ignore_eos=True), (), interrupt, unheard)
    again = list[str]()
    backend.answer(said("the pond"), GREEDY, (), again.append, unheard)
    assert "".join(again) == fake_llm().chat(said("the pond"), GREEDY)[0].text
    assert llm._outputs == {}


def piped(text: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    monkeypatch.setattr(millpond.llm, "load_engine", lambda config: fake_local_engine(fake_runtime(), max_model_len=80))
    flags = ("--temperature", "0", "--ignore-eos", "--max-tokens", "10")
    return CliRunner().invoke(build_app(), ["chat", *flags, *arguments], input=text)


def test_piped_lines_are_messages_and_answers_alone_are_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = fake_llm()
    first = llm.chat(said("the duck"), GREEDY)[0].text
    second = llm.chat(said("the duck", first, "a pond"), GREEDY)[0].text
    result = piped("the duck\n\n/params\na pond\n/exit\nnot read\n", monkeypatch)
    assert result.stdout == f"{first}\n{second}\n"
    assert "top_k = 40" in result.stderr
    assert result.exit_code == 0


def test_a_piped_message_that_fails_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result = piped("the duck " * 40 + "\nthe duck\n", monkeypatch)
    assert "/clear starts a new conversation" in result.stderr
    assert result.stdout == fake_llm().chat(said("the duck"), GREEDY)[0].text + "\n"
    assert result.exit_code == 1


TERMINAL_CHAT = """
import sys
sys.path.insert(0, {unit!r})
import time
import millpond.llm
from fake_local_engine import fake_local_engine, fake_runtime
engine = fake_local_engine(fake_runtime(8192))
step = engine.core.step
def slow_step(*arguments):
    time.sleep(0.005)
    return step(*arguments)
engine.core.step = slow_step
millpond.llm.load_engine = lambda config: engine
from millpond.cli.main import build_app
build_app()(["chat", "--ignore-eos", "--temperature", "0"], prog_name="millpond")
"""


class Terminal:
    """A chat in a terminal of its own. Waits have no deadline: a hang is the run's timeout."""

    def __init__(self, folder: Path) -> None:
        self._main, child = pty.openpty()
        program = TERMINAL_CHAT.format(unit=str(Path(__file__).parent))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            env={**os.environ, "MILLPOND_HOME": str(folder), "TERM": "dumb"},
        )
        os.close(child)
        self.seen = ""

    def wait_for(self, text: str, after: int = 0) -> int:
        """Place behind the text."""
        while text not in self.seen[after:]:
            try:
                data = os.read(self._main, 4096)
            except OSError:
                data = b""
            assert data, f"the chat ended before {text!r}: {self.seen}"
            self.seen += data.decode(errors="replace")
        return self.seen.index(text, after) + len(text)

    def interrupt_until(self, text: str, after: int) -> int:
        """As wait_for. Python may miss a signal between writing a prompt and reading; a user presses again, too."""
        while text not in self.seen[after:]:
            self.process.send_signal(signal.SIGINT)
            if select.select([self._main], [], [], 1.0)[0]:
                self.seen += os.read(self._main, 4096).decode(errors="replace")
        return self.seen.index(text, after) + len(text)

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self._main)
        return code


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    chat = Terminal(tmp_path)
    at = chat.wait_for("Ctrl-D leaves.")
    chat.wait_for("> ", at)
    chat.type("the duck\n")
    at = chat.wait_for("the duck\r\n", at)
    while len(chat.seen) < at + 20:
        chat.seen += os.read(chat._main, 4096).decode(errors="replace")
    chat.process.send_signal(signal.SIGINT)
    at = chat.wait_for("(interrupted)", at)
    at = chat.wait_for("> ", at)
    at = chat.wait_for("> ", chat.interrupt_until("(Ctrl-D or /exit leaves)", at))
    chat.type("/system\n")
    chat.wait_for("> ", chat.wait_for("system: none", at))
    chat.type("\x04")
    assert chat.end() == 0
    assert "the duck" in (tmp_path / "chat_history").read_text()
    assert (tmp_path / "chat_history").stat().st_mode & 0o077 == 0

"""`millpond generate`: one prompt streamed, or JSON lines in one batch. Knows the terminal; LLM does the work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from millpond.cli.models import complete_model
from millpond.cli.sampling import params_of
from millpond.cli.settings import Value, load_config
from millpond.config import DEFAULT_MODEL, Config
from millpond.errors import ConfigError
from millpond.sampling_params import GrammarKind, GrammarSpec, SamplingParams

if TYPE_CHECKING:
    from millpond.llm import LLM

MODEL = typer.Option(
    "--model",
    "-m",
    help="Registry name, path of a GGUF file, or hf:org/repo/file.gguf.",
    show_default=DEFAULT_MODEL,
    autocompletion=complete_model,
)
CONFIG = typer.Option("--config", help="TOML file to read.", show_default="./millpond.toml, if there")
SYSTEM = typer.Option("--system", "-s", help="System message of the conversation.")
STOP = typer.Option("--stop", help="Text that ends the output; may be given more than once.")
_CONSTRAINTS = "Constraints"
JSON_SCHEMA = typer.Option(
    "--json-schema", help="File with a JSON schema that the output is valid by.", rich_help_panel=_CONSTRAINTS
)
GRAMMAR = typer.Option(
    "--grammar", help="File with a grammar, Lark or GBNF, that the output matches.", rich_help_panel=_CONSTRAINTS
)
REGEX = typer.Option("--regex", help="Regular expression that the output matches.", rich_help_panel=_CONSTRAINTS)


def generate(
    flags: Mapping[str, Value],
    sampling: Mapping[str, object],
    prompt: Annotated[str | None, typer.Argument(help="The prompt; without it and --file, stdin is read.")] = None,
    model: Annotated[str | None, MODEL] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File with the prompt; -: stdin.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            "--jsonl",
            help='File of lines like {"prompt": "...", "id": 1, "params": {"max_tokens": 9}}, or with "messages" in '
            "the place of prompt; -: stdin. All run in one batch; the answers are lines in the same order.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File for the output, not stdout.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Answer the prompt as a user's message, or continue it as it is.",
            show_default="--chat if the model has a chat template",
        ),
    ] = None,
    system: Annotated[str | None, SYSTEM] = None,
    stop: Annotated[list[str] | None, STOP] = None,
    json_schema: Annotated[Path | None, JSON_SCHEMA] = None,
    grammar: Annotated[Path | None, GRAMMAR] = None,
    regex: Annotated[str | None, REGEX] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line with usage, as --jsonl does.")] = False,
    config: Annotated[Path | None, CONFIG] = None,
) -> None:
    """Generate text, without a server.

    The exit code is 1 when a prompt failed. Progress goes to stderr, so stdout is the output alone.
    """
    params = replace(params_of(sampling), grammar=constraint(json_schema, grammar, regex))
    settings = load_config({"model": model, **flags}, os.environ, config_file=config, folder=Path.cwd())
    stops = tuple(stop or ())
    if jsonl is not None:
        _refuse_beside_jsonl({"PROMPT": prompt, "--file": file, "--system": system, "--raw or --chat": chat})
        with _opened_lines(jsonl) as (lines, total), _opened_output(output) as sink, _loaded(settings) as llm:
            failed = _batch(llm, lines, total, params, stops, sink)
    else:
        text = _read_prompt(prompt, file, sys.stdin)
        with _opened_output(output) as sink, _loaded(settings) as llm:
            conversation = _conversation(llm, text, system, chat)
            failed = _one(llm, conversation, params, stops, sink, as_json=as_json)
    if failed:
        raise typer.Exit(1)


def _loaded(settings: Config) -> LLM:
    # Imported late: --help and a wrong setting must not wait for it.
    from millpond.llm import LLM, load_engine

    return LLM(engine=load_engine(settings))


def show_thought(text: str) -> None:
    """Reasoning, beside the answer, which alone goes to stdout: dim in a terminal, and not into files."""
    if sys.stderr.isatty():
        typer.echo(typer.style(text, dim=True), nl=False, err=True)


def constraint(schema: Path | None, grammar: Path | None, regex: str | None) -> GrammarSpec | None:
    """What every output must match. Its sense is checked where it is compiled."""
    given = [
        (GrammarKind.JSON_SCHEMA, "json_schema", schema),
        (GrammarKind.GRAMMAR, "grammar", grammar),
        (GrammarKind.REGEX, "regex", regex),
    ]
    chosen = [(kind, name, value) for kind, name, value in given if value is not None]
    if len(chosen) > 1:
        raise ConfigError(chosen[1][1], f"cannot be used with --{chosen[0][1].replace('_', '-')}")
    for kind, name, value in chosen:
        text = _read_text(value, name) if isinstance(value, Path) else value
        return GrammarSpec(kind, text, param=name)
    return None


def _read_text(path: Path, name: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(name, f"cannot read {path}: {error}; it must be a text file in UTF-8") from None


def _read_prompt(prompt: str | None, file: Path | None, stdin: TextIO) -> str:
    if prompt is not None and file is not None:
        raise ConfigError("prompt", "give PROMPT or --file, not both")
    if prompt is not None and prompt != "-":
        return prompt
    if file is not None and str(file) != "-":
        return _read_text(file, "file")
    if prompt is None and file is None and stdin.isatty():
        raise ConfigError("prompt", "there is none; run: millpond generate 'Name three colours.', or pipe a text in")
    return stdin.read()


def _refuse_beside_jsonl(given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError("jsonl", f"cannot be used with {name}: each line has its own prompt or messages")


@contextmanager
def _opened_lines(path: Path) -> Generator[tuple[Iterable[str], int | None]]:
    """The lines, and how many if that can be known."""
    if str(path) == "-":
        yield sys.stdin, None
        return
    try:
        with path.open(encoding="utf-8") as counted:
            total = sum(bool(line.strip()) for line in counted)
        opened = path.open(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError("jsonl", f"cannot read {path}: {error}; it must be a text file in UTF-8") from None
    with opened:
        yield opened, total


@contextmanager
def _opened_output(path: Path | None) -> Generator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        opened = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError("output", f"cannot write {path}: {error.strerror}") from None
    with opened:
        yield opened


def _conversation(llm: LLM, text: str, system: str | None, chat: bool | None) -> str | list[dict[str, str]]:
    """What to hand to LLM.stream: text to continue, or messages to answer."""
    if chat is None:
        chat = llm.has_chat_template
    if not chat:
        if system is not None:
            raise ConfigError("system", "a text that is continued as it is has no system message; leave out --system")
        return text
    messages = [{"role": "system", "content": system}] if system is not None else []
    return [*messages, {"role": "user", "content": text}]


def _one(
    llm: LLM,
    prompt: str | list[dict[str, str]],
    params: SamplingParams,
    stop: tuple[str, ...],
    sink: TextIO,
    *,
    as_json: bool,
) -> bool:
    """True: it failed."""
    from millpond.cli.jsonl import result_record

    stream = llm.stream(prompt, params, stop=stop, on_reasoning=None if as_json else show_thought)
    for delta in stream:
        if not as_json:
            sink.write(delta)
            sink.flush()
    result = stream.completion
    assert result is not None
    failed = not result.finish_reason.is_asked_for
    if as_json:
        sink.write(json.dumps({"id": 1, **result_record(result, llm.piece)}, ensure_ascii=False) + "\n")
    else:
        sink.write("\n")
        if failed:
            typer.echo(f"error: {result.message or 'the output ended by ' + result.finish_reason.value}", err=True)
    return failed


def _batch(
    llm: LLM, lines: Iterable[str], total: int | None, params: SamplingParams, stop: tuple[str, ...], sink: TextIO
) -> bool:
    """True: at least one failed."""
    from tqdm import tqdm

    from millpond.cli.jsonl import OrderedLines

    def write(line: str) -> None:
        sink.write(line)
        sink.flush()

    batch = OrderedLines(lines, params, stop, write, llm.piece)
    with tqdm(total=total, unit="prompt", file=sys.stderr, disable=None) as bar:
        for place, result in llm.results(batch.jobs()):
            batch.take(place, result)
            bar.set_postfix_str(f"{batch.tokens} tokens, {batch.failed} failed", refresh=False)
            bar.update(batch.done - bar.n)
        bar.update(batch.done - bar.n)
    typer.echo(f"{batch.done} prompts, {batch.tokens} tokens, {batch.failed} failed", err=True)
    return batch.failed > 0

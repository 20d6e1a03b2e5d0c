"""`millpond receipts list | show | verify | replay`: how they look in a terminal. millpond.receipts has the rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from millpond.cli.settings import config_of
from millpond.config import Config
from millpond.errors import CallerError, InternalError
from millpond.models import TerminalProgress
from millpond.receipts.chain import verify as verify_chain
from millpond.receipts.receipt import EngineFacts, Receipt, decode_receipt
from millpond.receipts.replay import replay as replay_receipt
from millpond.receipts.store import EndRow, ReceiptStore, opened
from millpond.request import Request
from millpond.types import SequenceId, TokenId

if TYPE_CHECKING:
    from millpond.engine.core import EngineCore

_FILE = typer.Argument(help="File that --receipts named.", show_default=False)
_WANTED = typer.Argument(help="Numbers or request ids.", show_default=False)


def list_receipts(
    file: Annotated[Path, _FILE],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="How many of the newest.")] = 20,
) -> None:
    """List the newest receipts, and what was begun and has no receipt."""
    with opened(file) as store:
        rows = list(store.ends(newest=limit))
        begun = store.unfinished()
    typer.echo("NUMBER  ENDED                PROMPT  OUTPUT  REASON     PARKS  REQUEST")
    for row in rows:
        receipt = _receipt(row)
        note = "" if receipt.complete else "  (incomplete: a row was dropped)"
        typer.echo(
            f"{row.number:6}  {_time(receipt.ended_at)}  {len(receipt.prompt_ids):6}  {len(receipt.output_ids):6}  "
            f"{receipt.reason:9}  {receipt.preemptions:5}  {receipt.request_id}{note}"
        )
    for begin in begun[-limit:]:
        typer.echo(
            f"     -  {_time(begin.accepted_at)}  {begin.prompt_tokens:6}       -  no end     -      {begin.request_id}"
        )


def show(file: Annotated[Path, _FILE], wanted: Annotated[list[str], _WANTED]) -> None:
    """Print receipts as JSON, one a line, with their number and hash."""
    with opened(file) as store:
        for row in _find(store, wanted):
            shown = {"number": row.number, "hash": row.hash, **msgspec.to_builtins(_receipt(row))}
            typer.echo(msgspec.json.encode(shown).decode())


def verify(
    file: Annotated[Path, _FILE],
    head: Annotated[
        str | None, typer.Option("--head", help="A hash that verify printed before: its receipt must be there.")
    ] = None,
) -> None:
    """Check that no receipt was changed, added, moved or removed. Prints the hash of the last one: note it."""
    with opened(file) as store:
        verdict = verify_chain(store.ends(), store.anchor(), head=head)
    for problem in verdict.problems:
        typer.echo(problem)
    typer.echo(f"{verdict.count} receipts, {len(verdict.problems)} problems; head {verdict.head}")
    if not verdict.holds:
        raise typer.Exit(1)


def replay(
    file: Annotated[Path, _FILE],
    wanted: Annotated[list[str] | None, _WANTED] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Without numbers: how many of the newest.")] = 20,
    model: Annotated[
        str | None, typer.Option("--model", help="Model file or name.", show_default="that of the receipt")
    ] = None,
) -> None:
    """Generate the outputs again, one at a time, and compare them token by token.

    Receipts made with --exact must be the same; those of the default mode may differ where two tokens were all but
    equally likely. Exit code 1 if one differs.
    """
    with opened(file) as store:
        rows = _find(store, wanted) if wanted else list(store.ends(newest=last))
    same = 0
    for facts, group in _by_engine(rows):
        same += _replay_group(group, facts, model)
    typer.echo(f"{same} of {len(rows)} identical")
    if same < len(rows):
        raise typer.Exit(1)


def _replay_group(rows: Sequence[EndRow], facts: EngineFacts, model: str | None) -> int:
    """How many were the same."""
    # Imported late: list, show and verify must not wait for the engine's imports.
    from millpond.llm import load_engine

    engine = load_engine(replay_config(facts, model), TerminalProgress(sys.stderr))
    try:
        digest = engine.core.info.model.digest
        if facts.model_digest and digest != facts.model_digest:
            raise CallerError(f"the model's sha256 is {digest}; the receipts were made with {facts.model_digest}")
        if engine.core.info.model.library != facts.library:
            typer.echo(f"note: another library: {facts.library} then, {engine.core.info.model.library} now", err=True)
        same = 0
        for row in rows:
            difference = replay_receipt(_receipt(row), generator(engine.core), engine.clock())
            length = len(_receipt(row).output_ids)
            typer.echo(f"{row.number}: {'identical' if difference is None else difference} ({length} tokens)")
            same += difference is None
        return same
    finally:
        engine.close()


def replay_config(facts: EngineFacts, model: str | None) -> Config:
    """The recorded engine, alone and without reuse: what an undisturbed run is. Raises ConfigError."""
    return config_of(
        {
            "model": model or facts.model,
            "exact": facts.exact,
            "kv_type_k": facts.kv_type_k,
            "kv_type_v": facts.kv_type_v,
            "kv_cells": facts.kv_cells,
            "max_running": facts.max_running,
            "max_model_len": facts.max_model_len,
            "prefix_cache": False,
        }
    )


def generator(core: EngineCore) -> Callable[[Request], Sequence[TokenId]]:
    """Runs one request after the other on `core`. Raises InternalError when one ends otherwise than by itself."""
    numbers = iter(range(1, sys.maxsize))

    def generate(request: Request) -> Sequence[TokenId]:
        core.add(SequenceId(next(numbers)), request)
        ids: list[TokenId] = []
        while core.has_work:
            result = core.step()
            ids += [token.token_id for token in result.tokens]
            for finish in result.finished:
                if not finish.reason.is_asked_for:
                    raise InternalError(f"the replay ended by {finish.reason.value}: {finish.message}")
        return ids

    return generate


def _by_engine(rows: Sequence[EndRow]) -> list[tuple[EngineFacts, list[EndRow]]]:
    """Rows that need the same engine together: loading it is what takes time. Raises CallerError."""
    groups: dict[EngineFacts, list[EndRow]] = {}
    for row in rows:
        facts = _receipt(row).engine
        if facts is None:
            raise CallerError(f"receipt {row.number} names no engine: none was ever ready")
        groups.setdefault(facts, []).append(row)
    return list(groups.items())


def _find(store: ReceiptStore, wanted: Sequence[str]) -> list[EndRow]:
    rows: list[EndRow] = []
    for name in wanted:
        found = store.find(name)
        if not found:
            raise CallerError(f"there is no receipt {name}")
        rows += found
    return rows


def _receipt(row: EndRow) -> Receipt:
    try:
        return decode_receipt(row.body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CallerError(f"receipt {row.number} cannot be read: {error}") from None


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")

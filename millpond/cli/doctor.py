"""`millpond doctor`: what this machine, library and model can do and promise. Knows the terminal; no check itself."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpond.cli.models import complete_model
from millpond.cli.settings import Value, load_config
from millpond.config import EngineConfig
from millpond.errors import ModelFileError
from millpond.models import ResolvedModel, TerminalProgress, resolve_model

if TYPE_CHECKING:
    from millpond.doctor.exact_settings import Trial
    from millpond.doctor.report import DoctorReport, ExactCost, ExactnessReport, Layout, ModelReport
    from millpond.outputs import MemoryAbilities

MODEL = typer.Argument(
    help="Registry name, path of a GGUF file, or hf:org/repo/file.gguf.",
    show_default="the configured one, if it is here",
    autocompletion=complete_model,
)
EXACTNESS = typer.Option("--exactness/--no-exactness", help="Measure which settings are exact, once for each model.")


def doctor(
    flags: Mapping[str, Value],
    model: Annotated[str | None, MODEL] = None,
    exactness: Annotated[bool, EXACTNESS] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file to read.", show_default="./millpond.toml, if there")
    ] = None,
) -> None:
    """Check this machine, the library and MODEL, and measure what --exact can promise.

    The exit code is 1 when the library or the model does not work, or when --exact is set and MODEL does not qualify.
    """
    settings = load_config({"model": model, **flags}, os.environ, config_file=config, folder=Path.cwd())
    progress = TerminalProgress(sys.stderr)
    resolved: ResolvedModel | None = None
    if model is not None:
        resolved = resolve_model(model, progress=progress)
    else:
        try:
            resolved = resolve_model(settings.model, offline=True, progress=progress)
        except ModelFileError as error:
            progress.note(f"no model checked: {error}")
    report = _examine(settings.engine, resolved, exactness=exactness, progress=progress)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        typer.echo("\n".join(render(report)))
    refused = report.exactness is not None and report.exactness.chosen is None
    if settings.engine.exact and refused:
        raise typer.Exit(1)


def _examine(
    engine: EngineConfig, model: ResolvedModel | None, *, exactness: bool, progress: TerminalProgress
) -> DoctorReport:
    # Imported late: --help must not wait for the engine's imports.
    from millpond import wiring
    from millpond.doctor.exact import store_of, subject_of
    from millpond.doctor.machine import library_report, machine_report
    from millpond.doctor.qualify import qualify
    from millpond.doctor.report import DoctorReport, exactness_report, generation_report, model_report
    from millpond.doctor.trial import try_in_child

    machine = machine_report()
    report = DoctorReport(machine, library_report(os.environ), engine.threads or machine.cores)
    if model is None:
        return report
    plain = replace(engine, exact=False, model_path=str(model.path), model_digest=model.sha256)
    progress.note(f"loading {model.name} ...")
    runtime = wiring.load_llamacpp(plain, lambda fraction: True)
    try:
        info = runtime.model
        report = replace(
            report,
            model=model_report(str(model.path), runtime),
            generation=generation_report(runtime, plain, time.monotonic),
        )
    finally:
        runtime.close()
    if not exactness:
        return report
    known = qualify(
        subject_of(plain, os.environ),
        store_of(os.environ),
        try_in_child,
        progress.note,
        kv_type_k=plain.kv_type_k,
        kv_type_v=plain.kv_type_v,
    )
    return replace(report, exactness=exactness_report(known, info, plain))


def render(report: DoctorReport) -> Iterable[str]:
    """The report in lines for a terminal."""
    machine, library = report.machine, report.library
    yield from _section("machine")
    yield f"  {machine.processor}, {machine.system}"
    yield f"  threads        {report.threads} ({machine.cores} physical cores usable)"
    if machine.memory_bytes is not None and machine.memory_available_bytes is not None:
        yield f"  memory         {_size(machine.memory_bytes)}, {_size(machine.memory_available_bytes)} available"
    yield from _section("library")
    yield f"  build          {library.build}"
    yield f"  file           {library.path}"
    yield "  ABI            parameters read as declared"
    yield f"  OpenMP         {library.openmp or 'no system runtime in use'}"
    yield f"  features       {' '.join(library.features)}"
    if report.model is not None:
        yield from _model(report.model)
    if report.generation is not None:
        made = report.generation
        yield from _memory(made.abilities)
        yield from _section("generation")
        yield f"  prompt         {made.prompt!r} ({made.prompt_tokens} tokens)"
        yield f"  output         {made.text!r} ({made.output_tokens} tokens)"
        yield (
            f"  speed          prefill {made.prefill_tokens_per_second:.0f} tokens/s, "
            f"decode {made.decode_tokens_per_second:.1f} tokens/s"
        )
    if report.exactness is not None:
        yield from _exactness(report.exactness)


def _section(title: str) -> list[str]:
    return [typer.style(title, bold=True)]


def _model(model: ModelReport) -> Iterable[str]:
    info = model.info
    window = f", sliding window of {info.n_swa} tokens" if info.n_swa else ""
    ends = ", ".join(f"{end.token_id} {end.piece!r}" for end in model.end_tokens)
    yield from _section("model")
    yield f"  name           {info.name} ({info.description}, {info.n_params / 1e6:.0f} M parameters)"
    yield f"  file           {model.path} ({_size(info.size_bytes)}, sha256 {info.digest[:16]}...)"
    yield f"  memory kind    {info.memory_kind.value}{window}, {info.n_layer} layers"
    yield f"  context        {info.n_ctx_train} tokens, {info.kv_bytes_per_token} bytes of KV a token"
    yield f"  chat template  {'yes' if model.chat_template else 'none: only text completions'}"
    yield f"  tokens         {info.n_vocab}; {'adds' if model.adds_bos else 'no'} BOS; ends at {ends or 'none'}"


def _memory(found: MemoryAbilities) -> Iterable[str]:
    """Lines of the model's section."""
    names = {"restore": found.restores, "cut back": found.trims, "decode side by side": found.batches}
    can = ", ".join(name for name, able in names.items() if able)
    yield f"  memory can     {can or 'nothing that could be relied on'}{' (tried)' if found.tested else ''}"
    for finding in found.findings:
        yield f"  finding        {finding}"


def _exactness(found: ExactnessReport) -> Iterable[str]:
    from millpond.doctor.exact_settings import Check

    yield from _section("exactness (separate KV streams; compared bit for bit)")
    names = [check.value for check in Check]
    width = max([len("settings"), *(len(trial.settings.describe()) for trial in found.trials)])
    yield f"  {'settings':<{width}}  {'  '.join(f'{name:>10}' for name in names)}   prefill/s  decode ms"
    for trial in found.trials:
        yield f"  {trial.settings.describe():<{width}}  {_verdicts(trial)}"
    if found.chosen is None or found.cost is None:
        yield "  --exact        no setting qualifies: it would be refused"
        return
    yield f"  --exact        picks {found.chosen.describe()}"
    yield from _cost(found.cost)


def _verdicts(trial: Trial) -> str:
    from millpond.doctor.exact_settings import Check

    if trial.failure:
        return trial.failure
    cells: list[str] = []
    for check in Check:
        verdict = trial.verdict(check)
        shown = "-" if verdict is None else "exact" if verdict.exact else f"off {verdict.largest_difference:.2g}"
        cells.append(f"{shown:>10}")
    speed = trial.speed
    shown = "" if speed is None else f"   {speed.prefill_tokens_per_second:9.0f}  {speed.decode_ms:9.1f}"
    return "  ".join(cells) + shown


def _cost(cost: ExactCost) -> Iterable[str]:
    if cost.prefill_ratio is not None and cost.decode_ratio is not None:
        yield (
            f"  costs          prefill at {cost.prefill_ratio:.0%}, decode at {cost.decode_ratio:.0%} "
            "of the speed of f16/f16"
        )
    yield f"  pool           {_pool(cost.exact)} for each of {cost.exact.sequences}, instead of"
    yield f"                 {_pool(cost.default)} out of one pool for {cost.default.sequences}"


def _pool(layout: Layout) -> str:
    return f"up to {layout.tokens_each} tokens ({layout.cells} cells, {_size(layout.kv_bytes)})"


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"

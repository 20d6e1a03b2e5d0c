"""The only place that knows every class: builds the server process and, run as a module, the engine process.

python -m millpond.wiring FD      the engine child; FD is its end of the channel
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from millpond.config import Config, EngineConfig
from millpond.errors import EngineFailed, SetupError

if TYPE_CHECKING:
    from millpond.async_llm import AsyncLLM, RequestGate
    from millpond.engine.core import EngineCore
    from millpond.engine.messages import Load
    from millpond.engine_client.observer import Observer
    from millpond.engine_client.supervisor import EngineCommand
    from millpond.models import ResolvedModel
    from millpond.runtime.base import Runtime, Vocab
    from millpond.text.input_processor import InputProcessor
    from millpond.watching import Watch

logger = logging.getLogger("millpond")

_PR_SET_PDEATHSIG = 1
_LOADING_SECONDS = 0.1
"""Between two looks at how far the model is loaded."""
OTHER_OPEN_FILES = 128
"""Descriptors of a server besides its connections, those to spare included."""
MAX_WAITING_GRAMMARS = 64
"""Not accepted yet; each takes milliseconds, half a second at the very worst."""
_ENGINE_OOM_SCORE = 500
"""The kernel takes the engine before the server: the server brings it back and nothing is lost."""


# -- server process ----------------------------------------------------------------------------------------------------


def serve(
    config: Config, model: ResolvedModel, *, command: EngineCommand | None = None, vocab: Vocab | None = None
) -> int:
    """`millpond serve`: returns when drained. Tests bring an engine and its vocabulary. Raises SetupError."""
    configure_logging(config.server.log_level, config.server.log_format)
    _allow_open_files(config.server.max_connections)
    engine = replace(engine_config(config.engine, model), engine_log_format=config.server.log_format)
    runner = asyncio.Runner(loop_factory=_loop_factory())
    with runner, closing(watch_of(replace(config, engine=engine), model)) as watch:

        def build() -> AsyncLLM:
            llm = build_async_llm(config, engine, model, command, vocab, watch.observer, watch.hooks)
            watch.attach(llm.client, llm.piece)
            return llm

        return runner.run(_serve(config, engine, model, build, watch))


def watch_of(config: Config, model: ResolvedModel) -> Watch:
    """Metrics and whatever else is to see what happens. `config`: with the engine's. Raises ConfigError."""
    from millpond.watching import Watch

    return Watch(config, config.server.model_name or model.name)


def _allow_open_files(connections: int) -> None:
    """Raises the soft limit so that each connection gets its descriptor, as far as the hard one lets."""
    needed = connections + OTHER_OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < needed:
            logger.warning("only %d files may be open here: fewer connections than --max-connections fit", allowed)


async def _serve(
    config: Config, engine: EngineConfig, model: ResolvedModel, build: Callable[[], AsyncLLM], watch: Watch
) -> int:
    from millpond.server.app import create_app
    from millpond.server.lifecycle import serve_app

    with _parked_files(engine):
        llm = build()
        name = config.server.model_name or model.name
        metrics = watch.metrics_page(llm.client)
        template = _chat_template(config.server.chat_template)
        console = llm.client.window if config.server.console else None
        app = create_app(
            llm,
            config.server,
            config.queue,
            name,
            time.time,
            metrics=metrics,
            chat_template=template,
            console=console,
        )
        llm.start()
        announcing = asyncio.create_task(_announce(llm, config.engine, engine, model))
        drains: list[tuple[float, asyncio.Task[None]]] = []

        def drain() -> None:
            task = asyncio.create_task(llm.drain(config.server.drain_timeout))
            drains.append((time.monotonic() + config.server.drain_timeout, task))

        flush_seconds = 0.0
        try:
            serving = asyncio.ensure_future(serve_app(app, config.server, lambda url: None, drain))
            in_order = await _served(serving, announcing)
            if in_order and engine.spill_dir and drains:
                flush_seconds = max(0.0, drains[0][0] - time.monotonic())
        finally:
            announcing.cancel()
            for _, task in drains:
                task.cancel()
            await llm.close(flush_seconds)
    return 0


async def _served(serving: asyncio.Future[bool], starting: asyncio.Future[None]) -> bool:
    """What `serving` gives. Raises SetupError when the first engine cannot start: nobody has been served yet."""
    await asyncio.wait({serving, starting}, return_when=asyncio.FIRST_COMPLETED)
    failure = starting.exception() if starting.done() and not starting.cancelled() else None
    if failure is not None and not serving.done():
        serving.cancel()
        await asyncio.wait([serving])
        raise failure
    return await serving


@contextmanager
def _parked_files(engine: EngineConfig) -> Generator[None]:
    """Holds the lock of this server's parked files while there is a disk tier."""
    from millpond.spill.instance import InstanceLock

    lock = InstanceLock.try_hold(Path(engine.spill_dir), engine.instance) if engine.spill_dir else None
    try:
        yield
    finally:
        if lock is not None:
            lock.release()


async def _announce(llm: AsyncLLM, asked: EngineConfig, engine: EngineConfig, model: ResolvedModel) -> None:
    """Says what is being loaded, how far it is, and what every "auto" became. Raises SetupError if it cannot be."""
    from millpond.engine.resolution import resolutions, table
    from millpond.runtime.llamacpp.context import physical_cores

    began = time.monotonic()
    await _show_loading(llm, model, lines=engine.engine_log_format == "text")
    try:
        info = await llm.client.wait_ready()
    except EngineFailed:
        raise SetupError(llm.client.state[1]) from None
    _keep_what_is_loaded()
    about = info.model
    head = (
        f"ready in {time.monotonic() - began:.1f} s: {about.name} ({about.description}), max_running {info.max_running}"
    )
    logger.info("\n".join([head, *table(resolutions(asked, engine, info, physical_cores()))]))


def _keep_what_is_loaded() -> None:
    """A full garbage collection no longer looks at modules and routes: that would hold a step or the loop for 50 ms."""
    gc.collect()
    gc.freeze()


async def _show_loading(llm: AsyncLLM, model: ResolvedModel, *, lines: bool) -> None:
    """Returns when the engine no longer loads. Without `lines` it only waits."""
    from millpond.models import SilentProgress, TerminalProgress

    size = model.path.stat().st_size
    progress = TerminalProgress(sys.stderr) if lines else SilentProgress()
    with progress.task(f"loading {model.name}", size) as report:
        while llm.client.state[0] == "loading":
            report(int(llm.client.load_fraction * size))
            await asyncio.sleep(_LOADING_SECONDS)
        if llm.client.state[0] == "ready":
            report(size)


def engine_config(config: EngineConfig, model: ResolvedModel) -> EngineConfig:
    """The engine's settings for one model file and this server process.

    With `exact` the model is qualified first, unless that was done before: seconds, or minutes for large models.
    Raises ConfigError where it does not qualify.
    """
    instance = f"{os.getpid()}-{secrets.token_hex(4)}"
    engine = replace(config, model_path=str(model.path), model_digest=model.sha256, instance=instance)
    if not engine.exact:
        return engine
    from millpond.doctor.exact import exact_config, store_of, subject_of

    return exact_config(engine, subject_of(engine, os.environ), store_of(os.environ), _say)


def _say(line: str) -> None:
    """A line of slow start-up work: for a person at a terminal, else for the log."""
    if sys.stderr.isatty():
        sys.stderr.write(line + "\n")
    else:
        logger.info(line)


def build_async_llm(
    config: Config,
    engine: EngineConfig,
    model: ResolvedModel,
    command: EngineCommand | None = None,
    vocab: Vocab | None = None,
    observer: Observer | None = None,
    gate: RequestGate | None = None,
) -> AsyncLLM:
    """Not started. Raises SetupError when the model's vocabulary cannot be loaded."""
    from millpond.async_llm import AsyncLLM, TextTools
    from millpond.engine_client.client import EngineClient
    from millpond.runtime.llamacpp.vocab import load_vocab
    from millpond.sampling.structured import CompileThread, GrammarCompiler
    from millpond.text.input_processor import InputProcessor, ToolSettings

    vocab = vocab or load_vocab(model.path, os.environ)
    template = _chat_template(config.server.chat_template) or _compiled(vocab.chat_template)
    client = EngineClient(
        engine, config.queue, eog_ids=vocab.eog_ids, clock=time.monotonic, command=command, observer=observer
    )
    server = config.server
    reading = ToolSettings(server.tool_format, whole_calls=server.cut_tool_calls == "drop")
    tools = TextTools(
        make_input_processor=lambda longest: InputProcessor(vocab, template, longest, datetime.now, reading),
        piece=vocab.piece,
        eog_ids=vocab.eog_ids,
        compile_grammar=CompileThread(GrammarCompiler(vocab), MAX_WAITING_GRAMMARS).submit,
    )
    return AsyncLLM(
        client,
        tools,
        clock=time.monotonic,
        draw_seed=lambda: secrets.randbits(63),
        request_timeout=config.queue.request_timeout,
        gate=gate,
    )


@asynccontextmanager
async def running_async_llm(config: Config, model: ResolvedModel) -> AsyncGenerator[AsyncLLM]:
    """An AsyncLLM that is ready; its engine process ends with the block. Raises SetupError or EngineFailed."""
    engine = engine_config(config.engine, model)
    with _parked_files(engine):
        llm = build_async_llm(config, engine, model)
        llm.start()
        try:
            await llm.client.wait_ready()
            yield llm
        finally:
            await llm.close()


def _chat_template(path: str) -> str | None:
    """The source in the file of --chat-template, if that is set. Raises ConfigError."""
    from millpond.errors import ConfigError

    if not path:
        return None
    try:
        return _compiled(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError("chat_template", f"cannot read {path}: {error}") from error


def _compiled(source: str | None) -> str | None:
    """The source itself, tried at start and not by the first request. Raises ConfigError."""
    from millpond.text.chat_template import ChatTemplate, TemplateTokens

    if source:
        ChatTemplate(source, TemplateTokens(), datetime.now)
    return source


def configure_logging(level: str, log_format: str = "text") -> None:
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    if log_format == "json":
        from millpond.telemetry.json_logs import JsonFormatter

        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonFormatter())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


# -- one process, for scripts ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine in this very process, stepped by millpond.llm; for one thread at a time."""

    core: EngineCore
    text: InputProcessor
    has_chat_template: bool
    vocab: Vocab
    clock: Callable[[], float]
    """The one the core is on: monotonic seconds."""
    draw_seed: Callable[[], int]
    """For requests without one."""
    close: Callable[[], None]


def load_local_engine(config: Config, model: ResolvedModel, progress: Callable[[float], bool]) -> LocalEngine:
    """Loads the model here, without a child process; `progress` hears 0.0 to 1.0. Raises SetupError."""
    from millpond.engine.build import build_core
    from millpond.text.input_processor import InputProcessor

    engine = engine_config(config.engine, model)
    given = _chat_template(config.server.chat_template)
    with ExitStack() as undo:
        undo.enter_context(_parked_files(engine))
        runtime = load_llamacpp(engine, progress)
        undo.callback(runtime.close)
        core = build_core(runtime, engine, time.monotonic)
        undo.callback(core.shutdown, config.server.drain_timeout if engine.spill_dir else 0.0)
        template = given or runtime.vocab.chat_template
        text = InputProcessor(runtime.vocab, template, core.info.max_model_len, datetime.now)
        kept = undo.pop_all()
    return LocalEngine(
        core, text, bool(template), runtime.vocab, time.monotonic, lambda: secrets.randbits(63), kept.close
    )


# -- engine process ----------------------------------------------------------------------------------------------------


def engine_main(
    descriptor: int, load_runtime: Callable[[EngineConfig, Callable[[float], bool]], Runtime] | None = None
) -> int:
    """Runs the engine until the channel closes. `load_runtime`: tests bring a fake."""
    _tie_to_parent()
    configure_logging("info")
    from millpond.engine.worker import Worker, WorkerChannel

    loader = load_runtime or load_llamacpp

    def build(load: Load, progress: Callable[[float], bool]) -> EngineCore:
        from millpond.engine.build import build_core
        from millpond.runtime.faults import FaultPlan, FaultyRuntime

        configure_logging("info", load.config.engine_log_format)
        runtime = loader(load.config, progress)
        if load.config.fault_plan:
            runtime = FaultyRuntime(runtime, FaultPlan.parse(load.config.fault_plan, epoch=load.epoch))
        core = build_core(runtime, load.config, time.monotonic)
        _keep_what_is_loaded()
        return core

    return Worker(WorkerChannel(socket.socket(fileno=descriptor)), build).run()


def load_llamacpp(config: EngineConfig, progress: Callable[[float], bool]) -> Runtime:
    """Raises SetupError."""
    from millpond.engine.build import context_params
    from millpond.runtime.llamacpp.context import create_context
    from millpond.runtime.llamacpp.library import load_library
    from millpond.runtime.llamacpp.model import LoadParams, check_generates, load_model, memory_kind, n_ctx_train
    from millpond.runtime.llamacpp.runtime import LlamaCppRuntime

    library = load_library(os.environ)
    model = load_model(
        library, Path(config.model_path), LoadParams(config.gpu_layers, config.use_extra_bufts), progress
    )
    check_generates(model)
    params = context_params(config, n_ctx_train=n_ctx_train(model), memory_kind=memory_kind(model))
    context = create_context(model, params)
    return LlamaCppRuntime(model, context, digest=config.model_digest, offloaded=config.gpu_layers != 0)


def _tie_to_parent() -> None:
    """Ctrl-C in a terminal reaches both processes: only the server acts on it. Without a server there is no engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(_ENGINE_OOM_SCORE))


if __name__ == "__main__":
    sys.exit(engine_main(int(sys.argv[1])))

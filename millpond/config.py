"""Every setting, its default and its help text, in small frozen groups. Knows no loader: see millpond.cli.settings.

One name everywhere: field `kv_cells` is `--kv-cells`, `MILLPOND_KV_CELLS` and `kv_cells` in the TOML file.
None means "auto": resolved once, into a new value, and printed at start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def setting(default: Any, help_text: str, **extra: Any) -> Any:
    """A dataclass field with its help. `extra`: `choices` (a tuple), `minimum`, `maximum` (of numbers, inclusive), or

    True for one of `secret` (never printed), `env_only` (no flag), `internal` (cannot be set or seen from outside).
    """
    return field(default=default, metadata={"help": help_text, **extra})


DEFAULT_MODEL = "smollm2-135m"
TOOL_FORMATS = (
    "auto",
    "deepseek",
    "deepseek_dsml",
    "gemma4",
    "glm",
    "harmony",
    "hermes",
    "json",
    "kimi_k2",
    "kimi_k3",
    "llama3",
    "mistral",
    "pythonic",
    "qwen3_coder",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine process needs; no port, no key, no path of the server's."""

    model_path: str = setting("", "path of the GGUF file (resolved from MODEL)", internal=True)
    model_digest: str = setting("", "sha256 of the file (resolved from MODEL)", internal=True)
    kv_cells: int | None = setting(None, "KV cells of the pool; auto: the model's context, at most 8192", minimum=1)
    max_running: int = setting(
        8, "sequences that decode at the same time; the others wait or are parked", minimum=1, maximum=255
    )
    max_model_len: int | None = setting(
        None, "longest prompt + output in tokens; auto: the model's context or the pool", minimum=2
    )
    threads: int | None = setting(None, "compute threads; auto: physical cores", minimum=1)
    gpu_layers: int = setting(0, "layers to offload to the GPU; -1: all", minimum=-1)
    max_step_ms: float | None = setting(
        None,
        "a step beside running streams stays under this: it bounds the gap between tokens; "
        "auto: what 48 prompt rows take here, between 100 and 200",
        minimum=1,
    )
    stream_interval_ms: float = setting(
        30.0,
        "tokens of steps shorter than this reach the server together, which leaves it more CPU; 0: one by one",
        minimum=0,
    )
    kv_type_k: str | None = setting(
        None,
        "type of the K cache; auto: f16, with --exact what qualifies",
        choices=("f16", "bf16", "f32", "q8_0", "q4_0"),
    )
    kv_type_v: str | None = setting(
        None,
        "type of the V cache; auto: f16, with --exact what qualifies",
        choices=("f16", "bf16", "f32", "q8_0", "q4_0"),
    )
    exact: bool = setting(False, "bit-exact outputs whatever the load: separate KV streams and qualified KV types")
    swa_full: bool = setting(
        False, "sliding-window models: every layer keeps all cells, at no gain but with --exact, where it is always on"
    )
    quantum: int = setting(0, "tokens after which a sequence gives its slot to a waiting one; 0: off", minimum=0)
    prefix_cache: bool = setting(True, "share prompt prefixes between requests")
    cache_cells: int | None = setting(
        None,
        "cells that idle prefixes may hold; auto: a quarter of the pool, less while they cost others time",
        minimum=0,
    )
    spill_ram: int = setting(1024, "MiB of RAM for parked sequences and cold prefixes; 0: none", minimum=0)
    spill_dir: str = setting("", "folder for the disk tier; empty: none")
    spill_disk: int = setting(4096, "MiB the disk tier may use", minimum=0)
    growth_watermark: float | None = setting(
        None,
        "share of the pool kept free for growth when a request is admitted; auto: 0.1, without a RAM or disk tier 0.25",
        minimum=0,
        maximum=0.25,
    )
    use_extra_bufts: bool = setting(True, "repack weights for this CPU (resolved by --exact)", internal=True)
    pass_rows: int | None = setting(None, "rows of one pass through the model (resolved by --exact)", internal=True)
    always_save: bool = setting(False, "never re-prefill what can be saved (resolved by --exact)", internal=True)
    instance: str = setting("", "names the server process; its parked files on disk are under this", internal=True)
    engine_log_format: str = setting("text", "as log_format of the server", internal=True)
    fault_plan: str = setting("", "faults to inject, for tests only", internal=True)


@dataclass(frozen=True, slots=True)
class QueueConfig:
    queue_requests: int = setting(256, "accepted requests that may wait; one more gets 429", minimum=1)
    queue_tokens: int = setting(262144, "prompt tokens that may wait", minimum=1)
    request_timeout: float = setting(600.0, "seconds after which a request ends with an error; 0: never", minimum=0)
    stall_timeout: float = setting(
        30.0, "seconds without a step, with work to do, after which the engine is restarted", minimum=0.1
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    api_key: str = setting("", "key that every route but /health and /ready asks for; empty: none", secret=True)
    keys_file: str = setting("", "TOML file of API keys, each with its limits (`millpond keys new`); empty: none")
    max_in_flight: int = setting(
        0,
        "requests that one API key (without keys: all clients) may have in flight; one more gets 429; 0: no limit",
        minimum=0,
    )
    max_connections: int = setting(
        1000, "open connections; on one more only /health and /ready answer, the rest gets 503", minimum=1
    )
    model_name: str = setting("", "name shown in /v1/models; empty: that of MODEL")
    chat_template: str = setting("", "file with a Jinja chat template, instead of the model's own")
    tool_format: str = setting(
        "auto", "how the model writes tool calls; auto: what its chat template shows", choices=TOOL_FORMATS
    )
    cut_tool_calls: str = setting(
        "keep",
        "keep: arguments of a long call stream as they are written, and one that a limit cuts ends where it was cut; "
        "drop: a call is sent when it is whole, and one that never is is left out",
        choices=("keep", "drop"),
    )
    strip_billing_line: bool = setting(
        True, "leave a client's per-request billing line out of system prompts: it defeats every prefix cache"
    )
    max_body_bytes: int = setting(32 * 1024 * 1024, "largest request body", minimum=1)
    drain_timeout: float = setting(30.0, "seconds that running requests get to finish after SIGTERM", minimum=0)
    client_timeout: float = setting(60.0, "seconds after which a client that takes no bytes is ended", minimum=0.1)
    header_timeout: float = setting(
        20.0, "seconds in which a request's head must arrive; then its connection is cut", minimum=0.1
    )
    cors_origins: str = setting("*", "origins allowed by CORS, comma separated; empty: none")
    log_level: str = setting("info", "log level", choices=("debug", "info", "warning", "error"))
    console: bool = setting(True, "show what happens, live, at GET /console")
    log_format: str = setting("text", "log lines as text, or as JSON objects", choices=("text", "json"))
    log_prompts: bool = setting(
        False, "with log_format json, the line of an output that ended has the texts of its prompt and of itself"
    )
    metrics: bool = setting(True, "count what happens, and answer GET /metrics")
    metrics_compat: str = setting("none", "also export metrics under the names of", choices=("none", "vllm"))
    plugins: bool = setting(True, "load the plugins that are installed (entry point group millpond.plugins)")
    plugin_budget_ms: float = setting(
        50.0, "time that one call of a plugin may take; ten longer ones in a row switch it off", minimum=0.1
    )
    receipts: str = setting("", "file that keeps a receipt of every output; empty: none is kept")
    receipts_days: float = setting(0.0, "days after which a receipt is taken away; 0: never", minimum=0)
    receipts_mib: int = setting(1024, "MiB of receipts above which the oldest are taken away; 0: no limit", minimum=0)


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `millpond serve` takes."""

    model: str = setting(DEFAULT_MODEL, "registry name, path of a GGUF file, or hf:org/repo/file.gguf")
    engine: EngineConfig = field(default_factory=EngineConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

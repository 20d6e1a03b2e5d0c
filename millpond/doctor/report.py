"""What `millpond doctor` tells of a model, as values. Knows model, engine and qualification; prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from millpond.config import EngineConfig
from millpond.doctor.exact import with_settings
from millpond.doctor.exact_settings import ExactSettings, Qualification, Trial
from millpond.doctor.machine import LibraryReport, MachineReport
from millpond.engine.build import build_core, context_params
from millpond.errors import InternalError
from millpond.outputs import MemoryAbilities, ModelInfo, TokenEvent
from millpond.request import Request
from millpond.runtime.base import ContextParams, Runtime, Vocab
from millpond.sampling_params import SamplingParams
from millpond.types import RequestId, SequenceId, TokenId

PROMPT = "A mill pond is a small lake that holds the water for a mill. When the gate is opened, the water"
OUTPUT_TOKENS = 32
_BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Bits a value of a KV cache takes, block scales included."""


@dataclass(frozen=True, slots=True)
class EndToken:
    token_id: TokenId
    piece: str


@dataclass(frozen=True, slots=True)
class ModelReport:
    path: str
    info: ModelInfo
    chat_template: bool
    adds_bos: bool
    end_tokens: tuple[EndToken, ...]
    """Every end-of-generation id."""


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """A short greedy output of the engine in its default mode."""

    prompt: str
    text: str
    prompt_tokens: int
    output_tokens: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    abilities: MemoryAbilities


@dataclass(frozen=True, slots=True)
class Layout:
    """How many sequences of what length a pool holds."""

    sequences: int
    tokens_each: int
    """Streams: a region of its own for each. Unified: the longest one, out of `cells` that all share."""
    cells: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class ExactCost:
    """What the chosen settings cost beside f16/f16; None where that was not measured."""

    prefill_ratio: float | None
    decode_ratio: float | None
    default: Layout
    exact: Layout


@dataclass(frozen=True, slots=True)
class ExactnessReport:
    trials: tuple[Trial, ...]
    chosen: ExactSettings | None
    cost: ExactCost | None
    """None where nothing was chosen."""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    machine: MachineReport
    library: LibraryReport
    threads: int
    model: ModelReport | None = None
    generation: GenerationReport | None = None
    exactness: ExactnessReport | None = None


def model_report(path: str, runtime: Runtime) -> ModelReport:
    vocab = runtime.vocab
    ends = [EndToken(i, vocab.piece(i, special=True).decode("utf-8", "replace")) for i in sorted(vocab.eog_ids)]
    return ModelReport(path, runtime.model, bool(vocab.chat_template), vocab.adds_bos, tuple(ends))


def generation_report(runtime: Runtime, config: EngineConfig, clock: Callable[[], float]) -> GenerationReport:
    """Runs the engine on one prompt. Raises InternalError when it does not end as it should."""
    core = build_core(runtime, config, clock)
    prompt_ids = _prompt_ids(runtime.vocab, core.info.max_model_len)
    limit = min(OUTPUT_TOKENS, core.info.max_model_len - len(prompt_ids))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    began = clock()
    core.add(SequenceId(1), Request(RequestId("doctor"), tuple(prompt_ids), params, limit, seed=0, arrival=began))
    tokens: list[TokenEvent] = []
    first = began
    while core.has_work:
        result = core.step()
        if result.tokens and not tokens:
            first = clock()
        tokens += result.tokens
        failed = [event.message for event in result.finished if event.message]
        if failed or not result.progressed:
            raise InternalError(f"the engine did not finish a prompt: {failed or core.stats()}")
        if result.finished:
            break
    ended = clock()
    text = b"".join(runtime.vocab.piece(event.token_id) for event in tokens).decode("utf-8", "replace")
    return GenerationReport(
        prompt=PROMPT,
        text=text,
        prompt_tokens=len(prompt_ids),
        output_tokens=len(tokens),
        prefill_tokens_per_second=len(prompt_ids) / max(first - began, 1e-9),
        decode_tokens_per_second=(len(tokens) - 1) / max(ended - first, 1e-9),
        abilities=core.info.abilities,
    )


def _prompt_ids(vocab: Vocab, max_model_len: int) -> list[TokenId]:
    begin = [vocab.bos_id] if vocab.adds_bos and vocab.bos_id is not None else []
    ids = [*begin, *vocab.tokenize(PROMPT, parse_special=False)]
    return ids[: max(1, max_model_len // 2)]


def exactness_report(known: Qualification, info: ModelInfo, config: EngineConfig) -> ExactnessReport:
    """`config`: the engine's settings as they would be without --exact. Raises ConfigError where they contradict."""
    chosen = known.choose(config.kv_type_k, config.kv_type_v)
    if chosen is None:
        return ExactnessReport(known.trials, None, None)
    plain = next((trial for trial in known.trials if trial.settings == ExactSettings("f16", "f16", True)), None)
    qualified = next(trial for trial in known.trials if trial.qualified == chosen)
    prefill = decode = None
    if plain is not None and plain.speed is not None and qualified.speed is not None:
        prefill = qualified.speed.prefill_tokens_per_second / plain.speed.prefill_tokens_per_second
        decode = plain.speed.decode_ms / qualified.speed.decode_ms
    cost = ExactCost(
        prefill_ratio=prefill,
        decode_ratio=decode,
        default=_layout(replace(config, exact=False), info),
        exact=_layout(with_settings(replace(config, exact=True), chosen), info),
    )
    return ExactnessReport(known.trials, chosen, cost)


def _layout(config: EngineConfig, info: ModelInfo) -> Layout:
    params = context_params(config, n_ctx_train=info.n_ctx_train, memory_kind=info.memory_kind)
    each = params.n_cells if params.unified else params.n_cells // params.n_slots
    longest = min(config.max_model_len or each, info.n_ctx_train or each, each)
    return Layout(config.max_running, longest, params.n_cells, _kv_bytes(params, info))


def _kv_bytes(params: ContextParams, info: ModelInfo) -> int:
    """`kv_bytes_per_token` was measured with f16 for both."""
    share = (_BITS[params.kv_type_k] + _BITS[params.kv_type_v]) / (2 * _BITS["f16"])
    return int(params.n_cells * info.kv_bytes_per_token * share)

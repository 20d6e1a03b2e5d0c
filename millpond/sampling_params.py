"""How one request wants its tokens chosen. Frozen, checked once; knows ids, numbers and grammars, no vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from millpond.errors import InvalidParameter
from millpond.types import TokenId

MAX_LOGIT_BIAS_ENTRIES = 4096
MAX_STOP_TOKEN_IDS = 128
MAX_TOKEN_LIST = 16_384
MAX_DRY_BREAKERS = 16
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CHOICES = 10_000


class GrammarKind(Enum):
    """How a GrammarSpec's text is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    """The whole output matches it, anchored or not."""
    CHOICE = "choice"
    """A JSON array of strings: the output is one of them."""
    LARK = "lark"
    """As llguidance reads it; `start` is the output."""
    GBNF = "gbnf"
    """llama.cpp's notation; `root` is the output."""
    GRAMMAR = "grammar"
    """Lark if it has a rule `start`, else GBNF."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What the whole output must match. Its size is checked here, its sense where it is compiled.

    Raises InvalidParameter when the text is too long.
    """

    kind: GrammarKind
    text: str
    flexible_whitespace: bool = False
    """Spaces and line ends between JSON tokens are allowed; else there are none."""
    preface: str = ""
    """Lark rules whose `preface` comes before what `text` says: a thought, say. "": nothing does."""
    alternative: str = ""
    """Lark of a whole output that will do as well: a tool call, say. "": none will."""
    param: str = "grammar"
    """The request field that it came from, for messages."""

    def __post_init__(self) -> None:
        size = sum(len(part.encode("utf-8", "replace")) for part in (self.text, self.preface, self.alternative))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidParameter(self.param, f"is too long: {size} bytes, at most {MAX_GRAMMAR_BYTES}")


@dataclass(frozen=True, slots=True)
class DryPenalty:
    """Against repeating what was there, token for token. A token that would make a repetition of n tokens one longer
    loses multiplier * base ** (n - allowed_length) when n is at least allowed_length.

    Raises InvalidParameter when a value is out of range.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    range: int = 0
    """Last tokens (prompt and output) that are looked at; 0: all."""
    breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    """A repetition does not reach over a token with one of these in its text."""

    def __post_init__(self) -> None:
        _check_float("dry_multiplier", self.multiplier, 0.0, 100.0)
        _check_float("dry_base", self.base, 1.0, 10.0)
        _check_int("dry_allowed_length", self.allowed_length, 1, 2**31 - 1)
        _check_int("dry_range", self.range, 0, 2**31 - 1)
        if len(self.breakers) > MAX_DRY_BREAKERS or any(not 0 < len(one) <= 64 for one in self.breakers):
            raise InvalidParameter("dry_sequence_breakers", f"at most {MAX_DRY_BREAKERS} texts of 1 to 64 characters")


@dataclass(frozen=True, slots=True)
class Xtc:
    """Against the obvious: with this probability, every candidate of at least `threshold` but the least of them is
    left out. Raises InvalidParameter when a value is out of range."""

    probability: float
    threshold: float = 0.1

    def __post_init__(self) -> None:
        _check_float("xtc_probability", self.probability, 0.0, 1.0)
        _check_float("xtc_threshold", self.threshold, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class DynamicTemperature:
    """The temperature follows the candidates' entropy (0 to 1 of the largest possible):
    temperature - spread + 2 * spread * entropy ** exponent, not below 0.

    Raises InvalidParameter when a value is out of range.
    """

    spread: float
    exponent: float = 1.0

    def __post_init__(self) -> None:
        _check_float("dynatemp_range", self.spread, 0.0, 100.0)
        _check_float("dynatemp_exponent", self.exponent, 0.0, 100.0)


@dataclass(frozen=True, slots=True)
class RepetitionGuard:
    """Ends an output whose last tokens are `min_count` times the same pattern of min_period to max_period tokens.

    Raises InvalidParameter when a value is out of range.
    """

    min_period: int = 2
    max_period: int = 64
    min_count: int = 4

    def __post_init__(self) -> None:
        _check_int("repetition_detection.max_pattern_size", self.max_period, 1, 64)
        _check_int("repetition_detection.min_pattern_size", self.min_period, 1, self.max_period)
        _check_int("repetition_detection.min_count", self.min_count, 3, 1000)

    def sees_loop(self, output_ids: Sequence[TokenId]) -> bool:
        """Does the output end in one? Most periods cost one comparison."""
        last, length = len(output_ids) - 1, len(output_ids)
        for period in range(self.min_period, self.max_period + 1):
            whole = period * self.min_count
            if whole > length:
                return False
            if output_ids[last] == output_ids[last - period]:
                end = output_ids[length - whole :]
                if end[period:] == end[:-period]:
                    return True
        return False


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """How long an output may think. From `budget` thought tokens on, `close_ids` are forced behind the next sentence,
    and behind any token once there are `hard_limit`. While it thinks, the output does not end.

    Raises InvalidParameter when a value is out of range.
    """

    open_ids: tuple[TokenId, ...]
    close_ids: tuple[TokenId, ...]
    budget: int
    hard_limit: int
    starts_open: bool
    """The prompt ends inside a thought."""
    reopens: bool = True
    """A thought may open anywhere; False: the reader of the output takes the tag for one at its start only."""

    def __post_init__(self) -> None:
        _check_int("thinking_budget", self.budget, 0, 2**31 - 1)
        _check_int("thinking_budget", self.hard_limit, self.budget, 2**31 - 1)
        if not self.close_ids:
            raise InvalidParameter("thinking_budget", "needs the tokens that close a thought")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Defaults are llama-server's, which suit small local models; `temperature` 0 is greedy.

    Raises InvalidParameter when a value is out of range. The draw is a function of (seed, output index) alone.
    """

    max_tokens: int | None = None
    """Output limit in tokens; None: as many as fit."""
    min_tokens: int = 0
    """End-of-generation ids are banned while fewer output tokens exist."""
    temperature: float = 0.8
    top_k: int = 40
    """0: off."""
    top_p: float = 0.95
    min_p: float = 0.05
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    """Last tokens (prompt and output) that the repetition penalty looks at; 0: all."""
    lz_penalty: float = 0.0
    """A token loses lz_penalty * (n - 2) for every time the last 256 tokens of the output hold the n-gram (n 3 to 5)
    that it would complete."""
    dry: DryPenalty | None = None
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    banned_token_ids: tuple[TokenId, ...] = ()
    """Never chosen, whatever the bias."""
    allowed_token_ids: tuple[TokenId, ...] = ()
    """Nothing else is chosen, end ids included; (): every id may be."""
    top_n_sigma: float = 0.0
    """Logits more than so many standard deviations below the largest are left out; 0: off. Not when greedy."""
    xtc: Xtc | None = None
    """Not when greedy."""
    dynamic_temperature: DynamicTemperature | None = None
    """Not when greedy."""
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    """Ban every end-of-generation id, so that only a limit ends the output."""
    seed: int | None = None
    logprobs: int | None = None
    """Number of alternatives reported a token (0: the chosen one only); None: none reported."""
    prompt_logprobs: int | None = None
    """The same for every token of the prompt but the first. All of it is then computed, whatever the cache holds."""
    grammar: GrammarSpec | None = None
    """Ends are allowed where it is complete, and then end the output, whatever min_tokens and ignore_eos say."""

    thinking: ThinkingBudget | None = None
    repetition_guard: RepetitionGuard | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high)
        for name, low, high in _INT_RANGES:
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, low, high)
        for name, limit in _LENGTHS:
            if len(getattr(self, name)) > limit:
                raise InvalidParameter(name, f"at most {limit} entries")
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raises InvalidParameter if an id is not a vocabulary index."""
        named = [
            ("logit_bias", [token for token, _ in self.logit_bias]),
            ("stop_token_ids", self.stop_token_ids),
            ("banned_token_ids", self.banned_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ]
        for name, ids in named:
            for token in ids:
                if not 0 <= token < n_vocab:
                    raise InvalidParameter(name, f"token id {token} is not in the vocabulary (0 to {n_vocab - 1})")


_FLOAT_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("lz_penalty", 0.0, 100.0),
    ("top_n_sigma", 0.0, 100.0),
)
_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("penalty_window", 0, 2**31 - 1),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
)
_LENGTHS: tuple[tuple[str, int], ...] = (
    ("logit_bias", MAX_LOGIT_BIAS_ENTRIES),
    ("stop_token_ids", MAX_STOP_TOKEN_IDS),
    ("banned_token_ids", MAX_TOKEN_LIST),
    ("allowed_token_ids", MAX_TOKEN_LIST),
)


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidParameter(name, f"must be between {low} and {high}, got {value}")


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(name, f"must be between {low} and {high}, got {value}")

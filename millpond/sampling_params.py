"""How one request wants its tokens chosen. Frozen, checked once; knows ids, numbers and grammars, no vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from millpond.errors import InvalidParameter
from millpond.types import TokenId

MAX_LOGIT_BIAS_ENTRIES = 4096
MAX_STOP_TOKEN_IDS = 128
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
    logit_bias: tuple[tuple[TokenId, float], ...] = ()
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    """Ban every end-of-generation id, so that only a limit ends the output."""
    seed: int | None = None
    logprobs: int | None = None
    """Number of alternatives reported a token (0: the chosen one only); None: none reported."""
    grammar: GrammarSpec | None = None
    """Ends are allowed where it is complete, and then end the output, whatever min_tokens and ignore_eos say."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def __post_init__(self) -> None:
        for name, low, high in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high)
        for name, low, high in _INT_RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise InvalidParameter(name, f"must be between {low} and {high}, got {value}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidParameter("logit_bias", f"at most {MAX_LOGIT_BIAS_ENTRIES} entries")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} entries")
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100.0, 100.0)

    def check_vocabulary(self, n_vocab: int) -> None:
        """Raises InvalidParameter if an id is not a vocabulary index."""
        named = [("logit_bias", [token for token, _ in self.logit_bias]), ("stop_token_ids", self.stop_token_ids)]
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
)
_INT_RANGES: tuple[tuple[str, int, int], ...] = (
    ("max_tokens", 1, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("top_k", 0, 2**31 - 1),
    ("penalty_window", 0, 2**31 - 1),
    ("seed", 0, 2**64 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
)


def _check_float(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParameter(name, f"must be between {low} and {high}, got {value}")

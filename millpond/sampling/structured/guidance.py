"""Grammars compiled by llguidance, and the matchers that follow outputs in them. Knows a vocabulary; no specs.

Every call is bounded by LIMITS, in work and memory. A matcher that hits one is in an error state, in which llguidance
would allow the end of the output: that state is always looked at before a mask is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from millpond.errors import GrammarFailed
from millpond.runtime.base import Vocab
from millpond.types import TokenId

LIMITS = LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=20_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""About 20 ms of a core a token at the very worst, and 100 MB a grammar; a JSON schema takes some thousandths of it."""
MAX_FORCED = 256
_Answer = TypeVar("_Answer")


class GuidanceVocabulary:
    """A model's vocabulary as llguidance wants it. Building it takes 0.1 s for 50 000 tokens. Threads may share it."""

    def __init__(self, vocab: Vocab) -> None:
        """Raises ValueError for a vocabulary without an end-of-generation token."""
        if not vocab.eog_ids:
            raise ValueError("the model has no end-of-generation token, so no constrained output could end")
        self.n_tokens = vocab.n_tokens
        self.eog_ids = vocab.eog_ids
        wrapper = TokenizerWrapper(_Pieces(vocab))
        self.tokenizer = LLTokenizer(wrapper, n_vocab=vocab.n_tokens, eos_token=sorted(vocab.eog_ids))


class _Pieces:
    """What TokenizerWrapper asks for: the bytes of every token, and a tokenization of forced text."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        ids = range(vocab.n_tokens)
        self.special_token_ids = [i for i in ids if vocab.is_control(i)]
        special = frozenset(self.special_token_ids)
        # A leading 0xff, which no text has, marks a control token: grammars reach it by id only.
        self.tokens = [b"\xff" + vocab.piece(i, special=True) if i in special else vocab.piece(i) for i in ids]
        self.eos_token_id = vocab.eos_id if vocab.eos_id in vocab.eog_ids else min(vocab.eog_ids)
        self.bos_token_id = vocab.bos_id
        self._by_piece = {piece: i for i, piece in enumerate(self.tokens) if piece and i not in special}
        self._longest = max(map(len, self._by_piece), default=1)

    def __call__(self, text: bytes | str) -> list[TokenId]:
        """The model's own tokenization where it gives the same bytes back, else the longest pieces."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._vocab.tokenize(data.decode(), parse_special=False)
        except UnicodeDecodeError:
            return self._longest_first(data)
        return ids if b"".join(map(self._vocab.piece, ids)) == data else self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[TokenId]:
        ids: list[TokenId] = []
        at = 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            found = next((size for size in sizes if data[at : at + size] in self._by_piece), 0)
            if not found:
                return ids
            ids.append(self._by_piece[data[at : at + found]])
            at += found
        return ids


class GuidanceGrammar:
    """A compiled grammar. Implements Grammar.

    Its matchers share one table of lexer states, which grows with every text they follow and has a limit. So a matcher
    that fails asks for a new table, once, before it believes that the grammar itself is too complex.
    """

    def __init__(self, vocabulary: GuidanceVocabulary, grammar: str) -> None:
        """`grammar` as llguidance reads it. Raises GrammarFailed when it does not compile or allows no first token."""
        self._vocabulary = vocabulary
        self._text = grammar
        self._generation = 0
        self._start = self._compile()
        _check(self._start)
        self.matcher().allowed(())

    def matcher(self) -> GuidanceMatcher:
        return GuidanceMatcher(self, self._vocabulary)

    def start(self, used: int | None = None) -> tuple[LLMatcher, int]:
        """A matcher at the start and the number of its table; `used`: of another table than this one."""
        if used == self._generation:
            self._start = self._compile()
            self._generation += 1
        return self._start.deep_copy(), self._generation

    def _compile(self) -> LLMatcher:
        return LLMatcher(self._vocabulary.tokenizer, self._text, log_level=0, limits=LIMITS)


class GuidanceMatcher:
    """Implements GrammarMatcher."""

    def __init__(self, grammar: GuidanceGrammar, vocabulary: GuidanceVocabulary) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self._matcher, self._table = grammar.start()
        self._consumed: list[TokenId] = []
        words = (vocabulary.n_tokens + 31) // 32
        self._words = np.zeros(words, dtype=np.uint32)
        self._bits = self._words.view(np.uint8)

    def allowed(self, output_ids: Sequence[TokenId]) -> NDArray[np.bool_]:
        words = self._words
        self._ask(output_ids, lambda matcher: matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes))
        return np.unpackbits(self._bits, count=self._vocabulary.n_tokens, bitorder="little").view(np.bool_)

    def forced(self, output_ids: Sequence[TokenId]) -> list[TokenId]:
        found = self._ask(output_ids, lambda matcher: matcher.compute_ff_tokens())[:MAX_FORCED]
        end = next((place for place, token in enumerate(found) if token in self._vocabulary.eog_ids), len(found))
        return found[:end]

    def count_accepted(self, output_ids: Sequence[TokenId], draft_ids: Sequence[TokenId]) -> int:
        return self._ask(output_ids, lambda matcher: matcher.validate_tokens(list(draft_ids)))

    def _ask(self, output_ids: Sequence[TokenId], question: Callable[[LLMatcher], _Answer]) -> _Answer:
        self._follow(output_ids)
        answer = question(self._matcher)
        if self._matcher.is_error():
            self._matcher, self._table = self._grammar.start(used=self._table)
            self._consumed.clear()
            self._follow(output_ids)
            answer = question(self._matcher)
            _check(self._matcher)
        return answer

    def _follow(self, output_ids: Sequence[TokenId]) -> None:
        """Brings the state to that of `output_ids`, or into an error."""
        known = self._common_length(output_ids)
        surplus = len(self._consumed) - known
        if surplus:
            self._matcher.rollback(surplus)
            del self._consumed[known:]
        if known < len(output_ids):
            new = list(output_ids[known:])
            self._matcher.consume_tokens(new)
            self._consumed += new

    def _common_length(self, output_ids: Sequence[TokenId]) -> int:
        consumed = self._consumed
        shared = min(len(consumed), len(output_ids))
        if consumed == list(output_ids[: len(consumed)]):
            return shared
        pairs = zip(consumed, output_ids, strict=False)
        return next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), shared)


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarFailed(_first_line(matcher.get_error()))


_MEANINGS = {
    "NoExtensionBias": "no token can come next",
    "NoExtension": "no token can come next",
    "ParserTooComplex": "it is too ambiguous or too large",
    "LexerTooComplex": "its regular expressions are too complex",
}


def _first_line(error: str) -> str:
    """The compiler's message without the dump of its state."""
    first = error.replace("<non-verbose/>", "").strip().partition("\n")[0].strip()
    return _MEANINGS.get(first, first[:300]) or "it has no meaning"

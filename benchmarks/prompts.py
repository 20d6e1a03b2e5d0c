"""Prompts of an exact token count that no cache has seen. Knows words and a tokenizer route; no server's name."""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from millpond.errors import SetupError

FIRST_WORD = "The"
WORDS_FILE = Path(__file__).with_name("words.txt")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Words that are one token each when a space stands before them."""

    words: tuple[str, ...]
    ids: tuple[int, ...]


def read_vocabulary(port: int) -> Vocabulary:
    """Asks a server's /tokenize (llama.cpp's shape). Raises SetupError if too few words are single tokens."""
    words = WORDS_FILE.read_text().split()
    found = [(word, ids[0]) for word in words if len(ids := _tokenize(port, f" {word}")) == 1]
    if len(found) < 100 or len(_tokenize(port, FIRST_WORD)) != 1:
        raise SetupError(f"only {len(found)} of {len(words)} words are single tokens of this model")
    return Vocabulary(tuple(word for word, _ in found), tuple(token_id for _, token_id in found))


def _tokenize(port: int, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["tokens"]


class PromptSource:
    """Draws prompts for one pair of one section: both subjects get the same ones, no two pairs do."""

    def __init__(self, vocabulary: Vocabulary, label: str) -> None:
        self._vocabulary = vocabulary
        self._random = random.Random(label)

    def ids(self, length: int) -> list[int]:
        return self._random.choices(self._vocabulary.ids, k=length)

    def text(self, length: int) -> str:
        """As many tokens, by SmolLM2's way of splitting at spaces (`usage.prompt_tokens` tells)."""
        return " ".join([FIRST_WORD, *self._random.choices(self._vocabulary.words, k=length - 1)])

"""Prompts of an exact token count that no cache has seen. Knows words, sentences and a tokenizer route; no server.

Words in random order are enough to measure time. Where outputs are checked, prompts are prose: on random words the
model itself is chaotic (its logits differ by 10 and more between two kernels), so a distance to them says nothing.
"""

from __future__ import annotations

import json
import random
import urllib.request
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from millpond.errors import SetupError

FIRST_WORD = "The"
WORDS_FILE = Path(__file__).with_name("words.txt")
SENTENCES_FILE = Path(__file__).with_name("sentences.txt")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of; `words` and `ids` are one token each when a space stands before them."""

    words: tuple[str, ...]
    ids: tuple[int, ...]
    sentences: tuple[tuple[int, ...], ...]
    """Ids of whole sentences, each with a space before it."""


def read_vocabulary(port: int) -> Vocabulary:
    """Asks a server's /tokenize (llama.cpp's shape). Raises SetupError if too few words are single tokens."""
    words = WORDS_FILE.read_text().split()
    found = [(word, ids[0]) for word in words if len(ids := _tokenize(port, f" {word}")) == 1]
    if len(found) < 100 or len(_tokenize(port, FIRST_WORD)) != 1:
        raise SetupError(f"only {len(found)} of {len(words)} words are single tokens of this model")
    sentences = [tuple(_tokenize(port, f" {line}")) for line in SENTENCES_FILE.read_text().splitlines()]
    return Vocabulary(tuple(word for word, _ in found), tuple(token_id for _, token_id in found), tuple(sentences))


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

    def prose(self, length: int) -> list[int]:
        """The sentences in another order, cut to `length`."""
        sentences = list(self._vocabulary.sentences)
        self._random.shuffle(sentences)
        ids = list(chain.from_iterable(sentences))
        if len(ids) < length:
            raise SetupError(f"the sentences are {len(ids)} tokens, {length} were asked for")
        return ids[:length]

    def text(self, length: int) -> str:
        """As many tokens, by SmolLM2's way of splitting at spaces (`usage.prompt_tokens` tells)."""
        return " ".join([FIRST_WORD, *self._random.choices(self._vocabulary.words, k=length - 1)])

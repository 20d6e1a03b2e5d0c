"""Where to save the state of a model whose state cannot be cut (recurrent, hybrid, sliding window). PURE.

A saved state is reusable at exactly its length only, so the lengths must be ones that a later request will share:

    |--- system, earlier turns ---|-- last user message --|-- assistant prompt --|-- answer ...... --|
           message borders ^              grid ^     border ^            prompt - 1 ^       at the end ^

The grid point lies a stride below the near-tail page, so a changed short tail still finds it (skippy.md 2.9).
"""

from __future__ import annotations

from collections.abc import Sequence

from millpond.types import TokenId

STRIDE = 128
MIN_TOKENS = 64
"""Below this, computing again is as cheap."""
MAX_CHECKPOINTS = 6
"""Of one prompt; the last ones win, they save the most."""


def checkpoint_lengths(prompt_ids: Sequence[TokenId], eog_ids: frozenset[TokenId]) -> tuple[int, ...]:
    """Ascending lengths below that of the prompt. Chat templates close a message with an end-of-generation token, so

    its place is a border that later turns, edited ones too, have in common with this one.
    """
    n_tokens = len(prompt_ids)
    grid = max(n_tokens // STRIDE * STRIDE - STRIDE, MIN_TOKENS)
    borders = [index + 1 for index, token in enumerate(prompt_ids) if token in eog_ids]
    wanted = {grid, n_tokens - 1, *borders[-MAX_CHECKPOINTS:]}
    return tuple(sorted(length for length in wanted if MIN_TOKENS <= length < n_tokens)[-MAX_CHECKPOINTS:])

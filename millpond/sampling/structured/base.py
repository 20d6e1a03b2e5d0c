"""What the sampler needs of a grammar. Knows ids; not how a grammar is written or compiled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from millpond.types import TokenId


class GrammarMatcher(Protocol):
    """Where one output stands in its grammar. Its state is a function of the ids it was last asked about.

    Any method may be asked about any output: one that goes on from the last costs the new tokens, a shorter one is a
    rollback. Raises GrammarFailed when the output does not match, or following it is too costly.
    """

    def allowed(self, output_ids: Sequence[TokenId]) -> NDArray[np.bool_]:
        """bool[n_vocab], valid until the next call: what may come next. End ids where the output is complete."""
        ...

    def forced(self, output_ids: Sequence[TokenId]) -> list[TokenId]:
        """Tokens of the text that must come next, whatever is sampled; often none. Never an end id."""
        ...

    def count_accepted(self, output_ids: Sequence[TokenId], draft_ids: Sequence[TokenId]) -> int:
        """How many of the draft's first tokens may follow. The state stays that of `output_ids`."""
        ...


class Grammar(Protocol):
    """A compiled grammar, shared by any number of outputs."""

    def matcher(self) -> GrammarMatcher:
        """At the start. Cheap: the compiled tables are shared."""
        ...

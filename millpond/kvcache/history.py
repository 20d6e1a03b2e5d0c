"""One sequence's token ids with the digests of its pages. PURE. Append-only: what was computed never changes."""

from __future__ import annotations

from collections.abc import Sequence

from millpond.kvcache.payload import PAGE_TOKENS, SpanKey, StateIdentity, extend_digest
from millpond.types import TokenId


class TokenHistory:
    """Prompt and output ids of a sequence; `digest_at` is cached a page, so a key costs at most one page of hashing."""

    def __init__(self, identity: StateIdentity, namespace: str, token_ids: Sequence[TokenId]) -> None:
        self.namespace = namespace
        self.token_ids = list(token_ids)
        self._page_digests = [identity.seed(namespace)]

    def __len__(self) -> int:
        return len(self.token_ids)

    def append(self, token_id: TokenId) -> None:
        self.token_ids.append(token_id)

    def digest_at(self, end: int) -> bytes:
        """Digest of tokens [0, end), by way of the page borders below it."""
        page, tail = divmod(end, PAGE_TOKENS)
        digests = self._page_digests
        while len(digests) <= page:
            start = (len(digests) - 1) * PAGE_TOKENS
            digests.append(extend_digest(digests[-1], self.token_ids[start : start + PAGE_TOKENS]))
        if not tail:
            return digests[page]
        return extend_digest(digests[page], self.token_ids[page * PAGE_TOKENS : end])

    def key(self, start: int, end: int) -> SpanKey:
        return SpanKey(self.digest_at(end), start, end)

"""One receipt: its fields, its canonical bytes and the hash that chains it to the one before. PURE."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from millpond.errors import CallerError
from millpond.sampling_params import SamplingParams

FORMAT = 1
GENESIS = "0" * 64
"""What the first receipt of a file follows."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What was run, as far as it can change an output."""

    model: str
    """As MODEL was given: a registry name, a path or a hub file."""
    model_digest: str
    """sha256 of the model file, hex."""
    library: str
    millpond: str
    exact: bool
    kv_type_k: str
    kv_type_v: str
    kv_cells: int
    max_running: int
    max_model_len: int
    prefix_cache: bool


class Receipt(msgspec.Struct, frozen=True):
    """One output. Times in milliseconds, but `accepted_at` and `ended_at`: seconds since 1970."""

    format: int
    request_id: str
    sequence: int
    run: str
    """Names the server process."""
    accepted_at: float
    ended_at: float
    prompt_ids: list[int]
    output_ids: list[int]
    reason: str
    """Why it ended."""
    told: str | None
    """What the client was told; None: it had given up, or its stream was still open when the server ended."""
    generated: int
    """Tokens that were sampled for it: the output, and what lay behind a stop string."""
    delivered: int | None
    """Tokens that its client's stream took; None: not known."""
    max_tokens: int
    seed: int
    priority: int
    params: dict[str, Any]
    cached_tokens: int
    computed_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    parked_ms: float
    preemptions: int
    engine: EngineFacts | None
    """None: no engine was ever ready."""
    adapter: str | None = None
    complete: bool = True
    """False: a row of it was dropped."""


_decoder = msgspec.json.Decoder(Receipt)


def encode_receipt(receipt: Receipt) -> bytes:
    """Canonical: UTF-8 JSON, members sorted, no spaces."""
    return msgspec.json.encode(receipt, order="sorted")


def decode_receipt(body: bytes) -> Receipt:
    """Raises msgspec.DecodeError or msgspec.ValidationError for what is no receipt."""
    return _decoder.decode(body)


def chain_hash(previous: str, body: bytes) -> str:
    """sha256 over the hash before, a line end and the body."""
    return hashlib.sha256(previous.encode() + b"\n" + body).hexdigest()


def params_of(receipt: Receipt) -> SamplingParams:
    """Raises CallerError for parameters that this version does not know or take."""
    try:
        return msgspec.convert(receipt.params, SamplingParams)
    except msgspec.ValidationError as error:
        raise CallerError(f"the receipt's parameters are not ours: {error}", param="params") from None


def plain_params(params: SamplingParams) -> dict[str, Any]:
    """Fields and values that JSON can hold; defaults included, so that a later version's defaults change nothing."""
    return msgspec.to_builtins(params)

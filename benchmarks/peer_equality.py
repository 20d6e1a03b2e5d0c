"""Greedy outputs of `millpond serve --exact` beside llama.cpp's own server: python benchmarks/peer_equality.py

The peer has one slot, no cache and the K/V types that --exact qualified; Millpond gets the prompts eight at a time.
Each pair of outputs must be equal in every id, or first differ at a tie: the two ids less than 0.05 logits apart in a
pass over prompt and common output. `--types f16/f16` compares Millpond's default pool with those types instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from prompts import PromptSource, read_vocabulary
from servers import REQUEST_TIMEOUT, RunningServer, millpond_spec, peer_spec, running
from settings import Settings

from millpond.config import EngineConfig
from millpond.doctor.exact import exact_config, store_of, subject_of
from millpond.errors import InternalError
from millpond.models import resolve_model
from millpond.runtime.base import Batch, ContextParams, Runtime
from millpond.runtime.llamacpp import LlamaCppRuntime
from millpond.types import SlotId

CELLS = 2048
TIE = 0.05
"""Logits."""
AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Pair:
    prompt_ids: list[int]
    ours: tuple[int, ...]
    peer: tuple[int, ...]

    @property
    def differs_at(self) -> int | None:
        same = [left == right for left, right in zip(self.ours, self.peer, strict=True)]
        return same.index(False) if False in same else None


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MILLPOND_TEST_MODEL", "smollm2-135m"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens a prompt")
    parser.add_argument("--longest", type=int, default=300, help="tokens of the longest prompt; the shortest has 10")
    parser.add_argument("--types", help="K/V types of both, like f16/f16, without --exact")
    return parser.parse_args()


def types_of(given: argparse.Namespace, path: Path, digest: str) -> tuple[str, str]:
    if given.types:
        key, value = given.types.split("/")
        return key, value
    plain = EngineConfig(model_path=str(path), model_digest=digest, exact=True, threads=given.threads)
    found = exact_config(plain, subject_of(plain, os.environ), store_of(os.environ), print)
    return found.kv_type_k or "f16", found.kv_type_v or "f16"


async def our_outputs(server: RunningServer, prompts: Sequence[list[int]], tokens: int) -> list[tuple[int, ...]]:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: list[int]) -> tuple[int, ...]:
        async with gate:
            return (await server.complete(prompt, tokens)).token_ids

    return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


def peer_output(server: RunningServer, prompt: list[int], tokens: int) -> tuple[int, ...]:
    """By the peer's native route: its OpenAI routes give no ids."""
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT) as answer:
        ids = tuple(json.load(answer)["tokens"])
    if len(ids) != tokens:
        raise InternalError(f"the peer gave {len(ids)} of {tokens} tokens")
    return ids


def tie_of(runtime: Runtime, pair: Pair, at: int) -> float:
    """Distance in logits between the two ids that came at output `at`."""
    ids = np.array([*pair.prompt_ids, *pair.ours[:at]], np.int32)
    last = np.zeros(len(ids), np.bool_)
    last[-1] = True
    runtime.decode(Batch(ids, np.arange(len(ids), dtype=np.int32), np.zeros(len(ids), np.int32), last))
    logits = runtime.logits(len(ids) - 1)
    distance = abs(float(logits[pair.ours[at]] - logits[pair.peer[at]]))
    runtime.drop(SlotId(0))
    return distance


def judge(pairs: Sequence[Pair], load: Callable[[], Runtime]) -> int:
    """Prints the verdict; the number of pairs that differ at more than a tie."""
    different = [(number, pair) for number, pair in enumerate(pairs) if pair.differs_at is not None]
    tokens = sum(len(pair.ours) for pair in pairs)
    print(f"{len(pairs) - len(different)} of {len(pairs)} outputs equal in every id ({tokens} tokens)")
    if not different:
        return 0
    runtime = load()
    wrong = 0
    for number, pair in different:
        at = pair.differs_at
        assert at is not None
        distance = tie_of(runtime, pair, at)
        wrong += distance >= TIE
        print(f"  prompt {number}, {len(pair.prompt_ids)} tokens: differs from token {at} on, by {distance:.4f} logits")
    runtime.close()
    return wrong


def main() -> int:
    given = parse_arguments()
    model = resolve_model(given.model)
    key, value = types_of(given, model.path, model.sha256)
    kv = ("--cache-type-k", key, "--cache-type-v", value)
    settings = Settings(
        model=model.path,
        threads=given.threads,
        pairs=None,
        only=(),
        millpond_arguments=(),
        peer_arguments=(),
        self_test=False,
    )
    peer = peer_spec(settings, CELLS, "--parallel", "1", "--no-prompt-cache", "--cache-ram", "0", *kv)
    mode = () if given.types else ("--exact", "--max-model-len", str(CELLS // 2))
    types = ("--kv-type-k", key, "--kv-type-v", value)
    ours = millpond_spec(settings, CELLS // 2 * AT_ONCE, "--max-running", str(AT_ONCE), *types, *mode)
    rng = random.Random(0)
    lengths = [rng.randint(10, given.longest) for _ in range(given.prompts)]
    with running(peer) as server:
        source = PromptSource(read_vocabulary(server.port), "peer equality")
        prompts = [source.prose(length) for length in lengths]
        began = time.monotonic()
        theirs = [peer_output(server, prompt, given.tokens) for prompt in prompts]
        print(f"peer: one slot, K/V {key}/{value}, {time.monotonic() - began:.0f} s")
    with running(ours) as server:
        began = time.monotonic()
        mine = asyncio.run(our_outputs(server, prompts, given.tokens))
        print(f"millpond: {AT_ONCE} at once, {' '.join(mode) or 'default pool'}, {time.monotonic() - began:.0f} s")
    pairs = [Pair(list(prompt), left, right) for prompt, left, right in zip(prompts, mine, theirs, strict=True)]
    params = ContextParams(
        n_cells=CELLS, n_slots=1, threads=given.threads, unified=False, kv_type_k=key, kv_type_v=value
    )

    def load() -> Runtime:
        return LlamaCppRuntime.load(model.path, params, digest="", gpu_layers=0, progress=None, environ=os.environ)

    wrong = judge(pairs, load)
    print("pass" if not wrong else f"{wrong} outputs differ at more than a tie")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

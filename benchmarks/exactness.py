"""--exact on a real model: every output equals its solo run, id for id and log probability for log probability.

python benchmarks/exactness.py --model M.gguf [--trials 3] [--streams 8] [--longest 700] [--output 40 60]
                               [--kv f16/f16] [--only together,turns]

Qualifies the model first (cached) and serves it in this process with what qualified; --kv tries other types instead,
which shows what the comparison sees. Random prompts, chunk sizes, time slices and orders; the seeds are printed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from millpond.bench.exact_cases import CASES, exact_requests, run_case, solo_outcomes
from millpond.config import EngineConfig
from millpond.doctor.checks import plain_tokens
from millpond.doctor.exact import exact_config, store_of, subject_of
from millpond.models import resolve_model
from millpond.runtime.base import Runtime
from millpond.wiring import load_llamacpp


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=os.environ.get("MILLPOND_TEST_MODEL", "smollm2-135m"))
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--longest", type=int, default=700, help="tokens of the longest prompt")
    parser.add_argument("--output", type=int, nargs=2, default=(40, 60), help="shortest and longest output")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", help="K/V types to use without qualifying them, like f16/f16")
    parser.add_argument("--only", default=",".join(CASES), help="cases, comma separated")
    return parser.parse_args()


def settings(given: argparse.Namespace) -> EngineConfig:
    model = resolve_model(given.model)
    config = EngineConfig(
        model_path=str(model.path),
        model_digest=model.sha256,
        exact=True,
        threads=given.threads,
        max_running=given.streams,
        max_model_len=given.longest + given.output[1],
    )
    if given.kv:
        key, value = given.kv.split("/")
        return replace(config, kv_type_k=key, kv_type_v=value)
    return exact_config(config, subject_of(config, os.environ), store_of(os.environ), print)


@contextmanager
def loaded(config: EngineConfig) -> Iterator[Runtime]:
    runtime = load_llamacpp(config, lambda fraction: True)
    try:
        yield runtime
    finally:
        runtime.close()


def main() -> int:
    given = parse_arguments()
    config = settings(given)
    wrong = 0
    with loaded(config) as runtime:
        print(f"{Path(config.model_path).name}: K/V {config.kv_type_k}/{config.kv_type_v}, {runtime.limits}")
        vocabulary = plain_tokens(runtime, 4000)
        for seed in range(given.first_seed, given.first_seed + given.trials):
            requests = exact_requests(
                seed, given.streams, vocabulary, longest=given.longest, output=tuple(given.output)
            )
            began = time.monotonic()
            solo = solo_outcomes(runtime, config, requests)
            tokens = sum(len(outcome.token_ids) for outcome in solo)
            prompts = [len(request.prompt_ids) for request in requests]
            print(f"seed {seed}: prompts {prompts}, {tokens} output tokens, solo {time.monotonic() - began:.1f} s")
            for name in given.only.split(","):
                began = time.monotonic()
                result = run_case(name, runtime, config, requests, solo, seed)
                wrong += len(result.wrong)
                print(
                    f"  {name:<9} {'equal' if not result.wrong else 'DIFFERS: ' + '; '.join(result.wrong)}"
                    f"   ({result.preemptions} parked, {result.restored_bytes / 1e6:.0f} MB restored, "
                    f"{result.recomputed_tokens} tokens recomputed, {len(result.chunks)} chunk sizes "
                    f"{min(result.chunks)} to {max(result.chunks)}, {time.monotonic() - began:.1f} s)",
                    flush=True,
                )
    print("all equal" if not wrong else f"{wrong} outputs differ")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

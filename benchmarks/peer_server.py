"""llama.cpp's own HTTP server, as the pinned wheel carries it: the peer of every side-by-side run.

python benchmarks/peer_server.py --model M.gguf --port 9931 --ctx 4096 [--parallel N] [--threads N] ...
Prints its address, then serves until it is ended. What is not given stays at the peer's own default (auto: 4 slots
over one shared pool, prompt cache on, flash attention auto). Knows nothing of Millpond.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

import xllamacpp

FLASH_ATTENTION = {
    "auto": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
CACHE_TYPES = {
    "f16": xllamacpp.ggml_type.GGML_TYPE_F16,
    "bf16": xllamacpp.ggml_type.GGML_TYPE_BF16,
    "f32": xllamacpp.ggml_type.GGML_TYPE_F32,
    "q8_0": xllamacpp.ggml_type.GGML_TYPE_Q8_0,
    "q4_0": xllamacpp.ggml_type.GGML_TYPE_Q4_0,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, default=9931)
    parser.add_argument("--ctx", type=int, default=4096, help="cells of the whole pool")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=-1, help="slots; -1: the peer's auto")
    parser.add_argument("--unified", type=int, choices=(0, 1), help="one pool for all slots, or one a slot")
    parser.add_argument("--cache-type-k", choices=CACHE_TYPES)
    parser.add_argument("--cache-type-v", choices=CACHE_TYPES)
    parser.add_argument("--cache-ram", type=int, help="MiB of the peer's prompt cache in RAM; 0: none")
    parser.add_argument("--no-prompt-cache", action="store_true", help="no reuse of a slot's earlier prompt")
    parser.add_argument("--flash-attn", choices=FLASH_ATTENTION)
    parser.add_argument("--embedding", action="store_true")
    return parser.parse_args()


def parameters(arguments: argparse.Namespace) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = arguments.model
    params.port = arguments.port
    params.n_ctx = arguments.ctx
    params.n_parallel = arguments.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.endpoint_metrics = params.endpoint_slots = True
    params.embedding = arguments.embedding
    if arguments.unified is not None:
        params.kv_unified = bool(arguments.unified)
    if arguments.cache_type_k:
        params.cache_type_k = CACHE_TYPES[arguments.cache_type_k]
    if arguments.cache_type_v:
        params.cache_type_v = CACHE_TYPES[arguments.cache_type_v]
    if arguments.cache_ram is not None:
        params.cache_ram_mib = arguments.cache_ram
    if arguments.no_prompt_cache:
        params.cache_prompt = False
    if arguments.flash_attn:
        params.flash_attn_type = FLASH_ATTENTION[arguments.flash_attn]
    return params


def main() -> None:
    server = xllamacpp.Server(parameters(parse_arguments()))
    print("listening on", server.listening_address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main()

"""The part of llama.h we use, declared by hand for one exact build. Knows layouts and signatures; calls nothing.

scripts/check_declarations.py compares this file with the llama.h of the pinned build.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from typing import Any

PINNED_DISTRIBUTION = "xllamacpp"
PINNED_VERSION = "2026.10.11549"

MAX_SEQUENCES = 256
"""LLAMA_MAX_SEQ; the wheel leaves out the function that tells it."""

LOG_CALLBACK = CFUNCTYPE(None, c_int, c_char_p, c_void_p)
PROGRESS_CALLBACK = CFUNCTYPE(c_bool, c_float, c_void_p)
ABORT_CALLBACK = CFUNCTYPE(c_bool, c_void_p)

TOKEN_ATTR_UNKNOWN = 1 << 0
TOKEN_ATTR_CONTROL = 1 << 3

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 8, "bf16": 30}
"""Names of EngineConfig.kv_type_* and their enum ggml_type."""


class LlamaModelParams(Structure):
    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int),
        ("load_mode", c_int),
        ("lazy_mode", c_int),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class LlamaContextParams(Structure):
    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int),
        ("rope_scaling_type", c_int),
        ("pooling_type", c_int),
        ("attention_type", c_int),
        ("flash_attn_type", c_int),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", c_void_p),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int),
        ("type_v", c_int),
        ("moe_cache_size", c_size_t),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class LlamaSamplerChainParams(Structure):
    _fields_ = (("no_perf", c_bool),)


class LlamaBatch(Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", c_void_p),
    )


class LlamaTokenData(Structure):
    _fields_ = (("id", c_int32), ("logit", c_float), ("p", c_float))


class LlamaTokenDataArray(Structure):
    _fields_ = (("data", c_void_p), ("size", c_size_t), ("selected", c_int64), ("sorted", c_bool))


STRUCTS: dict[str, type[Structure]] = {
    "llama_model_params": LlamaModelParams,
    "llama_context_params": LlamaContextParams,
    "llama_sampler_chain_params": LlamaSamplerChainParams,
    "llama_batch": LlamaBatch,
    "llama_token_data": LlamaTokenData,
    "llama_token_data_array": LlamaTokenDataArray,
}
"""C name to declaration, for the checks."""


@dataclass(frozen=True, slots=True)
class Declaration:
    name: str
    result: Any
    """A ctypes type, or None for void."""
    arguments: tuple[Any, ...]
    releases_gil: bool = False
    """True for calls that take long: with a busy thread, giving the GIL up and back costs 156 µs a call."""


MODEL = CONTEXT = VOCAB = SAMPLER = MEMORY = c_void_p
TOKEN = POS = SEQ_ID = c_int32

_TOKENIZE_ARGUMENTS = (VOCAB, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool)

DECLARATIONS: tuple[Declaration, ...] = (
    Declaration("llama_version", c_char_p, ()),
    Declaration("llama_backend_init", None, ()),
    Declaration("llama_log_set", None, (LOG_CALLBACK, c_void_p)),
    Declaration("llama_print_system_info", c_char_p, ()),
    Declaration("llama_supports_gpu_offload", c_bool, ()),
    Declaration("llama_model_default_params", LlamaModelParams, ()),
    Declaration("llama_context_default_params", LlamaContextParams, ()),
    Declaration("llama_sampler_chain_default_params", LlamaSamplerChainParams, ()),
    Declaration("llama_model_load_from_file", MODEL, (c_char_p, LlamaModelParams), releases_gil=True),
    Declaration("llama_model_free", None, (MODEL,), releases_gil=True),
    Declaration("llama_model_get_vocab", VOCAB, (MODEL,)),
    Declaration("llama_model_n_ctx_train", c_int32, (MODEL,)),
    Declaration("llama_model_n_layer", c_int32, (MODEL,)),
    Declaration("llama_model_n_swa", c_int32, (MODEL,)),
    Declaration("llama_model_n_params", c_uint64, (MODEL,)),
    Declaration("llama_model_size", c_uint64, (MODEL,)),
    Declaration("llama_model_desc", c_int32, (MODEL, c_void_p, c_size_t)),
    Declaration("llama_model_meta_val_str", c_int32, (MODEL, c_char_p, c_void_p, c_size_t)),
    Declaration("llama_model_chat_template", c_char_p, (MODEL, c_char_p)),
    Declaration("llama_model_has_encoder", c_bool, (MODEL,)),
    Declaration("llama_model_has_decoder", c_bool, (MODEL,)),
    Declaration("llama_model_is_recurrent", c_bool, (MODEL,)),
    Declaration("llama_model_is_hybrid", c_bool, (MODEL,)),
    Declaration("llama_model_is_diffusion", c_bool, (MODEL,)),
    Declaration("llama_init_from_model", CONTEXT, (MODEL, LlamaContextParams), releases_gil=True),
    Declaration("llama_free", None, (CONTEXT,), releases_gil=True),
    Declaration("llama_n_ctx", c_uint32, (CONTEXT,)),
    Declaration("llama_n_ctx_seq", c_uint32, (CONTEXT,)),
    Declaration("llama_n_batch", c_uint32, (CONTEXT,)),
    Declaration("llama_n_ubatch", c_uint32, (CONTEXT,)),
    Declaration("llama_n_seq_max", c_uint32, (CONTEXT,)),
    Declaration("llama_n_threads", c_int32, (CONTEXT,)),
    Declaration("llama_get_memory", MEMORY, (CONTEXT,)),
    Declaration("llama_memory_clear", None, (MEMORY, c_bool), releases_gil=True),
    Declaration("llama_memory_seq_rm", c_bool, (MEMORY, SEQ_ID, POS, POS)),
    Declaration("llama_memory_seq_cp", None, (MEMORY, SEQ_ID, SEQ_ID, POS, POS)),
    Declaration("llama_memory_seq_pos_min", POS, (MEMORY, SEQ_ID)),
    Declaration("llama_memory_seq_pos_max", POS, (MEMORY, SEQ_ID)),
    Declaration("llama_state_seq_get_size_ext", c_size_t, (CONTEXT, SEQ_ID, c_uint32), releases_gil=True),
    Declaration(
        "llama_state_seq_get_data_ext", c_size_t, (CONTEXT, c_void_p, c_size_t, SEQ_ID, c_uint32), releases_gil=True
    ),
    Declaration(
        "llama_state_seq_set_data_ext", c_size_t, (CONTEXT, c_char_p, c_size_t, SEQ_ID, c_uint32), releases_gil=True
    ),
    Declaration("llama_decode", c_int32, (CONTEXT, LlamaBatch), releases_gil=True),
    Declaration("llama_synchronize", None, (CONTEXT,), releases_gil=True),
    Declaration("llama_set_abort_callback", None, (CONTEXT, ABORT_CALLBACK, c_void_p)),
    Declaration("llama_get_logits_ith", c_void_p, (CONTEXT, c_int32)),
    Declaration("llama_vocab_n_tokens", c_int32, (VOCAB,)),
    Declaration("llama_vocab_get_attr", c_int, (VOCAB, TOKEN)),
    Declaration("llama_vocab_is_eog", c_bool, (VOCAB, TOKEN)),
    Declaration("llama_vocab_bos", TOKEN, (VOCAB,)),
    Declaration("llama_vocab_eos", TOKEN, (VOCAB,)),
    Declaration("llama_vocab_get_add_bos", c_bool, (VOCAB,)),
    Declaration("llama_tokenize", c_int32, _TOKENIZE_ARGUMENTS, releases_gil=True),
    Declaration("llama_token_to_piece", c_int32, (VOCAB, TOKEN, c_void_p, c_int32, c_int32, c_bool)),
    Declaration("llama_sampler_chain_init", SAMPLER, (LlamaSamplerChainParams,)),
    Declaration("llama_sampler_chain_add", None, (SAMPLER, SAMPLER)),
    Declaration("llama_sampler_init_top_k", SAMPLER, (c_int32,)),
    Declaration("llama_sampler_init_top_p", SAMPLER, (c_float, c_size_t)),
    Declaration("llama_sampler_init_min_p", SAMPLER, (c_float, c_size_t)),
    Declaration("llama_sampler_apply", None, (SAMPLER, POINTER(LlamaTokenDataArray))),
    Declaration("llama_sampler_free", None, (SAMPLER,)),
)


class Bindings:
    """The declared functions of one opened library. Pointers are ints, a NULL result is None.

    Raises AttributeError naming the function that the library does not export.
    """

    llama_version: Callable[[], bytes]
    llama_backend_init: Callable[[], None]
    llama_log_set: Callable[[Any, int | None], None]
    llama_print_system_info: Callable[[], bytes]
    llama_supports_gpu_offload: Callable[[], bool]
    llama_model_default_params: Callable[[], LlamaModelParams]
    llama_context_default_params: Callable[[], LlamaContextParams]
    llama_sampler_chain_default_params: Callable[[], LlamaSamplerChainParams]
    llama_model_load_from_file: Callable[[bytes, LlamaModelParams], int | None]
    llama_model_free: Callable[[int], None]
    llama_model_get_vocab: Callable[[int], int]
    llama_model_n_ctx_train: Callable[[int], int]
    llama_model_n_layer: Callable[[int], int]
    llama_model_n_swa: Callable[[int], int]
    llama_model_n_params: Callable[[int], int]
    llama_model_size: Callable[[int], int]
    llama_model_desc: Callable[[int, Any, int], int]
    llama_model_meta_val_str: Callable[[int, bytes, Any, int], int]
    llama_model_chat_template: Callable[[int, bytes | None], bytes | None]
    llama_model_has_encoder: Callable[[int], bool]
    llama_model_has_decoder: Callable[[int], bool]
    llama_model_is_recurrent: Callable[[int], bool]
    llama_model_is_hybrid: Callable[[int], bool]
    llama_model_is_diffusion: Callable[[int], bool]
    llama_init_from_model: Callable[[int, LlamaContextParams], int | None]
    llama_free: Callable[[int], None]
    llama_n_ctx: Callable[[int], int]
    llama_n_ctx_seq: Callable[[int], int]
    llama_n_batch: Callable[[int], int]
    llama_n_ubatch: Callable[[int], int]
    llama_n_seq_max: Callable[[int], int]
    llama_n_threads: Callable[[int], int]
    llama_get_memory: Callable[[int], int]
    llama_memory_clear: Callable[[int, bool], None]
    llama_memory_seq_rm: Callable[[int, int, int, int], bool]
    llama_memory_seq_cp: Callable[[int, int, int, int, int], None]
    llama_memory_seq_pos_min: Callable[[int, int], int]
    llama_memory_seq_pos_max: Callable[[int, int], int]
    llama_state_seq_get_size_ext: Callable[[int, int, int], int]
    llama_state_seq_get_data_ext: Callable[[int, int, int, int, int], int]
    llama_state_seq_set_data_ext: Callable[[int, bytes, int, int, int], int]
    llama_decode: Callable[[int, LlamaBatch], int]
    llama_synchronize: Callable[[int], None]
    llama_set_abort_callback: Callable[[int, Any, int | None], None]
    llama_get_logits_ith: Callable[[int, int], int | None]
    llama_vocab_n_tokens: Callable[[int], int]
    llama_vocab_get_attr: Callable[[int, int], int]
    llama_vocab_is_eog: Callable[[int, int], bool]
    llama_vocab_bos: Callable[[int], int]
    llama_vocab_eos: Callable[[int], int]
    llama_vocab_get_add_bos: Callable[[int], bool]
    llama_tokenize: Callable[[int, bytes, int, Any, int, bool, bool], int]
    llama_token_to_piece: Callable[[int, int, Any, int, int, bool], int]
    llama_sampler_chain_init: Callable[[LlamaSamplerChainParams], int]
    llama_sampler_chain_add: Callable[[int, int], None]
    llama_sampler_init_top_k: Callable[[int], int]
    llama_sampler_init_top_p: Callable[[float, int], int]
    llama_sampler_init_min_p: Callable[[float, int], int]
    llama_sampler_apply: Callable[[int, Any], None]
    llama_sampler_free: Callable[[int], None]

    def __init__(self, releasing: ctypes.CDLL, holding: ctypes.PyDLL) -> None:
        for declaration in DECLARATIONS:
            function = getattr(releasing if declaration.releases_gil else holding, declaration.name)
            function.restype = declaration.result
            function.argtypes = declaration.arguments
            setattr(self, declaration.name, function)

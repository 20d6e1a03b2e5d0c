"""Writes tiny GGUF files with random weights, for the kinds of memory that no small public model brings along.

Knows GGUF keys and tensor names of four architectures; the tokenizer is copied from a donor file. The output of such
a model means nothing and greedy text repeats itself: tests compare logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

CONTEXT_LENGTH = 2048
WIDTH = 128
FEED_FORWARD = 256
HEADS = 4
KV_HEADS = 2
HEAD_WIDTH = WIDTH // HEADS
SIZE = 10_000
"""Tokens of the vocabulary."""
WINDOW = 64
"""Sliding window of write_tiny_gemma3, in tokens."""


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """The first SIZE tokens of the donor's vocabulary, as GGUF metadata values: all of them take half a second to load.

    A byte-pair encoding makes each token of earlier ones, so the first are a vocabulary too.
    """

    pre: str
    tokens: list[bytes]
    types: list[int]
    merges: list[str]
    bos_id: int
    eos_id: int
    chat_template: str

    @classmethod
    @cache  # the package reads fifty thousand strings one by one
    def read(cls, donor: Path) -> Tokenizer:
        fields = gguf.GGUFReader(donor).fields

        def value(key: str) -> Any:
            return fields[f"tokenizer.{key}"].contents()

        field = fields["tokenizer.ggml.tokens"]
        tokens = [bytes(field.parts[index]) for index in field.data[:SIZE]]
        known = {token.decode() for token in tokens}
        return cls(
            pre=value("ggml.pre"),
            tokens=tokens,
            types=value("ggml.token_type")[:SIZE],
            merges=[merge for merge in value("ggml.merges") if merge.replace(" ", "") in known],
            bos_id=value("ggml.bos_token_id"),
            eos_id=value("ggml.eos_token_id"),
            chat_template=value("chat_template"),
        )


class _Writer:
    """A GGUF being written; matrices are (rows out, columns in), scaled to keep activations near 1."""

    def __init__(self, path: Path, architecture: str, tokenizer: Tokenizer, *, n_layers: int, seed: int) -> None:
        self.gguf = gguf.GGUFWriter(path, architecture)
        self._random = np.random.default_rng(seed)
        self.gguf.add_name(f"tiny-random-{architecture}")
        self.gguf.add_context_length(CONTEXT_LENGTH)
        self.gguf.add_embedding_length(WIDTH)
        self.gguf.add_block_count(n_layers)
        self.gguf.add_layer_norm_rms_eps(1e-5)
        self.gguf.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
        self._add_tokenizer(tokenizer)
        self.matrix("token_embd", len(tokenizer.tokens), WIDTH, scale=0.5)

    def matrix(self, name: str, rows: int, columns: int, *, scale: float | None = None, f32: bool = False) -> None:
        values = self._random.standard_normal((rows, columns)) * (columns**-0.5 if scale is None else scale)
        self.gguf.add_tensor(f"{name}.weight", values.astype(np.float32 if f32 else np.float16))

    def noise(self, name: str, size: int) -> None:
        self.gguf.add_tensor(name, (self._random.standard_normal(size) * 0.1).astype(np.float32))

    def ones(self, name: str, size: int) -> None:
        self.gguf.add_tensor(name, np.ones(size, dtype=np.float32))

    def norms(self, *names: str, size: int = WIDTH) -> None:
        for name in names:
            self.ones(f"{name}.weight", size)

    def feed_forward(self, block: str) -> None:
        self.norms(f"{block}.ffn_norm")
        self.gated_feed_forward(block)

    def gated_feed_forward(self, block: str) -> None:
        self.matrix(f"{block}.ffn_gate", FEED_FORWARD, WIDTH)
        self.matrix(f"{block}.ffn_up", FEED_FORWARD, WIDTH)
        self.matrix(f"{block}.ffn_down", WIDTH, FEED_FORWARD)

    def attention(self, block: str, *, gated: bool = False) -> None:
        """`gated`: the query matrix has a gate beside each head's query."""
        self.norms(f"{block}.attn_q_norm", f"{block}.attn_k_norm", size=HEAD_WIDTH)
        self.matrix(f"{block}.attn_q", WIDTH * (2 if gated else 1), WIDTH)
        self.matrix(f"{block}.attn_k", KV_HEADS * HEAD_WIDTH, WIDTH)
        self.matrix(f"{block}.attn_v", KV_HEADS * HEAD_WIDTH, WIDTH)
        self.matrix(f"{block}.attn_output", WIDTH, WIDTH)

    def finish(self) -> None:
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()

    def _add_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.gguf.add_vocab_size(len(tokenizer.tokens))
        self.gguf.add_tokenizer_model("gpt2")
        self.gguf.add_tokenizer_pre(tokenizer.pre)
        self.gguf.add_token_list(tokenizer.tokens)
        self.gguf.add_token_types(tokenizer.types)
        self.gguf.add_token_merges(tokenizer.merges)
        self.gguf.add_bos_token_id(tokenizer.bos_id)
        self.gguf.add_eos_token_id(tokenizer.eos_id)
        self.gguf.add_add_bos_token(False)
        self.gguf.add_chat_template(tokenizer.chat_template)


def write_tiny_lfm2(path: Path, tokenizer: Tokenizer, *, seed: int = 1) -> None:
    """Hybrid memory: short convolutions (a recurrent state) and attention, by turns."""
    kv_heads = [0, KV_HEADS, 0, KV_HEADS]
    writer = _Writer(path, "lfm2", tokenizer, n_layers=len(kv_heads), seed=seed)
    writer.gguf.add_feed_forward_length(FEED_FORWARD)
    writer.gguf.add_head_count(HEADS)
    writer.gguf.add_head_count_kv(kv_heads)
    writer.gguf.add_rope_freq_base(1e6)
    writer.gguf.add_shortconv_l_cache(3)
    writer.norms("token_embd_norm")
    for index, heads in enumerate(kv_heads):
        block = f"blk.{index}"
        writer.norms(f"{block}.attn_norm")
        writer.feed_forward(block)
        if heads:
            writer.attention(block)
        else:
            writer.matrix(f"{block}.shortconv.conv", WIDTH, 3, f32=True)
            writer.matrix(f"{block}.shortconv.in_proj", 3 * WIDTH, WIDTH)
            writer.matrix(f"{block}.shortconv.out_proj", WIDTH, WIDTH)
    writer.finish()


def write_tiny_mamba(path: Path, tokenizer: Tokenizer, *, seed: int = 1) -> None:
    """Recurrent memory: one state a sequence, no KV cell at all."""
    n_layers, inner, state, rank = 4, 2 * WIDTH, 16, 8
    writer = _Writer(path, "mamba", tokenizer, n_layers=n_layers, seed=seed)
    writer.gguf.add_feed_forward_length(0)
    writer.gguf.add_head_count(0)
    writer.gguf.add_ssm_conv_kernel(4)
    writer.gguf.add_ssm_inner_size(inner)
    writer.gguf.add_ssm_state_size(state)
    writer.gguf.add_ssm_time_step_rank(rank)
    writer.norms("output_norm")
    decay = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    for index in range(n_layers):
        block = f"blk.{index}"
        writer.norms(f"{block}.attn_norm")
        writer.matrix(f"{block}.ssm_in", 2 * inner, WIDTH)
        writer.matrix(f"{block}.ssm_conv1d", inner, 4, f32=True)
        writer.noise(f"{block}.ssm_conv1d.bias", inner)
        writer.matrix(f"{block}.ssm_x", rank + 2 * state, inner)
        writer.matrix(f"{block}.ssm_dt", inner, rank)
        writer.noise(f"{block}.ssm_dt.bias", inner)
        writer.gguf.add_tensor(f"{block}.ssm_a", decay)
        writer.ones(f"{block}.ssm_d", inner)
        writer.matrix(f"{block}.ssm_out", WIDTH, inner)
    writer.finish()


def write_tiny_gemma3(path: Path, tokenizer: Tokenizer, *, seed: int = 1) -> None:
    """Sliding-window memory: five layers see the last WINDOW tokens, the sixth sees all."""
    n_layers = 6
    writer = _Writer(path, "gemma3", tokenizer, n_layers=n_layers, seed=seed)
    writer.gguf.add_feed_forward_length(FEED_FORWARD)
    writer.gguf.add_head_count(HEADS)
    writer.gguf.add_head_count_kv(KV_HEADS)
    writer.gguf.add_key_length(HEAD_WIDTH)
    writer.gguf.add_value_length(HEAD_WIDTH)
    writer.gguf.add_rope_freq_base(1e6)
    writer.gguf.add_sliding_window(WINDOW)
    writer.norms("output_norm")
    for index in range(n_layers):
        block = f"blk.{index}"
        writer.norms(f"{block}.attn_norm", f"{block}.post_attention_norm", f"{block}.post_ffw_norm")
        writer.attention(block)
        writer.feed_forward(block)
    writer.finish()


def write_tiny_qwen35(path: Path, tokenizer: Tokenizer, *, seed: int = 1) -> None:
    """Hybrid memory: gated delta nets (a matrix as state) and gated attention, by turns."""
    n_layers, key_heads, value_heads, head = 4, 2, 4, 32
    keys, values = key_heads * head, value_heads * head
    writer = _Writer(path, "qwen35", tokenizer, n_layers=n_layers, seed=seed)
    writer.gguf.add_feed_forward_length(FEED_FORWARD)
    writer.gguf.add_head_count(HEADS)
    writer.gguf.add_head_count_kv(KV_HEADS)
    writer.gguf.add_key_length(HEAD_WIDTH)
    writer.gguf.add_value_length(HEAD_WIDTH)
    writer.gguf.add_rope_freq_base(1e6)
    writer.gguf.add_rope_dimension_count(HEAD_WIDTH)
    writer.gguf.add_rope_dimension_sections([8, 4, 4, 0])
    writer.gguf.add_full_attention_interval(2)
    writer.gguf.add_ssm_conv_kernel(4)
    writer.gguf.add_ssm_inner_size(values)
    writer.gguf.add_ssm_state_size(head)
    writer.gguf.add_ssm_time_step_rank(value_heads)
    writer.gguf.add_ssm_group_count(key_heads)
    writer.norms("output_norm")
    for index in range(n_layers):
        block = f"blk.{index}"
        writer.norms(f"{block}.attn_norm", f"{block}.post_attention_norm")
        writer.gated_feed_forward(block)
        if index % 2:
            writer.attention(block, gated=True)
            continue
        writer.matrix(f"{block}.attn_qkv", 2 * keys + values, WIDTH)
        writer.matrix(f"{block}.attn_gate", values, WIDTH)
        writer.matrix(f"{block}.ssm_conv1d", 2 * keys + values, 4, f32=True)
        writer.noise(f"{block}.ssm_dt.bias", value_heads)
        writer.gguf.add_tensor(f"{block}.ssm_a", -np.linspace(0.05, 0.5, value_heads, dtype=np.float32))
        writer.matrix(f"{block}.ssm_beta", value_heads, WIDTH)
        writer.matrix(f"{block}.ssm_alpha", value_heads, WIDTH)
        writer.norms(f"{block}.ssm_norm", size=head)
        writer.matrix(f"{block}.ssm_out", WIDTH, values)
    writer.finish()

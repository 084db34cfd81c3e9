"""Small models with random weights as files of llama.cpp, and prompts for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp

from kvpool.integrations.llamacpp import PrefixCache

HEADS, CONTEXT = 4, 4096
TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
KINDS = ["full attention", "recurrent"]


def save(
    path: Path, kind: str = "full attention", seed: int = 0, layers: int = 2, width: int = 64, inner: int = 128
) -> Path:
    """``width``: of the residual stream. ``inner``: of the layers between attention."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama" if kind == "full attention" else "mamba")

    def add(name: str, *shape: int, value: float | None = None) -> None:
        weights = random.standard_normal(shape) * 0.15 if value is None else np.full(shape, value)
        writer.add_tensor(name, weights.astype(np.float32))

    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([2, 3, 3, *[6] * 256, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for name in ("token_embd", "output"):
        add(f"{name}.weight", len(TOKENS), width)
    add("output_norm.weight", width, value=1.0)
    if kind == "full attention":
        _attention(writer, add, layers, width, inner)
    else:
        _recurrent(writer, add, layers, width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _attention(writer: gguf.GGUFWriter, add: Any, layers: int, width: int, inner: int) -> None:
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS // 2)
    writer.add_rope_dimension_count(width // HEADS)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}{name}.weight", width, value=1.0)
        for name, rows, columns in (
            ("attn_q", width, width),
            ("attn_k", width // 2, width),
            ("attn_v", width // 2, width),
            ("attn_output", width, width),
            ("ffn_gate", inner, width),
            ("ffn_up", inner, width),
            ("ffn_down", width, inner),
        ):
            add(f"{block}{name}.weight", rows, columns)


def _recurrent(writer: gguf.GGUFWriter, add: Any, layers: int, width: int) -> None:
    inner, state, rank, kernel = 2 * width, 16, 4, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    for layer in range(layers):
        block = f"blk.{layer}."
        add(f"{block}attn_norm.weight", width, value=1.0)
        for name, shape in (
            ("ssm_in.weight", (2 * inner, width)),
            ("ssm_conv1d.weight", (inner, kernel)),
            ("ssm_conv1d.bias", (inner,)),
            ("ssm_x.weight", (rank + 2 * state, inner)),
            ("ssm_dt.weight", (inner, rank)),
            ("ssm_dt.bias", (inner,)),
            ("ssm_out.weight", (width, inner)),
        ):
            add(f"{block}{name}", *shape)
        add(f"{block}ssm_a", inner, state, value=-1.0)
        add(f"{block}ssm_d", inner, value=1.0)


def save_adapter(path: Path, seed: int, *, layers: int = 2, width: int = 64, invocation: tuple[int, ...] = ()) -> Any:
    """A LoRA adapter for the attention of a model of ``save``. ``invocation``: the tokens that activate it."""
    random, rank = np.random.default_rng(seed), 4
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    if invocation:
        kind = gguf.GGUFValueType
        writer.add_key_value("adapter.alora.invocation_tokens", list(invocation), kind.ARRAY, sub_type=kind.UINT32)
    for layer in range(layers):
        for name, rows in (("attn_q", width), ("attn_k", width // 2), ("attn_v", width // 2)):
            for part, shape in (("a", (rank, width)), ("b", (rows, rank))):
                data = random.standard_normal(shape) * 0.3
                writer.add_tensor(f"blk.{layer}.{name}.weight.lora_{part}", data.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    adapter = xllamacpp.CommonAdapterLoraInfo()
    adapter.path, adapter.scale = str(path), 1.0
    return adapter


def params(model: Path, **settings: Any) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(model), CONTEXT, 1, False
    params.cpuparams.n_threads, params.verbosity = 1, -1
    for name, value in settings.items():
        setattr(params, name, value)
    return params


def prefix_cache(model: Path, settings: dict[str, Any] | None = None, **options: Any) -> PrefixCache:
    sizes: dict[str, Any] = {"host_bytes": "32MiB", "piece_bytes": 1 << 16}
    return PrefixCache(params(model, **(settings or {})), **(sizes | options))


def prompt(count: int, seed: int) -> list[int]:
    return [1, *np.random.default_rng(seed).integers(3, 259, count - 1).tolist()]


def answer(cache: PrefixCache, tokens: list[int], count: int = 8, **settings: Any) -> tuple[list[int], int]:
    """The greedy tokens after a prompt, and how many tokens of it were not computed."""
    reply = cache.complete(tokens, n_predict=count, temperature=0.0, ignore_eos=True, **settings)
    return reply["tokens"], reply["timings"]["cache_n"]

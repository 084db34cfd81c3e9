"""Writes a Llama with random weights for vLLM: small, and such that what it says depends on every block of its KV
cache.

Random weights of the usual size would do: attention over them is an average, which hides a wrong block. Queries and
keys have a gain here, so that each token looks at few others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

GAIN = 2.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama. vLLM's attention on CPUs wants a ``head_dim`` of 32 or more."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 256
    vocabulary: int = 512
    window: int = 0
    """If not 0, every second layer sees so many tokens only."""

    def config(self) -> dict[str, Any]:
        found = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "float32",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.window:
            kinds = ("full_attention", "sliding_attention")
            found |= {"sliding_window": self.window, "layer_types": [kinds[layer % 2] for layer in range(self.layers)]}
        return found


SHAPES = {
    "tiny": Shape(),
    "windowed": Shape(layers=4, window=96),
    "small": Shape(layers=12, hidden=512, heads=8, kv_heads=4, head_dim=64, inner=1536, vocabulary=2048),
}


def weights(shape: Shape, seed: int) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Names and arrays as in a checkpoint of Hugging Face's."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return (random.standard_normal((rows, columns), np.float32) * np.float32(gain / columns**0.5)).astype(
            np.float32
        )

    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", matrix(shape.vocabulary, shape.hidden, shape.hidden**0.5)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, rows in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}.self_attn.{name}_proj.weight", matrix(rows, shape.hidden, GAIN)
        yield f"{prefix}.self_attn.o_proj.weight", matrix(shape.hidden, queries, GAIN)
        for name, rows, columns in (
            ("gate", shape.inner, shape.hidden),
            ("up", shape.inner, shape.hidden),
            ("down", shape.hidden, shape.inner),
        ):
            yield f"{prefix}.mlp.{name}_proj.weight", matrix(rows, columns)
        for name in ("input", "post_attention"):
            yield f"{prefix}.{name}_layernorm.weight", np.ones(shape.hidden, np.float32)
    yield "model.norm.weight", np.ones(shape.hidden, np.float32)
    yield "lm_head.weight", matrix(shape.vocabulary, shape.hidden, 2 * GAIN)


def write(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """The folder, with the configuration and the weights of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    save_file(dict(weights(shape, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_tokenizer(folder: Path) -> None:
    """A tokenizer that has a token for each byte, and a template for chats."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: place for place, text in enumerate(["<s>", "</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")

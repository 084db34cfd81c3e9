"""Small models of mlx-lm with random weights, and an engine that keeps its own KV beside a prompt cache."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import gemma3_text, lfm2, llama
from mlx_lm.models.cache import QuantizedKVCache, can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache

from kvpool.integrations.mlx import PromptCache

VOCABULARY = 500
BITS, GROUP = 8, 32
_COMMON = {"hidden_size": 64, "num_attention_heads": 2, "vocab_size": VOCABULARY}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "full attention": (
        llama,
        _COMMON
        | {
            "model_type": "llama",
            "num_hidden_layers": 3,
            "intermediate_size": 96,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    "sliding windows": (
        gemma3_text,
        _COMMON
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "intermediate_size": 96,
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
    ),
    "recurrent hybrid": (
        lfm2,
        _COMMON
        | {
            "model_type": "lfm2",
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 96,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "rope_theta": 10000.0,
            "full_attn_idxs": [1, 3],
        },
    ),
}
"""By the kind of its layers: the module of a model, and its configuration."""
KINDS = [*CONFIGS, "quantised"]


def model_of(kind: str, seed: int = 0) -> Any:
    module, config = CONFIGS.get(kind, CONFIGS["full attention"])
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def prompt_cache(kind: str, model: Any, **options: Any) -> PromptCache:
    quantised: dict[str, Any] = {"kv_bits": BITS, "kv_group_size": GROUP} if kind == "quantised" else {}
    return PromptCache(model, **({"tokens_per_block": 16, "host_bytes": "4MiB"} | quantised | options))


def empty(kind: str, model: Any) -> list[Any]:
    caches: list[Any] = make_prompt_cache(model)
    return [QuantizedKVCache(GROUP, BITS) for _ in caches] if kind == "quantised" else caches


def compute(model: Any, tokens: list[int], caches: list[Any]) -> mx.array:
    """The logits after the last of the tokens."""
    logits = model(mx.array([tokens]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


def computed(kind: str, model: Any, tokens: list[int]) -> list[Any]:
    """Caches with the KV of these tokens."""
    caches = empty(kind, model)
    compute(model, tokens, caches)
    return caches


class Engine:
    """Computes prompts with a prompt cache, and keeps copies of all KV that it has computed."""

    def __init__(self, kind: str, model: Any, cache: PromptCache) -> None:
        self.kind, self.model, self.cache = kind, model, cache
        self.own: dict[tuple[int, ...], list[list[Any]]] = {}
        self.hits = self.reused = 0
        # The largest difference that splitting a prompt makes to its own KV, and where greedy tokens differ from those
        # of an uncut run: by how much the best was better there.
        self.spread, self.margins = 0.0, list[float]()

    def turn(self, tokens: list[int]) -> None:
        """Compute a prompt with what the cache has, and compare with the engine's own KV of the same beginning."""
        caches, rest = self.cache.fetch_nearest_cache("model", tokens)
        known = len(tokens) - len(rest)
        logits = compute(self.model, rest, caches if caches is not None else (caches := empty(self.kind, self.model)))
        if known:
            self.hits, self.reused = self.hits + 1, self.reused + known
            answers = [compute(self.model, rest, cache) for cache in self._own_of(tokens[:known])]
            assert answers, f"nobody has computed these {known} tokens"
            assert any(mx.array_equal(logits, answer).item() for answer in answers), f"other logits, {known} tokens"
            self._compare(logits, answers, compute(self.model, tokens, empty(self.kind, self.model)))
        self.own.setdefault(tuple(tokens), []).append(copy.deepcopy(caches))
        self.cache.insert_cache("model", tokens, caches)

    def _compare(self, split: mx.array, computed: list[mx.array], uncut: mx.array) -> None:
        self.spread = max(self.spread, *(mx.abs(answer - uncut).max().item() for answer in computed))
        if mx.argmax(split).item() != mx.argmax(uncut).item():
            second, best = mx.sort(uncut)[-2:].tolist()
            self.margins.append(best - second)

    def against_uncut(self) -> str:
        """Greedy tokens are those of uncut runs, or the two best are nearer to each other than splits are."""
        assert all(margin <= self.spread for margin in self.margins), (self.margins, self.spread)
        return f"{len(self.margins)} greedy tokens differ from uncut runs; splits differ by up to {self.spread:g}"

    def _own_of(self, tokens: list[int]) -> list[list[Any]]:
        """Copies of own caches with these tokens: cut, where they can be cut."""
        candidates = [cache for caches in (self.own.get(tuple(tokens), []),) for cache in copy.deepcopy(caches)]
        for known, all_caches in self.own.items():
            if len(known) > len(tokens) and list(known[: len(tokens)]) == tokens:
                for caches in all_caches:
                    if can_trim_prompt_cache(caches):
                        candidates.append(copy.deepcopy(caches))
                        trim_prompt_cache(candidates[-1], len(known) - len(tokens))
        return candidates


def converse(engine: Engine, conversations: int, rng: np.random.Generator) -> None:
    """Conversations with a few system prompts, that go on, branch, or are edited."""
    systems = [rng.integers(0, VOCABULARY, int(rng.integers(20, 60))).tolist() for _ in range(3)]
    live: list[list[int]] = []
    for _ in range(conversations):
        chance = rng.random()
        if not live or chance < 0.3:
            tokens = list(systems[rng.integers(len(systems))])
            engine.turn(tokens)
        else:
            tokens = list(live[rng.integers(len(live))])
            if chance > 0.8:
                tokens = tokens[: int(rng.integers(1, len(tokens)))]
        for _ in range(int(rng.integers(1, 4))):
            tokens = tokens + rng.integers(0, VOCABULARY, int(rng.integers(1, 40))).tolist()
            engine.turn(tokens)
        live = [*live[-20:], tokens]


def save(folder: Path, kind: str = "full attention", seed: int = 0) -> Path:
    """Write a model, with a tokenizer of words, as ``mlx_lm.server`` loads it."""
    from mlx.utils import tree_flatten
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    config = CONFIGS[kind][1]
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 1, "torch_dtype": "bfloat16"}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model_of(kind, seed).parameters())))
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "user", "assistant", *map(str, range(VOCABULARY - 4))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    fast.save_pretrained(folder)
    return folder


def save_adapter(folder: Path, seed: int, kind: str = "full attention") -> Path:
    """Write a LoRA adapter for a model of ``save``, as ``mlx_lm.load`` and the server's requests name it."""
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.tuner.utils import linear_to_lora_layers

    folder.mkdir()
    settings = {"num_layers": -1, "lora_parameters": {"rank": 4, "scale": 20.0, "dropout": 0.0}}
    (folder / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora"} | settings))
    model = model_of(kind)
    model.freeze()
    linear_to_lora_layers(model, len(model.layers), settings["lora_parameters"])
    mx.random.seed(seed)
    random = tree_map(lambda array: mx.random.normal(array.shape) * 0.3, model.trainable_parameters())
    mx.save_safetensors(str(folder / "adapters.safetensors"), dict(tree_flatten(random)))
    return folder

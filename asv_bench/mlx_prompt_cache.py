"""Figures of the prompt cache for mlx-lm beside mlx-lm's own, in the environment of ``tests.engines``::

    python -m tests.engines torchless run python -m asv_bench.mlx_prompt_cache
    python -m tests.engines torchless run python -m asv_bench.mlx_prompt_cache conversations --seed 3

Without an argument, it measures how long the first token of a turn takes after 2,000 tokens: computed, with mlx-lm's
``LRUPromptCache``, with kvpool's blocks in memory, and with those of a disk after a restart, in alternating rounds. And
how many bytes 50 branches of one prompt take in both. ``conversations`` compares the logits of 200 random conversations
for each kind of layers with those of the engine's own KV, and greedy tokens with those of uncut runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import llama
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache, trim_prompt_cache

from kvpool.integrations.mlx import PromptCache
from tests.engines.torchless import mlx_lab

CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": mlx_lab.VOCABULARY,
}
TURN, NEXT, ROUNDS = 2000, 16, 3


def model() -> Any:
    mx.random.seed(0)
    built = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    mx.eval(built.parameters())
    return built


Fetch = Callable[[list[int]], tuple[Any, list[int]]]


def of(cache: Any) -> Fetch:
    return lambda tokens: cache.fetch_nearest_cache("model", tokens)


def first_token(toy_model: Any, tokens: list[int], fetch: Fetch) -> float:
    """Milliseconds until the logits of a prompt are there."""
    began = time.perf_counter()
    caches, rest = fetch(tokens)
    mlx_lab.compute(toy_model, rest, caches or make_prompt_cache(toy_model))
    return (time.perf_counter() - began) * 1e3


def turns() -> None:
    toy_model, random = model(), np.random.default_rng(0)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options = {"host_bytes": "256MiB", "weights": "random", "stores": f"disk:{folder}/kv?capacity=1GiB"}
        for _ in range(ROUNDS):
            tokens = random.integers(0, mlx_lab.VOCABULARY, TURN + NEXT).tolist()
            theirs = LRUPromptCache()
            with PromptCache(toy_model, **options) as ours:
                caches = make_prompt_cache(toy_model)
                times.setdefault("computed", []).append(
                    first_token(toy_model, tokens, lambda tokens, caches=caches: (caches, tokens))
                )
                trim_prompt_cache(caches, NEXT)
                ours.insert_cache("model", tokens[:TURN], caches)
                theirs.insert_cache("model", tokens[:TURN], caches)
                for name, cache in (("LRUPromptCache", theirs), ("kvpool, memory", ours)):
                    fetched = first_token(
                        toy_model, tokens, lambda tokens, cache=cache: cache.fetch_nearest_cache("model", tokens)
                    )
                    times.setdefault(name, []).append(fetched)
                ours.drain(60)
            with PromptCache(toy_model, **options) as again:
                again.fetch_nearest_cache("model", [0, 1])
                fetched = first_token(
                    toy_model, tokens, lambda tokens, cache=again: cache.fetch_nearest_cache("model", tokens)
                )
                times.setdefault("kvpool, disk", []).append(fetched)
    computed = statistics.median(times["computed"])
    for name, milliseconds in times.items():
        median = statistics.median(milliseconds)
        print(f"{name:16} {median:8.1f} ms for the first token after {TURN} + {NEXT} tokens, 1/{computed / median:.0f}")


def branches() -> None:
    toy_model, random = model(), np.random.default_rng(1)
    system = random.integers(0, mlx_lab.VOCABULARY, TURN).tolist()
    theirs = LRUPromptCache(max_size=1000)
    with PromptCache(toy_model, host_bytes="1GiB") as ours:
        for _ in range(50):
            tokens = system + random.integers(0, mlx_lab.VOCABULARY, NEXT).tolist()
            caches, rest = ours.fetch_nearest_cache("model", tokens)
            caches = caches or make_prompt_cache(toy_model)
            mlx_lab.compute(toy_model, rest, caches)
            ours.insert_cache("model", tokens, caches)
            theirs.insert_cache("model", tokens, caches)
        print(
            f"50 branches of {TURN} tokens: LRUPromptCache {theirs.nbytes / 2**20:.0f} MiB, "
            f"kvpool {ours.nbytes / 2**20:.0f} MiB, {ours.nbytes / theirs.nbytes:.3f}"
        )


def conversations(seed: int, count: int) -> None:
    for kind in mlx_lab.KINDS:
        toy_model = mlx_lab.model_of(kind)
        with mlx_lab.prompt_cache(kind, toy_model, host_bytes="1MiB") as cache:
            engine = mlx_lab.Engine(kind, toy_model, cache)
            mlx_lab.converse(engine, count, np.random.default_rng(seed))
            print(f"{kind}: {engine.hits} hits, {engine.reused} tokens, all logits equal; {engine.against_uncut()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["turns", "conversations"], default="turns")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    if options.what == "conversations":
        conversations(options.seed, options.count)
    else:
        turns()
        branches()


if __name__ == "__main__":
    main()

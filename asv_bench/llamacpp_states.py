"""Figures of llama.cpp with kept states, in the environment of ``tests.engines``::

    python -m tests.engines torchless run python -m asv_bench.llamacpp_states

It says how long the next turn after 2,000 tokens takes: in a new engine, with llama.cpp's own prompts in RAM, with kept
states in memory, and after a restart with those of a disk. Other prompts take the slot in between. Medians of
alternating rounds, without the start of the engine.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import xllamacpp

from tests.engines.torchless import gguf_lab

TURN, ROUNDS = 2000, 5


class Plain:
    """llama.cpp alone, with so many MiB for prompts that have left their slot."""

    def __init__(self, model: Path, ram_mib: int) -> None:
        self.server = xllamacpp.Server(gguf_lab.params(model, cache_ram_mib=ram_mib))

    def complete(self, tokens: list[int]) -> None:
        answer = self.server.handle_completions({"prompt": tokens, "max_tokens": 1, "temperature": 0.0})
        assert "choices" in answer, answer


def seconds(complete: object, tokens: list[int]) -> float:
    assert callable(complete)
    began = time.perf_counter()
    complete(tokens)
    return time.perf_counter() - began


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = gguf_lab.save(Path(folder) / "model.gguf", layers=12, width=256)
        options = {"host_memory": "512MiB", "stores": f"disk:{folder}/kv?capacity=1GiB", "piece_bytes": 1 << 20}
        for seed in range(ROUNDS):
            tokens, others = gguf_lab.prompt(TURN, seed), gguf_lab.prompt(TURN, seed + 100)
            alone = Plain(model, 512)
            times.setdefault("computed", []).append(seconds(alone.complete, tokens))
            alone.complete(others)
            times.setdefault("cache_ram", []).append(seconds(alone.complete, [*tokens, 7, 8]))
            with gguf_lab.prefix_cache(model, **options) as cache:
                for prompt in (tokens, others):
                    cache.complete(prompt, n_predict=1, temperature=0.0)
                held = [*tokens, 7, 8]
                times.setdefault("kept, memory", []).append(
                    seconds(lambda held, cache=cache: cache.complete(held, n_predict=1, temperature=0.0), held)
                )
                cache.drain(60)
            with gguf_lab.prefix_cache(model, **options) as cache:
                times.setdefault("kept, restart", []).append(
                    seconds(lambda held, cache=cache: cache.complete(held, n_predict=1, temperature=0.0), held)
                )
    computed = statistics.median(times["computed"])
    for name, found in times.items():
        median = statistics.median(found)
        print(f"{name:14} {median * 1e3:8.1f} ms, 1/{computed / median:.0f}")


if __name__ == "__main__":
    main()

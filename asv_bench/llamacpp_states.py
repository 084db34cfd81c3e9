"""Figures of llama.cpp with kept states, in the environment of ``tests.engines``::

    python -m tests.engines torchless run python -m asv_bench.llamacpp_states [WIDTH...]

It measures how long the next turn after 2,000 tokens takes: in a new engine, with llama.cpp's own prompts in RAM, with
kept states in memory, and after a restart with those of a disk. Other prompts take the slot in between. Medians of
alternating rounds, without the start of the engine. One model of 12 layers for each width: what a token costs to
compute grows with its square, and what its state has to move only with the width.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xllamacpp

from tests.engines.torchless import gguf_lab

TURN, ROUNDS, LAYERS = 2000, 3, 12


class Plain:
    """llama.cpp alone, with so many MiB for prompts that have left their slot."""

    def __init__(self, model: Path, ram_mib: int) -> None:
        self.server = xllamacpp.Server(gguf_lab.params(model, cache_ram_mib=ram_mib))

    def complete(self, tokens: list[int]) -> None:
        answer = self.server.handle_completions({"prompt": tokens, "max_tokens": 1, "temperature": 0.0})
        assert "choices" in answer, answer


def seconds(complete: Callable[[list[int]], object], tokens: list[int]) -> float:
    began = time.perf_counter()
    complete(tokens)
    return time.perf_counter() - began


def turns(folder: str, width: int) -> dict[str, list[float]]:
    """Seconds of the next turn, by how it was come by."""
    times: dict[str, list[float]] = {}
    model = gguf_lab.save(Path(folder) / "model.gguf", layers=LAYERS, width=width, inner=4 * width)
    options = {"host_bytes": "512MiB", "stores": f"disk:{folder}/kv-{width}?capacity=1GiB", "piece_bytes": 1 << 20}
    for seed in range(ROUNDS):
        tokens, others = gguf_lab.prompt(TURN, seed), gguf_lab.prompt(TURN, seed + 100)
        held = [*tokens, 7, 8]
        alone = Plain(model, 512)
        times.setdefault("computed", []).append(seconds(alone.complete, tokens))
        alone.complete(others)
        times.setdefault("cache_ram", []).append(seconds(alone.complete, held))
        with gguf_lab.prefix_cache(model, **options) as cache:
            for prompt in (tokens, others):
                cache.complete(prompt, n_predict=1, temperature=0.0)
            ask = partial(cache.complete, n_predict=1, temperature=0.0)
            times.setdefault("kept, memory", []).append(seconds(ask, held))
            cache.drain(60)
        with gguf_lab.prefix_cache(model, **options) as cache:
            ask = partial(cache.complete, n_predict=1, temperature=0.0)
            times.setdefault("kept, restart", []).append(seconds(ask, held))
    return times


def main() -> None:
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for width in [int(text) for text in sys.argv[1:]] or [256]:
        with tempfile.TemporaryDirectory() as folder:
            times = turns(folder, width)
        computed = statistics.median(times["computed"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(f"width {width:5} {name:14} {median * 1e3:8.1f} ms, 1/{computed / median:.0f}", flush=True)


if __name__ == "__main__":
    main()

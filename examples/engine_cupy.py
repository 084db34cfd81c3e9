"""The engine of engine_numpy.py on a GPU, in CuPy: a staged block table, a paged attention kernel, everything on one
stream.

    python examples/engine_cupy.py # needs an NVIDIA GPU, and CuPy: pip install ".[cuda12]" or ".[cuda13]"

Nothing here waits for the pool's copies: every call names the stream, and the stream waits for the blocks that it
needs.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engine_numpy import HEAD_DIM, HEADS, KV_HEADS, LAYOUT, Batch, Engine, Floats, forward, options, serve

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Stream
from kvpool.device.cuda import unusable

SOURCE = Path(__file__).with_name("paged_attention.cu")
CONSTANTS = {"HEADS": HEADS, "KV_HEADS": KV_HEADS, "HEAD_DIM": HEAD_DIM, "BLOCK_TOKENS": LAYOUT.tokens_per_block}
THREADS = 128
COLUMNS = 16
"""Blocks of the longest sequence."""


def on_gpu(weights: Any, cupy: Any) -> Any:
    """The same dicts and lists with their arrays on the GPU."""
    if isinstance(weights, dict):
        return {name: on_gpu(each, cupy) for name, each in weights.items()}
    return [on_gpu(each, cupy) for each in weights] if isinstance(weights, list) else cupy.asarray(weights)


class CupyModel:
    """What ``Engine`` runs: see ``PagedModel``."""

    def __init__(self, weights: dict[str, Any], cache: kvpool.KVCacheManager, stream: Stream, cupy: Any) -> None:
        self.cupy, self.cache, self.stream = cupy, cache, stream
        self.on = cupy.cuda.Stream.from_external(stream)
        macros = tuple(f"-D{name}={value}" for name, value in CONSTANTS.items())
        self.kernel = cupy.RawKernel(SOURCE.read_text(encoding="utf-8"), "paged_attention", options=macros)
        with self.on:
            self.weights = on_gpu(weights, cupy)
            self.table = cupy.full((Engine.running_max, COLUMNS), -1, np.int32)

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        # [layers, K and V, blocks, tokens, kv_heads, head_dim]
        pool, size = self.cache.memory.device_pool, LAYOUT.tokens_per_block
        # Staged: the table is written when the stream gets there, as it is now, whatever becomes of the sequences
        # meanwhile.
        self.cache.tables.copy_batch_block_offsets(self.table, batch.sequences, stream=self.stream)
        with self.on:
            tokens, positions, owner = (
                self.cupy.asarray(values) for values in (batch.tokens, batch.positions, batch.owner)
            )
            blocks, places = self.table[owner, positions // size], positions % size

            def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
                pool[layer, 0, blocks, places], pool[layer, 1, blocks, places] = k, v
                q, out = self.cupy.ascontiguousarray(q), self.cupy.empty(q.shape)
                arguments = (
                    out,
                    q,
                    pool[layer, 0],
                    pool[layer, 1],
                    self.table,
                    np.int32(COLUMNS),
                    owner,
                    positions,
                    np.int32(len(q)),
                )
                self.kernel((-(-len(q) * HEADS // THREADS),), (THREADS,), arguments)
                return out

            logits = forward(self.weights, tokens, positions, attend, self.cupy)
            return np.asarray(self.cupy.asnumpy(logits))


def main(arguments: list[str] | None = None) -> int:
    parsed = options(("cuda",)).parse_args(arguments)
    missing = unusable()
    if missing:
        sys.exit(f"engine_cupy.py cannot run here: {missing}")
    import cupy

    return serve(
        get_device("cuda"), partial(CupyModel, cupy=cupy), chats=parsed.chats, seed=parsed.seed, check=parsed.check
    )


if __name__ == "__main__":
    sys.exit(main())

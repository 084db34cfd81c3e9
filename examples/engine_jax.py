"""The engine of engine_numpy.py with its model in JAX, which reads the pool in place through DLPack: on the CPU, and on
a GPU where one is.

    python examples/engine_jax.py [--device auto|cpu|cuda]

JAX takes arrays to be immutable, and a pool is not. So a step is one pure function, (pool, new tokens) -> (logits, new
K and V); what it returns is written into the pool by ``kvpool.scatter_kv`` when JAX is done reading. The next step
takes a new view.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
from engine_numpy import HEAD_DIM, HEADS, KV_HEADS, LAYOUT, Batch, Engine, Floats, forward, options, serve

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device, Stream
from kvpool.device.cuda import unusable

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    sys.exit(f"engine_jax.py needs JAX (pip install jax): {error}")

jax.config.update("jax_enable_x64", True)

COLUMNS = 16
"""Blocks of the longest sequence: one shape for all tables, so that JAX compiles once for each number of tokens."""


@jax.jit
def step(weights: Any, pool: Any, tokens: Any, positions: Any, owner: Any, table: Any) -> tuple[Any, Any]:
    """Logits [n, vocabulary], and the K and V of all layers [2, layers, n, kv_heads, head_dim]."""
    new = []

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        # K and V, sequences, positions, ...
        paged = pool[layer][:, table].reshape(2, len(table), -1, KV_HEADS, HEAD_DIM)
        new.append(jnp.stack([k, v]))
        # The pool does not have the new tokens yet: they take their places in what was gathered from it.
        keys, values = paged.at[:, owner, positions].set(new[-1], mode="drop")[:, owner]
        grouped = q.reshape(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("nkgd,nmkd->nkgm", grouped, keys) / np.sqrt(HEAD_DIM)
        future = jnp.arange(keys.shape[1]) > positions[:, None, None, None]
        return jnp.einsum("nkgm,nmkd->nkgd", jax.nn.softmax(jnp.where(future, -jnp.inf, scores)), values)

    return forward(weights, tokens, positions, attend, jnp), jnp.stack(new, axis=1)


class JaxModel:
    """What ``Engine`` runs: see ``PagedModel``."""

    def __init__(self, weights: dict[str, Any], cache: kvpool.KVCacheManager, stream: Stream, device: Device) -> None:
        self.weights, self.cache, self.stream, self.device = jax.tree.map(jnp.asarray, weights), cache, stream, device
        self.paged = kvpool.PagedKV.of_pool(LAYOUT, cache.device_pool)

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        n = len(batch.tokens)
        # JAX compiles for shapes: tokens are padded to 32 and its doubles, by some that no sequence has and that are
        # stored nowhere.
        more, nowhere = max(32, 1 << (n - 1).bit_length()) - n, COLUMNS * LAYOUT.tokens_per_block
        fillers = ((batch.tokens, 0), (batch.owner, 0), (batch.positions, nowhere), (batch.slots, -1))
        tokens, owner, positions, slots = (
            np.pad(values, (0, more), constant_values=filler) for values, filler in fillers
        )
        table = np.full((Engine.running_max, COLUMNS), -1)
        table[: len(batch.table), : batch.table.shape[1]] = batch.table
        # JAX does not show its streams, so the host waits where they meet the pool's: for onboards, for JAX, and for
        # the scatter.
        self.device.synchronize(self.device.record(self.stream))
        pool = jax.dlpack.from_dlpack(self.cache.device_pool)
        logits, new = jax.block_until_ready(step(self.weights, pool, tokens, positions, owner, table))
        kvpool.scatter_kv(self.paged, slots, new, stream=self.stream)
        self.device.synchronize(self.device.record(self.stream))
        return np.asarray(logits)[:n]


def main(arguments: list[str] | None = None) -> int:
    given = options(("auto", "cpu", "cuda")).parse_args(arguments)
    missing = unusable() or (
        None if jax.default_backend() == "gpu" else "this JAX sees no GPU (pip install 'jax[cuda13]')"
    )
    if given.device == "cuda" and missing:
        sys.exit(f"engine_jax.py cannot run on a GPU here: {missing}")
    if given.device == "cpu" or missing:
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
        device = get_device("cpu")
    else:
        device = get_device("cuda")
    return serve(device, partial(JaxModel, device=device), chats=given.chats, seed=given.seed, check=given.check)


if __name__ == "__main__":
    sys.exit(main())

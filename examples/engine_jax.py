"""The engine of engine_numpy.py with its model in JAX. The pool's device tier is a JAX array: each step gets it as a
donated argument, writes K and V where they belong, and gives it back at the same address.

    python examples/engine_jax.py [--device auto|cpu|cuda] [--store disk:/var/kv?capacity=1GiB]

Read it in this order: `step` (the model with paged attention), `DeviceTier` (the array that is a tier), `StoreEngine`
(a store for the pool: run it twice). `BesideTier` is for devices whose memory a pool cannot use, such as TPUs:
docs/jax.md.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from engine_numpy import HEAD_DIM, HEADS, KV_HEADS, LAYOUT, Batch, Engine, Floats, forward, options, serve

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device, Stream
from kvpool.device.cuda import unusable
from kvpool.storage import StorageManager, Store
from kvpool.storage.urls import open_store

try:
    import jax
    import jax.numpy as jnp
except ImportError as error:
    sys.exit(f'engine_jax.py needs JAX (pip install ".[jax]"): {error}')

jax.config.update("jax_enable_x64", True)

COLUMNS = 16
"""Blocks of the longest sequence: one shape for all tables, so that JAX compiles once for each number of tokens."""
BLOCKS = 26
MODEL = kvpool.ModelIdentity("tiny", "random", LAYOUT.dtype, LAYOUT, "engine_jax 1")


@partial(jax.jit, donate_argnums=0)
def step(kv: Any, weights: Any, tokens: Any, positions: Any, owner: Any, slots: Any, table: Any) -> tuple[Any, Any]:
    """The KV of all blocks with that of these tokens, and logits [n, vocabulary]. A slot after the last block is
    not written."""
    held = [kv]
    blocks, places = jnp.divmod(slots, LAYOUT.tokens_per_block)

    def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
        updated = held[0] = held[0].at[layer, :, blocks, places].set(jnp.stack([k, v], 1), mode="drop")
        # K and V, sequences, positions, ...
        paged = updated[layer][:, table].reshape(2, len(table), -1, KV_HEADS, HEAD_DIM)
        keys, values = paged[:, owner]
        grouped = q.reshape(-1, KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
        scores = jnp.einsum("nkgd,nmkd->nkgm", grouped, keys) / np.sqrt(HEAD_DIM)
        future = jnp.arange(keys.shape[1]) > positions[:, None, None, None]
        # What is masked out may be memory that was never written.
        values = jnp.where(jnp.isfinite(values), values, 0)
        return jnp.einsum("nkgm,nmkd->nkgd", jax.nn.softmax(jnp.where(future, -jnp.inf, scores)), values)

    logits = forward(weights, tokens, positions, attend, jnp)
    return held[0], logits


def padded(batch: Batch, blocks: int) -> tuple[Any, ...]:
    """A batch for ``step``. JAX compiles for shapes: tokens are padded to 32 and its doubles, by some that no sequence
    has and that are stored nowhere."""
    n = len(batch.tokens)
    more = max(32, 1 << (n - 1).bit_length()) - n
    fillers = ((batch.tokens, 0), (batch.positions, 0), (batch.owner, 0))
    tokens, positions, owner = (np.pad(values, (0, more), constant_values=filler) for values, filler in fillers)
    slots = np.pad(batch.slots, (0, more), constant_values=blocks * LAYOUT.tokens_per_block)
    table = np.zeros((Engine.running_max, COLUMNS), np.int64)
    table[: len(batch.table), : batch.table.shape[1]] = np.maximum(batch.table, 0)
    return tokens, positions, owner, slots, table


class DeviceTier:
    """The KV of all blocks as a JAX array that stays where it is, so that a pool can have its memory as device tier.

    A donated array is reused only if nobody else holds its memory: so the pool gets its address, and no view by DLPack.
    Raises RuntimeError if JAX gives a donated array back elsewhere.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.kv = jax.block_until_ready(jnp.zeros(LAYOUT.device_shape(blocks), LAYOUT.dtype))
        self.address = self.kv.unsafe_buffer_pointer()
        # Before anybody relies on it.
        self.replace(jax.jit(lambda kv: kv.at[0].set(0), donate_argnums=0)(self.kv))
        place = {"version": 3, "data": (self.address, False), "shape": (self.kv.nbytes,), "typestr": "|u1"}
        name = "__cuda_array_interface__" if jax.default_backend() == "gpu" else "__array_interface__"
        setattr(self, name, place)

    def replace(self, kv: Any) -> None:
        """Keep the array that a call has returned for the one that was donated to it."""
        self.kv = jax.block_until_ready(kv)
        if self.kv.unsafe_buffer_pointer() != self.address:
            raise RuntimeError(
                f"JAX {jax.__version__} on {jax.default_backend()} moves donated arrays: a pool cannot use this one as "
                "its tier. Keep a HostCache beside it: docs/jax.md"
            )


class JaxModel:
    """What ``Engine`` runs: see ``PagedModel``."""

    def __init__(
        self, weights: Any, cache: kvpool.KVCacheManager, stream: Stream, device: Device, tier: DeviceTier
    ) -> None:
        self.weights, self.stream, self.device, self.tier = jax.tree.map(jnp.asarray, weights), stream, device, tier

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        # JAX does not show its streams, so the host waits where they meet the pool's: for onboards, and for JAX.
        self.device.synchronize(self.device.record(self.stream))
        kv, logits = step(self.tier.kv, self.weights, *padded(batch, self.tier.blocks))
        self.tier.replace(kv)
        return np.asarray(logits)[: len(batch.tokens)]


class StoreEngine(Engine):
    """Load prompts from a store before they are admitted, and save all blocks there."""

    store: Store

    def run(self, check: bool = False) -> None:
        with StorageManager(self.cache, [self.store], identity=MODEL) as self.storage:
            super().run(check)
            self.storage.drain(60)
            loaded = self.storage.stats().loaded_blocks
        if loaded:
            self.happened["blocks that came from the store"] = loaded

    def admit(self) -> None:
        for chat in list(self.waiting)[: self.running_max - len(self.running)]:
            # Not long: blocks that were loaded for others may have to be used before there is room.
            self.storage.prefetch(self.cache.block_keys(chat.tokens), timeout=0.2).wait()
        super().admit()


class BesideTier:
    """A host tier for KV that JAX alone can address: blocks are copied there and back as arrays, by keys."""

    def __init__(self, host_blocks: int) -> None:
        self.cache = kvpool.HostCache(host_blocks, LAYOUT.block_bytes, identity=MODEL)
        self.tier = kvpool.HostTier.of(self.cache)

    def save(self, kv: Any, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Save those blocks that are not in the tier yet. Returns how many."""
        reserved, places = self.cache.reserve(keys), dict(zip(keys, blocks, strict=True))
        absent = np.array([places[key] for key in reserved.keys], np.int64)
        copied = np.asarray(jnp.moveaxis(kv[:, :, absent], 2, 0))
        self.tier.blocks[reserved.blocks] = copied.reshape(len(absent), -1).view(np.uint8)
        return self.cache.publish(reserved.keys)

    def load(self, kv: Any, keys: Sequence[bytes], blocks: Sequence[int]) -> Any:
        """The KV with these blocks filled. ``kv`` is donated. Raises BlockNotFound."""
        with self.cache.pin(keys) as lease:
            shape = (len(keys), *np.delete(kv.shape, 2))
            stored = self.tier.blocks[lease.blocks].view(kv.dtype).reshape(shape)
        return _filled(kv, np.array(blocks), np.moveaxis(stored, 0, 2))

    def close(self) -> None:
        self.cache.close()
        self.tier.close()


@partial(jax.jit, donate_argnums=0)
def _filled(kv: Any, blocks: Any, values: Any) -> Any:
    return kv.at[:, :, blocks].set(values)


def main(arguments: list[str] | None = None) -> int:
    parser = options(("auto", "cpu", "cuda"))
    parser.add_argument("--store", help="also keep blocks in this store, such as disk:/var/kv?capacity=1GiB")
    parsed = parser.parse_args(arguments)
    missing = unusable() or (
        None if jax.default_backend() == "gpu" else "this JAX sees no GPU (pip install 'jax[cuda13]')"
    )
    if parsed.device == "cuda" and missing:
        sys.exit(f"engine_jax.py cannot run on a GPU here: {missing}")
    if parsed.device == "cpu" or missing:
        jax.config.update("jax_platforms", "cpu")
    device, tier = get_device("cpu" if parsed.device == "cpu" or missing else "cuda"), DeviceTier(BLOCKS)
    pool: dict[str, Any] = {"memory": kvpool.MemoryOptions(device_memory=tier)}
    if parsed.store:
        StoreEngine.store = open_store(parsed.store)
        pool |= {"event_capacity": 4096, "secret": StoreEngine.store.secret}
    model, engine = partial(JaxModel, device=device, tier=tier), StoreEngine if parsed.store else Engine
    return serve(
        device, model, chats=parsed.chats, seed=parsed.seed, check=parsed.check, engine=engine, blocks=BLOCKS, **pool
    )


if __name__ == "__main__":
    sys.exit(main())

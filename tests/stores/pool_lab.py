"""Shared by tests of the storage manager: engines whose pools have storage managers, and one store under many pools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvpool import BlockKeys, KVCacheManager, LayerGroup, ModelIdentity
from kvpool.storage import MemoryStore, Prefetch
from kvpool.storage.storage_manager import StorageManager
from kvpool.storage.store import Store
from tests.engine import Engine, open_engine, small_layout

IDENTITY = ModelIdentity("tiny", "rev 1", "uint16", "2 layers", "test 1")
T = 4
"""tokens per block"""
SECRET = b"the secret of all pools here"
"""Pools that have it find what others have saved, as after a restart."""


def room(blocks: int) -> int:
    """Return the bytes of that many blocks of a store: each takes a page here."""
    return blocks * 4096


def make_engine(P: int = 32, S: int = 32, **options: Any) -> Engine:
    """An engine on a small pool."""
    return open_engine(T, P, S, **({"event_capacity": 4096, "secret": SECRET} | options))


def make_manager(engine: Engine, stores: Store | Sequence[Store], **options: Any) -> StorageManager:
    chosen = list(stores) if isinstance(stores, (list, tuple)) else [stores]
    return StorageManager(engine.cache, chosen, **({"identity": IDENTITY, "load_seconds": 600.0} | options))


def store(blocks: int = 256) -> MemoryStore:
    return MemoryStore(room(blocks))


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def seed(engine: Engine, manager: StorageManager, prompts: Iterable[Sequence[int]], **names: Any) -> None:
    """Compute prompts, and wait until they are saved."""
    for prompt in prompts:
        engine.seed(prompt, len(prompt), **names)
        assert manager.drain(600)


@contextmanager
def seeded(
    engine: Engine, prompt: Sequence[int], stores: Store | Sequence[Store], **options: Any
) -> Iterator[StorageManager]:
    """A storage manager that has saved a prompt."""
    with make_manager(engine, stores, **options) as manager:
        seed(engine, manager, [prompt])
        yield manager


def stocked(*prompts: Sequence[int]) -> MemoryStore:
    """A store in which another process has saved prompts."""
    engine, memory = make_engine(P=256, S=256), store(1024)
    with engine.cache, make_manager(engine, memory) as manager:
        seed(engine, manager, prompts)
    return memory


def prefetched(engine: Engine, manager: StorageManager, prompt: Sequence[int], **names: Any) -> Prefetch:
    """Prefetch a prompt, and wait for the end."""
    handle = manager.prefetch(engine.prompt(prompt, **names), timeout=600.0)
    assert handle.wait(600), manager.stats()
    return handle


def fetch(engine: Engine, manager: StorageManager, prompt: Sequence[int], **names: Any) -> int:
    """Prefetch a prompt. Return the number of blocks that came."""
    return prefetched(engine, manager, prompt, **names).blocks


def grouped(host_blocks: int = 32, head_dim: int = 3) -> KVCacheManager:
    """A pool of three groups: full attention in two parts, a window, and recurrent layers."""
    layouts = [small_layout(2, head_dim=head_dim), small_layout(2, kv_heads=1, head_dim=head_dim)]
    groups = [
        LayerGroup(layouts),
        LayerGroup(small_layout(2, layers=1, head_dim=head_dim), window=4),
        LayerGroup(small_layout(1, layers=3, head_dim=head_dim), kind="recurrent", snapshot_tokens=4),
    ]
    return KVCacheManager(
        groups=groups,
        device_blocks=[32] * 3,
        host_blocks=[host_blocks] * 3,
        device="cpu",
        event_capacity=4096,
        max_sequence_tokens=256,
        secret=SECRET,
    )


def write_all(cache: KVCacheManager, sequence: int, seed: int) -> None:
    """Write random bytes into the blocks of a sequence that it has not reused."""
    random = np.random.default_rng(seed)
    cached = int(cache.cached_tokens(sequence)) // 2
    for group, pools in zip(cache.groups, cache.memory.device_pools, strict=True):
        row = cache.block_table(sequence, group=group.index).dense()[0]
        for block in row[cached:]:
            for pool in pools if block >= 0 else ():
                part = pool[:, :, block] if pool.shape[2] == group.device_blocks else pool[block]
                part.view(np.uint8)[...] = random.integers(0, 256, part.view(np.uint8).shape, np.uint8)


def read_all(cache: KVCacheManager, keys: BlockKeys) -> dict[tuple[int, bytes], bytes]:
    """Return the bytes of the host copies of a prompt, by layer group and place."""
    contents = {}
    for group, pools in zip(cache.groups, cache.memory.host_pools, strict=True):
        for place, key in enumerate(keys.keys):
            lease = cache.find_and_pin_host(key, group=group.index)
            if lease is not None:
                block = int(lease.blocks[0]) - group.first_host_block
                contents[group.index, bytes([place])] = b"".join(pool[block].tobytes() for pool in pools)
                lease.close()
    return contents

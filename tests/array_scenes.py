"""Pools, caches and stores with something in them; and whether jitted code is handed memory of their callers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine import small_layout
from kvpool import HostCache, HostTier, KVCacheManager, LayerGroup, ModelIdentity, PagedKV
from kvpool.device.launches import Grid, Launch
from kvpool.device.sim import SimDevice
from kvpool.hostcache import HostCopies
from kvpool.pool import GraphTables
from kvpool.storage import HostStorageManager, MemoryStore, StorageManager, StoreWorker
from kvpool.tools.planner import Surveyor
from steps import arrays

T = 4


# -- what jitted code is handed --------------------------------------------------------------------

watched: list[Any] = []
seen: list[str] = []


def look(argument: Any) -> None:
    """Note whether something that jitted code is handed is, or points into, what is watched."""
    for array in watched:
        start = array.__array_interface__["data"][0]
        inside = range(start, start + array.nbytes)
        if isinstance(argument, np.ndarray):
            points = argument.dtype in (np.int64, np.uint64) and ((argument >= start) & (argument < inside.stop)).any()
            if np.shares_memory(argument, array) or points:
                seen.append("an array shares memory with the caller's, or points to it")
        elif isinstance(argument, (int, np.integer)) and int(argument) in inside:
            seen.append("an address is the caller's")


# -- scenes ------------------------------------------------------------------------------------------


class Plain:
    """Two sequences that run, a prompt that is cached on both tiers, and one on the host alone."""

    def __init__(self, device: Any = "cpu") -> None:
        self.cache = cache = KVCacheManager(
            small_layout(T), device_blocks=16, host_blocks=8, max_sequences=6, device=device, event_capacity=16
        )
        cache.release(self._committed(cache.add_sequence(np.arange(9))))
        cache.content.offload(np.arange(9))
        self.keys = cache.block_keys(np.arange(9))
        cache.imports.import_blocks(cache.block_keys(np.arange(300, 309)), [bytes(cache.layout.block_bytes)] * 2)
        self.one, self.two = (
            self._committed(cache.add_sequence(np.arange(100, 106))),
            cache.add_sequence(np.arange(200, 205)),
        )
        self.block = int(cache.block_table(self.one).dense()[0, 0])

    def _committed(self, sequence: int) -> int:
        self.cache.commit(sequence)
        return sequence

    @property
    def ids(self) -> list[int]:
        return [self.one, self.two]


class Away(Plain):
    """Two sequences that are swapped out."""

    def __init__(self) -> None:
        super().__init__()
        self.cache.swap_out(self.ids)


class Graph(Plain):
    """The same on a device whose streams can be captured."""

    def __init__(self) -> None:
        self.device = SimDevice(0, progress=0.0)
        super().__init__(device=self.device)
        self.stream, self.out = self.device.create_stream("graph"), arrays(2, 5, 2, 4)
        self.captured, self.graph = self.capture(self.cache.tables.capture_step_tables, self.out)

    def capture(self, call: Callable[..., GraphTables], target: Any) -> tuple[GraphTables, Any]:
        with self.device.capture(self.stream) as graph:
            return call(target, 2, stream=self.stream), graph

    def replay(self, captured: GraphTables, graph: Any, staged: dict[str, Any]) -> None:
        captured.stage(**staged, stream=self.stream)
        self.device.replay(graph, self.stream)
        self.device.synchronize()


class Grouped:
    """A pool with states and with cross attention, and a sequence that runs."""

    def __init__(self) -> None:
        kinds = [
            LayerGroup(small_layout(T)),
            LayerGroup(small_layout(1), kind="recurrent"),
            LayerGroup(small_layout(T), kind="cross"),
        ]
        self.cache = KVCacheManager(
            groups=kinds, device_blocks=[16, 16, 8], host_blocks=[4, 4, 4], max_sequence_tokens=64, device="cpu"
        )
        self.one = self.cache.add_sequence(np.arange(9), encoder_tokens=5)


class Nothing:
    """For what needs no pool: memory of a paged cache and of staging, which may be written, and what comes after it."""

    def __init__(self) -> None:
        self.memory, self.staging = np.zeros((2, 2, 8, T, 2, 3), np.uint16), np.zeros((2, 2, 6, 6), np.uint16)
        self.paged = PagedKV.of(self.memory[:, :, :4], "| L P B T H D")
        self.surveyor = Surveyor(T)


class Paged(Nothing):
    """Paged memory of an engine's own, and a host tier."""

    def __init__(self) -> None:
        super().__init__()
        identity = ModelIdentity("walk", "1", "uint16", "pages", "1")
        tier = HostTier(4, 2 * small_layout(T).block_bytes, identity=identity)
        self.copies = HostCopies(tier, self.paged, blocks_per_host_block=2, device="cpu")


WALKED = ModelIdentity("walk", "1", "uint8", "blocks of 64 bytes", "1")


def named(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


class Hosted:
    """A host cache with keys that are there, that somebody reads, and that wait for their bytes."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 64, identity=WALKED, event_capacity=16)
        self.cache.publish(self.cache.reserve(named("a", "b", "c")).keys)
        self.cache.reserve(named("p", "q"))
        self.lease = self.cache.pin(named("c"))
        self.cursor = self.cache.open_dirty_cursor(pending=False)


class Stored:
    """A store that has four blocks, and the memory that blocks are saved from and loaded to."""

    def __init__(self) -> None:
        memory = np.zeros((8, 64), np.uint8)
        self.queue = StoreWorker(MemoryStore(64 * 64), memory, WALKED)
        assert self.queue.save(self.keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(600, returned=True)

    def keys(self, *numbers: int) -> Any:
        return self.queue.secret.derive_keys(bytes([number]) for number in numbers)

    def close(self) -> None:
        assert self.queue.drain(600) and self.queue.close(600)


class Kept:
    """A host cache with a storage manager. One key is there, one waits for its bytes, and one is in the store."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 64, identity=WALKED)
        tier = HostTier(8, 64, identity=WALKED, memory=np.zeros(8 * 64, np.uint8))
        self.manager = HostStorageManager(self.cache, tier, [MemoryStore(64 * 64)])
        self.manager.publish(self.cache.reserve(named("stored")).keys)
        assert self.manager.drain(600)
        self.cache.forget(named("stored"))
        self.cache.publish(self.cache.reserve(named("here", "there")).keys)
        self.cache.reserve(named("p", "q"))

    def close(self) -> None:
        assert self.manager.drain(600) and self.manager.close(600)


class Saved(Plain):
    """A pool with a storage manager."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = StorageManager(self.cache, [MemoryStore(1 << 20)], identity=WALKED)

    def close(self) -> None:
        assert self.manager.drain(600) and self.manager.close(600)


class Uploads:
    """A launcher without a GPU: what would be uploaded is looked at like what jitted code is handed."""

    grid = Grid(1)

    def stream(self, stream: object, captured: bool = False) -> int:
        return 0

    def launch(self, launch: Launch, stream: int) -> None: ...

    def device_addresses(self, addresses: Any) -> Any:
        return addresses

    @contextmanager
    def uploaded(self, array: Any, stream: int, host: bool) -> Iterator[int]:
        look(array)
        yield 0

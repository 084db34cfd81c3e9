"""Pools, caches and stores with something in them, whose calls are made with memory that changes; and whether jitted
code is handed such memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from engine import Clock, small_layout
from kvpool import HostCache, HostTier, KVCacheManager, LayerGroup, ModelIdentity, PagedKV
from kvpool.device.cpu import CpuDevice
from kvpool.device.launches import Grid, Launch
from kvpool.device.regions import Region
from kvpool.device.sim import SimDevice
from kvpool.hostcache import HostCopies
from kvpool.pool import GraphTables
from kvpool.storage import HostStorageManager, MemoryStore, StorageManager, StoreWorker
from kvpool.tools.planner import Surveyor
from steps import arrays
from tests import debug

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


class Scene:
    """A pool with something in it; always the same."""

    def __init__(self, **options: Any) -> None:
        shape = {
            "device_blocks": 16,
            "host_blocks": 8,
            "max_sequences": 6,
            "secret": bytes(32),
            "clock": Clock(),
            "device": "cpu",
        }
        if "groups" not in options:
            options["layout"] = small_layout(T)
        self.cache = KVCacheManager(**shape | options)
        for state in self.cache.core.states:
            state.sequences["generation"] = 1  # drawn by chance, so that no id of one pool is one of another

    def picture(self) -> object:
        return [debug.dump(state) for state in self.cache.core.states]


class Plain(Scene):
    """Two sequences that run, a prompt that is cached on both tiers, and one on the host alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(event_capacity=16, **options)
        cache = self.cache
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


class Grouped(Scene):
    """A pool with states and with cross attention, and a sequence that runs."""

    def __init__(self) -> None:
        kinds = [
            LayerGroup(small_layout(T)),
            LayerGroup(small_layout(1), kind="recurrent"),
            LayerGroup(small_layout(T), kind="cross"),
        ]
        super().__init__(groups=kinds, device_blocks=[16, 16, 8], host_blocks=[4, 4, 4], max_sequence_tokens=64)
        self.one = self.cache.add_sequence(np.arange(9), encoder_tokens=5)


class Nothing:
    """For what needs no pool: memory of a paged cache and of staging, which may be written, and what comes after it."""

    def __init__(self) -> None:
        # one allocation: which address is lower decides on lines of a call
        both = np.zeros(2 * 2 * 8 * T * 6 + 2 * 2 * 6 * 6, np.uint16)
        self.memory, self.staging = (
            both[: -2 * 2 * 6 * 6].reshape(2, 2, 8, T, 2, 3),
            both[-2 * 2 * 6 * 6 :].reshape(2, 2, 6, 6),
        )
        self.paged = PagedKV.of(self.memory[:, :, :4], "| L P B T H D")
        assert self.paged.extent.nbytes  # worked out once, so that every call comes to as many lines
        self.staging[:] = np.arange(self.staging.size).reshape(self.staging.shape)
        self.layout = small_layout(T)
        self.device = CpuDevice()
        self.tiers = [np.arange(count * self.layout.block_bytes, dtype=np.uint32).astype(np.uint8) for count in (4, 2)]
        self.device.bind([Region.of(self.layout, *self.tiers, 4, 2)])
        self.surveyor = Surveyor(T)

    def picture(self) -> object:
        known, tables = int(self.surveyor.tables.counts[0]), self.surveyor.tables._asdict()
        tables = [tables[name].tobytes() for name in ("slots", "distances", "counts")] + [
            tables["keys"][:known].tobytes()
        ]
        return self.memory.tobytes(), self.staging.tobytes(), [tier.tobytes() for tier in self.tiers], tables


class Paged(Nothing):
    """Paged memory of an engine's own, and a host tier with something in it."""

    def __init__(self) -> None:
        super().__init__()
        identity = ModelIdentity("walk", "1", "uint16", "pages", "1")
        self.host = np.arange(4 * 2 * self.layout.block_bytes, dtype=np.uint32).astype(np.uint8)
        tier = HostTier(4, 2 * self.layout.block_bytes, identity=identity, memory=self.host)
        self.copies = HostCopies(tier, self.paged, blocks_per_host_block=2, device="cpu")

    def picture(self) -> object:
        return super().picture(), self.host.tobytes()


WALKED = ModelIdentity("walk", "1", "uint8", "blocks of 64 bytes", "1")


def named(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def _clocked(**options: Any) -> dict[str, Any]:
    return {"identity": WALKED, "secret": bytes(32), "clock": Clock(), "event_capacity": 16} | options


class Hosted:
    """A host cache with keys that are there, that somebody reads, and that wait for their bytes."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 64, **_clocked())
        self.cache.publish(self.cache.reserve(named("a", "b", "c")).keys)
        self.cache.reserve(named("p", "q"))
        self.lease = self.cache.pin(named("c"))
        self.cursor = self.cache.open_dirty_cursor(pending=False)

    def picture(self) -> object:
        return [debug.dump(state) for state in self.cache._states], len(self.cache.leases)


class Stored:
    """A store that has four blocks, and the memory that blocks are saved from and loaded to."""

    def __init__(self) -> None:
        self.store = MemoryStore(64 * 64)
        self.memory = np.arange(8 * 64, dtype=np.uint32).astype(np.uint8).reshape(8, 64)
        self.memory[:] += np.arange(8, dtype=np.uint8)[:, None]
        self.store._secret = bytes(32)
        self.queue = StoreWorker(self.store, self.memory, WALKED)
        assert self.queue.save(self.keys(0, 1, 2, 3), [0, 1, 2, 3]).wait(600, returned=True)

    def keys(self, *numbers: int) -> Any:
        return self.queue.secret.derive_keys(bytes([number]) for number in numbers)

    def picture(self) -> object:
        assert self.queue.drain(600)
        kept = sorted((key, *block) for key, block in self.store._blocks.items())
        return self.memory.tobytes(), kept, self.queue.free("load")

    def close(self) -> None:
        assert self.queue.close(600)


class Kept:
    """A host cache with a storage manager. One key is there, one waits for its bytes, and one is in the store."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 64, **_clocked())
        tier = HostTier(8, 64, identity=WALKED, memory=np.zeros(8 * 64, np.uint8))
        self.store = MemoryStore(64 * 64)
        self.store._secret = bytes(32)
        self.manager = HostStorageManager(self.cache, tier, [self.store])
        self.manager.publish(self.cache.reserve(named("stored")).keys)
        assert self.manager.drain(600)
        self.cache.forget(named("stored"))
        self.cache.publish(self.cache.reserve(named("here", "there")).keys)
        self.cache.reserve(named("p", "q"))

    def picture(self) -> object:
        assert self.manager.drain(600)
        kept = sorted(self.store._blocks), sorted(self.manager._loads._absent)
        return [debug.dump(state) for state in self.cache._states], kept

    def close(self) -> None:
        assert self.manager.close(600)


class Saved(Plain):
    """A pool with a storage manager, whose thread works by itself: the pool is not looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = StorageManager(self.cache, [MemoryStore(1 << 20)], identity=WALKED)
        assert self.manager.drain(600)

    def picture(self) -> object:
        return None

    def close(self) -> None:
        assert self.manager.close(600)


class Forgetting(Saved):
    """The same, after a call that takes something from the pool: it says what is left of the prompt."""

    def picture(self) -> object:
        return self.cache.match_prefix(np.arange(9)).tokens


class Uploads:
    """A launcher without a GPU: what would be uploaded is looked at like what jitted code is handed."""

    grid = Grid(1)

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def stream(self, stream: object, captured: bool = False) -> int:
        return 0

    def launch(self, launch: Launch, stream: int) -> None: ...

    def device_addresses(self, addresses: Any) -> Any:
        return addresses

    @contextmanager
    def uploaded(self, array: Any, stream: int, host: bool) -> Iterator[int]:
        look(array)
        self.seen.append(array.tolist())
        yield 0

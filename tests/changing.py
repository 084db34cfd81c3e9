"""Every public verb with every array that it takes: arguments that it accepts, and what each of them is changed to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine import Clock, small_layout
from kvpool import (
    BlockKeys,
    GraphTables,
    HostCache,
    HostCopies,
    HostTier,
    KVCacheManager,
    LayerGroup,
    ModelIdentity,
    PagedKV,
    StagingBuffers,
    StridedArray,
    gather_kv,
    scatter_kv,
)
from kvpool.device.cpu import CpuDevice
from kvpool.device.launches import Grid, Launch
from kvpool.device.regions import Region
from kvpool.device.sim import SimDevice
from kvpool.hostcache.host_copies import HostPlace
from kvpool.storage import BlockNames, HostStorageManager, MemoryStore, StorageManager, StoreRequest, StoreWorker
from kvpool.tools.planner import Surveyor
from kvpool.tools.replay.content import Request
from steps import NAMES, arrays
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
        cache.offload(np.arange(9))
        self.keys = cache.block_keys(np.arange(9))
        cache.import_blocks(cache.block_keys(np.arange(300, 309)), [bytes(cache.layout.block_bytes)] * 2)
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
        self.captured, self.graph = self.capture(self.cache.capture_step_tables, self.out)

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


def _named(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def _clocked(**options: Any) -> dict[str, Any]:
    return {"identity": WALKED, "secret": bytes(32), "clock": Clock(), "event_capacity": 16} | options


class Hosted:
    """A host cache with keys that are there, that somebody reads, and that wait for their bytes."""

    def __init__(self) -> None:
        self.cache = HostCache(8, 64, **_clocked())
        self.cache.publish(self.cache.reserve(_named("a", "b", "c")).keys)
        self.cache.reserve(_named("p", "q"))
        self.lease = self.cache.pin(_named("c"))
        self.cursor = self.cache.open_dirty_cursor(pending=False)

    def picture(self) -> object:
        return [debug.dump(state) for state in self.cache._states], len(self.cache.leases)


class Stored:
    """A store that has four blocks, and the memory that blocks are saved from and loaded to."""

    def __init__(self) -> None:
        self.store = MemoryStore(64 * 64)
        self.memory = np.arange(8 * 64, dtype=np.uint32).astype(np.uint8).reshape(8, 64)
        self.memory[:] += np.arange(8, dtype=np.uint8)[:, None]
        self.store.secret = bytes(32)
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
        self.store.secret = bytes(32)
        self.manager = HostStorageManager(self.cache, tier, [self.store])
        self.manager.publish(self.cache.reserve(_named("stored")).keys)
        assert self.manager.drain(600)
        self.cache.forget(_named("stored"))
        self.cache.publish(self.cache.reserve(_named("here", "there")).keys)
        self.cache.reserve(_named("p", "q"))

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


# -- cases -------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One verb with arguments that it accepts, those that are arrays as lists of numbers, and what each of them is
    changed to."""

    verb: str
    scene: Callable[[], Any]
    call: Callable[..., Any]
    arrays: dict[str, tuple[Any, Any]]
    """For each argument (before, after), of the scene."""
    dtypes: dict[str, Any] = {}
    """Where it is not int64."""
    forms: tuple[str, ...] = ("array", "interface", "list")
    """What the argument may be."""


def verb(
    name: str, scene: Callable[[], Any] = Plain, dtypes: dict[str, Any] | None = None, /, *rest: Any, **arrays: Any
) -> Case:
    """A call of a pool's method with these arrays, and with other arguments ``rest[0]``."""
    others = rest[0] if rest else {}
    return Case(
        name, scene, lambda scene, arguments: getattr(scene.cache, name)(**others, **arguments), arrays, dtypes or {}
    )


def of_both(numbers: Callable[[Any], list[int]], place: int, value: int) -> tuple[Any, Any]:
    """Numbers that depend on the scene, and the same with another value in one place."""

    def changed(scene: Any) -> list[int]:
        changed = list(numbers(scene))
        changed[place] = value
        return changed

    return numbers, changed


FAR, MANY = 1 << 40, 2_000_000
BOTH = of_both(lambda scene: scene.ids, -1, FAR)
ONE = of_both(lambda scene: [scene.one], -1, FAR)
APPENDED = {"ids": BOTH, "tokens": ([1, 2, 3], [1, 2, 9]), "counts": ([1, 2], [1, MANY])}
STEP = {"ids": BOTH, "first": ([4, 1], [4, FAR]), "counts": ([2, 3], [2, MANY])}
PROMPT = list(range(9)), [*range(5), 70, 71, 72, 73]
KEYS = (lambda scene: scene.keys.keys.tolist()), (lambda scene: [[1, 2], [3, 4]])
RUNNING = list(range(100, 106)), [1, *range(101, 106)]
ON_HOST = list(range(300, 309)), [*range(300, 307), 1, 1]
OWN_KEYS = (lambda scene: scene.cache.block_keys(np.arange(100, 106)).keys.tolist()), (lambda scene: [[1, 2]])
KEY = (lambda scene: scene.keys.keys[0].tolist()), (lambda scene: [1, 2])
SLOTS = {"slot_mapping": ([0, 1, 2, 5, -1, 15], [0, 1, 2, 5, -1, 31])}
STORED = (lambda scene: scene.keys(0, 1).tolist()), (lambda scene: scene.keys(2, 9).tolist())
KEEPER_VERBS = "prefetch", "match_prefix", "explain"
INT32, UINT64, ARRAYS, ARRAY, LIST = np.int32, np.uint64, ("array", "interface"), ("array",), ("list",)
TOKENS = {"prompt": INT32}


def _table(rows: int, dtype: Any = np.int32) -> Any:
    return np.full((rows, 6), -7, dtype)


def _offsets(scene: Any, arguments: dict[str, Any]) -> Any:
    target = _table(4)
    scene.cache.copy_batch_block_offsets(target, **arguments)
    return target


def _step(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        out = arrays(2, 5, 2, 4)
        if name == "step_tables":
            scene.cache.step_tables(**arguments, out=out)
        else:
            scene.cache.copy_step_tables(out, **arguments)
        return [getattr(out, name) for name in NAMES]

    return call


def _captured(scene: Any, arguments: dict[str, Any]) -> Any:
    target = _table(4)
    captured, graph = scene.capture(partial(scene.cache.capture_block_offsets, **arguments), target)
    scene.replay(captured, graph, {"ids": scene.ids})
    captured.close()
    return target


def _staged(scene: Any, arguments: dict[str, Any]) -> Any:
    scene.replay(scene.captured, scene.graph, arguments)
    return [getattr(scene.out, name).copy() for name in NAMES]


def _csr(scene: Any, arguments: dict[str, Any]) -> Any:
    vectors = np.full(3, -7, np.int32), np.full(12, -7, np.int32), np.full(2, -7, np.int32)
    scene.cache.copy_batch_block_csr(*vectors, **arguments)
    return vectors


def _batch(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: getattr(scene.cache, name)([arguments["prompts"], [1, 2]])


def _reserve(scene: Any, arguments: dict[str, Any]) -> Any:
    options = {"encoder_tokens": 5} if isinstance(scene, Grouped) else {}
    return scene.cache.reserve(**options | arguments)


def _cross(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        if name == "blocks_needed":
            return scene.cache.blocks_needed(np.arange(40, 50, dtype=np.int32), group=2, **arguments)
        prompt = np.arange(40, 50, dtype=np.int32)
        batch = name in ("add_sequence_batch", "plan_batch")
        return getattr(scene.cache, name)([prompt] if batch else prompt, **arguments)

    return call


def _hint(message: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": "drop", "action_version": 1, "payload": {"keys": message}}
    return {"protocol_version": 1, "message_id": "m", "actions": [action]}


def _lacking(scene: Any, arguments: dict[str, Any]) -> Any:
    return scene.cache.missing_blocks(np.arange(40, 49, dtype=np.int32), **arguments)


def _import(scene: Any, arguments: dict[str, Any]) -> Any:
    data = [bytes([i]) * scene.cache.layout.block_bytes for i in range(2)]
    return scene.cache.import_blocks(scene.cache.block_keys(np.arange(50, 60)), **{"data": data} | arguments)


def _copies(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    return lambda scene, arguments: copy(scene.paged, arguments["slot_mapping"], scene.staging)


def _several(copy: Callable[..., None]) -> Callable[[Any, dict[str, Any]], Any]:
    """The same staging as two, of which the first is skipped in part."""

    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        two = StagingBuffers([scene.staging[:, :, :4], scene.staging[:, :, 4:]])
        copy(scene.paged, arguments["slot_mapping"], two, skip_prefix_n_tokens=1)

    return call


def _host_copy(name: str) -> Callable[[Any, dict[str, Any]], Any]:
    def call(scene: Any, arguments: dict[str, Any]) -> Any:
        done = getattr(scene.copies, name)(**arguments, skip_prefix_n_tokens=1)
        return done.nbytes, done.fragments

    return call


def _places(scene: Any, arguments: dict[str, Any]) -> Any:
    with HostCopies(scene.copies.tier, [scene.paged] * 2, device="cpu", **arguments) as copies:
        return copies.group_bytes


def _two(step: int, *at: int) -> list[HostPlace]:
    return [HostPlace(first, step, ((0, 48, 12), (48, 48, 12))) for first in at]


def _uploads(scene: Any, arguments: dict[str, Any]) -> Any:
    launcher, device = Uploads(), StridedArray(1 << 20, scene.staging.shape, 2, memory="device", kind="u")
    scatter_kv(scene.paged, arguments["slot_mapping"], device, launcher=launcher)
    return launcher.seen


def _opaque(owner: str, name: str) -> Callable[[Any, dict[str, Any]], Any]:
    others = {"priority": 80} if name == "set_priority" else {}
    return lambda scene, arguments: getattr(getattr(scene, owner), name)(**others, **arguments)


def _publish(scene: Any, arguments: dict[str, Any]) -> int:
    return scene.manager.publish(_named("p", "q"), **arguments)


def _read_dirty(scene: Any, arguments: dict[str, Any]) -> list[bytes]:
    return scene.cache.read_dirty(scene.cursor, **arguments)


def _jobs(name: str) -> Callable[[Any, dict[str, Any]], StoreRequest]:
    """A job of two blocks, in rows that come after those that were saved."""
    others = {"rows": [6, 7]} if name in ("load", "save") else {}
    return lambda scene, arguments: getattr(scene.queue, name)(**others | arguments)


def _block_keys(scene: Any, arguments: dict[str, Any]) -> BlockKeys:
    keys = scene.keys
    return BlockKeys(**arguments, salt=None, adapter_id=None, root=(keys.namespace, *keys.root), origin=keys.origin)


def _strided(scene: Any, arguments: dict[str, Any]) -> Any:
    strided = StridedArray(scene.memory.ctypes.data, itemsize=2, kind="u", owner=scene.memory, **arguments)
    return strided.shape, strided.steps


def _record(scene: Any, arguments: dict[str, Any]) -> Any:
    scene.surveyor.record(Request(0, 0, 12, 0, hash_ids=arguments["hash_ids"], tokens_per_id=4))


CASES = [
    verb("block_keys", Plain, {"tokens": INT32}, tokens=PROMPT, extra_ids=([0] * 8 + [5], [0] * 8 + [6])),
    *(verb(name, Plain, TOKENS, prompt=PROMPT) for name in ("match_prefix", "add_sequence", "explain")),
    *(verb(name, Plain, TOKENS, prompt=RUNNING) for name in ("offload", "blocks_needed")),
    verb("prefetch", Plain, TOKENS, prompt=ON_HOST),
    Case("reserve", Plain, _reserve, {"prompt": PROMPT}, TOKENS),
    verb("offload", Plain, {"prompt": UINT64}, prompt=OWN_KEYS)._replace(forms=ARRAYS),
    *(verb(name, Plain, TOKENS, prompt=PROMPT) for name in ("forget", "cached_blocks")),
    verb("set_priority", Plain, TOKENS, {"priority": 80}, prompt=PROMPT),
    verb("missing_blocks", Plain, TOKENS, {"there": np.ones((1, 2), np.bool_)}, prompt=PROMPT),
    Case("missing_blocks", Plain, _lacking, {"there": ([[True, True]], [[True, False]])}, {"there": np.bool_}, ARRAYS),
    *(
        verb(name, Plain, {"prompt": UINT64}, prompt=KEYS)._replace(forms=ARRAYS)
        for name in ("forget", "cached_blocks")
    ),
    verb("set_priority", Plain, {"prompt": UINT64}, {"priority": 80}, prompt=KEYS)._replace(forms=ARRAYS),
    Case(
        "BlockKeys.extend",
        Plain,
        lambda scene, arguments: scene.keys.extend(**arguments),
        {"tokens": ([1, 2, 3, 4], [1, 2, 3, 9]), "extra_ids": ([0, 0, 0, 5], [0, 0, 0, 6])},
        {"tokens": INT32},
    ),
    verb("blocks_needed", Plain, {}, sequences=BOTH, new_tokens=([1, 4], [1, MANY])),
    *(
        Case(name, Plain, _batch(name), {"prompts": PROMPT}, {"prompts": INT32})
        for name in ("add_sequence_batch", "plan_batch")
    ),
    *(
        Case(name, Grouped, _cross(name), {"encoder_tokens": ([5], [9])})
        for name in ("add_sequence", "add_sequence_batch", "plan_batch", "reserve", "blocks_needed")
    ),
    verb("append_tokens", Plain, {"tokens": INT32}, **APPENDED),
    verb("commit", Plain, {}, ids=BOTH, counts=([6, 5], [6, MANY])),
    verb("rewind", Plain, {}, ids=of_both(lambda scene: scene.ids, 0, FAR), counts=([1, 2], [1, MANY])),
    *(
        verb(name, Plain, {}, ids=BOTH)
        for name in "release swap_out evictable_after_release keys_of request_stats block_table cached_tokens "
        "sequence_length committed_tokens load_targets fork".split()
    ),
    verb("block_table", Plain, {}, {"stream": 0}, ids=BOTH),
    verb("reorder", Plain, {}, ids=BOTH, parents=([1, 0], [1, FAR])),
    verb(
        "accept_drafts",
        Plain,
        {},
        {"drafts": [3]},
        ids=of_both(lambda scene: [scene.two], 0, FAR),
        accepted=([0, 2], [0, MANY]),
    ),
    verb(
        "accept_drafts",
        Plain,
        {},
        ids=of_both(lambda scene: [scene.two], 0, FAR),
        drafts=([3], [MANY]),
        accepted=([0, 2], [1, 2]),
        counts=([2], [MANY]),
    ),
    verb("resume", Away, {}, ids=BOTH),
    Case(
        "hints",
        Plain,
        lambda s, arguments: s.cache.hints(_hint(**arguments)),
        {"message": KEYS},
        {"message": UINT64},
        ARRAYS,
    ),
    verb("state_blocks", Grouped, {}, {"group": 1}, ids=ONE),
    Case("copy_batch_block_offsets", Plain, _offsets, {"ids": BOTH, "rows": ([3, 1], [3, FAR])}),
    Case("copy_batch_block_csr", Plain, _csr, {"ids": BOTH}),
    *(Case(name, Plain, _step(name), STEP) for name in ("step_tables", "copy_step_tables")),
    Case("capture_block_offsets", Graph, _captured, {"rows": ([3, 1], [3, FAR])}),
    Case("GraphTables.stage", Graph, _staged, STEP),
    verb("pin", Plain, {"keys": UINT64}, keys=KEYS)._replace(forms=ARRAYS),
    Case(
        "find_and_pin_host",
        Plain,
        lambda scene, arguments: scene.cache.find_and_pin_host(**arguments),
        {"key": KEY},
        {"key": UINT64},
        ARRAYS,
    ),
    verb("pin_blocks", Plain, {}, ids=of_both(lambda scene: [scene.block], 0, FAR)),
    Case("gather_kv", Nothing, _copies(gather_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv", Nothing, _copies(scatter_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv", Nothing, _uploads, SLOTS, {}, ARRAYS),
    Case("gather_kv of StagingBuffers", Nothing, _several(gather_kv), SLOTS, {}, ARRAYS),
    Case("scatter_kv of StagingBuffers", Nothing, _several(scatter_kv), SLOTS, {}, ARRAYS),
    *(
        Case(
            f"HostCopies.{name}",
            Paged,
            _host_copy(name),
            {"blocks": ([2, -1, 1], [2, -1, FAR]), "host_blocks": ([3, 0], [3, FAR])},
        )
        for name in ("copy_in", "copy_out")
    ),
    Case("HostCopies", Paged, _places, {"places": (_two(192, 0, 96), _two(96, 0, 192))}, {}, LIST),
    *(
        Case(f"HostCache.{name}", Hosted, _opaque("cache", name), {"keys": (_named(*before), _named(*after))}, {}, LIST)
        for name, before, after in (
            ("lookup", "ax", "ap"),
            ("pin", "ab", "ax"),
            ("touch", "abc", "xbc"),
            ("reserve", "xy", "xz"),
            ("publish", "pq", "px"),
            ("in_order", "pq", "px"),
            ("abort", "pq", "px"),
            ("forget", "ab", "ax"),
            ("set_priority", "ab", "ax"),
        )
    ),
    Case("HostStorageManager.publish", Kept, _publish, {"unsaved": (_named("p"), _named("x"))}, {}, LIST),
    Case("HostCache.read_dirty", Hosted, _read_dirty, {"keys": (_named(*"ab"), _named(*"ax"))}, {}, LIST),
    *(
        Case(f"HostStorageManager.{name}", Kept, _opaque("manager", name), {"keys": (before, after)}, {}, LIST)
        for name, before, after in (
            ("lookup", _named("here", "stored"), _named("here", "x")),
            ("pin", _named("here", "there"), _named("here", "x")),
            ("publish", _named("p", "q"), _named("p", "x")),
            ("touch", _named("here", "there"), _named("here", "x")),
            ("forget", _named("here", "there"), _named("here", "x")),
        )
    ),
    *(
        Case(f"StoreWorker.{name}", Stored, _jobs(name), {"keys": STORED} | rows, {"keys": np.uint8}, forms)
        for name, rows, forms in (
            ("find", {}, ARRAY),
            ("forget", {}, ARRAY),
            ("load", {}, ARRAY),
            ("load", {"rows": ([6, 7], [6, 5])}, ARRAY),
            ("save", {"rows": ([6, 7], [6, FAR])}, ARRAY),
        )
    ),
    Case(
        "StoreWorker.find_now",
        Stored,
        lambda scene, arguments: scene.queue.find_now(arguments["keys"]).tolist(),
        {"keys": STORED},
        {"keys": np.uint8},
        ARRAY,
    ),
    Case(
        "StoreWorker.give_back",
        Stored,
        lambda scene, arguments: (
            scene.queue.give_back(arguments["rows"]),
            sorted(scene.queue.take("load", 99).tolist()),
        ),
        {"rows": ([6, 7], [6, 5])},
        {},
        ARRAY,
    ),
    *(
        Case(f"StorageManager.{name}", Saved, _opaque("manager", name), {"prompt": PROMPT}, TOKENS)
        for name in KEEPER_VERBS
    ),
    Case("StorageManager.forget", Forgetting, _opaque("manager", "forget"), {"prompt": PROMPT}, TOKENS),
    Case(
        "StorageManager.forget", Forgetting, _opaque("manager", "forget"), {"prompt": KEYS}, {"prompt": UINT64}, ARRAYS
    ),
    *(
        Case("BlockNames", Nothing, call, {name: (_named("here", "there"), _named("here", "x"))}, {}, LIST)
        for name, call in (
            ("names", lambda scene, arguments: BlockNames(**arguments).names),
            ("contexts", lambda scene, arguments: BlockNames([b"a", b"b"], **arguments).contexts),
        )
    ),
    Case(
        "BlockKeys",
        Plain,
        _block_keys,
        {"tokens": PROMPT, "keys": KEYS, "extra_ids": ([0] * 8 + [5], [0] * 8 + [6])},
        {"tokens": INT32, "keys": UINT64},
        ARRAY,
    ),
    Case("StridedArray", Nothing, _strided, {"shape": ([3, 2], [2, 2]), "strides": ([8, 2], [16, 4])}, {}, LIST),
    Case("Surveyor.record", Nothing, _record, {"hash_ids": ([1, 2, 3], [1, 2, 4])}, {"hash_ids": UINT64}, ARRAY),
]


def _numbers(scene: Any, values: Any) -> list[Any]:
    return list(values(scene) if callable(values) else values)


class Interface:
    """An array that is none of NumPy's."""

    def __init__(self, array: Any) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__

    def __repr__(self) -> str:
        return "Interface()"


class Argument:
    """Memory of the caller's in one of several forms, and what becomes of it."""

    def __init__(self, case: Case, name: str, form: str, scene: Any, changes: bool) -> None:
        before, after = (_numbers(scene, values) for values in case.arrays[name])
        dtype = case.dtypes.get(name, np.int64)
        self.memory: Any = list(before) if form == "list" else np.array(before, dtype)
        self.after: Any = after if form == "list" else np.array(after, dtype)
        self.value = Interface(self.memory) if form == "interface" else self.memory
        if changes:
            self.change()

    def change(self) -> None:
        self.memory[:] = self.after


def _ids() -> Iterator[str]:
    """A name for each case: its verb, with a number from the second case of a verb on."""
    counts: Counter[str] = Counter()
    for case in CASES:
        counts[case.verb] += 1
        yield case.verb if counts[case.verb] == 1 else f"{case.verb} {counts[case.verb]}"


WALK = [
    pytest.param(case, name, form, id=f"{case_id}-{name}-{form}")
    for case_id, case in zip(_ids(), CASES, strict=True)
    for name in case.arrays
    for form in case.forms
]
CHANGED = [
    param
    for param in WALK
    for case, name, form in [param.values]
    if form == "array"
    or (form == "list" and (name == next(iter(case.arrays)) or case.forms == LIST))
    or (form == "interface" and 1 < len(case.arrays) and name == list(case.arrays)[-1])
]
"""Every argument as an array, of each case the first one as a list, and the last of several in another package's
array."""


@contextmanager
def scenes(case: Case) -> Iterator[Callable[[], Any]]:
    """Makes scenes of a case. One that has threads is closed when the next one is made, and at the end."""
    made: list[Any] = []

    def close() -> None:
        while made:
            getattr(made.pop(), "close", lambda: None)()

    def make() -> Any:
        close()
        made.append(case.scene())
        return made[0]

    try:
        yield make
    finally:
        close()


def given_to(case: Case, scene: Any, changed: str, form: str, changes: bool) -> tuple[dict[str, Any], Argument]:
    """The arguments of a call, of which one is in this form and can be changed."""
    arguments = {
        name: Argument(case, name, form if name == changed else "array", scene, changes and name == changed)
        for name in case.arrays
    }
    return {name: argument.value for name, argument in arguments.items()}, arguments[changed]

"""A store below LMCache's memory, as an L2 adapter of the type ``plugin`` that LMCache loads by module path. Only
LMCache imports this module.

Objects of one size are blocks of one store. A task of LMCache runs on a thread of the adapter, one for each kind, and
its end is signalled by that kind's event file descriptor.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvpool.integrations.options import LMCACHE, PART, ElementType
from kvpool.integrations.staged import Copy, StagedBlocks, check_store
from kvpool.storage.store import Bytes

with LMCACHE.imports():
    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
    from lmcache.v1.platform import create_event_notifier

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

log = LMCACHE.log

STORE, LOOKUP, LOAD = "store", "lookup", "load"
_SIZES_MAX = 16
"""Each size of objects has a store and memory of its own."""
_TASKS_MAX = 1024
"""Tasks of a kind that may wait. More of them end at once, without a result."""
_LAYOUTS_MAX = 4096
_CLOSE_S = 10.0
_OPEN_AGAIN_S = 10.0
"""For this long after a store could not be opened, no other attempt is made."""


class _Layout(NamedTuple):
    """How the bytes of an object are to be read."""

    nbytes: int
    text: str


class _SameSize(NamedTuple):
    """The objects of a task that have one size."""

    blocks: StagedBlocks
    places: list[int]
    """in the task"""
    names: list[bytes]

    def chosen(self, done: Sequence[bool]) -> list[int]:
        return [place for place, ok in zip(self.places, done, strict=True) if ok]

    def copies(self, objects: Sequence[MemoryObj], copy: Callable[[MemoryObj, Bytes], None]) -> Copy:
        return lambda at, row: copy(objects[self.places[at]], row)


class _TaskThread:
    """A thread that runs tasks, and signals their results by an event file descriptor. Thread-safe."""

    def __init__(self, kind: str) -> None:
        self.event = create_event_notifier()
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._results: dict[int, Any] = {}
        self._thread = threading.Thread(target=self._work, name=f"kvpool-lmcache-{kind}", daemon=True)
        self._thread.start()

    def begin(self, number: int, task: Callable[[], Any], otherwise: Any) -> None:
        """Run a task. Its result is ``otherwise`` if too many wait."""
        if self._tasks.qsize() < _TASKS_MAX:
            self._tasks.put((number, task))
        else:
            self._end(number, otherwise)

    def take(self, number: int) -> Any:
        """The result of a task, once. None if there is none yet."""
        return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        return {number: self._results.pop(number) for number in list(self._results)}

    def close(self) -> bool:
        """End the thread after the tasks that it has. Returns whether it has ended."""
        self._tasks.put(None)
        self._thread.join(_CLOSE_S)
        ended = not self._thread.is_alive()
        if ended:
            self.event.close()
        return ended

    def _work(self) -> None:
        while (item := self._tasks.get()) is not None:
            number, task = item
            self._end(number, task())

    def _end(self, number: int, result: Any) -> None:
        self._results[number] = result
        self.event.notify()


class KVPoolL2Adapter(L2AdapterInterface):
    """LMCache's objects in a store. Thread-safe: LMCache calls it from its controllers' threads.

    Its options are in ``adapter_params``: those of `StagedOptions`. ``{part}`` in ``stores`` stands for the size of the
    objects. Objects whose type of elements is not known are neither kept nor found.

    No call waits for the store, but ``delete`` and ``close``. A task ends at most ``find_seconds``, ``load_seconds`` or
    ``save_seconds`` after its thread has begun with it. What fails is an object that is not there; nothing is raised.

    A store evicts by its own rules, and has no locks: an object that was found may be gone when it is loaded.

    Raises
    ------
    TypeError, ValueError
        For options that are missing or not accepted.
    """

    def __init__(self, params: dict[str, Any], l1_memory_desc: L1MemoryDesc | None = None) -> None:
        self._options = LMCACHE.read(params)
        check_store(self._options)
        LMCACHE.checked_version()
        super().__init__()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        """Held by the adapter's threads while they open a store. No call of LMCache's but ``delete`` waits for it."""
        self._open_again = -math.inf
        self._blocks: dict[int, StagedBlocks] = {}
        self._layouts: dict[tuple[str, int, int], _Layout] = {}
        self._numbers, self._closed, self._refused = itertools.count(1), threading.Event(), set[str]()
        self._workers = {kind: _TaskThread(kind) for kind in (STORE, LOOKUP, LOAD)}

    # -- events --------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._workers[STORE].event.fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._workers[LOOKUP].event.fileno())

    def get_load_event_fd(self) -> int:
        return int(self._workers[LOAD].event.fileno())

    # -- tasks ---------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._begin(STORE, lambda: self._store(keys, objects), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._workers[STORE].take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to look for objects. Where ``group_layout_descs`` lacks a group, the layout is that of the last object
        of this model and group."""
        return self._begin(LOOKUP, lambda: self._look_up(keys, group_layout_descs), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._workers[LOOKUP].take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """End the wait for objects that a lookup has found. LMCache has loaded them, or does not load them.

        No object is released, as a store has no locks. But with ``load="faster"``, what was found counts as ahead of
        the objects of other requests until it was loaded; what is not loaded stops counting here.
        """
        for size, names in _names_by_size(keys, [self._known(key) for key in keys]).items():
            with self._lock:
                blocks = self._blocks.get(size)
            if blocks is not None:
                blocks.leave(list(names.values()))

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to load objects. Each is written after its bytes were found to be right, and not at all after the task
        has ended."""
        return self._begin(LOAD, lambda: self._load(keys, objects), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._workers[LOAD].take(task_id)

    # -- the rest ------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Drop objects. Asks the store first which of them it has, as LMCache counts their bytes."""
        for part in self._by_size(keys, [self._known(key) for key in keys]):
            answers = zip(part.places, part.names, part.blocks.find(part.names), strict=True)
            stored = [(place, name) for place, name, ok in answers if ok]
            part.blocks.forget([name for _, name in stored])
            if stored:
                self._notify_keys_deleted([keys[place] for place, _ in stored], [part.blocks.block_bytes] * len(stored))

    def get_usage(self) -> AdapterUsage:
        """LMCache's figures, with the bytes that the stores have in all, where they say so."""
        with self._lock:
            counts = [(size, blocks.worker.stats().store.get("blocks", 0)) for size, blocks in self._blocks.items()]
        return replace(super().get_usage(), total_bytes_used=sum(size * count for size, count in counts))

    def report_status(self) -> dict[str, Any]:
        with self._lock:
            blocks = dict(self._blocks)
        return {
            "is_healthy": not self._closed.is_set() and not any(staged.worker.suspended for staged in blocks.values()),
            "type": type(self).__name__,
            "store": self._options.kind,
            "stored_object_count": sum(staged.worker.stats().store.get("blocks", 0) for staged in blocks.values()),
            "object_bytes": sorted(blocks),
            "troubles": {
                f"{size} {kind} {what}": count
                for size, staged in blocks.items()
                for (kind, what), count in dict(staged.troubles).items()
            },
        }

    def close(self) -> None:
        """End all tasks, and close the stores. Waits at most 10 s for each thread and store."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            blocks = list(self._blocks.values())
        for staged in blocks:
            staged.close()
        ended = [worker.close() for worker in self._workers.values()]
        if not all(ended):
            log.warning("kvpool: a store hangs; its thread and event file descriptor stay")

    # -- on the threads of the adapter ---------------------------------------------------------------

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        stored = self._move(StagedBlocks.save, keys, objects, lambda memory, row: np.copyto(row, _bytes(memory)))
        sizes = [objects[place].get_size() for place in stored]
        if stored:
            self._notify_keys_stored([keys[place] for place in stored], sizes)
        return L2StoreResult(len(stored) == len(keys), sum(sizes))

    def _look_up(self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> Bitmap:
        described = {group: self._layout(desc.shapes, desc.dtypes) for group, desc in descs.items()}
        layouts = [
            described[group] if (group := key.object_group_id) in described else self._known(key) for key in keys
        ]
        self._remember(keys, layouts)
        hits = [part.chosen(part.blocks.find_hit(part.names)) for part in self._by_size(keys, layouts)]
        return _bitmap(len(keys), itertools.chain(*hits))

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        loaded = self._move(StagedBlocks.load, keys, objects, lambda memory, row: np.copyto(_bytes(memory), row))
        if loaded:
            self._notify_keys_accessed([keys[place] for place in loaded])
        return _bitmap(len(keys), loaded)

    def _move(
        self,
        call: Callable[[StagedBlocks, list[bytes], Copy], list[bool]],
        keys: list[ObjectKey],
        objects: list[MemoryObj],
        copy: Callable[[MemoryObj, Bytes], None],
    ) -> list[int]:
        """Save or load objects. Returns the places of those for which that was done."""
        layouts = [self._layout_of(memory) for memory in objects]
        self._remember(keys, layouts)
        done = []
        for part in self._by_size(keys, layouts):
            done += part.chosen(call(part.blocks, part.names, part.copies(objects, copy)))
        return done

    # -- inside --------------------------------------------------------------------------------------

    def _begin(self, kind: str, task: Callable[[], Any], otherwise: Any) -> int:
        number = next(self._numbers)

        def guarded() -> Any:
            try:
                return otherwise if self._closed.is_set() else task()
            except Exception as error:
                self._refuse(f"a {kind} task failed: {type(error).__name__}: {error}"[:1000])
                return otherwise

        self._workers[kind].begin(number, guarded, otherwise)
        return number

    def _layout_of(self, memory: MemoryObj) -> _Layout | None:
        about = memory.metadata
        layout = self._layout(about.shapes or [about.shape], about.dtypes or [about.dtype])
        return layout and layout._replace(nbytes=memory.get_size())

    def _layout(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[ElementType]) -> _Layout | None:
        """The layout of an object, or None where two types of elements would have the same one."""
        try:
            self._options.check_dtypes(dtypes)
        except ValueError as error:
            self._refuse(str(error))
            return None
        typed_shapes = list(zip(shapes, dtypes, strict=True))
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in typed_shapes)
        return _Layout(nbytes, repr([(tuple(shape), str(dtype)) for shape, dtype in typed_shapes]))

    def _by_size(self, keys: list[ObjectKey], layouts: Sequence[_Layout | None]) -> list[_SameSize]:
        """The objects of each size, where there is a store for them."""
        opened = ((self._open(size), names) for size, names in _names_by_size(keys, layouts).items())
        return [_SameSize(blocks, list(names), list(names.values())) for blocks, names in opened if blocks is not None]

    def _open(self, size: int) -> StagedBlocks | None:
        """The store for objects of this size, opened at its first use. None if it cannot be opened."""
        with self._opening:
            if size in self._blocks or self._closed.is_set() or time.monotonic() < self._open_again:
                return self._blocks.get(size)
            if len(self._blocks) >= (_SIZES_MAX if self._options.separate else 1):
                self._refuse(f"objects of {size} bytes beside {sorted(self._blocks)} need a store with {PART}")
                return None
            try:
                made = StagedBlocks.open(
                    LMCACHE,
                    self._options,
                    f"objects-{size}",
                    size,
                    model="named by each key",
                    elements="named by each key",
                    layout=f"objects of {size} bytes",
                )
            except Exception as error:
                self._open_again = time.monotonic() + _OPEN_AGAIN_S
                self._refuse(f"no store could be opened: {type(error).__name__}: {error}"[:1000])
                return None
            with self._lock:
                self._blocks[size] = made
        if self._closed.is_set():
            made.close()
        return made

    def _refuse(self, why: str) -> None:
        """Log each reason once."""
        with self._lock:
            first = why not in self._refused and len(self._refused) < _TASKS_MAX
            self._refused |= {why} if first else set()
        if first:
            log.error("kvpool: %s", why)

    def _remember(self, keys: list[ObjectKey], layouts: Sequence[_Layout | None]) -> None:
        """Keep the last layout of each model and group."""
        seen = {
            (key.model_name, key.kv_rank, key.object_group_id): layout
            for key, layout in zip(keys, layouts, strict=True)
            if layout is not None
        }
        with self._lock:
            for model_group, layout in seen.items():
                self._layouts.pop(model_group, None)
                self._layouts[model_group] = layout
            for old in list(self._layouts)[:-_LAYOUTS_MAX]:
                del self._layouts[old]

    def _known(self, key: ObjectKey) -> _Layout | None:
        with self._lock:
            return self._layouts.get((key.model_name, key.kv_rank, key.object_group_id))


def _names_by_size(keys: list[ObjectKey], layouts: Sequence[_Layout | None]) -> dict[int, dict[int, bytes]]:
    """By size, the places and names of the objects whose layout is known."""
    named: dict[int, dict[int, bytes]] = {}
    for place, (key, layout) in enumerate(zip(keys, layouts, strict=True)):
        if layout is not None:
            named.setdefault(layout.nbytes, {})[place] = _name(key, layout)
    return named


def _name(key: ObjectKey, layout: _Layout) -> bytes:
    """The name of an object: everything that identifies it."""
    parts = (key.chunk_hash, key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)
    return repr((*parts, layout.text)).encode()


def _bitmap(count: int, places: Iterable[int]) -> Bitmap:
    bitmap = Bitmap(count)
    for place in places:
        bitmap.set(place)
    return bitmap


def _bytes(memory: MemoryObj) -> Bytes:
    """The memory of an object, uint8[n]. It is not copied."""
    return np.frombuffer(memory.byte_array, np.uint8)

"""In a child of os.fork(): what belongs to the parent says so at once, nothing waits for a thread that is not there,
and nothing of the child's is damaged by what it inherits."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numba.core.compiler_lock import global_compiler_lock

from kvpool import HostCache, HostTier, KVCacheManager, MemoryOptions
from kvpool.common import jit
from kvpool.common.process import Closing
from kvpool.device.memory.main_memory import SharedMemory
from kvpool.errors import ForkedProcess
from kvpool.storage import MemoryStore, StoreWorker
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.host_storage_manager import HostStorageManager
from kvpool.storage.store import Space
from tests.children import in_child, refuses
from tests.engine import small_layout
from tests.hostcache.conftest import IDENTITY
from tests.hostcache.conftest import store as kept
from tests.stores import pool_lab
from tests.stores.lab import Gate, Wrong, memory, names

T = 4


def test_what_is_closed_at_the_end_of_a_block_has_to_say_how() -> None:
    with pytest.raises(TypeError, match="close"):
        type("Unending", (Closing,), {})()


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Another thread holds a lock."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            over.wait(600)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(600)
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def cache() -> Iterator[KVCacheManager]:
    with KVCacheManager(small_layout(T), device_blocks=8, host_blocks=8, device="cpu") as pool:
        yield pool


LOCKS: dict[str, Callable[[KVCacheManager], Any]] = {
    "state": lambda cache: cache.core.lock,
    "transfer": lambda cache: cache.core.transfer.lock,
    "staging": lambda cache: cache._staging._lock,
    "import": lambda cache: cache._writer._one,
}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_pool_in_whose_call_another_thread_was_refuses_a_child(cache: KVCacheManager, lock: str) -> None:
    sequence, prompt = cache.add_sequence(range(8)), cache.block_keys(range(50, 54))

    def child() -> None:
        refuses(
            lambda: cache.add_sequence(range(5)),
            lambda: cache.match_prefix(range(8)),
            lambda: cache.imports.import_blocks(prompt, [bytes(cache.layout.block_bytes)]),
            lambda: cache.tables.copy_batch_block_offsets(np.zeros((1, 8), np.int32), [sequence]),
            lambda: cache.exclusive().__enter__(),
            cache.stats,
            cache.verify,
            lambda: cache.close(force=True),
        )

    with held(LOCKS[lock](cache)):
        in_child(child)
    cache.release(sequence)
    in_child(lambda: cache.release(cache.add_sequence(range(8))))


def test_a_child_that_is_forked_inside_a_block_ends_it(cache: KVCacheManager) -> None:
    sequence = cache.add_sequence(range(8))

    def child() -> None:
        cache.release(sequence)
        assert not cache.core.transfer.waiting

    with cache.exclusive():
        cache.commit(sequence)
        in_child(child)
    in_child(cache.free_blocks.bit_length)
    cache.release(sequence)


def test_a_host_cache_in_whose_call_another_thread_was_refuses_a_child() -> None:
    with HostCache(4, 64, identity=IDENTITY) as index:
        kept(index, "a")
        lease = index.pin([b"a"])
        with held(index._lock):
            in_child(lambda: refuses(lambda: index.reserve([b"x"]), lambda: index.find(b"a"), lease.close))
        lease.close()


def test_a_child_does_not_wait_for_a_compiler_that_is_not_there() -> None:
    @jit.jit
    def added(number: int) -> int:
        return number + 1

    if not hasattr(added, "compile"):
        pytest.skip("nothing is compiled here")
    with held(global_compiler_lock):
        in_child(lambda: refuses(lambda: added(1)))
    assert added(1) == 2


def test_a_pool_in_shared_memory_refuses_a_child_and_keeps_its_parent() -> None:
    options: dict[str, Any] = {"device": "cpu", "memory": MemoryOptions(shared=True)}
    with KVCacheManager(small_layout(T), device_blocks=8, host_blocks=8, **options) as cache:
        sequence = cache.add_sequence(range(9))
        cache.commit(sequence)
        in_child(lambda: refuses(lambda: cache.content.offload(range(9)), cache.stats, lambda: cache.close(force=True)))
        cache.release(sequence)
        assert cache.content.offload(range(9)) == 2


def test_what_a_child_maps_is_not_where_its_parent_has_shared_memory() -> None:
    """Else the end of the inherited object takes it away."""
    nbytes = 32 << 20
    shared = SharedMemory(nbytes)
    first = shared.array.ctypes.data

    def child() -> None:
        nonlocal shared
        maps = [mmap.mmap(-1, nbytes // 4) for _ in range(50)]
        for mapping in maps:
            mapping[:5] = b"alive"
            assert not first <= ctypes.addressof(ctypes.c_char.from_buffer(mapping)) < first + nbytes
        shared.close()
        del shared
        gc.collect()
        assert all(mapping[:5] == b"alive" for mapping in maps)

    in_child(child)
    shared.array[:] = 1
    shared.close()


def test_a_host_storage_manager_refuses_a_child_and_keeps_its_parent() -> None:
    index = HostCache(8, 4096, identity=IDENTITY)
    tier = HostTier.of(index)
    with index, tier, HostStorageManager(index, tier, [Wrong(MemoryStore(1 << 20))]) as manager:
        kept(index, "a")

        def child() -> None:
            refuses(
                lambda: manager.find(b"a"),
                lambda: manager.find(b"no"),
                lambda: manager.lookup([b"no"]),
                lambda: manager.pin([b"a"]),
                lambda: manager.publish([b"a"]),
                lambda: manager.forget([b"a"]),
                manager.poll,
                manager.clear,
                manager.stats,
                lambda: manager.drain(600),
                manager.close,
            )
            with pytest.raises(ForkedProcess), manager:
                pass
            assert index.find(b"a") == index.HERE

        in_child(child)
        assert manager.find(b"no") == index.PENDING and manager.drain(600)


def test_a_child_does_not_wait_for_jobs_and_prefetches_of_its_parent(tmp_path: Any) -> None:
    wrong, gate = Wrong(MemoryStore(1 << 20)), Gate()
    wrong.before["find"] = gate
    disk = DiskStore(tmp_path / "store", 1 << 20)
    engine = pool_lab.make_engine()
    with StoreWorker(wrong, memory(), IDENTITY) as queue, StoreWorker(disk, memory(), IDENTITY) as other:
        with engine.cache, pool_lab.make_manager(engine, pool_lab.store()) as manager:
            job = queue.find(queue.secret.derive_keys(names(1)))
            assert gate.reached.wait(600)
            prefetch = manager.prefetch(range(40))
            key, row, space = queue.secret.derive_keys(names(1)), np.arange(1), Space(bytes(16), memory())
            calls = [
                lambda: job.wait(),
                lambda: job.cancel(),
                lambda: prefetch.wait(),
                lambda: queue.stats(),
                lambda: other.stats(),
                lambda: disk.stats(),
                lambda: disk.close(),
                lambda: queue.find(key),
                lambda: disk.find(key),
                lambda: disk.load(key, row, lambda: False),
                lambda: disk.forget(key),
                lambda: disk.open(space),
                lambda: manager.prefetch([1]),
                lambda: manager.match_prefix([1]),
                lambda: manager.stats(),
                lambda: manager.events(),
                lambda: manager.close(),
            ]
            in_child(lambda: refuses(*calls))
            gate.open()
            assert job.wait(600) and prefetch.wait(600)

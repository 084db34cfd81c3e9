"""What was made of exports keeps the memory below it: a pool does not close before, unless it is forced to, and nothing
crashes."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.common.arrays import dlpack
from kvpool.device.memory import Export
from kvpool.errors import PoolBusy
from tests.interop.arrays import DLPackOnly, open_pool
from tests.waiting import at_once

ROOT = Path(__file__).resolve().parents[2]
THROUGH: list[Callable[[Export], Any]] = [
    np.from_dlpack,
    np.asarray,
    lambda export: np.from_dlpack(export)[1:][0].T,
    lambda export: export.__dlpack__(),
]


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("through", THROUGH)
def test_a_pool_does_not_close_under_a_view_and_closes_after_it(through: Any, tier: str) -> None:
    cache = open_pool()
    export = cache.memory.export(tier)
    view, other = through(export), np.asarray(export[1])
    with pytest.raises(PoolBusy, match=r"views of exported memory live: 2; .*close\(force=True\)"):
        cache.close()
    assert not cache.closed
    del other
    with pytest.raises(PoolBusy, match="live: 1"):
        cache.close()
    cache.release(cache.add_sequence([1, 2, 3]))
    cache.verify()
    del view
    # The export itself holds nothing.
    assert not any(cache.close()) and export.shape


def test_a_forced_close_says_what_it_left_and_the_memory_stays_until_the_last_view() -> None:
    cache = open_pool()
    view = np.from_dlpack(cache.memory.export())
    view[...] = 5
    report = cache.close(force=True)
    assert cache.close() is report and cache.closed
    del cache
    gc.collect()
    filler = [np.full(view.shape, 9, np.float16) for _ in range(20)]
    assert (view == 5).all() and len(filler) == 20


def test_a_view_in_a_cycle_that_nobody_reaches_is_none() -> None:
    cache = open_pool()
    cycle: list[Any] = [np.from_dlpack(cache.memory.export())]
    cycle.append(cycle)
    del cycle
    assert not any(cache.close())


def test_leaving_the_with_statement_closes_and_complains() -> None:
    with pytest.warns(ResourceWarning, match="1 view of exported memory"), open_pool() as cache:
        view = np.from_dlpack(cache.memory.export())
    assert cache.closed and not view.any()
    with pytest.raises(ZeroDivisionError), open_pool() as cache:
        view = np.from_dlpack(cache.memory.export())
        raise ZeroDivisionError
    assert cache.closed and not view.any()


@pytest.mark.parametrize("version", [None, (1, 0)])
def test_a_deleter_may_be_called_by_a_thread_without_the_interpreter(version: Any) -> None:
    """As a package in C++ does: it renames the capsule, keeps the pointer, and calls the deleter from wherever it
    ends."""
    cache = open_pool()
    name = b"dltensor_versioned" if version else b"dltensor"
    capsule = cache.memory.export().__dlpack__(max_version=version)
    rename = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    pointer = dlpack._pointer(capsule, name)
    # After the tensor come the manager and the deleter; a versioned one has them in its head.
    head = dlpack.Head.from_address(pointer)
    deleter = (
        head.deleter if version else ctypes.c_void_p.from_address(pointer + ctypes.sizeof(dlpack.Tensor) + 8).value
    )
    used = ctypes.create_string_buffer(b"used_" + name)
    assert rename(capsule, ctypes.cast(used, ctypes.c_char_p)) == 0
    del capsule
    with pytest.raises(PoolBusy, match="live: 1"):
        cache.close()
    assert deleter
    # CFUNCTYPE lets go of the interpreter while it calls.
    thread = threading.Thread(target=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(deleter), args=(pointer,))
    thread.start()
    thread.join()
    cache.close()


def test_threads_that_take_and_drop_views_meet_a_close_without_harm() -> None:
    cache = open_pool()
    export = cache.memory.export("host")

    def take() -> None:
        with suppress(PoolClosed):
            while True:
                assert np.from_dlpack(export).shape == export.shape

    def close() -> None:
        try:
            while not cache.closed:
                with suppress(PoolBusy):
                    cache.close()
                gc.collect()
        finally:
            cache.close(force=True)

    at_once(lambda act: act(), [take] * 4 + [close])


def test_what_a_pool_was_given_is_let_go() -> None:
    """Arguments of other packages are not kept."""
    with open_pool() as cache:
        tokens = DLPackOnly(np.arange(9, dtype=np.int32))
        alive = weakref.ref(tokens)
        keys = cache.block_keys(tokens)
        cache.release(cache.add_sequence(keys))
        cache.release(cache.add_sequence(tokens))
        del tokens
        gc.collect()
        assert alive() is None and (keys.tokens == np.arange(9)).all()


SCRIPT = """
import builtins, gc, threading
import numpy as np
from tests.interop.arrays import open_pool

print("views outlive a forced close and are read and dropped by other threads", flush=True)
cache = open_pool()
views = [np.from_dlpack(cache.memory.export(tier)) for tier in ("device", "host") for _ in range(8)]
for view in views:
    view[...] = 3
cache.close(force=True)
del cache
def work(mine):
    assert (mine.pop() == 3).all()
    gc.collect()
threads = [threading.Thread(target=work, args=([view],)) for view in views]
del views, view
for thread in threads: thread.start()
for thread in threads: thread.join()

print("a pool is dropped without a close", flush=True)
view = np.from_dlpack(open_pool().memory.export())
gc.collect()
view[...] = 4
assert (view == 4).all()

print("the interpreter ends while views live", flush=True)
kept = open_pool()
builtins.kept = np.from_dlpack(kept.memory.export()), np.asarray(kept.memory.export("host"))
builtins.capsule = kept.memory.export().__dlpack__(max_version=(1, 0))

print("jax holds a view to the end", flush=True)
try:
    import jax
except ImportError:
    pass
else:
    cache = open_pool()
    held = jax.dlpack.from_dlpack(cache.memory.export("device"))
    cache.close(force=True)
    del cache
    gc.collect()
    assert not held.any()

print("the interpreter ends while a daemon thread takes views", flush=True)
taken = open_pool()
began = threading.Event()
def take():
    while True:
        np.from_dlpack(taken.memory.export()).sum()
        began.set()
threading.Thread(target=take, daemon=True).start()
assert began.wait(600)
print("ended")
"""


def test_a_process_ends_as_it_should_whatever_views_do() -> None:
    command = [sys.executable, "-X", "faulthandler", "-c", SCRIPT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("\nended\n"), done.stdout + done.stderr


def test_a_pool_that_nobody_holds_gives_its_memory_back_at_once() -> None:
    """Not when the collector comes, which knows nothing of gigabytes."""
    gc.collect()
    gc.disable()
    try:
        cache = open_pool()
        export = cache.memory.export("host")
        view = np.asarray(export)
        memory = [weakref.ref(cache._pools.flat("device")), weakref.ref(cache._pools.flat("host"))]
        del cache, export
        assert memory[0]() is None and memory[1]() is not None, "the view keeps what it is made of"
        del view
        assert memory[1]() is None
    finally:
        gc.enable()

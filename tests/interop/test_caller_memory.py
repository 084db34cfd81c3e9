"""A tier may lie in memory that the caller brings: it is checked, used in place, kept while the pool lives, and never
given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from kvpool import MemoryOptions
from kvpool.device.cpu import CpuDevice
from kvpool.errors import InsufficientMemory
from tests.interop.arrays import LAYOUT, DLPackOnly, GpuOnly, InterfaceOnly, aligned, open_pool

BYTES = {"device": 6 * LAYOUT.block_bytes, "host": 5 * LAYOUT.block_bytes}


@pytest.mark.parametrize(
    "wrap", [lambda array: array, DLPackOnly, InterfaceOnly, lambda array: array.view(np.float16).reshape(-1, 2, 4)]
)
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("as_function", [False, True])
def test_a_tier_lies_where_the_caller_says_and_stays_as_it_was_left(tier: str, wrap: Any, as_function: bool) -> None:
    raw, asked = aligned(BYTES[tier]), []

    def give(nbytes: int, alignment: int) -> Any:
        asked.append((nbytes, alignment))
        return wrap(raw)

    with open_pool(memory=MemoryOptions(**{f"{tier}_memory": give if as_function else wrap(raw)})) as cache:
        pool = cache.memory.device_pool if tier == "device" else cache.memory.host_pool
        assert pool.ctypes.data == raw.ctypes.data and pool.nbytes == raw.nbytes
        pool[...] = 3
        assert asked == [(BYTES[tier], 64)] * as_function
    held = raw.copy()
    gc.collect()
    np.testing.assert_array_equal(raw, held)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_it_is_kept_until_the_pool_is_closed_and_not_longer(tier: str) -> None:
    owner = DLPackOnly(aligned(BYTES[tier]))
    alive = weakref.ref(owner)
    cache = open_pool(memory=MemoryOptions(**{f"{tier}_memory": owner}))
    del owner
    gc.collect()
    assert alive() is not None
    cache.close()
    gc.collect()
    assert alive() is None


def test_memory_that_does_not_fit_is_refused_by_name() -> None:
    nbytes, read_only = BYTES["device"], aligned(BYTES["device"])
    read_only.flags.writeable = False
    wrong: list[tuple[Any, str]] = [
        (aligned(nbytes - 1), rf"expected exactly the {nbytes} bytes of its blocks, got {nbytes - 1}"),
        (aligned(2 * nbytes)[::2], "C order without gaps"),
        (aligned(nbytes).reshape(2, -1).T, "C order .* strides"),
        (aligned(nbytes, offset=32), "expected an address that is a multiple of 64"),
        (read_only, "read-only memory"),
        (GpuOnly(aligned(nbytes)), "is device memory: the cpu device has this tier in host memory"),
        (7, "an array with"),
        (lambda nbytes, alignment: None, "an array with"),
        (lambda nbytes, alignment: aligned(nbytes + 64), "expected exactly"),
    ]
    for given, message in wrong:
        with pytest.raises((TypeError, ValueError), match=f"device_memory.*{message}"):
            open_pool(memory=MemoryOptions(device_memory=given))
    with pytest.raises(ValueError, match="host_memory.*bytes"):
        open_pool(memory=MemoryOptions(host_memory=aligned(nbytes)))


def test_what_the_function_of_the_caller_raises_is_reported() -> None:
    def full(nbytes: int, alignment: int) -> Any:
        raise MemoryError("the engine's pool is full")

    def broken(nbytes: int, alignment: int) -> Any:
        raise ZeroDivisionError

    device = CpuDevice()
    with pytest.raises(InsufficientMemory, match="the engine's pool is full"):
        open_pool(device=device, memory=MemoryOptions(device_memory=full))
    with pytest.raises(ZeroDivisionError):
        open_pool(device=device, memory=MemoryOptions(host_memory=broken))
    open_pool(device=device).close()

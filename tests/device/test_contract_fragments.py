"""What every device promises of fragments: exactly those bytes go from one address to another, behind the stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.arrays.strided import as_strided
from kvpool.device.base import Device, Region
from kvpool.device.main_memory import SharedMemory
from kvpool.device.work import Fragments
from tests.device.pools import on_device, put, seen

HOST_BLOCKS, BLOCK_BYTES = 5, 3000
LAYOUT = BlockLayout(1, 1, BLOCK_BYTES, 1, dtype="uint8", planes=1)


def bound(device: Device) -> np.ndarray:
    """A host tier of random bytes that was there before the device, which is bound to it and has no blocks itself."""
    memory = SharedMemory(HOST_BLOCKS * BLOCK_BYTES)
    memory.array[...] = np.random.default_rng(0).integers(0, 256, memory.array.size, dtype=np.uint8)
    host = device.adopt(as_strided("memory", memory.array), "host", pin=True)
    device.bind([Region.of(LAYOUT, device.allocate(0, "device"), host, 0, HOST_BLOCKS)])
    return host


def fragments(*rows: tuple[int, int, int]) -> Fragments:
    return Fragments(np.array(rows, np.int64).reshape(-1, 3))


def address(array: Any) -> int:
    return as_strided("array", array).address


def test_memory_that_is_there_keeps_its_content_when_it_is_pinned_and_given_back(device: Device) -> None:
    memory = SharedMemory(2 * BLOCK_BYTES)
    memory.array[...] = 7
    host = device.adopt(as_strided("memory", memory.array), "host", pin=True)
    assert host.ctypes.data == memory.array.ctypes.data and (memory.array == 7).all()
    device.free(host)
    assert (memory.array == 7).all()


@pytest.mark.parametrize("into_host", [True, False])
def test_bytes_go_where_the_fragments_say_and_nowhere_else(device: Device, into_host: bool) -> None:
    """Of any length and alignment, in either direction, across the ends of what is registered at once."""
    host = bound(device)
    engine = on_device(device, np.random.default_rng(1).integers(0, 256, 12_000, dtype=np.uint8))
    random = np.random.default_rng(2)
    lengths = np.array([1, 63, 64, 65, 2999, 4100, 17, 1024])
    starts = np.cumsum([0, *lengths[:-1] + random.integers(0, 40, len(lengths) - 1)])
    places = np.sort(random.choice(300, len(lengths), replace=False)) + np.cumsum([0, *lengths[:-1]])
    here, there = address(engine) + starts, host.ctypes.data + places
    order = random.permutation(len(lengths))
    source, target = (here, there) if into_host else (there, here)
    before, expected = (seen(engine).copy(), host.copy()), [seen(engine).copy(), host.copy()]
    for start, place, length in zip(starts, places, lengths, strict=True):
        if into_host:
            expected[1][place : place + length] = before[0][start : start + length]
        else:
            expected[0][start : start + length] = before[1][place : place + length]
    rows = np.stack([source, target, lengths], axis=1)[order]
    device.enqueue(Fragments(rows))
    rows[...] = -1  # the caller's again
    device.synchronize()
    np.testing.assert_array_equal(seen(engine), expected[0])
    np.testing.assert_array_equal(host, expected[1])
    device.free(host)


def test_no_fragments_are_no_work(device: Device) -> None:
    host = bound(device)
    before = host.copy()
    device.enqueue(fragments())
    device.synchronize()
    np.testing.assert_array_equal(host, before)


def test_fragments_come_in_the_order_of_their_stream(device: Device) -> None:
    host = bound(device)
    engine = on_device(device, np.zeros(BLOCK_BYTES, np.uint8))
    put(engine, np.full(BLOCK_BYTES, 9, np.uint8))
    stream, first = device.create_stream("copies"), host.ctypes.data
    device.wait(stream, device.record(device.as_stream(None)))
    device.enqueue(fragments((address(engine), first, BLOCK_BYTES)), stream)
    device.enqueue(fragments((first, first + BLOCK_BYTES, BLOCK_BYTES)), stream)
    device.synchronize(device.record(stream))
    assert (host[: 2 * BLOCK_BYTES] == 9).all()
    device.free(host)


def test_a_device_that_is_not_bound_copies_nothing(device: Device) -> None:
    memory = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="not bound"):
        device.enqueue(fragments((memory.ctypes.data, memory.ctypes.data + 8, 8)))
    assert not memory.any()

"""What every device promises, against the plain NumPy reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.device import CpuDevice, get_device
from kvpool.device.base import NULL_EVENT, Device, DeviceEvent, Stream
from kvpool.device.memory.main_memory import ALIGNMENT, SharedMemory
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import Region
from kvpool.device.sim import SimDevice
from kvpool.device.work import Fragments, TokenMoves
from kvpool.errors import PoolClosed
from tests.device import reference
from tests.device.pools import (
    DEVICE_BLOCKS,
    as_moves,
    assert_same_as_reference,
    each_layout,
    images,
    make_pools,
    on_device,
    random_moves,
    seen,
)
from tests.waiting import at_once


def assert_images(pools: MemoryPools, expected: Iterable[np.ndarray]) -> None:
    """Both tiers have these bytes, once all that is enqueued is done."""
    pools.device.synchronize()
    for image, wanted in zip(images(pools), expected, strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


@each_layout
def test_copies_are_those_of_the_reference(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    assert_same_as_reference(pools, as_moves())
    for seed in range(6):
        assert_same_as_reference(pools, random_moves(layout, np.random.default_rng(seed)))


@pytest.mark.parametrize("tokens", ["NHD", "HND"])
def test_partial_copy_takes_the_first_tokens_of_every_layer_plane_and_head_and_leaves_the_rest(
    device: Device, tokens: str
) -> None:
    pools = make_pools(device, BlockLayout(2, 3, 4, 5, dtype="uint8", tokens=tokens))
    device_image, host_image = images(pools)
    source, target = device_image[:, :, 0], host_image[0]
    if tokens == "NHD":
        target[:, :, :2] = source[:, :, :2]
    else:
        target[:, :, :, :2] = source[:, :, :, :2]
    device.copy_blocks(as_moves((0, DEVICE_BLOCKS, 2)))
    assert_images(pools, (device_image, host_image))


def test_moves_may_be_read_only_or_strided(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    moves = random_moves(layout, np.random.default_rng(1))
    moves.flags.writeable = False
    assert_same_as_reference(pools, moves)
    assert_same_as_reference(pools, moves[::2])


@pytest.mark.parametrize("name", ["cpu", "sim"])
def test_two_pools_are_copied_at_once_by_two_threads(layout: BlockLayout, name: str) -> None:
    def work(seed: int) -> None:
        device = get_device(name)
        pools = make_pools(device, layout, seed)
        random = np.random.default_rng(seed)
        for _ in range(20):
            assert_same_as_reference(pools, random_moves(layout, random))
        device.close()

    at_once(work, range(2))


# Memory


@pytest.mark.parametrize("tier", ["device", "host"])
def test_memory_is_zeroed_and_aligned(device: Device, tier: str) -> None:
    for nbytes in (0, 1, 4095, 1 << 20):
        array = device.allocate(nbytes, tier)
        assert array.dtype == np.uint8 and array.shape == (nbytes,)
        assert not seen(array).any()
        assert nbytes == 0 or as_strided("array", array).address % ALIGNMENT == 0
        device.free(array)
    with pytest.raises(MemoryError):
        device.allocate(2**62, "host")


def test_a_device_serves_one_pool_at_a_time(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    with pytest.raises(ValueError, match="of its own"):
        MemoryPools(device, layout, 1, 0)
    assert_same_as_reference(pools, as_moves((0, 1, 4)))
    pools.close()
    assert_same_as_reference(make_pools(device, layout), as_moves((0, 1, 4)))


def test_nothing_is_copied_before_bind_or_after_free(device: Device, layout: BlockLayout) -> None:
    calls = (
        lambda: device.copy_blocks(as_moves((0, 1, 4))),
        lambda: device.enqueue(TokenMoves(np.zeros((0, 2), np.int64), np.zeros(1, np.int64))),
        lambda: device.enqueue(Fragments(np.array([(1 << 20, 1 << 21, 8)]))),
    )

    def assert_refused(error: type[Exception], message: str) -> None:
        for call in calls:
            with pytest.raises(error, match=message):
                call()

    assert_refused(ValueError, "not bound")
    make_pools(device, layout).close()
    assert_refused(ValueError, "not bound")
    device.close()
    assert_refused(PoolClosed, "closed")


def test_a_closed_device_says_so_and_closes_again(device: Device, layout: BlockLayout) -> None:
    view = make_pools(device, layout).flat("device")
    expected = seen(view).copy()
    device.close()
    device.close()
    for call in (device.synchronize, lambda: device.allocate(1, "host")):
        with pytest.raises(PoolClosed):
            call()
    np.testing.assert_array_equal(seen(view), expected)


# Choosing a device


def test_get_device_knows_names_and_devices() -> None:
    for name, kind in (("cpu", CpuDevice), ("auto", CpuDevice), ("sim", SimDevice)):
        assert isinstance(get_device(name), kind)
    device = CpuDevice()
    assert get_device(device) is device
    for wrong in ("gpu", "", None, CpuDevice):
        with pytest.raises((TypeError, ValueError), match="device: "):
            get_device(wrong)  # type: ignore[arg-type]


# ----------------------------------------
# What every device promises of token moves, against the plain NumPy reference.


def random_token_moves(layout: BlockLayout, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Groups as ``keep`` makes them: in each, a rising choice of the slots of a few blocks of its own moves to its
    begin, in order."""
    width, blocks, moves, starts = layout.tokens_per_block, random.permutation(DEVICE_BLOCKS), [], [0]
    for part in np.split(blocks, np.sort(random.integers(0, DEVICE_BLOCKS + 1, 2))):
        slots = (part[:, None] * width + np.arange(width)).ravel()
        chosen = np.sort(random.choice(len(slots), int(random.integers(0, len(slots) + 1)), replace=False))
        moves += [(slots[place], slots[to]) for to, place in enumerate(chosen) if place != to]
        starts.append(len(moves))
    return np.array(moves, np.int64).reshape(-1, 2), np.array(starts, np.int64)


@each_layout
def test_token_moves_are_those_of_the_reference(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    for seed in range(4):
        moves, starts = random_token_moves(layout, np.random.default_rng(seed))
        expected = images(pools)
        reference.move_tokens(layout, expected[0], moves)
        device.enqueue(TokenMoves(moves, starts))
        assert_images(pools, expected)


def test_token_moves_come_after_what_is_on_their_stream_and_belong_to_their_call(
    device: Device, layout: BlockLayout
) -> None:
    pools, stream = make_pools(device, layout), device.create_stream("own")
    expected, copied = images(pools), as_moves((0, 1, 4))
    moves, starts = np.array([(5, 4), (6, 5)], np.int64), np.array([0, 2])
    reference.copy_blocks(layout, *expected, copied)
    reference.move_tokens(layout, expected[0], moves)
    device.copy_blocks(copied, stream)
    device.enqueue(TokenMoves(moves, starts), stream)
    copied[...], moves[...], starts[...] = 0, 0, 0
    assert_images(pools, expected)


# ----------------------------------------
# What every device promises of fragments: exactly those bytes go from one address to another, in stream order.


HOST_BLOCKS, BLOCK_BYTES = 5, 3000
LAYOUT = BlockLayout(1, 1, BLOCK_BYTES, 1, dtype="uint8", planes=1)


def bound(device: Device) -> np.ndarray:
    """A host tier of random bytes that was there before the device, which is bound to it and has no blocks itself."""
    memory = SharedMemory(HOST_BLOCKS * BLOCK_BYTES)
    memory.array[...] = content = np.random.default_rng(0).integers(0, 256, memory.array.size, dtype=np.uint8)
    host = device.adopt(as_strided("memory", memory.array), "host", pin=True)
    assert host.ctypes.data == memory.array.ctypes.data
    device.free(host)
    host = device.adopt(as_strided("memory", memory.array), "host", pin=True)
    np.testing.assert_array_equal(host, content)
    device.bind([Region.of(LAYOUT, device.allocate(0, "device"), host, 0, HOST_BLOCKS)])
    return host


@pytest.mark.parametrize("into_host", [True, False])
def test_bytes_go_where_the_fragments_say_and_nowhere_else(device: Device, into_host: bool) -> None:
    """Fragments of any length and alignment, in either direction, across the ends of what is registered at once."""
    host = bound(device)
    engine = on_device(device, np.random.default_rng(1).integers(0, 256, 12_000, dtype=np.uint8))
    random = np.random.default_rng(2)
    lengths = np.array([1, 63, 64, 65, 2999, 4100, 17, 1024])
    starts = np.cumsum([0, *lengths[:-1] + random.integers(0, 40, len(lengths) - 1)])
    places = np.sort(random.choice(300, len(lengths), replace=False)) + np.cumsum([0, *lengths[:-1]])
    ends = [as_strided("engine", engine).address + starts, host.ctypes.data + places]
    expected = [seen(engine).copy(), host.copy()]
    for start, place, length in zip(starts, places, lengths, strict=True):
        parts = expected[0][start : start + length], expected[1][place : place + length]
        parts[into_host][...] = parts[not into_host]
    rows = np.stack([ends[not into_host], ends[into_host], lengths], axis=1)[random.permutation(len(lengths))]
    device.enqueue(Fragments(rows[:0]))
    device.enqueue(Fragments(rows))
    rows[...] = -1  # the caller's again
    device.synchronize()
    np.testing.assert_array_equal(seen(engine), expected[0])
    np.testing.assert_array_equal(host, expected[1])
    device.free(host)


def test_fragments_come_in_the_order_of_their_stream(device: Device) -> None:
    host = bound(device)
    engine = on_device(device, np.full(BLOCK_BYTES, 9, np.uint8))
    stream, first = device.create_stream("copies"), host.ctypes.data
    device.wait(stream, device.record(device.as_stream(None)))
    for source, target in ((as_strided("engine", engine).address, first), (first, first + BLOCK_BYTES)):
        device.enqueue(Fragments(np.array([(source, target, BLOCK_BYTES)])), stream)
    device.synchronize(device.record(stream))
    assert (host[: 2 * BLOCK_BYTES] == 9).all()
    device.free(host)


# ----------------------------------------
# What every device promises about streams and events.


FORMS: list[Callable[[int], Any]] = [
    lambda handle: None,
    lambda handle: 0,
    int,
    np.int64,
    Stream,
    lambda handle: SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
    lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)),
    lambda handle: SimpleNamespace(cuda_stream=handle),
    lambda handle: SimpleNamespace(ptr=handle),
]
NO_STREAMS: list[Any] = [
    *(True, 1.0, "0", -1, 2**64, SimpleNamespace(ptr=None), SimpleNamespace(ptr=-1), SimpleNamespace(cuda_stream=True)),
    *(SimpleNamespace(__cuda_stream__=7), SimpleNamespace(__cuda_stream__=lambda: (0, 1, 2))),
]


def test_streams_of_every_form_are_accepted_by_as_stream_and_copies(device: Device, layout: BlockLayout) -> None:
    make_pools(device, layout)
    # CUDA knows only streams that somebody has made.
    handle = device.create_stream("any").handle if device.name == "cuda" else 7
    for form in FORMS:
        stream = device.as_stream(form(handle))
        assert isinstance(stream, Stream) and stream.handle in (0, handle)
        assert device.as_stream(stream) == stream
        device.copy_blocks(as_moves((0, 1, 4)), stream)
        device.synchronize()
    for wrong in NO_STREAMS:
        with pytest.raises((TypeError, ValueError), match="stream: "):
            device.as_stream(wrong)


@pytest.mark.parametrize("streams", [1, 3])
def test_work_of_one_stream_or_of_several_that_wait_is_done_in_the_order_of_the_calls(
    device: Device, layout: BlockLayout, streams: int
) -> None:
    pools = make_pools(device, layout)
    expected = images(pools)
    random, event = np.random.default_rng(6), NULL_EVENT
    opened = [device.create_stream(f"{number}") for number in range(streams)]
    for i in range(30):
        moves, stream = random_moves(layout, random), opened[i % streams]
        reference.copy_blocks(layout, *expected, moves)
        if streams > 1:
            device.wait(stream, event)
        device.copy_blocks(moves, stream)
        moves[...] = 0  # the caller's again
        event = device.record(stream)
    assert_images(pools, expected)


def test_what_is_before_an_event_is_done_when_synchronize_returns_or_query_says_so(
    device: Device, layout: BlockLayout
) -> None:
    pools, stream = make_pools(device, layout), device.create_stream("copies")
    assert device.query(NULL_EVENT)
    device.synchronize(NULL_EVENT)
    expected = images(pools)

    def ask(event: DeviceEvent) -> None:
        while not device.query(event):
            pass

    for block, wait in enumerate((device.synchronize, ask)):
        moves = as_moves((block, 8 + block, 4))
        device.copy_blocks(moves, stream)
        event = device.record(stream)
        wait(event)
        assert device.query(event)
        reference.copy_blocks(layout, *expected, moves)
        np.testing.assert_array_equal(images(pools)[1], expected[1])
    device.synchronize()

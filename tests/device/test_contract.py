"""What every device promises, against the plain NumPy reference."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.device import CpuDevice, get_device
from kvpool.device.base import NULL_EVENT, NULL_STREAM, Device, Stream
from kvpool.device.memory.main_memory import ALIGNMENT, SharedMemory
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import Region
from kvpool.device.sim import SimDevice
from kvpool.device.work import Fragments, TokenMoves
from kvpool.errors import DeviceError, PoolClosed
from tests.device import reference
from tests.device.faults import FaultyDevice
from tests.device.pools import (
    DEVICE_BLOCKS,
    as_moves,
    assert_same_as_reference,
    host_writes,
    images,
    make_pools,
    on_device,
    put,
    random_moves,
    seen,
)
from tests.waiting import at_once

TYPES = ["uint8", "bfloat16", "float32", "int64"]
ORDERS = list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
# layers, kv_heads, head_dim, tokens_per_block: runs of a few lines, of one line, longer than what is fetched ahead with
# a rest that is not a chunk, and of odd sizes.
SHAPES = [(2, 2, 16, 8), (3, 1, 8, 8), (1, 3, 448, 4), (2, 3, 5, 3)]


# Each shape meets each order, and each of these pairs one type, so that each type meets each shape and each order.
LAYOUTS = [
    (shape, TYPES[(s + o) % len(TYPES)], *order) for s, shape in enumerate(SHAPES) for o, order in enumerate(ORDERS)
]


@pytest.mark.parametrize(("shape", "dtype", "order", "tokens", "planes"), LAYOUTS)
def test_copies_are_those_of_the_reference(
    device: Device, shape: tuple[int, int, int, int], dtype: str, order: str, tokens: str, planes: int
) -> None:
    layout = BlockLayout(*shape, dtype=dtype, planes=planes, order=order, tokens=tokens)
    pools = make_pools(device, layout)
    for seed in range(6):
        assert_same_as_reference(pools, random_moves(layout, np.random.default_rng(seed)))


@pytest.mark.parametrize("tokens", ["NHD", "HND"])
def test_partial_copy_takes_the_first_tokens_of_every_layer_plane_and_head_and_leaves_the_rest(
    device: Device, tokens: str
) -> None:
    layout = BlockLayout(2, 3, 4, 5, dtype="uint8", tokens=tokens)
    pools = MemoryPools(device, layout, 2, 1)
    image = np.zeros(pools.device_pool.shape, np.uint8)
    image[:, :, 0] = np.arange(image[:, :, 0].size, dtype=np.uint8).reshape(image[:, :, 0].shape)
    source = image[:, :, 0] if tokens == "NHD" else image[:, :, 0].swapaxes(2, 3)
    target = pools.host_pool[0] if tokens == "NHD" else pools.host_pool[0].swapaxes(2, 3)
    with host_writes(pools):
        put(pools.device_pool, image)
        target[...] = 255
    device.copy_blocks(as_moves((0, 2, 2)))
    device.synchronize()
    np.testing.assert_array_equal(target[:, :, :2], source[:, :, :2])
    assert (target[:, :, 2:] == 255).all()
    assert (seen(pools.device_pool)[:, :, 1] == 0).all()


def test_an_empty_batch_copies_nothing(device: Device, layout: BlockLayout) -> None:
    assert_same_as_reference(make_pools(device, layout), as_moves())


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
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 1 << 20])
def test_memory_is_zeroed_and_aligned(device: Device, tier: str, nbytes: int) -> None:
    array = device.allocate(nbytes, tier)
    assert array.dtype == np.uint8 and array.shape == (nbytes,)
    assert not seen(array).any()
    assert nbytes == 0 or as_strided("array", array).address % ALIGNMENT == 0
    device.free(array)


def test_memory_that_is_not_there_raises_memory_error(device: Device) -> None:
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
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))
    make_pools(device, layout).close()
    with pytest.raises(ValueError, match="not bound"):
        device.copy_blocks(as_moves((0, 1, 4)))


def test_a_closed_device_says_so_and_closes_again(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    view = pools.flat("device")
    expected = seen(view).copy()
    device.close()
    device.close()
    for call in (lambda: device.copy_blocks(as_moves()), device.synchronize, lambda: device.allocate(1, "host")):
        with pytest.raises(PoolClosed):
            call()
    np.testing.assert_array_equal(seen(view), expected)


# Choosing a device


def test_get_device_knows_names_and_devices() -> None:
    assert isinstance(get_device("cpu"), CpuDevice)
    assert isinstance(get_device("auto"), CpuDevice)
    assert isinstance(get_device("sim"), SimDevice)
    device = CpuDevice()
    assert get_device(device) is device


@pytest.mark.parametrize(
    ("spec", "error"),
    [("gpu", ValueError), ("", ValueError), (None, TypeError), (CpuDevice, TypeError), (0, TypeError)],
)
def test_get_device_names_what_it_does_not_know(spec: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="device: .*"):
        get_device(spec)


# The fault injector that other tests rely on


@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("completed", [0, 1, 2])
def test_faulty_device_has_copied_exactly_what_it_says(layout: BlockLayout, completed: int, sticky: bool) -> None:
    device = FaultyDevice(CpuDevice(), fail_at={(1, completed)}, sticky=sticky)
    pools = make_pools(device, layout)
    rows = as_moves((0, 7, 4), (1, 8, 4), (2, 9, 4))
    device.copy_blocks(as_moves((3, 4, 4)))
    expected = images(pools)
    reference.copy_blocks(layout, *expected, rows[:completed])
    with pytest.raises(DeviceError) as caught:
        device.copy_blocks(rows)
    assert (caught.value.completed, caught.value.sticky) == (completed, sticky)
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])
    if sticky:
        with pytest.raises(DeviceError):
            device.copy_blocks(rows)
        np.testing.assert_array_equal(pools.host_pool, expected[1])
    else:
        assert_same_as_reference(pools, rows)


# ----------------------------------------
# What every device promises of token moves, against the plain NumPy reference.


TOKEN_SHAPES = [(2, 2, 16, 8), (3, 1, 8, 7), (2, 3, 5, 3), (1, 3, 448, 5)]


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


def assert_moves_as_the_reference(pools: MemoryPools, moves: np.ndarray, starts: np.ndarray) -> None:
    device, host = images(pools)
    reference.move_tokens(pools.layout, device, moves)
    pools.device.enqueue(TokenMoves(moves, starts))
    pools.device.synchronize()
    for image, wanted in zip(images(pools), (device, host), strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("shape", TOKEN_SHAPES)
@pytest.mark.parametrize(
    ("order", "tokens", "planes"), list(product(["layer_first", "block_first"], ["NHD", "HND"], [1, 2]))
)
def test_token_moves_are_those_of_the_reference(
    device: Device, shape: tuple[int, int, int, int], order: str, tokens: str, planes: int
) -> None:
    layout = BlockLayout(*shape, dtype="float16", planes=planes, order=order, tokens=tokens)
    pools = make_pools(device, layout)
    for seed in range(4):
        assert_moves_as_the_reference(pools, *random_token_moves(layout, np.random.default_rng(seed)))
    pools.close()


def test_token_moves_come_after_what_is_on_their_stream_and_belong_to_their_call(
    device: Device, layout: BlockLayout
) -> None:
    pools, stream = make_pools(device, layout), device.create_stream("own")
    expected, _ = images(pools)
    moves, starts = np.array([(5, 4), (6, 5)], np.int64), np.array([0, 2])
    reference.copy_blocks(layout, expected, pools.host_pool.copy(), np.array([(0, 1, 4, 0)]))
    reference.move_tokens(layout, expected, moves)
    device.copy_blocks(np.array([(0, 1, 4, 0)], np.int64), stream)
    device.enqueue(TokenMoves(moves, starts), stream)
    moves[...], starts[...] = 0, 0
    device.synchronize()
    np.testing.assert_array_equal(images(pools)[0].view(np.uint8), expected.view(np.uint8))
    pools.close()


def test_token_moves_need_a_pool() -> None:
    device, nothing = CpuDevice(), TokenMoves(np.zeros((0, 2), np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="not bound"):
        device.enqueue(nothing)
    device.close()
    with pytest.raises(PoolClosed):
        device.enqueue(nothing)


# ----------------------------------------
# What every device promises of fragments: exactly those bytes go from one address to another, in stream order.


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
    """Fragments of any length and alignment, in either direction, across the ends of what is registered at once."""
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


def test_an_empty_list_of_fragments_makes_no_work(device: Device) -> None:
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


# ----------------------------------------
# What every device promises about streams and events.


FORMS: dict[str, Callable[[int], Any]] = {
    "None": lambda handle: None,
    "0": lambda handle: 0,
    "an int": int,
    "a NumPy int": np.int64,
    "the null stream": lambda handle: NULL_STREAM,
    "a Stream": Stream,
    "the protocol": lambda handle: SimpleNamespace(__cuda_stream__=lambda: (0, handle)),
    "the protocol as an attribute": lambda handle: SimpleNamespace(__cuda_stream__=(0, handle)),
    "cuda_stream": lambda handle: SimpleNamespace(cuda_stream=handle),
    "ptr": lambda handle: SimpleNamespace(ptr=handle),
}


@pytest.mark.parametrize("form", FORMS)
def test_streams_of_every_form_are_accepted_by_as_stream_and_copies(
    device: Device, layout: BlockLayout, form: str
) -> None:
    make_pools(device, layout)
    # CUDA knows only streams that somebody has made.
    handle = device.create_stream("any").handle if device.name == "cuda" else 7
    stream = device.as_stream(FORMS[form](handle))
    assert isinstance(stream, Stream) and stream.handle in (0, handle)
    assert device.as_stream(stream) == stream
    device.copy_blocks(as_moves((0, 1, 4)), stream)
    device.synchronize()


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (True, TypeError),
        (np.True_, TypeError),
        (1.0, TypeError),
        ("0", TypeError),
        (object(), TypeError),
        (SimpleNamespace(ptr=None), TypeError),
        (SimpleNamespace(cuda_stream=True), TypeError),
        (SimpleNamespace(__cuda_stream__=7), TypeError),
        (SimpleNamespace(__cuda_stream__=lambda: (0, 1, 2)), TypeError),
        (-1, ValueError),
        (2**64, ValueError),
        (SimpleNamespace(ptr=-1), ValueError),
    ],
)
def test_what_is_not_a_stream_is_refused_by_name(device: Device, stream: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="stream: .*"):
        device.as_stream(stream)


def test_work_on_one_stream_is_done_in_the_order_of_the_calls(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    expected = images(pools)
    random, stream = np.random.default_rng(5), device.create_stream("copies")
    for _ in range(30):
        moves = random_moves(layout, random)
        reference.copy_blocks(layout, *expected, moves)
        device.copy_blocks(moves, stream)
    device.synchronize()
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])


def test_work_after_a_wait_comes_after_what_the_event_was_recorded_after(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    expected = images(pools)
    random, streams = np.random.default_rng(6), [device.create_stream(name) for name in "abc"]
    event = NULL_EVENT
    for i in range(30):
        moves = random_moves(layout, random)
        reference.copy_blocks(layout, *expected, moves)
        device.wait(streams[i % 3], event)
        device.copy_blocks(moves, streams[i % 3])
        event = device.record(streams[i % 3])
    device.synchronize()
    np.testing.assert_array_equal(seen(pools.device_pool), expected[0])
    np.testing.assert_array_equal(pools.host_pool, expected[1])


def test_what_is_before_an_event_is_done_when_synchronize_returns_or_query_says_so(
    device: Device, layout: BlockLayout
) -> None:
    pools = make_pools(device, layout)
    first, second = (seen(pools.device_pool)[:, :, block].copy() for block in (0, 1))
    stream = device.create_stream("copies")
    device.copy_blocks(as_moves((0, 8, 4)), stream)
    event = device.record(stream)
    device.synchronize(event)
    assert device.query(event)
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 8), first)
    device.copy_blocks(as_moves((1, 9, 4)), stream)
    event = device.record(stream)
    while not device.query(event):
        pass
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 9), second)
    device.synchronize()


def test_the_null_event_is_complete_and_holds_nothing_back(device: Device, layout: BlockLayout) -> None:
    make_pools(device, layout)
    assert device.query(NULL_EVENT)
    device.synchronize(NULL_EVENT)
    device.wait(NULL_STREAM, NULL_EVENT)
    device.copy_blocks(as_moves((0, 8, 4)))
    device.synchronize()


def test_the_caller_may_use_its_moves_again_at_once(device: Device, layout: BlockLayout) -> None:
    pools = make_pools(device, layout)
    first = seen(pools.device_pool)[:, :, 0].copy()
    moves = as_moves((0, 8, 4))
    device.copy_blocks(moves)
    moves[0] = (1, 9, 1, 0)
    device.synchronize()
    np.testing.assert_array_equal(reference.block_view(layout, *images(pools), 8), first)

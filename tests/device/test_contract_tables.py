"""What every device promises about staged rows, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.arrays.layout import BlockLayout
from kvpool.arrays.strided import as_strided
from kvpool.device.base import NULL_STREAM, Device
from kvpool.device.work import StagedRows, StagedVectors, Table, staged_bytes
from kvpool.memory.pools import MemoryPools
from tests.device.pools import make_pools, on_device, seen


@pytest.fixture
def pools(device: Device, layout: BlockLayout) -> MemoryPools:
    return make_pools(device, layout)


def stage(
    pools: MemoryPools, table: Table, ids: np.ndarray, rows: list[int], planes: list[tuple[int, int, int]], columns: int
) -> StagedRows:
    """A buffer of its own with everything in it."""
    count, width = ids.shape
    buffer = pools.device.allocate(staged_bytes(len(planes), count, width), "host")
    parts = [ids.astype(np.int32).tobytes(), np.array(rows, np.int64).tobytes(), np.array(planes, np.int64).tobytes()]
    parts[0] += bytes(-len(parts[0]) % 8)
    with pools.device.host_access(stores=[buffer]):
        buffer[:] = np.frombuffer(b"".join(parts), np.uint8)
    return StagedRows(table, buffer, buffer.ctypes.data, len(planes), count, width, columns)


def expected(
    out: np.ndarray, ids: np.ndarray, rows: list[int], values: list[tuple[int, int]], columns: int
) -> np.ndarray:
    result = out.copy()
    wide = np.full((len(ids), columns), -1)
    wide[:, : ids.shape[1]] = ids
    for plane, (scale, offset) in zip(result.reshape(-1, *out.shape[-2:]), values, strict=True):
        plane[rows, :columns] = np.where(wide < 0, -1, wide * scale + offset)
    return result


@pytest.mark.parametrize("width", [0, 1, 3, 6])
@pytest.mark.parametrize("leading", [(), (2,), (3, 2)])
def test_rows_are_those_of_numpy(pools: MemoryPools, width: int, leading: tuple[int, ...]) -> None:
    random, device = np.random.default_rng(7), pools.device
    out = random.integers(0, 99, (*leading, 5, 7), dtype=np.int32)
    ids, rows = random.integers(-1, 9, (3, width)), [4, 0, 1]
    values = [(int(random.integers(1, 5)), 10 * i) for i in range(int(np.prod(leading)))]
    wanted = expected(out, ids, rows, values, 6)
    target = on_device(device, out)
    table = device.views.table(target)
    planes = [(start, *value) for start, value in zip(table.starts(), values, strict=True)]
    device.enqueue(stage(pools, table, ids, rows, planes, 6), device.create_stream("tables"))
    device.synchronize()
    np.testing.assert_array_equal(seen(target), wanted)


def test_vectors_get_their_pieces_and_keep_the_rest(pools: MemoryPools) -> None:
    device = pools.device
    numbers = np.arange(9, dtype=np.int32)
    buffer = device.allocate(64, "host")
    with device.host_access(stores=[buffer]):
        buffer[4:40] = numbers.view(np.uint8)
    targets = [on_device(device, np.full(size, -7, np.int32)) for size in (4, 6)]
    vectors = [device.views.table(target, "vector", vector=True) for target in targets]
    pieces = [(vectors[0], 4, 8), (vectors[1], 20, 20)]
    device.enqueue(StagedVectors(buffer, buffer.ctypes.data, pieces), device.create_stream("tables"))
    device.synchronize()
    assert seen(targets[0]).tolist() == [0, 1, -7, -7] and seen(targets[1]).tolist() == [4, 5, 6, 7, 8, -7]


@pytest.mark.parametrize("target", [None, [1], np.zeros(2), np.zeros((2, 2), np.int32), np.zeros(4, np.int32)[::2]])
def test_what_is_no_vector_is_refused_by_name(device: Device, target: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="indices"):
        device.views.table(target, "indices", vector=True)


def test_hand_overs_on_one_stream_arrive_in_the_order_of_the_calls(pools: MemoryPools) -> None:
    device = pools.device
    out = on_device(device, np.zeros((2, 4), np.int32))
    table, stream = device.views.table(out), device.create_stream("tables")
    for turn in range(20):
        device.enqueue(stage(pools, table, np.full((1, 4), turn), [turn % 2], [(0, 1, 0)], 4), stream)
    device.synchronize(device.record(stream))
    assert seen(out).tolist() == [[18] * 4, [19] * 4]


def test_the_null_stream_is_the_default(pools: MemoryPools) -> None:
    device = pools.device
    out = on_device(device, np.zeros((1, 2), np.int32))
    table = device.views.table(out)
    device.enqueue(stage(pools, table, np.array([[5, -1]]), [0], [(0, 2, 1)], 2))
    device.synchronize(device.record(NULL_STREAM))
    assert seen(out).tolist() == [[11, -1]]


@pytest.mark.parametrize(
    "target", [None, [[1]], np.zeros((2, 2)), np.zeros(4, np.int32), np.zeros((2, 4), np.int32)[:, ::2]]
)
def test_what_is_no_table_is_refused_by_name(device: Device, target: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="target"):
        device.views.table(target)


def test_a_table_says_where_its_planes_begin(device: Device) -> None:
    out = on_device(device, np.zeros((3, 4, 2, 5), np.int32)).transpose(0, 2, 1, 3)
    table = device.views.table(out)
    assert table.starts() == [160 * pool + 20 * plane for pool in range(3) for plane in range(2)]
    assert table.owner is out and table.address == as_strided("out", out).address

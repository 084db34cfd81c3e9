"""What every device promises about staged rows, against plain NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.device.base import NULL_STREAM, STAGING, Device
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.work import StagedRows, StagedStep, StagedVectors, StepTargets, Table, staged_bytes
from kvpool.pool import StepTables
from steps import NAMES, arrays, check
from tests.device import reference
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
def test_what_is_not_a_vector_is_refused_by_name(device: Device, target: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="indices"):
        device.views.table(target, "indices", vector=True)


def test_table_uploads_on_one_stream_arrive_in_the_order_of_the_calls(pools: MemoryPools) -> None:
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
def test_what_is_not_a_table_is_refused_by_name(device: Device, target: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="target"):
        device.views.table(target)


def test_a_table_says_where_its_planes_begin(device: Device) -> None:
    out = on_device(device, np.zeros((3, 4, 2, 5), np.int32)).transpose(0, 2, 1, 3)
    table = device.views.table(out)
    assert table.starts() == [160 * pool + 20 * plane for pool in range(3) for plane in range(2)]
    assert table.owner is out and table.address == as_strided("out", out).address


# ----------------------------------------
# What every device promises about the tables of a step, against plain NumPy.


T = 4


@pytest.fixture
def steps_device(device: Device) -> Device:
    """A device with a pool."""
    make_pools(device, BlockLayout(layers=1, kv_heads=1, head_dim=2, tokens_per_block=T, dtype="uint8"))
    return device


def stage_steps(
    device: Device, targets: StepTargets, rows: list[list[int]], first: list[int], counts: list[int], sinks: int
) -> StagedStep:
    """A buffer of its own with everything in it. Columns of -1 of a row from ``sinks`` on are those that are left
    out."""
    numbers, ids, slots = [], [], 0
    for row, start, count in zip(rows, first, counts, strict=True):
        used = row[: -(-(start + count) // T)]
        numbers.append((len(ids), used.count(-1), start + count, slots))
        ids += [block for block in used if block >= 0]
        slots += count
    numbers.append((len(ids), 0, 0, slots))
    columns = max((-(-(start + count) // T) for start, count in zip(first, counts, strict=True)), default=0)
    content = np.array(numbers, np.int64).tobytes() + np.array(ids, np.int32).tobytes()
    buffer = device.allocate(len(content), STAGING)
    with device.host_access(stores=[buffer]):
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
    return StagedStep(targets, buffer, buffer.ctypes.data, len(rows), columns, T, sinks)


def random_rows(random: np.random.Generator, sinks: int) -> tuple[list[list[int]], list[int], list[int]]:
    """Rows with holes after the sinks, and tokens after the holes."""
    rows, first, counts = [], [], []
    for _ in range(random.integers(0, 6)):
        used, row = int(random.integers(0, 9)), random.integers(0, 99, 9).tolist()
        gone = int(random.integers(0, used - sinks)) if sinks and used > sinks + 1 else 0
        row[sinks : sinks + gone] = [-1] * gone
        length = used * T - int(random.integers(0, T)) if used else 0
        count = int(random.integers(0, length - (sinks + gone) * T * (gone > 0) + 1))
        rows.append(row)
        first.append(length - count)
        counts.append(count)
    return rows, first, counts


@pytest.mark.parametrize("seed", range(4))
def test_tables_are_those_of_the_reference(steps_device: Device, seed: int) -> None:
    random, device, sinks = np.random.default_rng(seed), steps_device, seed % 2 * 2
    rows, first, counts = random_rows(random, sinks)
    wanted = reference.step_tables(rows, first, counts, T)
    some = [name for name in NAMES if random.random() < 0.8] or ["table"]
    sizes = len(rows) + 1, sum(counts) + 1, wanted["table"].shape[1] + 1, len(wanted["indices"]) + 1
    out = arrays(*sizes, wanted=some, put=lambda values: on_device(device, values))
    targets = device.views.step(out)
    device.enqueue(stage_steps(device, targets, rows, first, counts, sinks), device.create_stream("steps"))
    device.synchronize()
    check(out, wanted, seen)


def test_long_rows_and_many_sequences(steps_device: Device) -> None:
    """More columns than a thread block has threads, and more sequences than a launch has thread blocks."""
    device = steps_device
    for count, columns in ((2, 300), (1100, 1)):
        rows = np.random.default_rng(0).integers(0, 99, (count, columns)).tolist()
        first, counts = [columns * T - 3] * count, [2] * count
        wanted = reference.step_tables(rows, first, counts, T)
        out = arrays(count, 2 * count, columns, count * columns, put=lambda values: on_device(device, values))
        targets = device.views.step(out)
        device.enqueue(stage_steps(device, targets, rows, first, counts, 0), device.create_stream("steps"))
        device.synchronize()
        check(out, wanted, seen)


def test_what_is_not_an_array_of_a_step_is_refused_by_name(steps_device: Device) -> None:
    for name in NAMES:
        for bad in ([1], np.zeros((1, 8)), np.zeros((2, 2), np.float32)):
            with pytest.raises((TypeError, ValueError), match=name):
                steps_device.views.step(StepTables(**{name: bad}))


def test_step_tables_and_other_hand_overs_of_one_stream_arrive_in_the_order_of_the_calls(steps_device: Device) -> None:
    device = steps_device
    out = arrays(1, 4, 1, 1, put=lambda values: on_device(device, values))
    targets, stream = device.views.step(out), device.create_stream("steps")
    for turn in range(20):
        device.enqueue(stage_steps(device, targets, [[turn]], [0], [T], 0), stream)
    device.synchronize(device.record(stream))
    assert seen(out.slot_mapping).tolist() == [19 * T + t for t in range(T)] and seen(out.table).tolist() == [[19]]

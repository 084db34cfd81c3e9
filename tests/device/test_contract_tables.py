"""What every device promises about staged rows, against plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.device.base import NULL_STREAM, STAGING, Device
from kvpool.device.work import StagedRows, StagedStep, StagedVectors, StepTargets, Table
from steps import NAMES, arrays, check
from tests.device import reference
from tests.device.pools import make_pools, on_device, seen


@pytest.fixture
def pooled(device: Device, layout: BlockLayout) -> Device:
    """A device with a pool."""
    make_pools(device, layout)
    return device


def staged(device: Device, *parts: np.ndarray) -> np.ndarray:
    """A buffer of its own with these parts, each at a multiple of 8 bytes."""
    content = b"".join(part.tobytes() + bytes(-part.nbytes % 8) for part in parts)
    buffer = device.allocate(len(content), STAGING)
    with device.host_access(stores=[buffer]):
        buffer[: len(content)] = np.frombuffer(content, np.uint8)
    return buffer


def stage(
    device: Device, table: Table, ids: np.ndarray, rows: list[int], planes: list[tuple[int, int, int]], columns: int
) -> StagedRows:
    buffer = staged(device, ids.astype(np.int32), np.array(rows, np.int64), np.array(planes, np.int64))
    return StagedRows(table, buffer, buffer.ctypes.data, len(planes), *ids.shape, columns)


# More columns, rows and planes than a thread block has threads, a launch has thread blocks, or shared memory has room.
LARGE = [((2,), 2, 7, 130), ((1,), 4, 600, 601), ((1,), 1100, 2, 3), ((250,), 3, 2, 4)]


@pytest.mark.parametrize(
    ("leading", "count", "width", "columns"),
    [*((leading, 3, width, 6) for leading, width in product([(), (2,), (3, 2)], [0, 1, 3, 6])), *LARGE],
)
def test_rows_are_those_of_numpy(
    pooled: Device, leading: tuple[int, ...], count: int, width: int, columns: int
) -> None:
    random = np.random.default_rng(7)
    rows = random.permutation(count + 2)[:count].tolist()
    out = random.integers(0, 99, (*leading, count + 2, columns + 1), dtype=np.int32)
    ids = np.full((count, columns), -1)
    ids[:, :width] = random.integers(-1, 9, (count, width))
    values = [(int(random.integers(1, 5)), 10 * i) for i in range(int(np.prod(leading)))]
    target = on_device(pooled, out)
    table = pooled.views.table(target)
    planes = [(start, *value) for start, value in zip(table.starts(), values, strict=True)]
    upload = stage(pooled, table, ids[:, :width], rows, planes, columns)
    pooled.enqueue(upload, pooled.create_stream("tables"))
    pooled.synchronize()
    expected = out.copy()
    for plane, (scale, offset) in zip(expected.reshape(-1, count + 2, columns + 1), values, strict=True):
        plane[rows, :columns] = np.where(ids < 0, -1, ids * scale + offset)
    np.testing.assert_array_equal(seen(target), expected)


def test_vectors_get_their_pieces_and_keep_the_rest(pooled: Device) -> None:
    buffer = staged(pooled, np.arange(-1, 9, dtype=np.int32))
    targets = [on_device(pooled, np.full(size, -7, np.int32)) for size in (4, 6)]
    vectors = [pooled.views.table(target, "vector", vector=True) for target in targets]
    pieces = [(vectors[0], 4, 8), (vectors[1], 20, 20)]
    pooled.enqueue(StagedVectors(buffer, buffer.ctypes.data, pieces), pooled.create_stream("tables"))
    pooled.synchronize()
    assert seen(targets[0]).tolist() == [0, 1, -7, -7] and seen(targets[1]).tolist() == [4, 5, 6, 7, 8, -7]


@pytest.mark.parametrize("own", [True, False], ids=["a stream", "the null stream"])
def test_table_uploads_on_one_stream_arrive_in_the_order_of_the_calls(pooled: Device, own: bool) -> None:
    out = on_device(pooled, np.zeros((2, 4), np.int32))
    step = arrays(1, 4, 1, 1, put=lambda values: on_device(pooled, values))
    table, targets = pooled.views.table(out), pooled.views.step(step)
    stream = pooled.create_stream("tables") if own else NULL_STREAM
    uploads: list[StagedRows | StagedStep] = []  # their buffers live until they are read
    for turn in range(20):
        uploads.append(stage(pooled, table, np.full((1, 4), turn), [turn % 2], [(0, 1, 0)], 4))
        uploads.append(stage_steps(pooled, targets, [[turn]], [0], [T], 0))
    for upload in uploads:
        pooled.enqueue(upload, stream)
    pooled.synchronize(pooled.record(stream))
    assert seen(out).tolist() == [[18] * 4, [19] * 4]
    assert seen(step.slot_mapping).tolist() == [19 * T + t for t in range(T)] and seen(step.table).tolist() == [[19]]


def test_what_is_not_a_table_a_vector_or_an_array_of_a_step_is_refused_by_name(device: Device) -> None:
    for target in (None, [[1]], np.zeros((2, 2)), np.zeros(4, np.int32), np.zeros((2, 4), np.int32)[:, ::2]):
        with pytest.raises((TypeError, ValueError), match="target"):
            device.views.table(target)
    for target in (None, [1], np.zeros(2), np.zeros((2, 2), np.int32), np.zeros(4, np.int32)[::2]):
        with pytest.raises((TypeError, ValueError), match="indices"):
            device.views.table(target, "indices", vector=True)
    for name in NAMES:
        with pytest.raises((TypeError, ValueError), match=name):
            device.views.step(StepTargets(**{name: np.zeros((2, 2), np.float32)}))


def test_a_table_says_where_its_planes_begin(device: Device) -> None:
    out = on_device(device, np.zeros((3, 4, 2, 5), np.int32)).transpose(0, 2, 1, 3)
    table = device.views.table(out)
    assert table.starts() == [160 * pool + 20 * plane for pool in range(3) for plane in range(2)]
    assert table.owner is out and table.address == as_strided("out", out).address


# ----------------------------------------
# What every device promises about the tables of a step, against plain NumPy.


T = 4


def stage_steps(
    device: Device, targets: StepTargets, rows: list[list[int]], first: list[int], counts: list[int], sinks: int
) -> StagedStep:
    """Columns of -1 of a row from ``sinks`` on are those that are left out."""
    numbers, ids, slots = [], list[int](), 0
    columns = [-(-(start + count) // T) for start, count in zip(first, counts, strict=True)]
    for row, used, start, count in zip(rows, columns, first, counts, strict=True):
        numbers.append((len(ids), row[:used].count(-1), start + count, slots))
        ids += [block for block in row[:used] if block >= 0]
        slots += count
    numbers.append((len(ids), 0, 0, slots))
    buffer = staged(device, np.array(numbers, np.int64), np.array(ids, np.int32))
    return StagedStep(targets, buffer, buffer.ctypes.data, len(rows), max(columns, default=0), T, sinks)


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


def assert_step(
    device: Device,
    rows: list[list[int]],
    first: list[int],
    counts: list[int],
    names: Sequence[str] = NAMES,
    sinks: int = 0,
) -> None:
    """The device writes the tables of the reference, into arrays with a place more than they need."""
    wanted = reference.step_tables(rows, first, counts, T)
    sizes = len(rows) + 1, sum(counts) + 1, wanted["table"].shape[1] + 1, len(wanted["indices"]) + 1
    out = arrays(*sizes, wanted=names, put=lambda values: on_device(device, values))
    step = stage_steps(device, device.views.step(out), rows, first, counts, sinks)
    device.enqueue(step, device.create_stream("steps"))
    device.synchronize()
    check(out, wanted, seen)


@pytest.mark.parametrize("seed", range(4))
def test_tables_are_those_of_the_reference(pooled: Device, seed: int) -> None:
    random, sinks = np.random.default_rng(seed), seed % 2 * 2
    rows = random_rows(random, sinks)
    names = [name for name in NAMES if random.random() < 0.8] or ["table"]
    assert_step(pooled, *rows, names=names, sinks=sinks)


@pytest.mark.parametrize(("count", "columns"), [(2, 300), (1100, 1)])
def test_long_rows_and_many_sequences(pooled: Device, count: int, columns: int) -> None:
    """More columns than a thread block has threads, and more sequences than a launch has thread blocks."""
    rows = np.random.default_rng(0).integers(0, 99, (count, columns)).tolist()
    assert_step(pooled, rows, [columns * T - 3] * count, [2] * count)

"""What every device promises about the tables of a step, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool import StepTables
from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import STAGING, Device
from kvpool.device.work import StagedStep, StepTargets
from steps import NAMES, arrays, check
from tests.device import reference
from tests.device.pools import make_pools, on_device, seen

T = 4


@pytest.fixture
def steps_device(device: Device) -> Device:
    """A device with a pool."""
    make_pools(device, BlockLayout(layers=1, kv_heads=1, head_dim=2, tokens_per_block=T, dtype="uint8"))
    return device


def stage(
    device: Device, targets: StepTargets, rows: list[list[int]], first: list[int], counts: list[int], sinks: int
) -> StagedStep:
    """A buffer of its own with everything in it. Of a row, columns of -1 from ``sinks`` on are those that are left
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
    """Rows with holes behind the sinks, and tokens behind the holes."""
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
    device.enqueue(stage(device, targets, rows, first, counts, sinks), device.create_stream("steps"))
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
        device.enqueue(stage(device, targets, rows, first, counts, 0), device.create_stream("steps"))
        device.synchronize()
        check(out, wanted, seen)


def test_what_is_no_array_of_a_step_is_refused_by_name(steps_device: Device) -> None:
    for name in NAMES:
        for bad in ([1], np.zeros((1, 8)), np.zeros((2, 2), np.float32)):
            with pytest.raises((TypeError, ValueError), match=name):
                steps_device.views.step(StepTables(**{name: bad}))


def test_step_tables_and_other_hand_overs_of_one_stream_arrive_in_the_order_of_the_calls(steps_device: Device) -> None:
    device = steps_device
    out = arrays(1, 4, 1, 1, put=lambda values: on_device(device, values))
    targets, stream = device.views.step(out), device.create_stream("steps")
    for turn in range(20):
        device.enqueue(stage(device, targets, [[turn]], [0], [T], 0), stream)
    device.synchronize(device.record(stream))
    assert seen(out.slot_mapping).tolist() == [19 * T + t for t in range(T)] and seen(out.table).tolist() == [[19]]

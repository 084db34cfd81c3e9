"""The kernel that copies fragments, run by the shim, against the plain reference."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device import CpuDevice
from kvpool.device import launches as copies
from kvpool.device.copy_plan import make_plan
from kvpool.device.fragments import Cutter
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import BYTES, FROM, TO, TOKENS
from tests.device import reference
from tests.device.pools import DEVICE_BLOCKS, HOST_BLOCKS, as_moves, each_layout, images, make_pools, random_moves
from tests.kernels.fragment_tables import Table, launched, table_of, tabulate
from tests.kernels.shim import ShimLauncher


def launch_all(table: Table, launcher: ShimLauncher, chosen: int | None = None, bulk: bool = False) -> None:
    """What a device does with a table, but in three launches: the first rows are in the argument of a launch that has
    few or some, and the others where kernels can read them."""
    ends = min(15, len(table.rows) // 3), min(127, 2 * len(table.rows) // 3)
    for size, rows in zip((1, 2, 0), np.split(table.rows, ends), strict=True):
        launch_table(table._replace(rows=rows), launcher, chosen, bulk, size)


def launch_table(
    table: Table, launcher: ShimLauncher, chosen: int | None = None, bulk: bool = False, size: int = 0
) -> None:
    """Run the launches of a table."""
    with launcher.uploaded(table.rows, 0, host=True) as rows:
        for launch in launched(table, rows, launcher.grid, chosen, bulk, size):
            launcher.launch(launch, 0)


def table_of_blocks(pools: MemoryPools, moves: np.ndarray) -> Table:
    plan = make_plan(pools.layout, pools.flat("device"), pools.flat("host"), DEVICE_BLOCKS, HOST_BLOCKS)
    cutter = Cutter(plan, np.array([[plan.host.base, plan.host.base + pools.flat("host").nbytes, 1 << 30]]))
    return table_of(cutter, moves)


def check(pools: MemoryPools, moves: np.ndarray, launcher: ShimLauncher, chosen: int | None = None) -> None:
    expected = images(pools)
    reference.copy_blocks(pools.layout, *expected, moves)
    launch_all(table_of_blocks(pools, moves), launcher, chosen)
    for image, wanted in zip(images(pools), expected, strict=True):
        np.testing.assert_array_equal(image.view(np.uint8), wanted.view(np.uint8))


@each_layout
def test_shim_copies_blocks_as_the_reference_does(layout: BlockLayout) -> None:
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    check(pools, as_moves(), launcher)
    assert not launcher.launches
    for seed in range(4):
        moves = random_moves(layout, np.random.default_rng(seed))
        check(pools, moves, launcher, chosen=1 + seed % 2)
        moves[:, TOKENS] = layout.tokens_per_block
        check(pools, moves, launcher)


def random_fragments(
    random: np.random.Generator, count: int, most: int, unit: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """Memory, and fragments from its first half to its second that share no byte. Ends lie anywhere; most of them, and
    most lengths, are whole words. All are multiples of ``unit``."""
    sizes = random.integers(1, most, count)
    sizes = np.where(random.random(count) < 0.7, -(-sizes // 16) * 16, sizes)
    gaps = random.choice([0, 0, 16, 48, 4, 1, 5, 16 * int(random.integers(1, 40))], (2, count))
    sizes, gaps = -(-sizes // unit) * unit, gaps // unit * unit
    ends = np.cumsum(sizes + gaps, axis=1)
    half = int(ends.max()) + 64
    raw = random.integers(0, 256, 2 * half + 4096, dtype=np.uint8)
    memory = raw[-raw.ctypes.data % 4096 :][: 2 * half]
    first = memory.ctypes.data + random.choice([0, 16, 4, 3], 2) // unit * unit + np.array([0, -(-half // 16) * 16])
    rows = np.empty((count, 3), np.int64)
    rows[:, FROM], rows[:, TO] = first[:, None] + ends - sizes
    rows[:, BYTES] = sizes
    return raw, rows


@pytest.mark.parametrize(("most", "bulk"), [(3, False), *product([40, 700, 9000], [False, True]), (50_000, True)])
@pytest.mark.parametrize("seed", range(12))
def test_shim_copies_fragments_of_any_size_and_alignment_and_nothing_beside_them(
    seed: int, most: int, bulk: bool
) -> None:
    """In bulk, whole words alone; each load comes as late as it may, and each store reads its stage as late as it
    may."""
    random, launcher = np.random.default_rng([seed, most]), ShimLauncher()
    raw, rows = random_fragments(random, int(random.integers(1, 60)), most, unit=16 if bulk else 1)
    expected, base = raw.copy(), raw.ctypes.data
    for source, target, nbytes in rows.tolist():
        expected[target - base : target - base + nbytes] = raw[source - base : source - base + nbytes]
    table = tabulate(rows)
    assert table.in_words or not bulk
    launch_all(table, launcher, chosen=1 + seed % 3, bulk=bulk)
    assert {launch.source for launch in launcher.launches} == {"bulk_fragments.cu" if bulk else "copy_fragments.cu"}
    np.testing.assert_array_equal(raw, expected)


@pytest.mark.parametrize("crooked", [(0, 0, 0), (8, 0, 0), (0, 4, 0), (0, 0, 1)])
def test_only_whole_words_can_be_copied_in_bulk(crooked: tuple[int, int, int]) -> None:
    rows = np.array([[4096, 1 << 20, 64], [8192, 1 << 21, 64]]) + np.array([(0, 0, 0), crooked])
    assert tabulate(rows).in_words == (not any(crooked))


def unpacked(table: Table) -> list[tuple[int, int, int, int]]:
    """For each row: bytes of a run, runs, and the units between them at each end."""
    low = (1 << 32) - 1
    return [(shape & low, shape >> 32, steps & low, steps >> 32) for _, _, shape, steps in table.rows.tolist()]


def test_runs_of_one_length_and_distance_are_one_row() -> None:
    places = np.arange(16)
    rows = np.stack([4096 + 512 * places, 1 << 20 | 128 * places, np.full(16, 128)], axis=1)
    assert unpacked(tabulate(rows)) == [(128, 16, 32, 8)]
    rows[8:, FROM] += 4096
    assert unpacked(tabulate(rows)) == [(128, 8, 32, 8)] * 2


def test_whole_words_are_copied_as_such_whatever_the_ends() -> None:
    """Both ends are equally far after the start of a word: the bytes before and after it are rows of their own."""
    rows = unpacked(tabulate(np.array([[4096 + 5, 8192 + 21, 11 + 64 + 3]])))
    assert [run for run, *_ in rows] == [11, 64, 3]
    assert unpacked(tabulate(np.array([[4096, 8196, 64]])))[0][0] == 64, "four bytes apart: words of four bytes"


def test_a_layer_first_block_is_one_row_however_many_layers_it_has() -> None:
    layout = BlockLayout(5, 2, 64, 8, dtype="float32", order="layer_first")
    pools = make_pools(CpuDevice(), layout)
    rows = unpacked(table_of_blocks(pools, as_moves((0, 7, 8), (1, 9, 8))))
    assert [row[:2] for row in rows] == [(layout.segment_bytes, layout.layers * layout.planes)] * 2


def test_one_long_fragment_among_short_ones_does_not_make_warps_look_at_nothing() -> None:
    sizes = np.array([1 << 20, *[64] * 1000])
    ends = np.cumsum(sizes + 4096)
    table = tabulate(np.stack([ends, ends + (1 << 30), sizes], axis=1))
    looked, needed = len(table.rows) * -(-table.words // copies.PIECE_WORDS), (1 << 20) // 4096 + 1000
    assert looked <= 3 * needed


def test_shim_reads_one_row_of_the_table_for_a_piece() -> None:
    layout = BlockLayout(3, 2, 64, 8, dtype="float32")
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    launch_table(table_of_blocks(pools, as_moves((0, 7, 8), (1, 8, 8), (2, 9, 8))), launcher)
    (launch,) = launcher.launches
    pieces = 3 * int(launch.record[1])
    # For each lane; a warp makes two loads of 16 bytes.
    assert pieces == 3 * layout.block_bytes // 4096 and launcher.table_loads == 2 * 32 * pieces


def test_shim_splits_batches_of_more_pieces_than_the_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = BlockLayout(2, 2, 16, 8)
    pools, launcher = make_pools(CpuDevice(), layout), ShimLauncher()
    monkeypatch.setattr(copies, "COUNT_MAX", 2)
    check(pools, as_moves((0, 7, 8), (1, 8, 8), (2, 9, 3), (3, 10, 8), (4, 5, 8)), launcher)
    assert len(launcher.launches) > 2

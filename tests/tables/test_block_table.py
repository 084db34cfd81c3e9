"""Block tables: the host table in place, dense and CSR forms, and rows that are handed over to a device's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, open_engine, small_layout
from kvpool import KVCacheManager, MemoryOptions, PoolClosed
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, STAGING, Stream, WrappedDevice
from kvpool.device.work import StagedRows, Work
from kvpool.errors import DeviceError
from tests.tables.uploads import picture

Make = Callable[..., Engine]
GARBAGE = 1234567


def target(*shape: int) -> np.ndarray:
    return np.full(shape, GARBAGE, np.int32)


def whole(engine: Engine, ids: list[int], columns: int) -> np.ndarray:
    """Return what rows of that many columns should be, from the state itself."""
    state = engine.cache.core.tokens
    return np.array(
        [
            [*state.table[i & 0xFFFFFFFF, : state.sequences["blocks"][i & 0xFFFFFFFF]], *[-1] * columns][:columns]
            for i in ids
        ]
    )


# -- on the host ---------------------------------------------------------------------------------------


def test_the_host_table_keeps_its_address_and_layout(make: Make) -> None:
    engine = make(T=2, P=16, max_sequences=4)
    table = engine.cache.block_table([]).table
    pointer, shape, strides = table.ctypes.data, table.shape, table.strides
    for turn in range(20):
        sequence = engine.add(range(turn, turn + 5))
        engine.append(sequence, [1, 2, 3])
        block_table = engine.cache.block_table(sequence.id)
        assert (block_table.table.ctypes.data, block_table.table.shape, block_table.table.strides) == (
            pointer,
            shape,
            strides,
        )
        assert not block_table.table.flags.writeable
        np.testing.assert_array_equal(table[block_table.rows[0], :4], block_table.dense()[0])
        engine.release(sequence)
    engine.cache.clear()
    assert engine.cache.block_table([]).table.ctypes.data == pointer


def test_a_row_that_shrank_has_no_stale_ids(make: Make) -> None:
    engine = make(T=2, P=16)
    sequence = engine.add(range(9))
    out = target(1, 8)
    engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    engine.rewind(sequence, 6)
    block_table = engine.cache.block_table(sequence.id)
    assert block_table.dense().shape == (1, 2) and (block_table.table[block_table.rows[0], 2:] == -1).all()
    engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    np.testing.assert_array_equal(out, whole(engine, [sequence.id], 8))
    assert (out[0, 2:] == -1).all()


def test_dense_is_as_wide_as_asked_and_refuses_what_does_not_fit(make: Make) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    block_table = engine.cache.block_table(ids)
    np.testing.assert_array_equal(block_table.dense(), whole(engine, ids, 3))
    for width in (3, 4, 40):
        wide = block_table.dense(width)
        np.testing.assert_array_equal(wide, whole(engine, ids, width))
        assert wide.flags.c_contiguous and wide.dtype == np.int32
    for bad, error in ((2, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="width: .*"):
            block_table.dense(bad)  # type: ignore[arg-type]
    assert engine.cache.block_table([]).dense().shape == (0, 0)


def test_csr_is_the_dense_table_without_padding(make: Make) -> None:
    engine = make(T=3, P=32)
    sequences = [engine.add(range(100 * n, 100 * n + n)) for n in (1, 3, 4, 7)]
    sequences.append(engine.rewind(engine.add([7, 7]), 2))
    block_table = engine.cache.block_table([s.id for s in sequences])
    indptr, indices, last = block_table.csr()
    assert [array.dtype for array in (indptr, indices, last)] == [np.int32] * 3
    assert indptr.tolist() == [0, 1, 2, 4, 7, 7] and last.tolist() == [1, 3, 1, 1, 0]
    dense = block_table.dense()
    for i in range(len(sequences)):
        assert indices[indptr[i] : indptr[i + 1]].tolist() == dense[i][dense[i] >= 0].tolist()
    empty = engine.cache.block_table([]).csr()
    assert empty.indptr.tolist() == [0] and len(empty.indices) == len(empty.last_page_len) == 0


# -- handed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [3, 4, 5, 7, 8, 13])
@pytest.mark.parametrize("lengths", [(1, 5, 6), (2, 2, 2), (6, 1, 1)])
def test_rows_are_written_whole_for_any_number_of_columns(make: Make, columns: int, lengths: tuple[int, ...]) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add(range(10 * n, 10 * n + length)).id for n, length in enumerate(lengths)]
    out = target(5, columns)
    engine.cache.tables.copy_batch_block_offsets(out, ids)
    np.testing.assert_array_equal(out[:3], whole(engine, ids, columns))
    assert (out[3:] == GARBAGE).all()


def test_sequences_go_to_the_rows_that_are_named(make: Make) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add(range(10 * n, 10 * n + n + 1)).id for n in range(3)]
    out, rows = target(6, 4), np.array([5, 0, 2], np.uint8)
    engine.cache.tables.copy_batch_block_offsets(out, ids, rows=rows)
    np.testing.assert_array_equal(out[rows], whole(engine, ids, 4))
    assert (out[[1, 3, 4]] == GARBAGE).all()
    engine.cache.tables.copy_batch_block_offsets(out, ids[2], rows=3)
    np.testing.assert_array_equal(out[3], out[2])


@pytest.mark.parametrize(
    ("scale", "v_offset"),
    [(3, None), (3, 1000), ([2, 7], None), ((2, 7), 1000), (np.array([2, 7]), [1000, 5]), ([5], [1])],
)
def test_ids_are_scaled_and_offset_per_pool_and_plane_and_none_stays_none(
    make: Make, scale: Any, v_offset: Any
) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    pools = [scale] if isinstance(scale, int) else scale
    shape = ([] if isinstance(scale, int) else [len(pools)]) + ([] if v_offset is None else [2]) + [3, 5]
    out = target(*shape)
    engine.cache.tables.copy_batch_block_offsets(out, ids, scale=scale, v_offset=v_offset)
    expected, planes = whole(engine, ids, 5), out.reshape(-1, 3, 5)
    offsets = v_offset if isinstance(v_offset, list) else [v_offset] * len(pools)
    wanted = [
        (stride, each)
        for stride, offset in zip(pools, offsets, strict=True)
        for each in ([0] if v_offset is None else [0, offset])
    ]
    assert len(planes) == len(wanted)
    for plane, (stride, offset) in zip(planes, wanted, strict=True):
        np.testing.assert_array_equal(plane[:2], np.where(expected < 0, -1, expected * stride + offset))
        assert (plane[2] == GARBAGE).all()


def test_targets_may_be_strided(make: Make) -> None:
    """[pools, rows, 2, columns], as engines keep it, seen with the planes in front; and a part of a larger table."""
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    out = target(2, 6, 2, 9)
    engine.cache.tables.copy_batch_block_offsets(
        out.transpose(0, 2, 1, 3)[:, :, 1:4, 2:6], ids, rows=[2, 0], scale=[1, 4], v_offset=3
    )
    expected, untouched = whole(engine, ids, 4), np.ones(out.shape, bool)
    for pool, scale in enumerate((1, 4)):
        for plane, offset in enumerate((0, 3)):
            for row, wanted in ((3, expected[0]), (1, expected[1])):
                np.testing.assert_array_equal(
                    out[pool, row, plane, 2:6], np.where(wanted < 0, -1, wanted * scale + offset)
                )
                untouched[pool, row, plane, 2:6] = False
    assert (out[untouched] == GARBAGE).all() and untouched.sum() == out.size - 2 * 2 * 2 * 4


def test_any_tables_are_those_of_the_state(make: Make) -> None:
    for seed in range(40):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        engine = make(T=int(rng.integers(1, 4)), P=80, max_sequences=6)
        ids = [engine.add(rng.integers(0, 99, rng.integers(1, 12)).tolist()).id for _ in range(rng.integers(1, 6))]
        ids = rng.permutation(ids)[: rng.integers(1, len(ids) + 1)].tolist()
        columns, available = int(rng.integers(12, 20)), int(rng.integers(len(ids), 9))
        rows, cut = rng.permutation(available)[: len(ids)], int(rng.integers(1, 13))
        out, short = target(available, columns), target(available, columns)
        engine.cache.tables.copy_batch_block_offsets(out, ids, rows=rows)
        engine.cache.tables.copy_batch_block_offsets(short, np.array(ids), rows=rows.tolist(), max_blocks=cut)
        expected, expected_short = target(available, columns), target(available, columns)
        expected[rows] = whole(engine, ids, columns)
        expected_short[rows, :cut] = expected[rows, :cut]
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(short, expected_short)


def test_an_empty_list_of_sequences_makes_no_work(make: Make) -> None:
    engine, out = make(), target(2, 2)
    engine.cache.tables.copy_batch_block_offsets(out, [])
    assert (out == GARBAGE).all() and not engine.cache._staging._buffers


# -- what is refused ---------------------------------------------------------------------------------------

LIVE = 5
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (None, {}, TypeError, "target.*NoneType"),
    ([[1]], {}, TypeError, "target.*list"),
    (np.zeros((2, LIVE), np.int64), {}, TypeError, "target.*int64"),
    (np.zeros((2, LIVE), ">i4"), {}, TypeError, "target.*>i4"),
    (np.zeros(LIVE, np.int32), {}, ValueError, r"target.*shape.*\(5,\)"),
    (np.zeros((0, LIVE), np.int32), {}, ValueError, "target.*shape"),
    (np.zeros((2, 2 * LIVE), np.int32)[:, ::2], {}, ValueError, "target.*strides"),
    (np.zeros((LIVE, 2), np.int32).T, {}, ValueError, "target.*strides"),
    (np.zeros((2, LIVE), np.int32)[::-1], {}, ValueError, "target.*strides"),
    (np.lib.stride_tricks.as_strided(np.zeros(9, np.int32), (2, LIVE), (16, 4)), {}, ValueError, "target.*overlap"),
    (np.broadcast_to(np.zeros(LIVE, np.int32), (2, LIVE)), {}, ValueError, "target.*read-only"),
    (
        np.frombuffer(bytearray(41), np.uint8)[1:].view(np.int32).reshape(2, LIVE),
        {},
        ValueError,
        "target.*multiple of 4",
    ),
    (np.zeros((1, LIVE), np.int32), {}, ValueError, "target: expected 2 rows or more, one for each sequence, got 1"),
    (
        np.zeros((2, 2), np.int32),
        {},
        ValueError,
        "target: expected max_blocks, or 3 columns for the blocks of sequence .*, got 2 columns",
    ),
    (
        np.zeros((2, 2, LIVE), np.int32),
        {},
        ValueError,
        r"target: expected \[rows, columns\] with this scale and v_offset, got shape \[2, 2, 5\]",
    ),
    (
        np.zeros((2, LIVE), np.int32),
        {"v_offset": 1},
        ValueError,
        r"target: expected \[2, rows, columns\] with this scale and v_offset, got shape \[2, 5\]",
    ),
    (
        np.zeros((2, LIVE), np.int32),
        {"scale": [1, 2]},
        ValueError,
        r"target: expected \[2, rows, columns\] with this scale and v_offset, got shape \[2, 5\]",
    ),
    (
        np.zeros((3, 2, LIVE), np.int32),
        {"scale": [1, 2, 3], "v_offset": 4},
        ValueError,
        r"target: expected \[3, 2, rows, columns\] with this scale and v_offset, got shape \[3, 2, 5\]",
    ),
    *(((2, LIVE), {"scale": bad}, TypeError, "scale: .*") for bad in (None, 1.5, True, "1", [[1]])),
    *(((2, LIVE), {"scale": bad}, ValueError, "scale: .*") for bad in (0, -1, 2**31)),
    *(((2, 2, LIVE), {"v_offset": bad}, TypeError, "v_offset: .*") for bad in (1.5, True, "1", [None])),
    *(((2, 2, LIVE), {"v_offset": bad}, ValueError, "v_offset: .*") for bad in (-1, 2**31)),
    (
        (2, 2, LIVE),
        {"v_offset": [1]},
        ValueError,
        "v_offset: expected one number, or one for each pool that scale lists, got 1",
    ),
    (
        (2, 2, 2, LIVE),
        {"scale": [1, 2], "v_offset": [1]},
        ValueError,
        "v_offset: expected one number, or one for each pool that scale lists, got 1",
    ),
    ((2, LIVE), {"scale": 2**29}, ValueError, "scale, v_offset: .*int32.*536870912"),
    ((2, 2, LIVE), {"v_offset": 2**31 - 2}, ValueError, "scale, v_offset: .*int32.*2147483646"),
    *(((2, LIVE), {"max_blocks": bad}, ValueError, "max_blocks: .*") for bad in (0, -1, LIVE + 1)),
    *(((2, LIVE), {"max_blocks": bad}, TypeError, "max_blocks: .*") for bad in (1.5, True, "1")),
    *(
        ((2, LIVE), {"rows": bad}, ValueError, "rows: expected one for each of the 2 sequences, got ")
        for bad in ([], [0], [0, 1, 2], 1)
    ),
    *(
        ((2, LIVE), {"rows": bad}, ValueError, rf"rows\[1\]: .*{bad[1]}")
        for bad in ([0, 2], [0, -1], [1, 1], [0, 2**40])
    ),
    *(((2, LIVE), {"rows": bad}, TypeError, "rows") for bad in ("ab", [0.0, 1.0], [True, False], 1.5)),
    *(((2, LIVE), {"stream": bad}, TypeError, "stream: .*") for bad in ("x", 1.5, True)),
]


@pytest.mark.parametrize(("out", "options", "error", "message"), REFUSED, ids=lambda value: f"{value!r:.40}")
def test_bad_arguments_are_named_and_change_nothing(
    make: Make, out: Any, options: dict[str, Any], error: type, message: str
) -> None:
    engine = make(T=2, P=16)
    ids = [engine.add([1]).id, engine.add(range(5)).id]
    out = target(*out) if isinstance(out, tuple) else out
    before, written = picture(engine), np.array(out)
    with pytest.raises(error, match=message):
        engine.cache.tables.copy_batch_block_offsets(out, ids, **options)
    assert picture(engine) == before
    np.testing.assert_array_equal(out, written)


@pytest.mark.parametrize("depth", [0, -1, 2**16 + 1, 1.5, True, None])
def test_a_bad_staging_depth_is_refused(depth: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="staging_depth: .*"):
        open_engine(2, 4, 0, memory=MemoryOptions(staging_depth=depth))


# -- devices that fail, and sequences that grow meanwhile ------------------------------------------------------


class Refusing(WrappedDevice):
    """A CPU device that fails to stage, or to take memory, as often as it is set to."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.stages = self.allocations = 0
        self.sticky = False

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self.stages -= 1
        if self.stages >= 0:
            raise DeviceError("staging refused", sticky=self.sticky)
        super().enqueue(work, stream)

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        self.allocations -= tier == STAGING
        if self.allocations >= 0 and tier == STAGING:
            raise MemoryError("no memory")
        return super().allocate(nbytes, tier, shared)


def test_only_columns_in_use_travel() -> None:
    engine, device = refusing()
    ids, out, widths = [engine.add(range(n)).id for n in (1, 5)], target(2, 9), list[tuple[int, int]]()
    enqueue = device.enqueue

    def noted(work: Work, stream: Stream = NULL_STREAM) -> None:
        assert isinstance(work, StagedRows)
        widths.append((work.width, work.columns))
        enqueue(work, stream)

    device.enqueue = noted  # type: ignore[method-assign]
    for most in (None, 2, 5):
        engine.cache.tables.copy_batch_block_offsets(out, ids, max_blocks=most)
    engine.cache.tables.copy_batch_block_offsets(out, ids[0])
    assert widths == [(3, 9), (2, 2), (3, 5), (1, 9)]
    engine.cache.release(ids)
    engine.cache.close()


def refusing() -> tuple[Engine, Refusing]:
    device = Refusing()
    return Engine(KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=device)), device


def test_a_hand_over_that_the_device_refuses_is_reported_and_the_next_one_goes_through() -> None:
    engine, device = refusing()
    sequence, out = engine.add(range(5)), target(1, 4)
    for refused in ("allocations", "stages"):
        setattr(device, refused, 1)
        with pytest.raises((DeviceError, MemoryError), match="refused|no memory"):
            engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
        assert (out == GARBAGE).all() and engine.cache._staging.retained == 0
        engine.cache.verify()
    engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    np.testing.assert_array_equal(out, whole(engine, [sequence.id], 4))
    engine.release(sequence)
    engine.cache.close()


def test_a_device_that_is_lost_while_staging_closes_the_pool() -> None:
    engine, device = refusing()
    sequence, out = engine.add(range(5)), target(1, 4)
    device.stages, device.sticky = 1, True
    with pytest.raises(DeviceError, match="staging refused"):
        engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    with pytest.raises(PoolClosed, match="staging refused"):
        engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    engine.cache.stats()
    engine.cache.close()


def test_buffers_are_taken_again_and_never_more_than_may_be_under_way(make: Make) -> None:
    engine = make(T=1, P=4000, memory=MemoryOptions(staging_depth=2), max_sequences=40)
    ids = [engine.cache.add_sequence(range(k, k + 90)) for k in range(0, 3600, 90)]
    sizes: list[int] = []
    for count in (1, 15, 40, 3, 20, 40, 1):
        out = target(count, 90)
        engine.cache.tables.copy_batch_block_offsets(out, ids[:count])
        np.testing.assert_array_equal(out, whole(engine, ids[:count], 90))
        engine.cache.verify()
        sizes.append(len(engine.cache._staging._buffers))
    assert max(sizes) <= 2
    engine.cache.release(ids)


# ----------------------------------------
# A persistent block table in memory of the caller's: rows of one array serve several pools, and each keeps to its
# own.


def test_two_pools_keep_their_rows_of_one_table() -> None:
    table = np.full((7, 4), 77, np.int32)
    options: dict[str, Any] = {"max_sequence_tokens": 16, "device": "cpu"}
    with (
        KVCacheManager(
            small_layout(4), device_blocks=8, max_sequences=4, memory=MemoryOptions(table=table[1:5]), **options
        ) as target,
        KVCacheManager(
            small_layout(4), device_blocks=8, max_sequences=2, memory=MemoryOptions(table=table[5:]), **options
        ) as draft,
    ):
        assert (table[0] == 77).all() and (table[1:] == -1).all()
        ids = [target.add_sequence([1, 2, 3, 4, 5]), target.add_sequence([6]), draft.add_sequence([7, 8])]
        for cache, first, mine in ((target, 1, ids[:2]), (draft, 5, ids[2:])):
            block_table = cache.block_table(mine)
            assert np.shares_memory(block_table.table, table) and not block_table.table.flags.writeable
            np.testing.assert_array_equal(table[first + block_table.rows], block_table.table[block_table.rows])
            cache.append_tokens(mine, [1] * 4 * len(mine), [4] * len(mine))
            assert ((table[first + block_table.rows] >= 0).sum(1) == -(-cache.sequence_length(mine) // 4)).all()
            cache.verify()
        target.release(ids[:2])
        assert (table[1:5] == -1).all() and (table[5:] >= 0).sum() == 2
        draft.release(ids[2:])
    assert (table[0] == 77).all()


READ_ONLY = np.zeros((2, 4), np.int32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ([[0] * 4] * 2, TypeError, "table: expected an int32 array, got list"),
        (np.zeros((2, 4), np.int64), TypeError, "table: expected an int32 array, got int64"),
        (np.zeros((2, 5), np.int32), ValueError, r"expected \[max_sequences, columns\] = \[2, 4\]"),
        (np.zeros(8, np.int32), ValueError, r"table: expected \[max_sequences, columns\] = \[2, 4\], got shape \[8\]"),
        (np.zeros((2, 8), np.int32)[:, :4], ValueError, "C-contiguous"),
        (READ_ONLY, ValueError, "writable"),
    ],
    ids=range(6),
)
def test_a_table_that_does_not_fit_is_refused_and_left_alone(table: Any, error: type[Exception], message: str) -> None:
    before = np.array(table)
    with pytest.raises(error, match=message):
        KVCacheManager(
            small_layout(4),
            device_blocks=8,
            max_sequences=2,
            max_sequence_tokens=16,
            device="cpu",
            memory=MemoryOptions(table=table),
        )
    np.testing.assert_array_equal(table, before)

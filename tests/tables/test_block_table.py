"""Block tables: the host table in place, dense and CSR forms, and rows that are handed over to a device's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine import Engine, small_layout
from kvpool import KVCacheManager, MemoryOptions, PoolClosed
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, STAGING, Stream, WrappedDevice
from kvpool.device.work import StagedRows, Work
from kvpool.errors import DeviceError
from tests.tables.conftest import Two
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
    place = table.ctypes.data, table.shape, table.strides
    for turn in range(20):
        sequence = engine.add(range(turn, turn + 5))
        engine.append(sequence, [1, 2, 3])
        block_table = engine.cache.block_table(sequence.id)
        assert (block_table.table.ctypes.data, block_table.table.shape, block_table.table.strides) == place
        assert not block_table.table.flags.writeable
        np.testing.assert_array_equal(table[block_table.rows[0], :4], block_table.dense()[0])
        engine.rewind(sequence, 6)
        assert (table[block_table.rows[0], 1:] == -1).all(), "a row that shrank has no stale ids"
        engine.release(sequence)


def test_dense_is_as_wide_as_asked_and_refuses_what_does_not_fit(two: Two) -> None:
    engine, ids = two
    block_table = engine.cache.block_table(ids)
    for width, dense in ((3, block_table.dense()), *((width, block_table.dense(width)) for width in (3, 4, 40))):
        np.testing.assert_array_equal(dense, whole(engine, ids, width))
        assert dense.flags.c_contiguous and dense.dtype == np.int32
    for bad in (2, -1, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="width: "):
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
    assert indices.tolist() == dense[dense >= 0].tolist()
    assert [part.tolist() for part in engine.cache.block_table([]).csr()] == [[0], [], []]


# -- handed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "v_offset", "planes"),
    [
        (3, None, [(3, 0)]),
        (3, 1000, [(3, 0), (3, 1000)]),
        ((2, 7), None, [(2, 0), (7, 0)]),
        ((2, 7), 1000, [(2, 0), (2, 1000), (7, 0), (7, 1000)]),
        (np.array([2, 7]), [1000, 5], [(2, 0), (2, 1000), (7, 0), (7, 5)]),
    ],
)
def test_ids_are_scaled_and_offset_per_pool_and_plane_and_none_stays_none(
    two: Two, scale: Any, v_offset: Any, planes: list[tuple[int, int]]
) -> None:
    engine, ids = two
    out = target(*([] if isinstance(scale, int) else [2]), *([] if v_offset is None else [2]), 3, 5)
    engine.cache.tables.copy_batch_block_offsets(out, ids, scale=scale, v_offset=v_offset)
    expected = whole(engine, ids, 5)
    for plane, (stride, offset) in zip(out.reshape(-1, 3, 5), planes, strict=True):
        np.testing.assert_array_equal(plane[:2], np.where(expected < 0, -1, expected * stride + offset))
        assert (plane[2] == GARBAGE).all()


def test_targets_may_be_strided(two: Two) -> None:
    """[pools, rows, 2, columns], as engines keep it, seen with the planes in front; and a part of a larger table."""
    engine, ids = two
    out, wanted = target(2, 6, 2, 9), target(2, 6, 2, 9)
    part = (slice(None), slice(None), slice(1, 4), slice(2, 6))
    engine.cache.tables.copy_batch_block_offsets(
        out.transpose(0, 2, 1, 3)[part], ids, rows=[2, 0], scale=[1, 4], v_offset=3
    )
    expected = whole(engine, ids, 4)
    for pool, scale in enumerate((1, 4)):
        for plane, offset in enumerate((0, 3)):
            wanted[pool, [3, 1], plane, 2:6] = np.where(expected < 0, -1, expected * scale + offset)
    np.testing.assert_array_equal(out, wanted)


def test_any_tables_are_those_of_the_state(make: Make) -> None:
    for seed in range(40):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        engine = make(T=int(rng.integers(1, 4)), P=80, max_sequences=6)
        ids = [engine.add(rng.integers(0, 99, rng.integers(1, 12)).tolist()).id for _ in range(rng.integers(1, 6))]
        ids = rng.permutation(ids)[: rng.integers(0, len(ids) + 1)].tolist()
        columns, available = int(rng.integers(12, 20)), int(rng.integers(max(1, len(ids)), 9))
        rows, cut = rng.permutation(available)[: len(ids)].astype(np.uint8), int(rng.integers(1, 13))
        for most, given in ((None, rows), (cut, rows.tolist())):
            out, expected = target(available, columns), target(available, columns)
            engine.cache.tables.copy_batch_block_offsets(out, ids, rows=given, max_blocks=most)
            if ids:
                expected[rows, :most] = whole(engine, ids, columns)[:, :most]
            np.testing.assert_array_equal(out, expected)


# -- what is refused ---------------------------------------------------------------------------------------

LIVE = 5
SHAPES = "with this scale and v_offset, got shape "


def zeros(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.zeros(shape, dtype)


TARGETS: list[tuple[Any, dict[str, Any], str]] = [
    (None, {}, "target.*NoneType"),
    ([[1]], {}, "target.*list"),
    (zeros(2, LIVE, dtype=np.int64), {}, "target.*int64"),
    (zeros(2, LIVE, dtype=">i4"), {}, "target.*>i4"),
    (zeros(LIVE), {}, r"target.*shape.*\(5,\)"),
    (zeros(0, LIVE), {}, "target.*shape"),
    (zeros(2, 2 * LIVE)[:, ::2], {}, "target.*strides"),
    (zeros(2, LIVE)[::-1], {}, "target.*strides"),
    (np.lib.stride_tricks.as_strided(zeros(9), (2, LIVE), (16, 4)), {}, "target.*overlap"),
    (np.broadcast_to(zeros(LIVE), (2, LIVE)), {}, "target.*read-only"),
    (np.frombuffer(bytearray(41), np.uint8)[1:].view(np.int32).reshape(2, LIVE), {}, "target.*multiple of 4"),
    (zeros(1, LIVE), {}, "target: expected 2 rows or more, one for each sequence, got 1"),
    (zeros(2, 2), {}, "target: expected max_blocks, or 3 columns for the blocks of sequence .*, got 2 columns"),
    (zeros(2, 2, LIVE), {}, rf"target: expected \[rows, columns\] {SHAPES}\[2, 2, 5\]"),
    (zeros(2, LIVE), {"v_offset": 1}, rf"target: expected \[2, rows, columns\] {SHAPES}\[2, 5\]"),
    (zeros(2, LIVE), {"scale": [1, 2]}, rf"target: expected \[2, rows, columns\] {SHAPES}\[2, 5\]"),
    (zeros(3, 2, LIVE), {"scale": [1, 2, 3], "v_offset": 4}, rf"expected \[3, 2, rows, columns\] {SHAPES}\[3, 2, 5\]"),
    (zeros(2, 2, 2, LIVE), {"scale": [1, 2], "v_offset": [1]}, "v_offset: .*one for each pool that scale lists, got 1"),
]
OPTIONS: list[tuple[str, str, list[Any]]] = [
    ("scale", "scale: ", [None, 1.5, True, "1", [[1]], 0, -1, 2**31]),
    ("scale", "scale, v_offset: .*int32.*536870912", [2**29]),
    ("v_offset", "v_offset: ", [1.5, True, "1", [None], -1, 2**31]),
    ("v_offset", "scale, v_offset: .*int32.*2147483646", [2**31 - 2]),
    ("max_blocks", "max_blocks: ", [0, -1, LIVE + 1, 1.5, True, "1"]),
    ("rows", "rows: expected one for each of the 2 sequences, got ", [[], [0], [0, 1, 2], 1]),
    ("rows", r"rows\[1\]: ", [[0, 2], [0, -1], [1, 1], [0, 2**40]]),
    ("rows", "rows", ["ab", [0.0, 1.0], [True, False], 1.5]),
    ("stream", "stream: ", ["x", 1.5, True]),
]
REFUSED = TARGETS + [
    (zeros(*((2,) if name == "v_offset" else ()), 2, LIVE), {name: value}, message)
    for name, message, values in OPTIONS
    for value in values
]


def test_bad_arguments_are_named_and_change_nothing(two: Two) -> None:
    engine, ids = two
    for out, options, message in REFUSED:
        before, written = picture(engine.cache), np.array(out)
        with pytest.raises((TypeError, ValueError), match=message):
            engine.cache.tables.copy_batch_block_offsets(out, ids, **options)
        assert picture(engine.cache) == before
        np.testing.assert_array_equal(out, written)


# -- devices that fail, and sequences that grow meanwhile ------------------------------------------------------


class Refusing(WrappedDevice):
    """A CPU device that fails to stage, or to take memory, as often as it is set to, and notes the widths of rows."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.stages = self.allocations = 0
        self.sticky = False
        self.widths: list[tuple[int, int]] = []

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self.stages -= 1
        if self.stages >= 0:
            raise DeviceError("staging refused", sticky=self.sticky)
        assert isinstance(work, StagedRows)
        self.widths.append((work.width, work.columns))
        super().enqueue(work, stream)

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        self.allocations -= tier == STAGING
        if self.allocations >= 0 and tier == STAGING:
            raise MemoryError("no memory")
        return super().allocate(nbytes, tier, shared)


@pytest.fixture
def refusing() -> Iterator[tuple[Engine, Refusing]]:
    device = Refusing()
    engine = Engine(KVCacheManager(small_layout(2), device_blocks=16, host_blocks=0, device=device))
    yield engine, device
    engine.cache.close()


def test_only_columns_in_use_travel(refusing: tuple[Engine, Refusing]) -> None:
    engine, device = refusing
    ids, out = [engine.add(range(n)).id for n in (1, 5)], target(2, 9)
    for most in (None, 2, 5):
        engine.cache.tables.copy_batch_block_offsets(out, ids, max_blocks=most)
    engine.cache.tables.copy_batch_block_offsets(out, ids[0])
    assert device.widths == [(3, 9), (2, 2), (3, 5), (1, 9)]


def test_a_hand_over_that_the_device_refuses_is_reported_and_the_next_one_goes_through(
    refusing: tuple[Engine, Refusing],
) -> None:
    engine, device = refusing
    sequence, out = engine.add(range(5)), target(1, 4)
    for refused in ("allocations", "stages"):
        setattr(device, refused, 1)
        with pytest.raises((DeviceError, MemoryError), match="refused|no memory"):
            engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
        assert (out == GARBAGE).all() and engine.cache._staging.retained == 0
        engine.cache.verify()
    engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    np.testing.assert_array_equal(out, whole(engine, [sequence.id], 4))


def test_a_device_that_is_lost_while_staging_closes_the_pool(refusing: tuple[Engine, Refusing]) -> None:
    engine, device = refusing
    sequence, out = engine.add(range(5)), target(1, 4)
    device.stages, device.sticky = 1, True
    for error in (DeviceError, PoolClosed):
        with pytest.raises(error, match="staging refused"):
            engine.cache.tables.copy_batch_block_offsets(out, sequence.id)
    engine.cache.stats()


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


def pool_in(table: Any, sequences: int = 2) -> KVCacheManager:
    memory, options = MemoryOptions(table=table), {"max_sequences": sequences, "max_sequence_tokens": 16}
    return KVCacheManager(small_layout(4), device_blocks=8, device="cpu", memory=memory, **options)


def test_two_pools_keep_their_rows_of_one_table() -> None:
    table = np.full((7, 4), 77, np.int32)
    with pool_in(table[1:5], 4) as target, pool_in(table[5:]) as draft:
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


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([[0] * 4] * 2, "table: expected an int32 array, got list"),
        (zeros(2, 4, dtype=np.int64), "table: expected an int32 array, got int64"),
        (zeros(2, 5), r"expected \[max_sequences, columns\] = \[2, 4\]"),
        (zeros(8), r"table: expected \[max_sequences, columns\] = \[2, 4\], got shape \[8\]"),
        (zeros(2, 8)[:, :4], "C-contiguous"),
        (np.frombuffer(bytes(32), np.int32).reshape(2, 4), "writable"),
    ],
    ids=range(6),
)
def test_a_table_that_does_not_fit_is_refused_and_left_alone(table: Any, message: str) -> None:
    before = np.array(table)
    with pytest.raises((TypeError, ValueError), match=message):
        pool_in(table)
    np.testing.assert_array_equal(table, before)

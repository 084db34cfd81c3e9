"""A persistent block table in memory of the caller's: rows of one array serve several pools, and each keeps to its
own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager


def test_two_pools_keep_their_rows_of_one_table() -> None:
    table = np.full((7, 4), 77, np.int32)
    options: dict[str, Any] = {"max_sequence_tokens": 16, "device": "cpu"}
    with (
        KVCacheManager(small_layout(4), device_blocks=8, max_sequences=4, table=table[1:5], **options) as target,
        KVCacheManager(small_layout(4), device_blocks=8, max_sequences=2, table=table[5:], **options) as draft,
    ):
        assert (table[0] == 77).all() and (table[1:] == -1).all()
        ids = [target.add_sequence([1, 2, 3, 4, 5]), target.add_sequence([6]), draft.add_sequence([7, 8])]
        for cache, first, mine in ((target, 1, ids[:2]), (draft, 5, ids[2:])):
            found = cache.block_table(mine)
            assert np.shares_memory(found.table, table) and not found.table.flags.writeable
            np.testing.assert_array_equal(table[first + found.rows], found.table[found.rows])
            cache.append_tokens(mine, [1] * 4 * len(mine), [4] * len(mine))
            assert ((table[first + found.rows] >= 0).sum(1) == -(-cache.sequence_length(mine) // 4)).all()
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
        ([[0] * 4] * 2, TypeError, "int32 array, not list"),
        (np.zeros((2, 4), np.int64), TypeError, "int32 array, not int64"),
        (np.zeros((2, 5), np.int32), ValueError, r"accepted is \[max_sequences, columns\] = \[2, 4\]"),
        (np.zeros(8, np.int32), ValueError, "table has shape"),
        (np.zeros((2, 8), np.int32)[:, :4], ValueError, "C-contiguous"),
        (READ_ONLY, ValueError, "writable"),
    ],
    ids=range(6),
)
def test_a_table_that_does_not_fit_is_refused_and_left_alone(table: Any, error: type[Exception], message: str) -> None:
    before = np.array(table)
    with pytest.raises(error, match=message):
        KVCacheManager(
            small_layout(4), device_blocks=8, max_sequences=2, max_sequence_tokens=16, device="cpu", table=table
        )
    np.testing.assert_array_equal(table, before)

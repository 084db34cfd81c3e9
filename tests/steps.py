"""What tests of step tables share: arrays to be written, and what the reference says they should be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvpool import KVCacheManager
from kvpool.pool import StepTables
from tests.device import reference

NAMES = ("slot_mapping", "seq_lens", "query_start_loc", "last_page_len", "table", "indptr", "indices")
GARBAGE = 1234567


def arrays(
    sequences: int,
    tokens: int,
    columns: int,
    blocks: int,
    wanted: Sequence[str] = NAMES,
    put: Callable[..., Any] = np.array,
) -> StepTables:
    """Arrays of these sizes full of garbage; ``put`` brings them to where they are wanted."""
    shapes = {
        "slot_mapping": tokens,
        "seq_lens": sequences,
        "query_start_loc": sequences + 1,
        "last_page_len": sequences,
        "table": (sequences, columns),
        "indptr": sequences + 1,
        "indices": blocks,
    }
    dtypes = {"slot_mapping": np.int64}
    return StepTables(**{name: put(np.full(shapes[name], GARBAGE, dtypes.get(name, np.int32))) for name in wanted})


def expected(
    cache: KVCacheManager, ids: Any, first: Any, counts: Any, group: int | None = None
) -> dict[str, np.ndarray]:
    """What the reference makes of the block table as it is now."""
    rows = cache.block_table(ids, group=group).dense().tolist()
    return reference.step_tables(rows, list(first), list(counts), cache.tokens_per_block)


def check(found: StepTables, wanted: dict[str, np.ndarray], get: Callable[[Any], np.ndarray] = np.asarray) -> None:
    """Each array that there is begins with what it should be, and is garbage after that."""
    for name, values in wanted.items():
        actual = getattr(found, name)
        if actual is None:
            continue
        array = get(actual)
        assert array.dtype == (np.int64 if name == "slot_mapping" else np.int32), name
        if name == "table":
            rows, columns = values.shape
            np.testing.assert_array_equal(array[:rows, :columns], values, err_msg=name)
            assert (array[:rows, columns:] == -1).all() and (array[rows:] == GARBAGE).all(), name
        else:
            np.testing.assert_array_equal(array[: len(values)], values, err_msg=name)
            assert (array[len(values) :] == GARBAGE).all(), name


def same(found: StepTables, wanted: dict[str, np.ndarray]) -> None:
    """New arrays are exactly what they should be."""
    for name in NAMES:
        array = getattr(found, name)
        assert array.dtype == wanted[name].dtype, name
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def spans(
    random: np.random.Generator, lengths: Sequence[int], least: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Some tokens of each sequence, from token ``least`` on, none of a few."""
    first = [
        int(random.integers(low, length + 1)) for low, length in zip(least or [0] * len(lengths), lengths, strict=True)
    ]
    return first, [int(random.integers(0, length - start + 1)) for length, start in zip(lengths, first, strict=True)]

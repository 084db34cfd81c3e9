"""Retention: which tokens of a prompt are worth keeping longer, as (start, end, priority, ttl) ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument

OPEN_END = 1 << 62
MAX_TTL = (1 << 31) - 1


class RetentionRange(NamedTuple):
    """Tokens [start, end) of a prompt (``end`` None: to its end), for blocks whose first token is in this range."""

    start: int
    end: int | None
    priority: int
    ttl_ms: int | None = None


def priority_argument(name: str, value: object) -> int:
    """A priority: 0 (goes first) to 100 (stays longest)."""
    return integer_argument(name, value, 0, 100)


def ttl_argument(name: str, value: object) -> int:
    """Milliseconds from release, or None for ever, which is -1 here."""
    return -1 if value is None else integer_argument(name, value, 1, MAX_TTL)


def retention_rows(ranges: Sequence[RetentionRange | tuple[int | None, ...]]) -> npt.NDArray[np.int64]:
    """Ranges as int64[n, 4] rows (start, end, priority, ttl), sorted by start.

    Raises ValueError for a negative index, an empty range, an overlap, or an open end before the last range; TypeError
    for no range.
    """
    if not isinstance(ranges, (list, tuple)):
        raise TypeError(f"retention={ranges!r:.80}: accepted is a list of ranges")
    rows = []
    for i, given in enumerate(ranges):
        name = f"retention[{i}]"
        try:
            one = RetentionRange(*given)
        except TypeError:
            raise TypeError(f"{name}={given!r}: accepted is (start, end, priority[, ttl_ms])") from None
        start = integer_argument(f"{name}.start", one.start, 0, OPEN_END - 1)
        end = OPEN_END if one.end is None else integer_argument(f"{name}.end", one.end, 0, OPEN_END)
        if end <= start:
            raise ValueError(f"{name}={given!r}: end must be above start")
        rows.append(
            (
                start,
                end,
                priority_argument(f"{name}.priority", one.priority),
                ttl_argument(f"{name}.ttl_ms", one.ttl_ms),
            )
        )
    rows.sort()
    for before, after in zip(rows, rows[1:], strict=False):
        if after[0] < before[1]:
            raise ValueError(f"retention={list(ranges)!r}: ranges overlap, or an open end is not the last")
    return np.array(rows, np.int64).reshape(-1, 4)

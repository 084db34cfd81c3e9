"""Rows of main memory through which blocks go to a store and come from it."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvpool.common.changes import Step
from kvpool.storage.store import Bytes, Store, store_argument
from kvpool.storage.store_requests import LOAD, RequestKind

PAGE_BYTES = 4096


def row_padding_of(store: Store) -> int:
    """How many bytes more the rows have that are made for this store alone: whole pages."""
    return -(-store_argument("store", store).row_padding // PAGE_BYTES) * PAGE_BYTES


def staging_rows(count: int, nbytes: int) -> Bytes:
    """Make rows in main memory, each of whole pages and at the start of one, for direct I/O.

    Parameters
    ----------
    count : int
        Number of rows.
    nbytes : int
        The least bytes of a row.

    Returns
    -------
    ndarray of uint8, shape (count, bytes)
        Zeros.
    """
    size = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    raw = np.zeros(count * size + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + count * size].reshape(count, size)


def memory_argument(memory: object) -> Bytes:
    """The rows that a store is given: a view of the array whose shape and type nobody else can change."""
    if isinstance(memory, np.ndarray) and memory.dtype == np.uint8 and memory.ndim == 2 and memory.size:
        if memory.flags.c_contiguous and memory.flags.writeable:
            return np.asarray(memory)[...]
    raise ValueError("memory: expected a writable, C-contiguous array uint8[slots, block_bytes], got another")


class LentRows:
    """Rows that are lent to callers. Half of them, rounded down, are kept for loads, so that no save keeps a load
    waiting. The owner holds its lock."""

    def __init__(self, count: int) -> None:
        self.count, self._free = count, list(range(count))
        self._kept_for_loads = count // 2

    def __len__(self) -> int:
        return len(self._free)

    def free(self, kind: RequestKind) -> int:
        """How many rows a request of this kind can take now."""
        return max(0, len(self._free) - (0 if kind == LOAD else self._kept_for_loads))

    def lending(self, kind: RequestKind, most: int, taken: list[int]) -> tuple[Step, Step]:
        """The steps that move up to ``most`` rows to a list of the caller's."""
        first = len(self._free) - min(most, self.free(kind))
        return partial(taken.extend, self._free[first:]), partial(self._free.__delitem__, slice(first, None))

    def giving_back(self, rows: list[int]) -> Step:
        """The step that takes rows back."""
        return partial(self._free.extend, rows)

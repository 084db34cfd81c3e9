"""Rows of main memory through which blocks go to a store and come from it."""

from __future__ import annotations

import numpy as np

from kvpool.storage.store import Bytes, Store, store_argument

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

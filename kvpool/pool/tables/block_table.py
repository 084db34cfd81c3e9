"""Block tables: the persistent host table that CPU readers use in place, its dense and CSR forms, and checks of the
targets of uploads."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Bools, Int32s, Int64s
from kvpool.common.arrays.dlpack import CPU, check_no_stream, make_capsule
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.jit import jit
from kvpool.device.work import Table

_INT32_MAX = 2**31 - 1


class Csr(NamedTuple):
    """The block ids of sequences, one sequence after the other, as attention libraries such as FlashInfer take them.

    ``BlockTable.csr`` returns it.

    Attributes
    ----------
    indptr : ndarray of int32, shape (n + 1,)
        The blocks of sequence i are ``indices[indptr[i]:indptr[i + 1]]``.
    indices : ndarray of int32, shape (total,)
        The block ids. Blocks that a window has passed are left out: attention that counts the window back from the last
        token does not read them.
    last_page_len : ndarray of int32, shape (n,)
        Tokens in the last block of each sequence: 1 to ``tokens_per_block``, or 0 if the sequence has no token.
    """

    indptr: Int32s
    indices: Int32s
    last_page_len: Int32s


class BlockTable(NamedTuple):
    """The block table of sequences on the host.

    ``KVCacheManager.block_table`` returns it. It also implements DLPack, for ``table`` without a copy; the importing
    package must support read-only arrays (DLPack 1.0), or ask for a copy.

    Attributes
    ----------
    table : ndarray of int32, shape (max_sequences, max_blocks)
        The block table of all sequences of the pool, read-only. Column i of a row is the block of the tokens from
        ``i * tokens_per_block`` on; -1 after the last block, and where a window has passed the block. The array keeps
        its address while the pool lives, and every call that changes these sequences changes it.
    rows : ndarray of int64, shape (n,)
        The row of each sequence.
    lengths : ndarray of int64, shape (n,)
        The number of tokens of each sequence.
    tokens_per_block : int
        The number of tokens of a block.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     ids = cache.add_sequence_batch([range(6), range(10, 19)]).ids
    ...     table = cache.block_table(ids)
    ...     print(table.dense())
    ...     print(*table.csr())
    ...     cache.release(ids)
    [[ 0  1 -1]
     [ 2  3  4]]
    [0 2 5] [0 1 2 3 4] [2 1]
    """

    table: Int32s
    rows: Int64s
    lengths: Int64s
    tokens_per_block: int

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> Any:
        """Return a capsule of ``table``, without a copy. Raises BufferError for a request that cannot be met,
        ValueError for a stream."""
        check_no_stream(stream)
        return make_capsule(self.table, writable=False, max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0

    @property
    def blocks(self) -> Int64s:
        """The number of blocks of each sequence, int64 of shape (n,)."""
        return -(-self.lengths // self.tokens_per_block)

    def dense(self, width: int | None = None) -> Int32s:
        """Return a copy of the rows of the sequences.

        Parameters
        ----------
        width : int, optional
            The number of columns. By default that of the longest row.

        Returns
        -------
        ndarray of int32, shape (n, width)
            Block ids, and -1 after the last block of each sequence.

        Raises
        ------
        TypeError, ValueError
            For a bad width, and if a row has more blocks.

        Notes
        -----
        It reads the table as it is now: no other call may change these sequences meanwhile.
        """
        longest = int(self.blocks.max(initial=0))
        wide = longest if width is None else integer_argument("width", width, 0, _INT32_MAX)
        if wide < longest:
            raise ValueError(f"width: expected the {longest} blocks of the longest sequence, or more, got {wide}")
        rows = np.full((len(self.rows), wide), -1, np.int32)
        rows[:, :longest] = self.table[self.rows, :longest]
        return rows

    def csr(self) -> Csr:
        """Return a copy of the block ids without padding.

        Returns
        -------
        Csr
            Block ids, and where those of each sequence begin.

        Raises
        ------
        ValueError
            For more than ``2**31 - 1`` blocks.

        Notes
        -----
        It reads the table as it is now: no other call may change these sequences meanwhile.
        """
        dense = self.dense()
        present = dense != -1
        indptr = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
        if indptr[-1] > _INT32_MAX:
            raise ValueError(f"ids: expected up to {_INT32_MAX} blocks, got {indptr[-1]}")
        indices = dense[present]
        last = np.where(self.lengths > 0, (self.lengths - 1) % self.tokens_per_block + 1, 0)
        return Csr(indptr.astype(np.int32), indices, last.astype(np.int32))


def planes_argument(table: Table, scale: object, v_offset: object, ids: int) -> Int64s:
    """For each plane of a target its first byte, scale and offset, int64[planes, 3], if the target has the right shape.

    The shape is [rows, columns]. If ``v_offset`` is given, [2] for K and V comes before it. If ``scale`` is a list,
    [pools] comes first. ``ids`` is the number of possible block ids. Raises TypeError or ValueError.
    """
    if type(scale) is not int or v_offset is not None:
        scale, v_offset = _integers("scale", scale, 1), _integers("v_offset", v_offset, 0)
    return _planes(table.shape, table.strides, scale, v_offset, ids)


def _integers(name: str, value: Any, low: int) -> Any:
    """An int or None as it is; else a tuple of checked ints for a list, or one."""
    if value is None or type(value) is int:
        return value
    if _is_list(value):
        return tuple(integer_argument(name, item, low, _INT32_MAX) for item in value)
    return integer_argument(name, value, low, _INT32_MAX)


@lru_cache(maxsize=256)
def _planes(shape: tuple[int, ...], strides: tuple[int, ...], scale: Any, v_offset: Any, ids: int) -> Int64s:
    """Cached, since an engine hands over to the same few targets at every step. Nobody writes to it."""
    pooled, listed = isinstance(scale, tuple), isinstance(v_offset, tuple)
    scales = scale if pooled else (integer_argument("scale", scale, 1, _INT32_MAX),)
    offsets = (
        v_offset if listed else () if v_offset is None else (integer_argument("v_offset", v_offset, 0, _INT32_MAX),)
    )
    if listed and not (pooled and len(offsets) == len(scales)):
        raise ValueError(f"v_offset: expected one number, or one for each pool that scale lists, got {len(offsets)}")
    leading = (len(scales),) * pooled + (2,) * bool(offsets)
    if shape[:-2] != leading:
        text = "".join(f"{count}, " for count in leading)
        raise ValueError(
            f"target: expected [{text}rows, columns] with this scale and v_offset, got shape {list(shape)}"
        )
    planes = []
    for pool, factor in enumerate(scales):
        for offset in (0, offsets[pool if listed else 0]) if offsets else (0,):
            if (ids - 1) * factor + offset > _INT32_MAX:
                raise ValueError(
                    f"scale, v_offset: expected ids within int32, got {factor}, {offset} for block {ids - 1}"
                )
            planes.append((factor, offset))
    starts = Table(0, shape, strides, None).starts()
    return np.array([(start, *plane) for start, plane in zip(starts, planes, strict=True)], np.int64)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim == 1)


def rows_argument(rows: Int64s | None, count: int, available: int) -> Int64s:
    """The row of a target for each of ``count`` sequences, int64[count]; by default the first rows. Raises
    ValueError."""
    if rows is None:
        if count > available:
            raise ValueError(f"target: expected {count} rows or more, one for each sequence, got {available}")
        return _first_rows(count)
    if len(rows) != count:
        raise ValueError(f"rows: expected one for each of the {count} sequences, got {len(rows)}")
    bad = _first_bad(rows, available, np.zeros(available, np.bool_))
    if bad >= 0:
        raise ValueError(f"rows[{bad}]: expected different rows of the target's {available}, got {rows[bad]}")
    return rows


@lru_cache(maxsize=64)
def _first_rows(count: int) -> Int64s:
    """Cached; nobody writes to it."""
    return np.arange(count)


@jit
def _first_bad(rows: Int64s, available: int, seen: Bools) -> int:
    """The place of a row that does not exist or is named twice, else -1."""
    for i in range(len(rows)):
        if rows[i] < 0 or rows[i] >= available or seen[rows[i]]:
            return i
        seen[rows[i]] = True
    return -1


def own_table(table: object, groups: int, sequences: int, columns: int) -> Int32s | None:
    """The caller's memory for a persistent table, or None without one. Raises TypeError or ValueError."""
    if table is None:
        return None
    if not isinstance(table, np.ndarray) or table.dtype != np.int32:
        raise TypeError(f"table: expected an int32 array, got {getattr(table, 'dtype', type(table).__name__)}")
    table = np.asarray(table)[...]  # whose shape and strides nobody else changes
    shape = (groups, sequences, columns)[groups == 1 :]
    if table.shape != shape:
        text = "groups, " * (groups > 1) + "max_sequences, columns"
        raise ValueError(f"table: expected [{text}] = {list(shape)}, got shape {list(table.shape)}")
    flags = table.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        raise ValueError("table: expected an array that is C-contiguous, aligned and writable, got another")
    return table

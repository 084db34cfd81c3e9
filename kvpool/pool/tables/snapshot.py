"""Uploads: block tables of some sequences, copied into a buffer and then to memory of the device, dense or as
CSR."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import array_at, memcpy
from kvpool.device.base import NULL_STREAM
from kvpool.device.work import OFFSET, SCALE, START, StagedRows, StagedVectors, Table, Work, staged_bytes, staged_views
from kvpool.pool.tables.staging import Buffer, Staging
from kvpool.pool.transfer.transfer import Transfer
from kvpool.state.records import NONE, SEVERAL_STREAMS, TOO_LARGE, TOO_SMALL, H, group_at, sequences_of
from kvpool.state.requests import holes
from kvpool.state.sequences import check, stream_of

_INT32_MAX = 2**31 - 1


@jit
def used_blocks(group, ids):  # type: ignore[no-untyped-def]
    """The columns of the longest of these sequences, and the blocks of all. Without the state lock it is a guess, and
    ids may be wrong."""
    sequences = sequences_of(group)
    most, total = 0, 0
    for i in range(len(ids)):
        slot = ids[i] & 0xFFFFFFFF
        if slot < group.sequences:
            most, total = (
                max(most, sequences[slot].blocks),
                total + sequences[slot].blocks - holes(group, slot),
            )
    return most, total


@jit
def dense_room(groups, g, ids, planes, rows, columns, least):  # type: ignore[no-untyped-def]
    """Bytes of the buffer that ``stage_dense`` is likely to need."""
    return staged_bytes(planes, rows, max(least, min(used_blocks(group_at(groups, g), ids)[0], columns)))


@jit
def csr_room(groups, g, ids):  # type: ignore[no-untyped-def]
    """Bytes of the buffer that ``stage_csr`` is likely to need."""
    return 4 * (2 * len(ids) + 1 + used_blocks(group_at(groups, g), ids)[1])


@jit
def check_streams(group, ids):  # type: ignore[no-untyped-def]
    """0 or an error: those of ``sequences.check``, or SEVERAL_STREAMS if the call names no stream and the sequences
    were used last on different ones; then ``detail`` is the first sequence on another stream."""
    error = check(group, ids, True)
    if error or group.stream != NONE:
        return error
    sequences = sequences_of(group)
    for i in range(1, len(ids)):
        if sequences[ids[i] & 0xFFFFFFFF].stream != sequences[ids[0] & 0xFFFFFFFF].stream:
            group.detail = i
            return SEVERAL_STREAMS
    return 0


@jit
def _copy_rows(group, slot, first, address, columns):  # type: ignore[no-untyped-def]
    """Copy ``columns`` columns of the host table to ``address``, from column ``first`` of a sequence's row on. If they
    are more than the row has, they go on in the next rows."""
    memcpy(address, group.table_at + 4 * (slot * group.columns + first), 4 * columns)


@jit
def _width(group, ids, columns, least, cut):  # type: ignore[no-untyped-def]
    """How many columns an upload of ``least`` to ``columns`` has, or an error of ``stage_dense``."""
    error = check_streams(group, ids)
    if error:
        return error
    sequences = sequences_of(group)
    width = least
    for i in range(len(ids)):
        row_blocks = sequences[ids[i] & 0xFFFFFFFF].blocks
        if row_blocks > columns and not cut:
            group.detail = i
            group.bound = row_blocks
            return TOO_LARGE
        width = max(width, min(row_blocks, columns))
    return width


@jit
def stage_dense(groups, g, ids, rows, planes, address, nbytes, columns, least, cut):  # type: ignore[no-untyped-def]
    """Write an upload of ``least`` to ``columns`` columns into the buffer at ``address``. Returns how many. Rows
    behind the sequences have no blocks.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``check_streams``;
    TOO_LARGE, unless ``cut``, if the sequence at ``detail`` has ``bound`` columns; TOO_SMALL for the buffer.
    """
    group = group_at(groups, g)
    width = _width(group, ids, columns, least, cut)
    if width < 0:
        return width
    if staged_bytes(len(planes), len(rows), width) > nbytes:
        return TOO_SMALL
    to_ids, to_rows, to_planes = staged_views(address, len(planes), len(rows), width)
    for p in range(len(planes)):
        for k in range(3):
            to_planes[p, k] = planes[p, k]
    first = 0
    for i in range(len(ids)):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(group, slot)
        # Rows that follow each other are copied together: short copies cost more than their bytes.
        if i + 1 == len(ids) or width < group.columns or ids[i + 1] & 0xFFFFFFFF != slot + 1:
            _copy_rows(group, slot - (i - first), 0, address + 4 * first * width, (i + 1 - first) * width)
            first = i + 1
    for i in range(len(rows)):
        to_rows[i] = rows[i]
        if i >= len(ids):
            to_ids[i] = -1
    return width


@jit
def write_dense(groups, ids, g, rows, planes, columns, cut, table, row_stride):  # type: ignore[no-untyped-def]
    """Write an upload to a table in main memory, without a buffer. ``table`` is an address. Returns 0, or 1 with
    nothing written if ``stage_dense`` has an error."""
    group = group_at(groups, g)
    if _width(group, ids, columns, 0, cut) < 0:
        return 1
    sequences = sequences_of(group)
    for p in range(len(planes)):
        scale = planes[p, SCALE]
        offset = planes[p, OFFSET]
        for i in range(len(ids)):
            slot = ids[i] & 0xFFFFFFFF
            filled = min(sequences[slot].blocks, columns)
            place = table + planes[p, START] + rows[i] * row_stride
            target = array_at(place, (columns,), np.int32)
            _copy_rows(group, slot, 0, place, filled)
            for c in range(filled if scale != 1 or offset else 0):
                target[c] = target[c] * scale + offset if target[c] >= 0 else -1
            for c in range(filled, columns):
                target[c] = -1
    return 0


@jit
def stage_csr(groups, g, ids, address, nbytes, room):  # type: ignore[no-untyped-def]
    """Write the CSR form into the buffer at ``address``: first indptr, then last_page_len, then indices. Returns the
    number of block ids.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``check_streams``;
    TOO_LARGE if the ``detail`` ids are more than ``room``; TOO_SMALL for the buffer.
    """
    group = group_at(groups, g)
    error = check_streams(group, ids)
    if error:
        return error
    total = used_blocks(group, ids)[1]
    if total > room:
        group.detail = total
        return TOO_LARGE
    n = len(ids)
    if 4 * (2 * n + 1 + total) > nbytes:
        return TOO_SMALL
    sequences = sequences_of(group)
    indptr, last = array_at(address, (n + 1,), np.int32), array_at(address + 4 * (n + 1), (n,), np.int32)
    done = 0
    for i in range(n):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(group, slot)
        row_blocks, length = sequences[slot].blocks, sequences[slot].length
        indptr[i] = done
        last[i] = (length - 1) % group.width + 1 if length else 0
        place, gone = address + 4 * (2 * n + 1 + done), holes(group, slot)
        if gone:
            _copy_rows(group, slot, 0, place, group.sinks)
            place += 4 * group.sinks
            _copy_rows(group, slot, sequences[slot].first, place, row_blocks - sequences[slot].first)
        else:
            _copy_rows(group, slot, 0, place, row_blocks)
        done += row_blocks - gone
    indptr[n] = done
    return total


class BlockTableUpload(ABC):
    """Block tables on their way into ``targets``, on ``stream``. After the snapshot, ``enqueue`` has the device read
    them.

    ``begun`` says that the device may read the buffer. What is ``captured`` belongs to a graph, which writes the
    targets. Its shape does not change: ``least`` columns are staged of every sequence.
    """

    captured, least, begun = False, 0, False
    stream = NULL_STREAM

    def __init__(self, targets: Sequence[Table]) -> None:
        self.targets = targets

    def capture(self, columns: int) -> None:
        """Make it that of a graph, in a pool whose sequences have up to ``columns`` columns."""
        self.captured, self.least = True, columns

    def choose(self, first: Int64s, counts: Int64s) -> None:
        """Choose tokens of a step. Raises ValueError where there are none to choose."""
        if len(first) or len(counts):
            raise ValueError("first, counts: expected None, since block offsets are of all tokens, got numbers")

    @abstractmethod
    def room(self, groups: Int64s, g: int, ids: Int64s) -> int:
        """The bytes of a buffer that is likely to be large enough. Needs no lock."""

    @abstractmethod
    def stage(self, groups: Int64s, g: int, ids: Int64s, buffer: Buffer) -> int:
        """Snapshot the tables into ``buffer``. Returns the argument of ``work``, or an error of the jitted function.

        The caller holds the state lock. Raises ValueError, with nothing changed, for sequences for which the targets
        have no room.
        """

    @abstractmethod
    def work(self, buffer: Buffer, staged: int) -> Work:
        """What the device has to do."""

    def enqueue(self, transfer: Transfer, staging: Staging, buffer: Buffer, staged: int) -> None:
        """Have the device write the targets; those of a graph are written when it is replayed. The caller holds the
        transfer lock. Raises DeviceError."""
        self.begun = True
        event, refused = transfer.upload(None if self.captured else self.work(buffer, staged), self.stream)
        if self.captured:
            # Behind this event comes the replay: from now on the device waits for this stream when it closes.
            buffer.replays = self.stream
        else:
            staging.retain(buffer, self.stream, event, self.targets)
        if refused:
            raise refused.pop()  # Whoever kept it would be kept by its frames.


class DenseTableUpload(BlockTableUpload):
    """Rows of one table. ``planes`` and ``rows`` are as in ``StagedRows``. At most ``columns`` columns of a sequence
    are written.

    A longer sequence is ``cut``, or is an error.
    """

    def __init__(self, table: Table, planes: Int64s, rows: Int64s, columns: int, cut: bool) -> None:
        self.targets: Sequence[Table] = (table,)
        self.planes, self.rows, self.columns, self.cut = planes, rows, columns, cut

    def capture(self, columns: int) -> None:
        super().capture(min(columns, self.columns))

    def room(self, groups: Int64s, g: int, ids: Int64s) -> int:
        return int(dense_room(groups, g, ids, len(self.planes), len(self.rows), self.columns, self.least))

    def stage(self, groups: Int64s, g: int, ids: Int64s, buffer: Buffer) -> int:
        room = buffer.address, buffer.nbytes
        width = int(stage_dense(groups, g, ids, self.rows, self.planes, *room, self.columns, self.least, self.cut))
        if width == TOO_LARGE:
            raise ValueError(
                f"target: expected max_blocks, or {groups[g, H.bound]} columns for the blocks of sequence "
                f"{ids[groups[g, H.detail]]}, got {self.columns} columns"
            )
        return width

    def work(self, buffer: Buffer, staged: int) -> Work:
        shape = len(self.planes), len(self.rows), staged, self.columns
        return StagedRows(self.targets[0], buffer.array, buffer.address, *shape)


class CsrTableUpload(BlockTableUpload):
    """``indptr``, ``indices`` and ``last_page_len`` of ``count`` sequences, each to the start of its vector."""

    def __init__(self, vectors: Sequence[Table], count: int) -> None:
        super().__init__(vectors)
        self.count = count

    def room(self, groups: Int64s, g: int, ids: Int64s) -> int:
        return int(csr_room(groups, g, ids))

    def stage(self, groups: Int64s, g: int, ids: Int64s, buffer: Buffer) -> int:
        available = self.targets[1].shape[0]
        total = int(stage_csr(groups, g, ids, buffer.address, buffer.nbytes, min(available, _INT32_MAX)))
        if total == TOO_LARGE:
            least = groups[g, H.detail]
            raise ValueError(
                f"indices: expected {least} entries or more, of which {_INT32_MAX} are used at most, got {available}"
            )
        return total

    def work(self, buffer: Buffer, staged: int) -> Work:
        indptr, indices, last = self.targets
        n = self.count
        pieces = [
            (indptr, 0, 4 * (n + 1)),
            (last, 4 * (n + 1), 4 * n),
            (indices, 4 * (2 * n + 1), 4 * staged),
        ]
        return StagedVectors(buffer.array, buffer.address, [piece for piece in pieces if piece[2]])


def stream_error(groups: Any, g: int, ids: Int64s) -> ValueError:
    """The exception for SEVERAL_STREAMS."""
    return ValueError(
        f"stream: expected one by name, since sequence {ids[groups[g, H.detail]]} was used on another stream than "
        f"{ids[0]}, got None"
    )

"""Hand-overs: block tables of some sequences, snapshot into a buffer and on their way to memory of the device, dense or as CSR."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.device.base import Device, Stream
from kvpool.device.block_copy import memcpy
from kvpool.device.tables import StagedRows, StagedVectors, Table, staged_bytes, staged_views
from kvpool.errors import DeviceError
from kvpool.jit import jit
from kvpool.staging import Buffer, Staging
from kvpool.state.atomics import array_at
from kvpool.state.blocks import A_TABLE, COLUMNS, DETAIL, DETAIL2, NONE, SEQUENCES, SINKS, STREAM, WIDTH, sequences_of
from kvpool.state.live import check, stream_of
from kvpool.state.windows import holes

SEVERAL_STREAMS, TOO_LARGE, TOO_SMALL = -8, -9, -10
_INT32_MAX = 2**31 - 1

Ids = npt.NDArray[np.int64]


@jit
def _used(h, ids):  # type: ignore[no-untyped-def]
    """Columns of the longest of these sequences, and blocks of all. A guess without the state lock, where ids may be wrong."""
    sequences = sequences_of(h)
    most, total = np.int64(0), np.int64(0)
    for i in range(ids.shape[0]):
        slot = ids[i] & 0xFFFFFFFF
        if slot < h[SEQUENCES]:
            most, total = max(most, np.int64(sequences[slot].blocks)), total + sequences[slot].blocks - holes(h, slot)
    return most, total


@jit
def dense_room(h, ids, planes, columns):  # type: ignore[no-untyped-def]
    """Bytes of the buffer that ``stage_dense`` is likely to need."""
    return staged_bytes(planes, ids.shape[0], min(_used(h, ids)[0], columns))


@jit
def csr_room(h, ids):  # type: ignore[no-untyped-def]
    """Bytes of the buffer that ``stage_csr`` is likely to need."""
    return 4 * (2 * ids.shape[0] + 1 + _used(h, ids)[1])


@jit
def _check(h, ids):  # type: ignore[no-untyped-def]
    """0 or an error: those of ``live.check``; SEVERAL_STREAMS, where the call names none and the sequence at DETAIL is on another one."""
    error = check(h, ids, True)
    if error or h[STREAM] != NONE:
        return error
    sequences = sequences_of(h)
    for i in range(1, ids.shape[0]):
        if sequences[ids[i] & 0xFFFFFFFF].stream != sequences[ids[0] & 0xFFFFFFFF].stream:
            h[DETAIL] = i
            return SEVERAL_STREAMS
    return 0


@jit
def _copy_rows(h, slot, first, address, columns):  # type: ignore[no-untyped-def]
    """Columns of the host table from the ``first`` one of a sequence's row on; more than a row are those of the next rows too."""
    memcpy(address, h[A_TABLE] + 4 * (slot * h[COLUMNS] + first), 4 * columns)


@jit
def stage_dense(h, ids, rows, planes, address, nbytes, columns, cut):  # type: ignore[no-untyped-def]
    """Write a hand-over of at most ``columns`` columns into the buffer at ``address``; returns the columns in use.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``_check``; TOO_LARGE, unless ``cut``,
    where the sequence at DETAIL has DETAIL2 columns; TOO_SMALL for the buffer.
    """
    error = _check(h, ids)
    if error:
        return error
    sequences, width = sequences_of(h), 0
    for i in range(ids.shape[0]):
        used = sequences[ids[i] & 0xFFFFFFFF].blocks
        if used > columns and not cut:
            h[DETAIL], h[DETAIL2] = i, used
            return TOO_LARGE
        width = max(width, min(used, columns))
    if staged_bytes(planes.shape[0], rows.shape[0], width) > nbytes:
        return TOO_SMALL
    _, to_rows, to_planes = staged_views(address, planes.shape[0], rows.shape[0], width)
    for p in range(planes.shape[0]):
        for k in range(3):
            to_planes[p, k] = planes[p, k]
    first = 0
    for i in range(ids.shape[0]):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(h, slot)
        to_rows[i] = rows[i]
        # Whole rows that follow each other are copied at once: short copies cost more than their bytes.
        if i + 1 == ids.shape[0] or width < h[COLUMNS] or ids[i + 1] & 0xFFFFFFFF != slot + 1:
            _copy_rows(h, slot - (i - first), 0, address + 4 * first * width, (i + 1 - first) * width)
            first = i + 1
    return width


@jit
def stage_csr(h, ids, address, nbytes, room):  # type: ignore[no-untyped-def]
    """Write the CSR form into the buffer at ``address``: indptr, last_page_len, indices, one behind the other; returns the block ids.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``_check``; TOO_LARGE, where DETAIL
    ids are more than ``room``; TOO_SMALL for the buffer.
    """
    error = _check(h, ids)
    if error:
        return error
    total = _used(h, ids)[1]
    if total > room:
        h[DETAIL] = total
        return TOO_LARGE
    n = ids.shape[0]
    if 4 * (2 * n + 1 + total) > nbytes:
        return TOO_SMALL
    sequences = sequences_of(h)
    indptr, last = array_at(address, (n + 1,), np.int32), array_at(address + 4 * (n + 1), (n,), np.int32)
    done = np.int64(0)
    for i in range(n):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(h, slot)
        used, length = np.int64(sequences[slot].blocks), sequences[slot].length
        indptr[i] = done
        last[i] = (length - 1) % h[WIDTH] + 1 if length else 0
        place, gone = address + 4 * (2 * n + 1 + done), holes(h, slot)
        if gone:
            _copy_rows(h, slot, 0, place, h[SINKS])
            place += 4 * h[SINKS]
            _copy_rows(h, slot, sequences[slot].first, place, used - sequences[slot].first)
        else:
            _copy_rows(h, slot, 0, place, used)
        done += used - gone
    indptr[n] = done
    return total


class HandOver(ABC):
    """Block tables on their way into ``targets``: once they are decided, ``enqueue`` has the device read them.

    ``retained`` says that the buffer is no longer the call's, ``error`` why the device did not take all of it.
    """

    def __init__(self, targets: Sequence[Table]) -> None:
        self.targets = targets
        self.error: DeviceError | None = None
        self.retained = False

    @abstractmethod
    def room(self, header: Ids, ids: Ids) -> int:
        """Bytes of a buffer that is likely to be large enough. No lock is needed."""

    @abstractmethod
    def stage(self, header: Ids, ids: Ids, buffer: Buffer) -> int:
        """Snapshot the tables into ``buffer``; returns what ``send`` is told, or an error of the jitted function.

        The state lock is held by the caller. Raises ValueError, with nothing changed, for sequences that the targets have no room for.
        """

    @abstractmethod
    def send(self, device: Device, buffer: Buffer, staged: int, stream: Stream) -> None:
        """Enqueue it. Raises DeviceError."""

    def enqueue(self, staging: Staging, device: Device, buffer: Buffer, staged: int, stream: Stream) -> None:
        """Have the device write the targets. The transfer lock is held by the caller. Raises DeviceError for what orders no more."""
        try:
            self.send(device, buffer, staged, stream)
        except DeviceError as error:
            if error.sticky:
                raise
            # Some of it may be enqueued, and read the buffer.
            self.error = error
        event = device.record(stream)
        self.retained = True
        staging.retain(buffer, event, self.targets)


class DenseHandOver(HandOver):
    """Rows of one table. ``planes`` and ``rows`` are as in ``StagedRows``; at most ``columns`` columns of a sequence are written.

    A longer one is ``cut``, or an error.
    """

    def __init__(self, table: Table, planes: Ids, rows: Ids, columns: int, cut: bool) -> None:
        super().__init__([table])
        self.planes, self.rows, self.columns, self.cut = planes, rows, columns, cut

    def room(self, header: Ids, ids: Ids) -> int:
        return int(dense_room(header, ids, len(self.planes), self.columns))

    def stage(self, header: Ids, ids: Ids, buffer: Buffer) -> int:
        width = int(stage_dense(header, ids, self.rows, self.planes, buffer.address, buffer.array.nbytes, self.columns, self.cut))
        if width == TOO_LARGE:
            raise ValueError(
                f"target has {self.columns} columns: sequence {ids[header[DETAIL]]} has {header[DETAIL2]} blocks; "
                "accepted are as many, or max_blocks"
            )
        return width

    def send(self, device: Device, buffer: Buffer, staged: int, stream: Stream) -> None:
        rows = StagedRows(buffer.array, buffer.address, len(self.planes), len(self.rows), staged, self.columns)
        device.stage_rows(self.targets[0], rows, stream)


class CsrHandOver(HandOver):
    """``indptr``, ``indices`` and ``last_page_len`` of ``count`` sequences, each to the begin of its vector."""

    def __init__(self, vectors: Sequence[Table], count: int) -> None:
        super().__init__(vectors)
        self.count = count

    def room(self, header: Ids, ids: Ids) -> int:
        return int(csr_room(header, ids))

    def stage(self, header: Ids, ids: Ids, buffer: Buffer) -> int:
        available = self.targets[1].shape[0]
        total = int(stage_csr(header, ids, buffer.address, buffer.array.nbytes, min(available, _INT32_MAX)))
        if total == TOO_LARGE:
            raise ValueError(f"indices has {available} entries: accepted are {header[DETAIL]} or more, and at most {_INT32_MAX} are used")
        return total

    def send(self, device: Device, buffer: Buffer, staged: int, stream: Stream) -> None:
        indptr, indices, last = self.targets
        n = self.count
        pieces = [(indptr, 0, 4 * (n + 1)), (last, 4 * (n + 1), 4 * n), (indices, 4 * (2 * n + 1), 4 * staged)]
        device.stage_vectors(StagedVectors(buffer.array, buffer.address, [piece for piece in pieces if piece[2]]), stream)


def vectors_argument(vectors: dict[str, Table], count: int) -> None:
    """Raise ValueError unless ``indptr`` and ``last_page_len`` of ``count`` sequences fit, and no two vectors share memory."""
    for name, needed in (("indptr", count + 1), ("last_page_len", count)):
        if vectors[name].shape[0] < needed:
            raise ValueError(f"{name} has {vectors[name].shape[0]} entries: accepted are {needed} or more")
    ranges = sorted((vector.address, vector.address + 4 * vector.shape[0], name) for name, vector in vectors.items() if vector.shape[0])
    for (_, end, name), (begin, _, other) in zip(ranges, ranges[1:], strict=False):
        if begin < end:
            raise ValueError(f"{name} and {other} share memory: accepted are arrays that lie apart")


def stream_error(header: Any, ids: Ids) -> ValueError:
    """The exception for SEVERAL_STREAMS."""
    return ValueError(f"stream=None: sequence {ids[header[DETAIL]]} was used on another stream than {ids[0]}: name one")

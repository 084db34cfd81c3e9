"""Staged tables: the verbs that hand block tables over to a stream of the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.block_table import planes_argument, rows_argument
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.errors import DeviceError
from kvpool.hand_over import SEVERAL_STREAMS, TOO_SMALL, CsrHandOver, DenseHandOver, HandOver, stream_error, vectors_argument
from kvpool.layout import integer_argument
from kvpool.pool import Pool
from kvpool.sequence import id_array
from kvpool.staging import Buffer
from kvpool.state import live
from kvpool.state.blocks import DETAIL, DETAIL2


class TablePool(Pool):
    """A pool whose block tables can be handed over; ``KVCacheManager`` is one."""

    def copy_batch_block_offsets(
        self, target: Any, ids: Any, *, rows: Any = None, max_blocks: int | None = None, scale: Any = 1, v_offset: Any = None,
        stream: Any = None, group: int | None = None,
    ) -> None:  # fmt: skip
        """Hand the block tables of sequences, as they are now, over to ``stream``: enqueue the write of their rows of ``target``.

        ``target``: int32[rows, columns] that the device can write, each row without gaps, of any length; with one more dimension in
        front, [pools], where ``scale`` is a list, and behind that [2], for K and V, where ``v_offset`` (one, or one per pool) is given.
        Block id b becomes ``b * scale``, for V ``b * scale + v_offset``; where there is no block is -1. ``rows``: the row of the target
        for each sequence, all different (default: 0, 1, ...).

        Rows are written whole, and a sequence that does not fit is an error; with ``max_blocks`` only that many columns are, and what
        is behind them, of the sequence and of the target, is left out. Only columns in use travel. What is handed over belongs to this
        call: the sequences may be changed, released and their blocks and rows reused as soon as it returns.

        ``group``: of layers, to be named where there are several, whose blocks it is about.

        ``stream`` (default: the one that all these sequences used last) waits for what they were used on before. Waits, outside the
        locks, while ``staging_depth`` hand-overs are under way. Thread-safe; changes nothing but the stream of the sequences. Raises
        UnknownSequence, DeviceError, TypeError, ValueError.
        """
        which, table = id_array("ids", ids), self._device.as_table(target)
        g = self._group(group)
        planes = planes_argument(table, scale, v_offset, self._groups[g].device_blocks)
        places = rows_argument(None if rows is None else id_array("rows", rows).copy(), len(which), table.shape[-2])
        columns = table.shape[-1] if max_blocks is None else integer_argument("max_blocks", max_blocks, 1, table.shape[-1])
        on = None if stream is None else self._device.as_stream(stream)
        if len(which):
            hand_over = DenseHandOver(table, planes, places, columns, cut=max_blocks is not None)
            self._hand_over("copy_batch_block_offsets", hand_over, which, on, g)
        else:
            with self._lock:
                self._check_open()

    def copy_batch_block_csr(
        self, indptr: Any, indices: Any, last_page_len: Any, ids: Any, *, stream: Any = None, group: int | None = None
    ) -> None:
        """Hand the block tables of n sequences over to ``stream`` in the form of ``BlockTable.csr``, with no padding.

        ``indptr`` int32[n + 1 or more], ``indices`` int32[all their blocks, or more] and ``last_page_len`` int32[n or more] are vectors
        without gaps that the device can write and that lie apart. Entries behind those in use are left as they are; a vector that is
        too small is a ValueError that says how many are needed. So is a recurrent group, whose rows are mostly holes. After a
        DeviceError, some of the three may have been written.

        Everything else is as in ``copy_batch_block_offsets``.
        """
        which, g = id_array("ids", ids), self._group(group)
        if self._groups[g].kind == "recurrent":
            raise ValueError(f"group={g}: accepted are groups for attention; states are where copy_batch_block_offsets says")
        named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        vectors = {name: self._device.as_table(vector, name, vector=True) for name, vector in named.items()}
        vectors_argument(vectors, len(which))
        on = None if stream is None else self._device.as_stream(stream)
        self._hand_over("copy_batch_block_csr", CsrHandOver(list(vectors.values()), len(which)), which, on, g)

    def _hand_over(self, call: str, hand_over: HandOver, which: npt.NDArray[np.int64], stream: Stream | None, g: int) -> None:
        """Stage and enqueue; again where a sequence has outgrown the buffer meanwhile."""
        self._refuse_inside(call)
        decided = 0
        while not decided:
            buffer = self._staging.take(hand_over.room(self._states.heads[g], which))
            try:
                decided = self._decide(0, stream, self._stage, which, hand_over, buffer, stream, g)
            finally:
                if not hand_over.retained:
                    self._staging.give_back(buffer)
        if hand_over.error is not None:
            raise hand_over.error
        if not hand_over.retained:
            raise DeviceError(f"the device has failed: {self._transfer.broken}", sticky=True)

    def _stage(
        self, heads: npt.NDArray[np.int64], which: npt.NDArray[np.int64], hand_over: HandOver, buffer: Buffer, stream: Stream | None,
        g: int,
    ) -> int:  # fmt: skip
        """Snapshot the tables; whether the buffer was large enough. The state lock is held by the caller."""
        order = self._transfer.order
        if stream is not None and order is not None:
            self._states.reserve_accesses(len(which))
        with self._device.host_access(stores=[buffer.array]):
            staged = hand_over.stage(heads[g], which, buffer)
        if staged == SEVERAL_STREAMS:
            raise stream_error(heads[g], which)
        if staged < 0:
            heads[0, DETAIL], heads[0, DETAIL2] = heads[g, DETAIL], heads[g, DETAIL2]
            return 0 if staged == TOO_SMALL else staged
        if len(heads) > 1:
            live.use(heads, which)
        if stream is None and order is not None and len(which):
            stream = order.stream(int(self._state.sequences["stream"][which[0] & 0xFFFFFFFF]))
        self._transfer.put_behind(partial(hand_over.enqueue, self._staging, self._device, buffer, staged, stream or NULL_STREAM))
        return 1

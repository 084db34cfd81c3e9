"""Hand-overs of block tables to a stream of the device. Each is staged into a buffer of its own, under the state
lock."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.entry.arguments import id_array
from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import DeviceError
from kvpool.pool.core import Core
from kvpool.pool.host_tables import step_arguments
from kvpool.state.codes import SEVERAL_STREAMS, TOO_SMALL
from kvpool.state.records import H
from kvpool.state.sequences import use
from kvpool.tables.block_table import planes_argument, rows_argument
from kvpool.tables.snapshot import CsrHandOver, DenseHandOver, HandOver, stream_error, vectors_argument
from kvpool.tables.staging import Buffer, Staging
from kvpool.tables.step_tables import StepHandOver, step_argument


class Tables:
    """Hands the block tables of one pool to its device. Thread-safe."""

    def __init__(self, core: Core, depth: int) -> None:
        self._core, self.staging = core, Staging(core.device, core.transfer, depth)

    def copy_offsets(
        self,
        target: Any,
        ids: Any,
        rows: Any,
        max_blocks: int | None,
        scale: Any,
        v_offset: Any,
        stream: Any,
        group: int | None,
    ) -> None:
        """What ``KVCacheManager.copy_batch_block_offsets`` does."""
        which, table = id_array("ids", ids), self._core.device.views.table(target)
        g = self._core.config.group(group)
        planes = planes_argument(table, scale, v_offset, self._core.config.groups[g].device_blocks)
        places = rows_argument(None if rows is None else id_array("rows", rows), len(which), table.shape[-2])
        columns = (
            table.shape[-1] if max_blocks is None else integer_argument("max_blocks", max_blocks, 1, table.shape[-1])
        )
        on = None if stream is None else self._core.as_stream(stream)
        if len(which):
            hand_over = DenseHandOver(table, planes, places, columns, cut=max_blocks is not None)
            self._hand_over("copy_batch_block_offsets", hand_over, which, on, g)
        else:
            with self._core.lock:
                self._core.check_open()

    def copy_csr(self, indptr: Any, indices: Any, last_page_len: Any, ids: Any, stream: Any, group: int | None) -> None:
        """What ``KVCacheManager.copy_batch_block_csr`` does."""
        which, g = id_array("ids", ids), self._core.config.group(group)
        if self._core.config.groups[g].kind == "recurrent":
            raise ValueError(
                f"group={g}: accepted are groups for attention; states are where copy_batch_block_offsets says"
            )
        named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        vectors = {name: self._core.device.views.table(vector, name, vector=True) for name, vector in named.items()}
        vectors_argument(vectors, len(which))
        on = None if stream is None else self._core.as_stream(stream)
        self._hand_over("copy_batch_block_csr", CsrHandOver(list(vectors.values()), len(which)), which, on, g)

    def copy_step(self, target: Any, ids: Any, first: Any, counts: Any, stream: Any, group: int | None) -> None:
        """What ``KVCacheManager.copy_step_tables`` does."""
        which, begins, each, g = step_arguments(self._core, ids, first, counts, group)
        targets = self._core.device.views.step(step_argument("target", target))
        targets.check_rows(len(which))
        on = None if stream is None else self._core.device.as_stream(stream)
        self._hand_over(
            "copy_step_tables", StepHandOver(targets, len(which), begins, each, *self._rows_of(g)), which, on, g
        )

    def _rows_of(self, g: int) -> tuple[int, int]:
        """The tokens of a block of a group, and how many first columns no window passes."""
        numbers = self._core.states.heads[g]
        return int(numbers[H.width]), int(numbers[H.sinks])

    def _hand_over(
        self, call: str, hand_over: HandOver, which: npt.NDArray[np.int64], stream: Stream | None, g: int
    ) -> None:
        """Stage and enqueue a hand-over. Starts again if a sequence has outgrown the buffer meanwhile. If the device
        refuses it, raises DeviceError; no block is lost."""
        self._core.refuse_inside(call)
        decided, behind = 0, stream or self._core.as_stream(self._stream_of(which))
        with DeferSignals():
            while not decided:
                buffer = self.staging.take(hand_over.room(self._core.states.heads, g, which), behind)
                try:
                    decided = self._core.decide(stream, self._stage, which, hand_over, buffer, stream, g)
                finally:
                    if not hand_over.retained:
                        self.staging.give_back(buffer)
        if hand_over.error is not None:
            raise hand_over.error
        if not hand_over.retained:
            raise DeviceError(f"the device has failed: {self._core.transfer.broken}", sticky=True)

    def _stream_of(self, which: npt.NDArray[np.int64]) -> Stream:
        """The stream that these sequences used last. A guess without the state lock, where ids may be wrong."""
        order, used = self._core.transfer.order, self._core.tokens.sequences["stream"]
        if order is None or not len(which):
            return NULL_STREAM
        return order.stream(int(used[(which[0] & 0xFFFFFFFF) % len(used)]))

    def _stage(
        self,
        heads: npt.NDArray[np.int64],
        which: npt.NDArray[np.int64],
        hand_over: HandOver,
        buffer: Buffer,
        stream: Stream | None,
        g: int,
    ) -> int:
        """Snapshot the tables. Returns whether the buffer was large enough. The caller holds the state lock."""
        order = self._core.transfer.order
        with self._core.device.host_access(stores=[buffer.array]):
            staged = hand_over.stage(heads, g, which, buffer)
        if staged == SEVERAL_STREAMS:
            raise stream_error(heads, g, which)
        if staged < 0:
            heads[0, H.detail], heads[0, H.bound] = heads[g, H.detail], heads[g, H.bound]
            return 0 if staged == TOO_SMALL else staged
        if len(heads) > 1:
            use(heads, which)
        if stream is None and order is not None and len(which):
            stream = order.stream(int(self._core.tokens.sequences["stream"][which[0] & 0xFFFFFFFF]))
        self._core.transfer.put_behind(
            partial(hand_over.enqueue, self.staging, self._core.device, buffer, staged, stream or NULL_STREAM)
        )
        return 1

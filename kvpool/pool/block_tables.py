"""Block tables on their way out of a pool: for readers on the host in place, and handed over to a stream of the device.
Each hand-over is staged into a buffer of its own, under the state lock."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.copying.transfer import NO_IDS
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.entry.arguments import each_argument, id_array
from kvpool.entry.interrupt import DeferSignals
from kvpool.errors import DeviceError
from kvpool.pool.core import Core, refusal
from kvpool.state import recurrent
from kvpool.state.records import SEVERAL_STREAMS, TOO_SMALL, H
from kvpool.state.sequences import use
from kvpool.tables.block_table import BlockTable, planes_argument, rows_argument
from kvpool.tables.snapshot import CsrHandOver, DenseHandOver, HandOver, stream_error, vectors_argument
from kvpool.tables.staging import Buffer, Staging
from kvpool.tables.step_tables import HostStep, StepHandOver, StepTables, step_argument

Ids = npt.NDArray[np.int64]


class BlockTables:
    """The block tables of one pool, for the host and for its device. Thread-safe."""

    def __init__(self, core: Core, depth: int) -> None:
        self._core, self.staging = core, Staging(core.device, core.transfer, depth)

    def block_table(self, ids: object, stream: object, group: int | None) -> BlockTable:
        core, which, g = self._core, id_array("ids", ids), self._core.config.group(group)
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        with core.lock:
            rows = core.rows(which)
            lengths = core.states[g].sequences["length"][rows].astype(np.int64)
            return BlockTable(core.tables[g], rows, lengths, core.config.tokens_per_block)

    def state_blocks(self, ids: object, stream: object, group: int | None) -> npt.NDArray[np.int32]:
        core, which, g = self._core, id_array("ids", ids), self._core.config.group(group)
        kind = core.config.groups[g].kind
        if kind != "recurrent":
            raise ValueError(f"group={g}: accepted are recurrent groups; this one is of kind {kind}")
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        out = np.empty((len(which), 2), np.int32)
        with core.lock:
            recurrent.state_blocks(core.states.heads, g, core.rows(which), out)
        return out

    def step(
        self, ids: object, first: object, counts: object, out: object, stream: object, group: int | None
    ) -> StepTables:
        core, (which, begins, each, g) = self._core, step_arguments(self._core, ids, first, counts, group)
        step = HostStep(None if out is None else step_argument("out", out), begins, each)
        if stream is not None:
            core.decide(stream, step.write, which, g, True, ids=which)
            return step.written
        with core.lock:
            core.check_open()
            error = step.write(core.states.heads, which, g, False)
            if error < 0:
                raise refusal(core.states.heads, error, which, core.tokens.sequences)
        return step.written

    def copy_offsets(
        self,
        target: object,
        ids: object,
        rows: object,
        max_blocks: int | None,
        scale: object,
        v_offset: object,
        stream: object,
        group: int | None,
    ) -> None:
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

    def copy_csr(
        self, indptr: object, indices: object, last_page_len: object, ids: object, stream: object, group: int | None
    ) -> None:
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

    def copy_step(
        self, target: object, ids: object, first: object, counts: object, stream: object, group: int | None
    ) -> None:
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

    def _hand_over(self, call: str, hand_over: HandOver, which: Ids, stream: Stream | None, g: int) -> None:
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

    def _stream_of(self, which: Ids) -> Stream:
        """The stream that these sequences used last. A guess without the state lock, where ids may be wrong."""
        order, used = self._core.transfer.order, self._core.tokens.sequences["stream"]
        if order is None or not len(which):
            return NULL_STREAM
        return order.stream(int(used[(which[0] & 0xFFFFFFFF) % len(used)]))

    def _stage(
        self,
        heads: Ids,
        which: Ids,
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


def step_arguments(
    core: Core, ids: object, first: object, counts: object, group: int | None
) -> tuple[Ids, Ids, Ids, int]:
    """Sequences, first tokens and counts of a step, each as private int64[n], and the group. None becomes int64[0]."""
    which, g = id_array("ids", ids), core.config.group(group)
    if core.config.groups[g].kind == "recurrent":
        raise ValueError(f"group={g}: accepted are groups for attention; states are where state_blocks says")
    begins, each = (
        NO_IDS if given is None else each_argument(name, given, len(which), highest=None)  # the state checks the values
        for name, given in (("first", first), ("counts", counts))
    )
    return which, begins, each, g

"""Block tables on their way out of a pool: for readers on the host in place, and handed over to a stream of the device.
Each upload is staged into a buffer of its own, under the state lock."""

from __future__ import annotations

from functools import partial

import numpy as np

from kvpool.common.arguments import Ids, each_argument, id_array
from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing
from kvpool.device.base import NULL_STREAM, Stream, StreamLike, stream_argument
from kvpool.device.work import Table, check_apart, check_entries
from kvpool.errors import DeviceError
from kvpool.pool.core import Core, refusal
from kvpool.pool.tables.block_table import planes_argument, rows_argument
from kvpool.pool.tables.snapshot import BlockTableUpload, CsrTableUpload, DenseTableUpload, stream_error, write_dense
from kvpool.pool.tables.staging import Buffer, Staging
from kvpool.pool.tables.step_tables import HostStep, StepTables, StepTableUpload, step_argument
from kvpool.pool.transfer.transfer import NO_IDS
from kvpool.state import recurrent
from kvpool.state.records import SEVERAL_STREAMS, TOO_SMALL, H
from kvpool.state.sequences import use

Rows = Int64s
WRITTEN_AT_ONCE = 1 << 16
"""The most block ids of an upload that is written under the state lock."""


class BlockTables:
    """Tables of live sequences for kernels: ``cache.tables``. Thread-safe.

    ``KVCacheManager.block_table`` is the table on the host. These calls write tables on a stream of the device, inside
    CUDA graphs, or for a step that computes several tokens of each sequence.
    """

    def __init__(self, core: Core, staging: Staging) -> None:
        self.core, self._staging = core, staging

    def state_blocks(self, ids: Ids, stream: StreamLike = None, group: int | None = None) -> Int32s:
        """Device blocks of the states of these sequences in a recurrent group, int32[n, 2]: where a step reads, and
        where it writes.

        The first has the state after the committed tokens; it is -1 where none is committed. The second takes the state
        after all tokens. Both are the same where the running state is overwritten in place. Snapshots between them are
        in the block table: the entry of column i, if it is not -1, takes the state after ``(i + 1) * tokens_per_block``
        tokens.

        The committed state is there until a step overwrites it. So an engine that verifies drafts keeps the states
        between. After a ``rewind`` the engine writes the running state again, unless the sequence now ends with a
        column that had the same block before: that block has its state, and others may read it. After a ``keep`` of
        drafts that are not the first ones, the engine writes the states of all columns from the first dropped draft on.

        ``group``: the index of a group of layers, required where there are several. ``stream``: where the engine
        continues with the sequences; it waits for the streams that used them before. Thread-safe; changes nothing but
        the stream. Raises UnknownSequence, DeviceError, TypeError, ValueError (also for a group that is not recurrent).
        """
        core, which, g = self.core, id_array("ids", ids), self.core.config.group(group)
        kind = core.config.groups[g].kind
        if kind != "recurrent":
            raise ValueError(f"group: expected a recurrent group, got {g}, which is of kind {kind}")
        if stream is not None:
            core.decide(stream, use, which, ids=which)
        out = np.empty((len(which), 2), np.int32)
        with core.lock, core.changes:
            recurrent.state_blocks(core.states.groups, g, core.rows(which), out)
        return out

    def step_tables(
        self,
        ids: Ids,
        first: Ids | None = None,
        counts: Ids | None = None,
        *,
        out: StepTables | None = None,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> StepTables:
        """The tables that attention kernels need for a step, on the host. In the step, each sequence computes
        ``counts[i]`` tokens from ``first[i]`` on.

        ``first``, ``counts``: int64[n]; by default from the committed tokens on, and to the end. Sequence i is as long
        as its last token of the step. ``out``: a ``StepTables`` with NumPy arrays to write, for arrays that are used
        again, or if only some are wanted. It is returned. Without it, all arrays are new.

        In a group with a window, tokens before ``first`` may have been given back, but not those from there on. In a
        group for cross attention the tokens are the encoder's.

        ``group``: the index of a group of layers, required where there are several. ``stream``: where the engine
        continues with the sequences; it waits for the streams that used them before. Thread-safe; changes nothing but
        the stream. Raises UnknownSequence, DeviceError, TypeError, ValueError (also for recurrent groups, and for
        arrays that are too small, with nothing written).
        """
        core, (which, begins, each, g) = self.core, step_arguments(self.core, ids, first, counts, group)
        step = HostStep(None if out is None else step_argument("out", out), begins, each)
        if stream is not None:
            core.use(core.as_stream(stream), step.write, which, g, True, ids=which)
            return step.written
        with core.lock, core.changes:
            core.check_open()
            error = step.write(core.states.groups, which, g, False)
            if error < 0:
                raise refusal(core.states.groups, error, which, core.tokens.sequences)
        return step.written

    def copy_batch_block_offsets(
        self,
        target: object,
        ids: Ids,
        *,
        rows: Ids | None = None,
        max_blocks: int | None = None,
        scale: Ids = 1,
        v_offset: Ids | None = None,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> None:
        """Write the block tables of sequences, as they are now, into ``target`` on ``stream``.

        ``target``: int32[rows, columns] that the device can write; each row is without gaps, of any length. If
        ``scale`` is a list, the target has one more dimension in front, [pools]. If ``v_offset`` (one, or one per pool)
        is given, it has [2] after that, for K and V. Block id b becomes ``b * scale``, for V ``b * scale + v_offset``.
        An entry without a block becomes -1. ``rows``: the row of the target for each sequence, all different (default:
        0, 1, ...).

        Rows are written whole, and a sequence that does not fit is an error. With ``max_blocks`` only that many columns
        are written; the other blocks of the sequence are left out, and the other columns of the target stay as they
        are. The call takes a private copy of the table: you may change or release the sequences as soon as it returns.

        ``group``: the index of a group of layers, required where there are several. ``stream`` (default: the one that
        all these sequences used last) waits for the streams that used them before. If ``staging_depth`` uploads to
        that stream are under way, the call waits, without a lock. Thread-safe; changes nothing but the stream of the
        sequences. Raises UnknownSequence, DeviceError, TypeError, ValueError.
        """
        which = id_array("ids", ids)
        table = self.core.device.views.table(target)
        upload, g = self._dense(table, len(which), rows, max_blocks, scale, v_offset, group)
        if not len(which):
            self.core.as_stream(stream)
        elif not self._write(upload, which, stream, g):
            self._upload("copy_batch_block_offsets", upload, which, stream, g)

    def _write(self, over: DenseTableUpload, which: Rows, stream: StreamLike, g: int) -> bool:
        """Write an upload at once, under the state lock, where it is a matter of microseconds. Returns False if the
        upload has to be staged, or is refused."""
        core = self.core
        (table,) = over.targets
        if not core.device.in_memory or len(which) * len(over.planes) * over.columns > WRITTEN_AT_ONCE:
            return False
        core.refuse_inside("copy_batch_block_offsets")
        place = over.columns, over.cut, table.address, table.strides[-2]
        return core.decide(stream, write_dense, which, g, over.rows, over.planes, *place, ids=which) == 0

    def _dense(
        self,
        table: Table,
        count: int,
        rows: Ids | None,
        max_blocks: int | None,
        scale: Ids,
        v_offset: Ids | None,
        group: int | None,
    ) -> tuple[DenseTableUpload, int]:
        """The upload of ``count`` sequences, and the group. Raises TypeError, ValueError."""
        g = self.core.config.group(group)
        planes = planes_argument(table, scale, v_offset, self.core.config.groups[g].device_blocks)
        places = rows_argument(None if rows is None else id_array("rows", rows), count, table.shape[-2])
        most = table.shape[-1]
        columns = most if max_blocks is None else integer_argument("max_blocks", max_blocks, 1, most)
        return DenseTableUpload(table, planes, places, columns, cut=max_blocks is not None), g

    def copy_batch_block_csr(
        self,
        indptr: object,
        indices: object,
        last_page_len: object,
        ids: Ids,
        *,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> None:
        """Write the block tables of n sequences on ``stream`` in the form of ``BlockTable.csr``, with no padding.

        ``indptr`` int32[n + 1 or more], ``indices`` int32[all their blocks, or more] and ``last_page_len`` int32[n or
        more] are vectors without gaps that the device can write and that do not overlap. Entries after those in use are
        left as they are. A vector that is too small is a ValueError that says how many entries are needed. A recurrent
        group is a ValueError too, since its rows are mostly holes. After a DeviceError, some of the three may have been
        written.

        Everything else is as in ``copy_batch_block_offsets``.
        """
        which, g = id_array("ids", ids), attention_group(self.core, group)
        named = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
        vectors = {name: self.core.device.views.table(vector, name, vector=True) for name, vector in named.items()}
        check_entries(vectors, len(which))
        check_apart(vectors)
        self._upload("copy_batch_block_csr", CsrTableUpload(list(vectors.values()), len(which)), which, stream, g)

    def copy_step_tables(
        self,
        target: StepTables,
        ids: Ids,
        first: Ids | None = None,
        counts: Ids | None = None,
        *,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> None:
        """Write the tables of a step on ``stream``, into arrays that the device can write.

        The tables are those of ``step_tables``. Everything else is as in ``copy_batch_block_offsets``: the call takes a
        private copy, so you may change or release the sequences as soon as it returns. On a GPU, one Numba kernel
        writes all the arrays; it needs the extra ``cuda12`` or ``cuda13``. After a DeviceError, some of the arrays may
        have been written.
        """
        which, begins, each, g = step_arguments(self.core, ids, first, counts, group)
        targets = self.core.device.views.step(step_argument("target", target))
        targets.check_rows(len(which))
        upload = StepTableUpload(targets, len(which), begins, each)
        self._upload("copy_step_tables", upload, which, stream, g)

    def capture_block_offsets(
        self,
        target: object,
        sequences: int,
        *,
        rows: Ids | None = None,
        max_blocks: int | None = None,
        scale: Ids = 1,
        v_offset: Ids | None = None,
        stream: StreamLike,
        group: int | None = None,
    ) -> GraphTables:
        """Have a CUDA graph hand over block tables of up to ``sequences`` sequences: each replay writes those that were
        staged last. Before the first ``stage`` of what this returns, there are none.

        ``stream`` is being captured into the graph. What is written is what ``copy_batch_block_offsets`` writes with
        the same arguments, and -1 into the rows behind the last sequence. The whole width of the target, or
        ``max_blocks``, crosses the link at each replay. Thread-safe; changes nothing. Raises TypeError, ValueError,
        with nothing captured: also for a stream that is not being captured, and on a device without graphs. Raises
        DeviceError, MemoryError.
        """
        count, table = self._sequences_argument(sequences), self.core.device.views.table(target)
        upload, g = self._dense(table, count, rows, max_blocks, scale, v_offset, group)
        return self._capture("capture_block_offsets", upload, count, stream, g)

    def capture_step_tables(
        self, target: StepTables, sequences: int, *, stream: StreamLike, group: int | None = None
    ) -> GraphTables:
        """Have a CUDA graph hand over the tables of a step of up to ``sequences`` sequences: each replay writes those
        that were staged last.

        Behind the last sequence come sequences without tokens, up to ``sequences``: their lengths are 0, and their rows
        of ``table`` -1. A replay reads only what is in use. Everything else is as in ``capture_block_offsets`` and
        ``copy_step_tables``.
        """
        count, g = self._sequences_argument(sequences), attention_group(self.core, group)
        targets = self.core.device.views.step(step_argument("target", target))
        targets.check_rows(count)
        return self._capture("capture_step_tables", StepTableUpload(targets, count, NO_IDS, NO_IDS), count, stream, g)

    def _sequences_argument(self, sequences: int) -> int:
        return integer_argument("sequences", sequences, 1, self.core.config.settings.sequences)

    def _capture(self, call: str, upload: BlockTableUpload, count: int, stream: object, g: int) -> GraphTables:
        """Record an upload in a graph. It has a buffer of its own, in which are no sequences yet."""
        core, on = self.core, stream_argument(stream)
        core.refuse_inside(call)
        upload.capture(core.tables[g].shape[1])
        buffer = self._staging.allocate(upload.room(core.states.groups, g, NO_IDS))
        try:
            with core.transfer.lock:
                with core.lock, core.changes, core.device.host_access(stores=[buffer.array]):
                    core.check_open()
                    staged = upload.stage(core.states.groups, g, NO_IDS, buffer)
                core.device.enqueue(upload.work(buffer, staged), on, captured=True)
        except BaseException:
            self._staging.give_back(buffer)
            raise
        return GraphTables(core, self._staging, upload, buffer, count, g)

    def _upload(self, call: str, upload: BlockTableUpload, which: Rows, stream: StreamLike, g: int) -> None:
        """Stage and enqueue an upload. Starts again if a sequence has outgrown the buffer meanwhile. If the device
        refuses it, raises DeviceError; no block is lost."""
        decided, on = 0, None if stream is None else self.core.as_stream(stream)
        self.core.refuse_inside(call)
        behind = on or self.core.as_stream(self._stream_of(which))
        while not decided:
            upload.cancelled = False
            buffer = self._staging.take(upload.room(self.core.states.groups, g, which), behind, upload)
            try:
                staged = self.core, self._staging, upload, buffer, on, g
                decided = self.core.use(on, _stage, which, *staged)
            finally:
                if not upload.retained:
                    self._staging.cancel(upload)
        if upload.error is not None:
            raise upload.error
        if not upload.retained:
            raise DeviceError(f"the device has failed: {self.core.transfer.broken}", sticky=True)

    def _stream_of(self, which: Rows) -> Stream:
        """The stream that these sequences used last. A guess without the state lock, where ids may be wrong."""
        order, last_streams = self.core.transfer.order, self.core.tokens.sequences["stream"]
        if order is None or not len(which):
            return NULL_STREAM
        return order.stream(int(last_streams[(which[0] & 0xFFFFFFFF) % len(last_streams)]))


class GraphTables(Closing):
    """An upload in a CUDA graph. ``capture_block_offsets`` and ``capture_step_tables`` make it.

    Before each replay, ``stage`` puts the tables of that step into a buffer that only this graph reads. Nothing is
    launched for it: the replay reads the buffer and writes the targets. The buffer is one, so ``stage`` waits until the
    replay before has ended. An engine that prepares a step while another one runs captures two graphs, and takes them
    in turn.

    ``close`` gives the buffer back: the graph must not be replayed any more then, nor when the pool is closed. One
    thread at a time.

    Attributes
    ----------
    sequences
        The most sequences that it takes.
    """

    def __init__(
        self, core: Core, staging: Staging, upload: BlockTableUpload, buffer: Buffer, sequences: int, g: int
    ) -> None:
        self._core, self._staging, self.sequences, self._group = core, staging, sequences, g
        self._upload: BlockTableUpload = upload
        self._buffer: Buffer | None = buffer

    def stage(
        self, ids: Ids, first: Ids | None = None, counts: Ids | None = None, *, stream: StreamLike = None
    ) -> None:
        """Stage the tables of sequences, as they are now, for the replays that are launched on ``stream`` from now on.

        ``first``, ``counts``: for the tables of a step, as in ``step_tables``. ``stream`` is that of the replay, and
        waits for the streams that used the sequences before; None is the default stream. You may change or release the
        sequences as soon as the call returns, and launch the graph several times.

        Waits, with no lock held, until the replays before are done: on the stream that was named for them, or on this
        one if there was none. A stream that was named by its number has to live until then: some drivers end a process
        that asks for a destroyed one, others report it, and the call waits for the whole device. After an error, a
        replay writes what it wrote before. Changes nothing but the stream of the sequences. Raises UnknownSequence,
        DeviceError, PoolClosed, TypeError, ValueError: also for more than
        ``sequences``, after ``close``, and while one of both streams is being captured.
        """
        core, which = self._core, id_array("ids", ids)
        if self._buffer is None:
            raise ValueError("this upload is closed: capture another one")
        if len(which) > self.sequences:
            raise ValueError(f"ids: expected up to {self.sequences} sequences, as in the capture, got {len(which)}")
        self._upload.choose(*(tokens_argument(*pair, len(which)) for pair in (("first", first), ("counts", counts))))
        on = core.as_stream(stream)
        core.refuse_inside("stage")
        self._staging.await_replay(self._buffer, on)
        core.use(on, _stage, which, core, self._staging, self._upload, self._buffer, on, self._group)
        core.check_open()

    def close(self) -> None:
        """Give the buffer back once the replays so far are done, or with the pool if ``stage`` was never called; waits
        for the device only where the driver reports that stream as destroyed (see ``stage``). A second call does
        nothing. Raises
        ValueError, with nothing changed, while the stream of the replays is being captured; DeviceError."""
        buffer = self._buffer
        if buffer is not None and not self._core.closed:
            self._staging.retain_replay(buffer)
            self._buffer = None


def _stage(
    groups: Rows,
    which: Rows,
    core: Core,
    staging: Staging,
    upload: BlockTableUpload,
    buffer: Buffer,
    stream: Stream | None,
    g: int,
) -> int:
    """Snapshot the tables. Returns whether the buffer was large enough. The caller holds the state lock."""
    order = core.transfer.order
    with core.device.host_access(stores=[buffer.array]):
        staged = upload.stage(groups, g, which, buffer)
    if staged == SEVERAL_STREAMS:
        raise stream_error(groups, g, which)
    if staged < 0:
        groups[0, H.detail], groups[0, H.bound] = groups[g, H.detail], groups[g, H.bound]
        return 0 if staged == TOO_SMALL else staged
    if len(groups) > 1:
        use(groups, which)
    if stream is None and order is not None and len(which):
        stream = order.stream(int(core.tokens.sequences["stream"][which[0] & 0xFFFFFFFF]))
    core.transfer.put_behind(partial(upload.enqueue, staging, core.device, buffer, staged, stream or NULL_STREAM))
    return 1


def step_arguments(
    core: Core, ids: Ids, first: Ids | None, counts: Ids | None, group: int | None
) -> tuple[Rows, Rows, Rows, int]:
    """Sequences, first tokens and counts of a step, each as private int64[n], and the group. None becomes int64[0]."""
    which, g = id_array("ids", ids), attention_group(core, group)
    return which, tokens_argument("first", first, len(which)), tokens_argument("counts", counts, len(which)), g


def attention_group(core: Core, group: int | None) -> int:
    """A group that has tables of a step. Raises ValueError for a recurrent one."""
    g = core.config.group(group)
    if core.config.groups[g].kind == "recurrent":
        raise ValueError(
            f"group: expected one for attention, got {g}, which is recurrent: state_blocks says where states are"
        )
    return g


def tokens_argument(name: str, values: Ids | None, count: int) -> Rows:
    """A number for each sequence, as private int64[n], or int64[0] for None. The state checks the values."""
    return NO_IDS if values is None else each_argument(name, values, count, highest=None)

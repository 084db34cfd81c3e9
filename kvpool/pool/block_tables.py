"""BlockTables: tables of live sequences for kernels, on the host, on a stream of the device, and in CUDA graphs. Each
upload is staged into a buffer of its own, under the state lock."""

from __future__ import annotations

import numpy as np

from kvpool.common.arguments import Ids, each_argument, id_array
from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import AnyArray
from kvpool.common.process import Closing
from kvpool.device.base import NULL_STREAM, Stream, StreamLike, stream_argument
from kvpool.device.work import Table, check_apart, check_entries
from kvpool.pool.core import Core
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
    """The calls that give kernels the block tables of live sequences. It is ``KVCacheManager.tables``.

    ``KVCacheManager.block_table`` returns the block table on the host. The calls here write it on a stream of the
    device, or have a CUDA graph write it. For a step that computes several tokens of each sequence, they also compute
    slot mappings, lengths and offsets.

    Notes
    -----
    Thread-safe. A call with a ``stream`` has that stream wait for the streams that used the sequences before, and the
    sequences are used there from now on. Nothing else in the pool changes.

    Examples
    --------
    >>> import numpy as np
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     ids = cache.add_sequence_batch([range(6), range(10, 19)]).ids
    ...     target = np.empty((2, 4), np.int32)  # on a GPU: an array there
    ...     cache.tables.copy_batch_block_offsets(target, ids)
    ...     print(target)
    ...     cache.release(ids)
    [[ 0  1 -1 -1]
     [ 2  3  4 -1]]
    """

    def __init__(self, core: Core, staging: Staging) -> None:
        self.core, self._staging = core, staging

    def state_blocks(self, ids: Ids, stream: StreamLike = None, group: int | None = None) -> Int32s:
        """Return the device blocks of the states of sequences in a recurrent group.

        Parameters
        ----------
        ids : int or array_like of int64, shape (n,)
            The sequences.
        stream : Stream, int, or stream of another package, optional
            The stream on which the engine continues with the sequences.
        group : int, optional
            The index of the recurrent group, required where there are several groups.

        Returns
        -------
        ndarray of int32, shape (n, 2)
            The block from which a step reads, and the block to which it writes. The first has the state after the
            committed tokens; -1 if none is committed. The second takes the state after all tokens. They are the same
            if the running state is overwritten in place.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, and for a group that is not recurrent.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        Snapshots between the two are in the block table: the entry of column i, if it is not -1, takes the state after
        ``(i + 1) * tokens_per_block`` tokens.

        The committed state stays until a step overwrites it, so an engine that verifies drafts keeps the states in
        between. After a ``rewind``, the engine writes the running state again, unless the sequence now ends with a
        column that had the same block before: that block has its state, and others may read it. After an
        ``accept_drafts`` of drafts that are not the first ones, the engine writes the states of all columns from the
        first rejected draft on.
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
        """Return the tables that attention kernels need for a step, on the host.

        In the step, sequence i computes ``counts[i]`` tokens from token ``first[i]`` on.

        Parameters
        ----------
        ids : int or array_like of int64, shape (n,)
            The sequences.
        first : int or array_like of int64, shape (n,), optional
            The index of the first token of the step in each sequence. By default the first uncommitted token.
        counts : int or array_like of int64, shape (n,), optional
            The number of tokens of the step in each sequence. By default all from ``first`` on.
        out : StepTables, optional
            NumPy arrays to write, to use them again, or to get only some of the tables. By default all arrays are new.
        stream : Stream, int, or stream of another package, optional
            The stream on which the engine continues with the sequences.
        group : int, optional
            The index of a group of layers, required where there are several. In a group for cross attention, the tokens
            are those of the encoder.

        Returns
        -------
        StepTables
            ``out``, or new NumPy arrays.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, a recurrent group, tokens that a window has passed, and arrays that are too small.
            Nothing is written then.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.
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
                raise core.refusal(error, which)
        return step.written

    def copy_batch_block_offsets(
        self,
        target: AnyArray,
        ids: Ids,
        *,
        rows: Ids | None = None,
        max_blocks: int | None = None,
        scale: Ids = 1,
        v_offset: Ids | None = None,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> None:
        """Write the block tables of sequences, as they are now, to an array of the device on a stream.

        Parameters
        ----------
        target : array of int32, shape (rows, columns)
            Memory that the device can write. Each row is contiguous; rows may be apart. Row i gets the block ids of
            sequence i, and -1 after them and where there is no block. It has more axes with ``scale`` and ``v_offset``.
        ids : int or array_like of int64, shape (n,)
            The sequences.
        rows : int or array_like of int64, shape (n,), optional
            The row of the target for each sequence, all different. By default 0, 1, ...
        max_blocks : int, optional
            Write only this many columns, and leave the others as they are. By default rows are written whole, and a
            sequence with more blocks than columns is an error.
        scale : int or list of int, default 1
            Write ``id * scale`` in place of the block id. With a list, the target has shape (pools, rows, columns), and
            each pool has a scale of its own.
        v_offset : int or list of int, optional
            Write two tables, K and V, with ``id * scale`` and ``id * scale + v_offset``. The target has shape
            (2, rows, columns), or (pools, 2, rows, columns).
        stream : Stream, int, or stream of another package, optional
            The stream on which the table is written. By default the stream that all these sequences used last.
        group : int, optional
            The index of a group of layers, required where there are several.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, for a sequence that does not fit, and without a ``stream`` for sequences that were used
            last on different streams.
        DeviceError, MemoryError, PoolClosed
            Where the device fails, or a sequence has lost a block; where there is no memory for a staging buffer; after
            the pool was closed.

        Notes
        -----
        The call takes a private copy of the tables: the caller may change or release the sequences as soon as it
        returns. If ``staging_depth`` uploads are in flight on the stream, it waits for the oldest, and holds no lock.
        """
        which = id_array("ids", ids)
        table = self.core.device.views.table(target)
        upload, g = self._dense(table, len(which), rows, max_blocks, scale, v_offset, group)
        if not len(which):
            self.core.as_stream(stream)
        elif not self.core.device.in_memory or not self._write(upload, which, stream, g):
            self._upload("copy_batch_block_offsets", upload, which, stream, g)

    def _write(self, over: DenseTableUpload, which: Rows, stream: StreamLike, g: int) -> bool:
        """Write an upload at once, under the state lock, where it is a matter of microseconds. Returns False if the
        upload has to be staged, or is refused."""
        core = self.core
        (table,) = over.targets
        if len(which) * len(over.planes) * over.columns > WRITTEN_AT_ONCE:
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
        indptr: AnyArray,
        indices: AnyArray,
        last_page_len: AnyArray,
        ids: Ids,
        *,
        stream: StreamLike = None,
        group: int | None = None,
    ) -> None:
        """Write the block tables of sequences as CSR, as ``BlockTable.csr`` returns them, to arrays of the device.

        The three arrays are contiguous, and do not overlap. They may be larger than needed: the entries after those in
        use are left as they are.

        Parameters
        ----------
        indptr : array of int32, shape (n + 1 or more,)
            Gets the index of each sequence's first block in ``indices``, and the number of all blocks.
        indices : array of int32, shape (number of blocks or more,)
            Gets the block ids of one sequence after the other.
        last_page_len : array of int32, shape (n or more,)
            Gets the number of tokens in each sequence's last block.
        ids : int or array_like of int64, shape (n,)
            The sequences.
        stream : Stream, int, or stream of another package, optional
            As for ``copy_batch_block_offsets``.
        group : int, optional
            The index of a group of layers, required where there are several. It must not be recurrent.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument. For an array that is too small, with the number of entries that are needed.
        DeviceError, MemoryError, PoolClosed
            As for ``copy_batch_block_offsets``. After a DeviceError, some of the arrays may have been written.

        Notes
        -----
        As for ``copy_batch_block_offsets``.
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
        """Write the tables of a step, as ``step_tables`` returns them, to arrays of the device.

        Parameters
        ----------
        target : StepTables
            Arrays that the device can write. Only those that are not None are written.
        ids : int or array_like of int64, shape (n,)
            The sequences.
        first : int or array_like of int64, shape (n,), optional
            As for ``step_tables``.
        counts : int or array_like of int64, shape (n,), optional
            As for ``step_tables``.
        stream : Stream, int, or stream of another package, optional
            As for ``copy_batch_block_offsets``.
        group : int, optional
            The index of a group of layers, required where there are several. It must not be recurrent.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            As for ``step_tables``.
        DeviceError, MemoryError, PoolClosed
            As for ``copy_batch_block_offsets``. After a DeviceError, some of the arrays may have been written.

        Notes
        -----
        As for ``copy_batch_block_offsets``. On a GPU, one Numba kernel writes all arrays, which needs the extra
        ``cuda12`` or ``cuda13``.
        """
        which, begins, each, g = step_arguments(self.core, ids, first, counts, group)
        targets = self.core.device.views.step(step_argument("target", target))
        targets.check_rows(len(which))
        upload = StepTableUpload(targets, len(which), begins, each)
        self._upload("copy_step_tables", upload, which, stream, g)

    def capture_block_offsets(
        self,
        target: AnyArray,
        sequences: int,
        *,
        rows: Ids | None = None,
        max_blocks: int | None = None,
        scale: Ids = 1,
        v_offset: Ids | None = None,
        stream: StreamLike,
        group: int | None = None,
    ) -> GraphTables:
        """Capture an upload of block tables in a CUDA graph.

        Each replay writes what ``copy_batch_block_offsets`` writes with the same arguments, for the sequences that
        were staged last, and -1 to the rows after them. Before the first ``GraphTables.stage`` there are no sequences.

        Parameters
        ----------
        target : array of int32, shape (rows, columns)
            As for ``copy_batch_block_offsets``.
        sequences : int
            The most sequences of one replay.
        rows : int or array_like of int64, shape (sequences,), optional
            As for ``copy_batch_block_offsets``.
        max_blocks : int, optional
            As for ``copy_batch_block_offsets``.
        scale : int or list of int, default 1
            As for ``copy_batch_block_offsets``.
        v_offset : int or list of int, optional
            As for ``copy_batch_block_offsets``.
        stream : Stream, int, or stream of another package
            The stream that is being captured.
        group : int, optional
            The index of a group of layers, required where there are several.

        Returns
        -------
        GraphTables
            Stages the tables of each replay.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, a stream that is not being captured, and a device without graphs. Nothing is captured
            then.
        DeviceError, MemoryError, PoolClosed
            Where the device fails; where there is no memory for the buffer; after the pool was closed.

        Notes
        -----
        Each replay copies the whole width of the target, or ``max_blocks`` columns, from the host.
        """
        count, table = self._sequences_argument(sequences), self.core.device.views.table(target)
        upload, g = self._dense(table, count, rows, max_blocks, scale, v_offset, group)
        return self._capture("capture_block_offsets", upload, count, stream, g)

    def capture_step_tables(
        self, target: StepTables, sequences: int, *, stream: StreamLike, group: int | None = None
    ) -> GraphTables:
        """Capture an upload of the tables of a step in a CUDA graph.

        Each replay writes what ``copy_step_tables`` writes, for the sequences that were staged last. The entries after
        them, up to ``sequences``, are those of sequences without tokens: lengths are 0, and rows of ``table`` are -1.

        Parameters
        ----------
        target : StepTables
            As for ``copy_step_tables``.
        sequences : int
            The most sequences of one replay.
        stream : Stream, int, or stream of another package
            The stream that is being captured.
        group : int, optional
            The index of a group of layers, required where there are several. It must not be recurrent.

        Returns
        -------
        GraphTables
            Stages the tables of each replay.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, a stream that is not being captured, and a device without graphs. Nothing is captured
            then.
        DeviceError, MemoryError, PoolClosed
            As for ``capture_block_offsets``.

        Notes
        -----
        A replay copies only the entries in use from the host.
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
        core, staging = self.core, self._staging
        on = None if stream is None else core.as_stream(stream)
        core.refuse_inside(call)
        behind, done = on or core.as_stream(self._stream_of(which)), False
        while not done:
            buffer = staging.take(upload.room(core.states.groups, g, which), behind, upload)
            try:
                done = _stage_and_enqueue(core, staging, upload, buffer, which, on, g)
            finally:
                if buffer.user is upload:
                    staging.cancel(upload)

    def _stream_of(self, which: Rows) -> Stream:
        """The stream that these sequences used last. A guess without the state lock, where ids may be wrong."""
        order, last_streams = self.core.transfer.order, self.core.tokens.sequences["stream"]
        if order is None or not len(which):
            return NULL_STREAM
        return order.stream(int(last_streams[(which[0] & 0xFFFFFFFF) % len(last_streams)]))


class GraphTables(Closing):
    """An upload of tables in a CUDA graph.

    ``BlockTables.capture_block_offsets`` and ``capture_step_tables`` return it. Before each replay, ``stage`` writes
    the tables of that step to a buffer that only this graph reads. It launches nothing: the replay copies the buffer to
    the targets.

    Attributes
    ----------
    sequences : int
        The most sequences of one replay.

    Notes
    -----
    One thread at a time may use it. There is one buffer, so ``stage`` waits for the end of the replay before. An engine
    that prepares a step while another one runs captures two graphs, and alternates between them.

    Do not replay the graph after ``close``, or after the pool was closed.
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
        """Stage the tables of sequences, as they are now, for the next replays.

        Parameters
        ----------
        ids : int or array_like of int64, shape (n,)
            Up to ``sequences`` sequences.
        first : int or array_like of int64, shape (n,), optional
            As for ``BlockTables.step_tables``. Only for an upload of the tables of a step.
        counts : int or array_like of int64, shape (n,), optional
            Likewise.
        stream : Stream, int, or stream of another package, optional
            The stream on which the graph is launched. By default the default stream.

        Raises
        ------
        UnknownSequence
            For an id that is not a live sequence.
        TypeError, ValueError
            For a bad argument, for more than ``sequences`` sequences, after ``close``, and while the stream of this or
            of the replay before is being captured. The next replay then writes what the replay before wrote.
        DeviceError, PoolClosed
            Where the device has failed, or a sequence has lost a block; after the pool was closed.

        Notes
        -----
        The caller may change or release the sequences as soon as the call returns, and launch the graph several times.

        The call waits until earlier replays have ended, on the stream that was named for them, and holds no lock
        meanwhile. A stream that was named by its number must exist until then: with some drivers, a query of a
        destroyed stream ends the process; others report it, and the call waits for the whole device.
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
        _stage_and_enqueue(core, self._staging, self._upload, self._buffer, which, on, self._group)

    def close(self) -> None:
        """Give the buffer back once the replays so far are done. A second call does nothing.

        Raises
        ------
        ValueError
            While the stream of the replays is being captured. Nothing is changed then.
        DeviceError
            Where the device fails.

        Notes
        -----
        It does not wait, unless the driver reports that the stream of the replays was destroyed: see ``stage``. If
        ``stage`` was never called, the buffer is given back with the pool.
        """
        buffer = self._buffer
        if buffer is not None and not self._core.closed:
            self._staging.retain_replay(buffer)
            self._buffer = None


def _stage_and_enqueue(
    core: Core, staging: Staging, upload: BlockTableUpload, buffer: Buffer, which: Rows, on: Stream | None, g: int
) -> bool:
    """Snapshot the tables under the state lock, and have the device read them, both under the transfer lock. So uploads
    are enqueued in the order of their snapshots, and ``close`` waits for them. Returns whether the buffer was large
    enough."""
    transfer = core.transfer
    with transfer.lock:
        staged = core.use(on, _stage, which, core, upload, buffer, on, g) - 1
        if staged >= 0:
            # What a stream does that it waits for here may read the targets.
            transfer.drain_accesses()
            upload.enqueue(transfer, staging, buffer, staged)
    if transfer.waiting:
        transfer.drain()
    return staged >= 0


def _stage(
    groups: Rows, which: Rows, core: Core, upload: BlockTableUpload, buffer: Buffer, on: Stream | None, g: int
) -> int:
    """Snapshot the tables. Returns the result of ``stage`` and one, 0 if the buffer is too small, or an error. The
    caller holds the state lock."""
    with core.device.host_access(stores=[buffer.array]):
        staged = upload.stage(groups, g, which, buffer)
    if staged == SEVERAL_STREAMS:
        raise stream_error(groups, g, which)
    if staged < 0:
        groups[0, H.detail], groups[0, H.bound] = groups[g, H.detail], groups[g, H.bound]
        return 0 if staged == TOO_SMALL else staged
    if len(groups) > 1:
        use(groups, which)
    order = core.transfer.order
    if on is None and order is not None and len(which):
        on = order.stream(int(core.tokens.sequences["stream"][which[0] & 0xFFFFFFFF]))
    upload.stream = on or NULL_STREAM
    return staged + 1


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

"""Tables of a step: the metadata that attention kernels read for some tokens of each sequence. They are written on the
host, or uploaded to a device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.strided import AnyArray
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import address_of, memcpy
from kvpool.device.work import (
    HOLES,
    LENGTH,
    QUERY,
    STORED,
    AsTable,
    StagedStep,
    StepTargets,
    Work,
    host_table,
    numbers_bytes,
    write_step,
)
from kvpool.pool.tables.snapshot import BlockTableUpload, check_streams, used_blocks
from kvpool.pool.tables.staging import Buffer
from kvpool.state.records import BAD_COUNT, PASSED, TOO_LARGE, TOO_SMALL, H, group_at, sequences_of
from kvpool.state.requests import holes
from kvpool.state.sequences import check, stream_of, use

TOKENS, PAGES, BLOCKS = range(3)
"""The limits of a step, as ``detail`` of TOO_LARGE names them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepTables:
    """The tables that attention kernels need for a step, in which each of n sequences computes some tokens.

    ``BlockTables.step_tables`` returns it. An engine also makes one of its own arrays, for ``step_tables(out=)``,
    ``copy_step_tables`` and ``capture_step_tables`` to write. Those arrays may be larger than needed, as the fixed
    buffers of a CUDA graph are: the entries after those in use are left as they are.

    Parameters
    ----------
    slot_mapping : array of int64, shape (tokens,), optional
        The slot of each token of the step, ``block * tokens_per_block + position in the block``, one sequence after the
        other. Like each of these arrays, None if it is not wanted.
    seq_lens : array of int32, shape (n,), optional
        The length of each sequence, up to its last token of the step.
    query_start_loc : array of int32, shape (n + 1,), optional
        The index of each sequence's first token among the tokens of the step; then the number of all tokens.
    last_page_len : array of int32, shape (n,), optional
        Tokens in the last block of each sequence: 1 to ``tokens_per_block``, or 0 if the sequence has no token.
    table : array of int32, shape (n, columns), optional
        The blocks of the first ``seq_lens`` tokens; -1 after them, and where a window has passed a block. Rows may be
        apart.
    indptr : array of int32, shape (n + 1,), optional
        The blocks of sequence i are ``indices[indptr[i]:indptr[i + 1]]``.
    indices : array of int32, shape (blocks,), optional
        The same blocks as in ``table``, without padding and without those that a window has passed.

    Notes
    -----
    Make a ``StepTables`` once and use it for all steps, since the first use checks its arrays. Threads can share it, as
    long as they do not write the same arrays at the same time.

    Examples
    --------
    >>> import kvpool
    >>> layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
    >>> with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    ...     ids = cache.add_sequence_batch([range(6), range(10, 19)]).ids
    ...     step = cache.tables.step_tables(ids, first=[4, 0], counts=[2, 3])
    ...     print(step.slot_mapping.tolist(), step.seq_lens, step.query_start_loc, step.last_page_len)
    ...     print(step.table.tolist(), step.indptr, step.indices)
    ...     cache.release(ids)
    [4, 5, 8, 9, 10] [6 3] [0 2 5] [2 3]
    [[0, 1], [2, -1]] [0 2 3] [0 1 2]
    """

    slot_mapping: AnyArray | None = None
    seq_lens: AnyArray | None = None
    query_start_loc: AnyArray | None = None
    last_page_len: AnyArray | None = None
    table: AnyArray | None = None
    indptr: AnyArray | None = None
    indices: AnyArray | None = None
    _known: dict[AsTable, StepTargets] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # The copies of the arrays are at other addresses.
        return {**vars(self), "_known": {}}

    def targets(self, as_table: AsTable) -> StepTargets:
        """Return the addresses of the arrays. They are checked only once, since that takes longer than most steps.
        Raises TypeError, ValueError."""
        targets = self._known.get(as_table)
        if targets is None:
            targets = self._known[as_table] = StepTargets.of(self, as_table)
        return targets


def step_argument(name: str, value: object) -> StepTables:
    """Return ``value``. Raises TypeError unless it is a ``StepTables``."""
    if type(value) is not StepTables:
        raise TypeError(f"{name}: expected StepTables, got {value!r:.80}")
    return value


@jit
def _number(group, ids, first, counts, packed, limits, numbers):  # type: ignore[no-untyped-def]
    """Write the numbers of a step as in ``StagedStep``. Block ids that are not ``packed`` are the persistent table. The
    numbers behind those of the sequences are for sequences without tokens.

    ``first`` int64[0] means the committed tokens, ``counts`` int64[0] means up to the end. Returns the columns of the
    longest sequence. Errors: BAD_COUNT if the sequence at ``detail`` has ``bound`` tokens; PASSED if its first
    ``bound`` tokens may have no block; TOO_LARGE if the limit ``detail`` would have to be ``bound``.
    """
    most = tokens = blocks = 0
    for i in range(len(ids)):
        slot = ids[i] & 0xFFFFFFFF
        sequence = sequences_of(group)[slot]
        length, gone = sequence.length, holes(group, slot)
        begin = first[i] if len(first) else sequence.committed
        count = counts[i] if len(counts) else length - begin
        if begin < 0 or begin > length or count < 0 or count > length - begin:
            group.detail, group.bound = i, length
            return BAD_COUNT
        end = begin + count
        if gone and begin < (group.sinks + gone) * group.width:
            group.detail, group.bound = i, (group.sinks + gone) * group.width
            return PASSED
        pages = (end + group.width - 1) // group.width
        numbers[i, STORED] = blocks if packed else slot * group.columns
        numbers[i, HOLES], numbers[i, LENGTH], numbers[i, QUERY] = gone, end, tokens
        most, tokens, blocks = max(most, pages), tokens + count, blocks + pages - gone
    for n in range(len(ids), len(numbers)):
        numbers[n, STORED], numbers[n, HOLES], numbers[n, LENGTH], numbers[n, QUERY] = blocks, 0, 0, tokens
    for limit in range(3):
        needed = tokens if limit == TOKENS else most if limit == PAGES else blocks
        if needed > limits[limit]:
            group.detail, group.bound = limit, needed
            return TOO_LARGE
    return most


@jit
def write_host_step(groups, g, ids, first, counts, limits, numbers, places):  # type: ignore[no-untyped-def]
    """Write the tables of a step to ``places``. ``numbers`` int64[n + 1, 4] is scratch, and has the step's numbers
    afterwards.

    Returns the columns of the longest sequence. Errors, with nothing written: those of ``sequences.check`` and
    ``_number``.
    """
    group = group_at(groups, g)
    error = check(group, ids, True)
    if error:
        return error
    most = _number(group, ids, first, counts, False, limits, numbers)
    if most >= 0:
        write_step(address_of(numbers), len(ids), group.table_at, False, group.width, group.sinks, places)
    return most


@jit
def step_room(groups, g, ids, count, least):  # type: ignore[no-untyped-def]
    """Bytes of the buffer that ``stage_step`` is likely to need for ``count`` sequences."""
    return numbers_bytes(count) + 4 * max(count * least, used_blocks(group_at(groups, g), ids)[1])


@jit
def stage_step(groups, g, ids, first, counts, limits, numbers, address, nbytes):  # type: ignore[no-untyped-def]
    """Write a ``StagedStep`` into the buffer at ``address``. Returns the columns of the longest sequence. ``numbers``
    int64[n + 1, 4] is scratch: what a buffer of a graph has stays there after an error.

    The sequences are used on the call's stream from now on. Errors, with nothing changed: those of ``check_streams``
    and ``_number``; TOO_SMALL for the buffer.
    """
    group = group_at(groups, g)
    error = check_streams(group, ids)
    if error:
        return error
    behind = numbers_bytes(len(numbers) - 1)
    most = _number(group, ids, first, counts, True, limits, numbers)
    if most < 0:
        return most
    if behind + 4 * numbers[len(numbers) - 1, STORED] > nbytes:
        return TOO_SMALL
    memcpy(address, address_of(numbers), behind)
    for i in range(len(ids)):
        slot = ids[i] & 0xFFFFFFFF
        stream_of(group, slot)
        row, place = group.table_at + 4 * slot * group.columns, address + behind + 4 * numbers[i, STORED]
        count, gone = numbers[i + 1, STORED] - numbers[i, STORED], numbers[i, HOLES]
        if gone:
            memcpy(place, row, 4 * group.sinks)
            memcpy(place + 4 * group.sinks, row + 4 * (group.sinks + gone), 4 * (count - group.sinks))
        else:
            memcpy(place, row, 4 * count)
    return most


class StepTableUpload(BlockTableUpload):
    """The tables of a step of ``count`` sequences. ``first`` and ``counts`` are as in ``_number``."""

    def __init__(self, targets: StepTargets, count: int, first: Int64s, counts: Int64s) -> None:
        super().__init__(list(targets.tables.values()))
        self.step, self.count = targets, count
        self.first, self.counts = first, counts
        self._group = 0, 0

    def choose(self, first: Int64s, counts: Int64s) -> None:
        self.first, self.counts = first, counts

    def room(self, groups: Int64s, g: int, ids: Int64s) -> int:
        return int(step_room(groups, g, ids, self.count, self.least))

    def stage(self, groups: Int64s, g: int, ids: Int64s, buffer: Buffer) -> int:
        numbers, room = np.empty((self.count + 1, 4), np.int64), (buffer.address, buffer.nbytes)
        most = int(stage_step(groups, g, ids, self.first, self.counts, self.step.limits, numbers, *room))
        refuse_step(groups, g, ids, most)
        self._group = int(groups[g, H.width]), int(groups[g, H.sinks])
        return most

    def work(self, buffer: Buffer, staged: int) -> Work:
        shape = self.count, max(staged, self.least), *self._group
        return StagedStep(self.step, buffer.array, buffer.address, *shape)


def refuse_step(groups: Int64s, g: int, ids: Int64s, error: int) -> None:
    """Raise ValueError for an error of ``_number``. The caller holds the state lock."""
    detail, bound = int(groups[g, H.detail]), int(groups[g, H.bound])
    if error == BAD_COUNT:
        raise ValueError(f"first, counts: expected tokens of sequence {ids[detail]}, which has {bound}, got others")
    if error == PASSED:
        raise ValueError(
            f"first: expected {bound} or more for sequence {ids[detail]}, whose window has passed the others, got less"
        )
    if error == TOO_LARGE:
        name = ("slot_mapping", "table", "indices")[detail]
        what = "columns" if detail == PAGES else "entries"
        raise ValueError(f"{name}: expected {bound} {what} or more, and up to {2**31 - 1}, got fewer")


class HostStep:
    """The tables of a step on the host, in ``out`` or in new arrays. ``written`` has them afterwards."""

    def __init__(self, out: StepTables | None, first: Int64s, counts: Int64s) -> None:
        self.written, self._first, self._counts = out or _NOTHING, first, counts
        self._targets, self._new = self.written.targets(host_table), out is None

    def write(self, groups: Int64s, ids: Int64s, g: int, follow: bool) -> int:
        """Write the tables. With ``follow``, the sequences are used on the call's stream from now on. The caller holds
        the state lock.

        Returns 0, or an error of ``sequences.check``. Raises ValueError. In both cases nothing has been changed or
        written.
        """
        targets, numbers = self._targets, np.empty((len(ids) + 1, 4), np.int64)
        targets.check_rows(len(ids))
        most = write_host_step(groups, g, ids, self._first, self._counts, targets.limits, numbers, targets.places)
        if most < 0:
            refuse_step(groups, g, ids, most)
            groups[0, H.detail] = groups[g, H.detail]
            return int(most)
        if self._new:
            self.written, made = _new_tables(numbers, int(most))
            write_host_step(groups, g, ids, self._first, self._counts, made.limits, numbers, made.places)
        return int(use(groups, ids)) if follow else 0


_NOTHING = StepTables()


def _new_tables(numbers: Int64s, columns: int) -> tuple[StepTables, StepTargets]:
    """Arrays for a step with these numbers, and the addresses of those that are not empty."""
    n, blocks, tokens = len(numbers) - 1, int(numbers[-1, STORED]), int(numbers[-1, QUERY])
    arrays: dict[str, Array] = {
        "slot_mapping": np.empty(tokens, np.int64),
        "seq_lens": np.empty(n, np.int32),
        "query_start_loc": np.empty(n + 1, np.int32),
        "last_page_len": np.empty(n, np.int32),
        "table": np.empty((n, columns), np.int32),
        "indptr": np.empty(n + 1, np.int32),
        "indices": np.empty(blocks, np.int32),
    }
    some = {name: array for name, array in arrays.items() if array.size}
    return StepTables(**arrays), StepTables(**some).targets(host_table)

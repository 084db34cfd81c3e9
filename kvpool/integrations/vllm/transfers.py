"""Copy jobs of an engine's worker. A job copies blocks of several groups from or to host blocks, and is tracked until
it has ended."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.paged import PagedKV, Plane, check_strides
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.errors import DeviceError
from kvpool.hostcache.host_copies import HostCopies, HostCopy, HostPlace


class Run(NamedTuple):
    """Bytes of a block of one layer: fragments at equal distances, here and in the layer's page in a host block."""

    offset: int
    host_offset: int
    nbytes: int
    """of a fragment"""
    fragments: int
    stride: int
    host_stride: int


class LayerPages(NamedTuple):
    """The blocks of one layer, and the page that each takes in a host block, of which others may fill the rest."""

    tensor: Any
    """[blocks, bytes], of any package"""
    page_bytes: int
    runs: tuple[Run, ...]
    """all with one number of fragments"""
    writes: bool = True
    """whether this worker stores them; another one has the same bytes if not"""

    @classmethod
    def whole(cls, tensor: Any) -> LayerPages:
        """Pages that are the blocks themselves."""
        width = as_strided("tensor", tensor).shape[-1]
        return cls(tensor, width, (Run(0, 0, width, 1, width, width),))


class Piece(NamedTuple):
    """Layers of a group that lie alike, and where they lie in a host block."""

    cache: PagedKV
    place: HostPlace
    writes: bool


def pieces(layers: Sequence[LayerPages], blocks_per_host_block: int, first_byte: int = 0) -> list[Piece]:
    """The memory of a group, whose layers lie one after the other in a host block from ``first_byte`` on: those that
    lie alike together. Raises TypeError, ValueError for tensors that are none, or not [blocks, bytes]."""
    alike: dict[Any, list[StridedArray]] = {}
    for index, layer in enumerate(layers):
        array = as_strided(f"tensors[{index}]", layer.tensor)
        check_strides(f"tensors[{index}]", array)
        if len(array.shape) != 2 or array.steps[1] != 1 or len({run.fragments for run in layer.runs}) != 1:
            raise ValueError(
                f"tensors[{index}]: expected [blocks, bytes], in one number of fragments, got shape {array.shape}"
            )
        if not all(_is_within(run, array.shape[1], layer.page_bytes) for run in layer.runs):
            raise ValueError(
                f"tensors[{index}]: expected runs within its blocks and within the page, got {layer.runs!r:.80}"
            )
        alike.setdefault((array.shape[0], array.steps, *layer[1:]), []).append(array)
    group_pieces = []
    for (blocks, steps, page, runs, writes), arrays in alike.items():
        bases = np.array([[array.address + run.offset for array in arrays] for run in runs], np.int64)
        planes = tuple(Plane(steps[0], run.stride, 0, 1, run.nbytes) for run in runs)
        writable = all(array.writable for array in arrays)
        cache = PagedKV(bases, planes, blocks, runs[0].fragments, arrays[0].memory, writable, tuple(arrays))
        layer_bytes = page * blocks_per_host_block
        place = HostPlace(first_byte, layer_bytes, tuple((run.host_offset, page, run.host_stride) for run in runs))
        group_pieces.append(Piece(cache, place, writes))
        first_byte += len(arrays) * layer_bytes
    return group_pieces


def _is_within(run: Run, width: int, page_bytes: int) -> bool:
    """Whether all fragments lie in a block of ``width`` bytes, and in a page."""
    last = run.fragments - 1
    ends = run.offset + last * run.stride + run.nbytes, run.host_offset + last * run.host_stride + run.nbytes
    return min(run) >= 0 and ends[0] <= width and ends[1] <= page_bytes


class GroupBlocks(NamedTuple):
    """The blocks of one group that a job copies."""

    group: int
    blocks: Int64s
    """int64[n]: ids of the engine's blocks, beginning with the first place of the first host block. A negative id says
    that the job has no block for this place."""
    host_blocks: Int64s
    """int64[ceil(n / blocks_per_host_block)]."""


class Ended(NamedTuple):
    """A job that has ended. Nothing reads or writes its blocks any more."""

    job: int
    store: bool
    error: str | None
    """Why the copy failed, or None."""
    nbytes: int
    seconds: float
    host_blocks: set[int]
    """that it copied to, or from"""
    partial: set[int]
    """those of which it left something out"""


class _Job(NamedTuple):
    copies: list[HostCopy]
    store: bool
    parts: Sequence[GroupBlocks]
    error: str | None
    began: float


class Transfers:
    """Jobs over one worker's copy engine.

    A load copies bytes that a store of this worker has written, or it fails. It never reads a host block that no store
    has filled, or whose store failed, whatever the engine's scheduler believes. Where others fill host blocks too, the
    scheduler names those of a load that are filled in part, and only they are held to this.

    Parameters
    ----------
    copies
        The worker's copy engine. ``close`` closes it.
    host_blocks, blocks_per_host_block
        The number of host blocks in the tier, and of the engine's blocks in a host block.
    groups
        The pieces of each group, which are the caches of ``copies`` in this order.

    Notes
    -----
    Not thread-safe: an engine's worker calls it from one thread.
    """

    def __init__(
        self,
        copies: HostCopies,
        host_blocks: int,
        blocks_per_host_block: int,
        groups: Sequence[Sequence[Piece]],
    ) -> None:
        self._copies = copies
        numbers = itertools.count()
        # The caches of each group, and those that this worker stores.
        self._caches = [[(next(numbers), piece.writes) for piece in group] for group in groups]
        self._written = np.zeros((host_blocks, blocks_per_host_block), bool)
        self._jobs: dict[int, _Job] = {}

    def warm_up(self) -> None:
        """Compile what copies run: copy the first block of each group to the first host block and back, before either
        is written. Raises DeviceError."""
        blocks, hosts = np.zeros(1, np.int64), np.zeros(1, np.int64)
        for cache, _ in itertools.chain.from_iterable(self._caches):
            self._copies.copy_in(blocks, hosts, group=cache).wait()
            self._copies.copy_out(blocks, hosts, group=cache).wait()

    def parts(
        self,
        blocks: Sequence[int] | Array,
        counts: Sequence[int],
        firsts: Sequence[int],
        host_blocks: Sequence[int],
    ) -> list[GroupBlocks]:
        """Split a job into the parts of its groups.

        Parameters
        ----------
        blocks
            Ids of the engine's blocks, group after group.
        counts
            The number of blocks of each group.
        firsts
            The index of each group's first block in its request. It determines the block's place in a host block.
        host_blocks
            Host blocks, group after group.

        Raises
        ------
        ValueError
            If the numbers of blocks and host blocks do not match ``counts`` and ``firsts``.
        """
        per = self._written.shape[1]
        ends = np.cumsum(
            [-(-(first % per + count) // per) if count else 0 for count, first in zip(counts, firsts, strict=True)]
        )
        if sum(counts) != len(blocks) or ends[-1] != len(host_blocks):
            raise ValueError(
                f"host_blocks: groups of {list(counts)} blocks from {list(firsts)} on take {ends[-1]} host blocks, "
                f"and there are {len(blocks)} blocks and {len(host_blocks)} host blocks"
            )
        group_blocks, at, hosts = [], 0, np.array(host_blocks, np.int64)
        for group, (count, first, end) in enumerate(zip(counts, firsts, ends.tolist(), strict=True)):
            if count:
                placed = np.full(first % per + count, -1, np.int64)
                placed[first % per :] = blocks[at : at + count]
                group_blocks.append(GroupBlocks(group, placed, hosts[end + (-len(placed) // per) : end]))
                at += count
        return group_blocks

    def store(self, job: int, parts: Sequence[GroupBlocks], stream: Any = None) -> None:
        """Begin to copy the engine's blocks to host blocks, after all work that is enqueued on ``stream``."""
        for part in parts:
            self._written[part.host_blocks] = False
        self._begin(job, parts, stream, store=True, error=None)

    def load(
        self, job: int, parts: Sequence[GroupBlocks], stream: Any = None, partial: Collection[int] | None = None
    ) -> None:
        """Begin to copy host blocks to the engine's blocks, after all work that is enqueued on ``stream``.

        ``partial``: the host blocks of which a store has left something out. All others are whole. None: that is
        unknown, and what no store of this worker has written is not loaded.
        """
        checked = None if partial is None else np.fromiter(partial, np.int64, len(partial))
        missing = [part for part in parts if not self._has(part, checked)]
        error = "a host block was never written, or its store failed" if missing else None
        self._begin(job, () if error else parts, stream, store=False, error=error)

    def finished(self) -> list[Ended]:
        """The jobs that have ended since the last call, in the order in which they began."""
        return [
            self._end(number, self._jobs.pop(number))
            for number in [n for n, job in self._jobs.items() if _is_over(job)]
        ]

    def wait(self, jobs: Sequence[int] | set[int]) -> None:
        """Wait until these jobs have ended. The next ``finished`` still returns them. Unknown jobs are ignored."""
        for job in filter(None, map(self._jobs.get, jobs)):
            for copy in job.copies:
                _outcome(copy)

    def close(self) -> None:
        """Wait for all jobs, and close the copy engine."""
        self.wait(list(self._jobs))
        self._jobs.clear()
        self._copies.close()

    def _has(self, part: GroupBlocks, checked: Int64s | None) -> bool:
        """Whether stores of this worker have written what a part has blocks for, in the host blocks that are checked,
        or in all."""
        hosts, places = self._places(part)
        written = self._written[hosts, places]
        return bool((written if checked is None else written | ~np.isin(hosts, checked)).all())

    def _places(self, part: GroupBlocks) -> tuple[Int64s, Int64s]:
        """Indices into ``_written`` of the places that a part has blocks for."""
        index = np.flatnonzero(part.blocks >= 0)
        return part.host_blocks[index // self._written.shape[1]], index % self._written.shape[1]

    def _begin(self, job: int, parts: Sequence[GroupBlocks], stream: Any, *, store: bool, error: str | None) -> None:
        began, copies = time.perf_counter(), []
        copy = self._copies.copy_in if store else self._copies.copy_out
        try:
            for part in parts:
                for cache, writes in self._caches[part.group]:
                    if writes or not store:
                        copies.append(copy(part.blocks, part.host_blocks, stream=stream, group=cache))
        except DeviceError as failed:
            error = str(failed)
        self._jobs[job] = _Job(copies, store, parts, error, began)

    def _end(self, number: int, job: _Job) -> Ended:
        seconds = time.perf_counter() - job.began
        error = next(filter(None, [job.error, *map(_outcome, job.copies)]), None)
        per, hosts, partial = self._written.shape[1], set[int](), set[int]()
        for part in job.parts:
            written = np.zeros((len(part.host_blocks), per), bool)
            written.reshape(-1)[: len(part.blocks)] = part.blocks >= 0
            hosts.update(part.host_blocks.tolist())
            partial.update(part.host_blocks[~written.all(axis=1)].tolist())
            if job.store and error is None:
                self._written[self._places(part)] = True
        return Ended(number, job.store, error, sum(copy.nbytes for copy in job.copies), seconds, hosts, partial)


def _is_over(job: _Job) -> bool:
    try:
        return all(copy.done for copy in job.copies)
    except DeviceError:
        for copy in job.copies:
            _outcome(copy)
        return True


def _outcome(copy: HostCopy) -> str | None:
    """Wait for a copy, and say why it failed."""
    try:
        copy.wait()
    except DeviceError as error:
        return str(error)
    return None

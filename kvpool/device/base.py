"""Device: the interface of what owns the memory of the two tiers and copies blocks in and between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays import dlpack
from kvpool.arrays.layout import BlockLayout, integer_argument
from kvpool.arrays.strided import StridedArray, as_strided
from kvpool.device.shared import GpuMemory, MainMemory
from kvpool.device.steps import StagedStep, StepTargets
from kvpool.device.tables import StagedRows, StagedVectors, Table, host_table

TIERS = ("device", "host")
ALIGNMENT = 4096
"""In bytes. Every allocation starts at a multiple of it, so that a block of whole pages lies on whole pages."""

SOURCE, TARGET, TOKENS, TICKET = range(4)
"""Columns of a batch of moves."""
FROM, TO, BYTES = range(3)
"""Columns of fragments: contiguous bytes from one address to another."""


@dataclass(frozen=True)
class Stream:
    """A stream of the caller. ``handle`` is the driver's number for it. ``owner`` keeps it alive."""

    handle: int
    owner: Any = field(default=None, compare=False, repr=False)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which other packages take a stream: the version of the protocol, and the handle."""
        return 0, self.handle


NULL_STREAM = Stream(0)
"""The stream of a caller that names no stream."""


class Event:
    """A point on a stream, made by ``record``. It is *complete* once all work that was enqueued there before it is
    done."""

    __slots__ = ("__weakref__",)


NULL_EVENT = Event()
"""Complete from the start, on every device."""


class Part(NamedTuple):
    """Memory of some layers of a region. Both tiers have the same ``layout`` and are given as flat bytes."""

    layout: BlockLayout
    device_pool: Any
    host_pool: Any


class Region(NamedTuple):
    """Blocks of one kind. They lie in one or more parts, and a copy of a block copies it in every part.

    All parts have the same number of blocks, and as many tokens in a block.
    """

    parts: tuple[Part, ...]
    device_blocks: int
    host_blocks: int

    @classmethod
    def of(cls, layout: BlockLayout, device_pool: Any, host_pool: Any, device_blocks: int, host_blocks: int) -> Region:
        """A region of one part."""
        return cls((Part(layout, device_pool, host_pool),), device_blocks, host_blocks)

    @property
    def tokens_per_block(self) -> int:
        return self.parts[0].layout.tokens_per_block


class Device(ABC):
    """Memory for one pool, and the copies of its blocks.

    One device serves one pool. ``bind`` tells the device where the regions of the pool lie in both tiers. After that,
    ``copy_blocks`` works on block ids. These count the device blocks of all regions, in the order of the regions, then
    the host blocks of all regions. With one region, the device has ``[0, device_blocks)`` and the host has
    ``[device_blocks, device_blocks + host_blocks)``.

    Work is *enqueued* on a stream when a call returns, and *done* some time later. Work on one stream is done in the
    order in which it was enqueued. Only events order the work of two streams. A *synchronous* device does everything
    before the call returns, so its streams and events mean nothing.

    Thread-safety. One thread at a time enqueues: the one that holds the transfer lock. The calls that enqueue are
    ``copy_blocks``, ``copy_fragments``, ``move_tokens``, ``stage_rows``, ``stage_vectors``, ``stage_step``, ``record``
    and ``wait``. On a synchronous device, several threads may copy at a time. Any thread may call ``query``,
    ``synchronize``, ``as_table``, ``as_step`` and ``allocate`` at any time, and ``free`` for memory that is not bound.
    Everything else may be called only while nobody enqueues.
    """

    name: str
    synchronous: bool
    """Whether everything is done when the call returns."""
    one_memory: bool
    """Whether both tiers are taken from the same memory. Then only their sum has to fit."""

    @abstractmethod
    def allocate(self, nbytes: int, tier: str) -> Any:
        """Take zeroed memory for a tier: uint8[nbytes] that starts at a multiple of ``ALIGNMENT``.

        The host tier is a NumPy array. The device tier is an array of the device's own package; where it is not main
        memory, it has ``__cuda_array_interface__`` and DLPack. Pages are not touched where the system gives memory on
        first use. Raises MemoryError.
        """

    def allocate_shared(self, nbytes: int, tier: str) -> Any:
        """Take memory as ``allocate`` does, such that ``ipc_handle`` accepts it. Raises MemoryError, and ValueError on
        a device that cannot share memory."""
        raise ValueError(f"shared=True: the {self.name} device has no memory that processes share; accepted is False")

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Take main memory for small buffers that copies and kernels read: uint8[nbytes] with any content.

        Neither this call nor ``free`` of the buffer waits for the device, once as many buffers exist as are used at a
        time. Raises DeviceError, MemoryError.
        """
        found: NDArray[np.uint8] = self.allocate(nbytes, "host")
        return found

    def ipc_handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        """The handle by which another process opens memory of a tier. Raises DeviceError, and ValueError for memory
        that no other process can open."""
        raise ValueError(f"{tier} tier: the {self.name} device has no memory that processes share")

    @abstractmethod
    def free(self, array: Any) -> None:
        """Give back memory of ``allocate`` or ``allocate_staging``. If the device was bound to it, the device is
        unbound. Views stay readable on the CPU."""

    def adopt(self, memory: StridedArray, tier: str) -> Any:
        """Use memory of the caller, uint8[nbytes], for a tier; returns what ``allocate`` would return.

        The device keeps the memory alive until ``free``, and never gives it back to the system. Its content may be
        anything. Raises ValueError where this device cannot use it.
        """
        raise ValueError(f"{tier}_memory: the {self.name} device takes no memory of the caller's; accepted is None")

    def pin(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Use existing main memory, uint8[nbytes] from the start of a page, for the host tier; returns what
        ``allocate`` would return. Its content stays. ``free`` unpins the memory, which stays too. Raises ValueError,
        DeviceError, MemoryError."""
        found: NDArray[np.uint8] = self.adopt(as_strided("memory", memory), "host")
        return found

    def as_array(self, memory: StridedArray) -> Any:
        """The same elements as an array of the type that ``allocate`` returns for that memory. The array keeps
        ``owner`` alive."""
        return memory.host_view()

    def as_pinned_memory(self, memory: StridedArray) -> Any:
        """Pinned memory of this device, bytes without gaps, as an object of the device's own package. It keeps
        ``owner`` alive."""
        raise TypeError(f"the {self.name} device has no pinned memory")

    def dlpack_device(self, tier: str) -> tuple[int, int]:
        """A tier's place in the terms of DLPack: the type of the device, and its index."""
        return dlpack.CPU, 0

    @abstractmethod
    def available_bytes(self, tier: str) -> int | None:
        """The bytes that ``allocate`` can be expected to find in a tier, or None where nobody knows."""

    @abstractmethod
    def as_stream(self, stream: Any) -> Stream:
        """The stream that an argument of a public call means.

        Accepted are None, an integer handle, a Stream, and objects with ``__cuda_stream__``, ``cuda_stream`` or
        ``ptr``. Raises TypeError for anything else. Raises ValueError for a handle that is no address, and for a stream
        on which no work can be enqueued now because it was destroyed or is being captured.
        """

    @abstractmethod
    def bind(self, regions: Sequence[Region]) -> None:
        """Learn where the blocks lie: in the memory of one or more regions. That memory is kept alive until any of it
        is freed.

        Raises TypeError or ValueError for objects that are not regions, for memory of the wrong size or type, and for a
        device that is bound already.
        """

    @abstractmethod
    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        """Enqueue copies of blocks on ``stream``.

        ``moves`` is int64[n, 4] with rows (source id, target id, tokens, ticket). A row copies from any tier to any
        tier inside one region; different rows may be of different regions. The caller ensures that the rows are
        independent: no row writes a block that another row reads or writes. The device may make them in any order, and
        at the same time.

        ``tokens`` is 1 to the tokens of a block of the region. If it is less than a whole block, the first ``tokens``
        tokens of every layer, plane and head are copied, and the rest of the target keeps its content. The device
        ignores the ticket.

        Raises TypeError or ValueError for rows that are no moves of this pool; nothing has been copied then. Raises
        DeviceError where the device fails: the first ``completed`` rows have been enqueued, and any of the others may
        have been. It does no harm to copy those again.
        """

    @abstractmethod
    def copy_fragments(self, fragments: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: ``fragments`` int64[n, 3] of (source address, target address, bytes).

        Fragments are not checked. The caller ensures that none writes what another one reads or writes, so the device
        may make them in any order and at the same time. Each lies in memory that the device can reach: memory that
        ``bind`` got, memory of its GPU, pinned memory, or, on a device without a GPU, any main memory. The caller keeps
        that memory alive as long as the device is bound. The array may be changed when this returns. Raises ValueError
        for a device that is not bound. Raises DeviceError where the device fails: any fragment may have been copied.
        """

    @abstractmethod
    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: move tokens to other slots of device blocks, in all parts, layers, planes and heads.

        ``moves`` is int64[n, 2] with rows (source, target) inside one region. A slot is block id * width + token, where
        width is the most tokens that a block of any region has. Tokens of regions whose blocks have fewer tokens than
        that do not move.

        Group g of the rows is [starts[g], starts[g + 1]); ``starts`` is int64[groups + 1], from 0 to n. The rows of a
        group are made in order. The caller ensures two rules. Inside a group, a row may write what an earlier row
        reads, but may not read what an earlier row writes. No group writes what another group reads or writes.

        Raises TypeError or ValueError for rows that are no token moves of this pool; nothing has been moved then.
        Raises DeviceError where the device fails: any target may have been written.
        """

    def as_table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        """The memory that a public call names by its argument ``name``: int32[..., rows, columns] that this device can
        write.

        The elements of a row follow each other without gaps. A ``vector`` is int32[n] without gaps; n may be 0. Raises
        TypeError or ValueError, which name the argument, for anything else.
        """
        return host_table(target, name, vector, itemsize)

    def as_step(self, arrays: Any) -> StepTargets:
        """The memory that a public call names by ``arrays``, a ``StepTables``; attributes that are None are left out.

        Also loads the kernel that will write it. Raises DeviceError, and the errors of ``as_table``.
        """
        found: StepTargets = arrays.targets(host_table)
        return found

    @abstractmethod
    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: write staged block ids into rows of a table, as ``kvpool.device.tables.write_rows``
        does.

        The device reads the buffer when the work is done, not before. Until then the caller does not change the buffer,
        and keeps buffer and table alive. The device does not check what is staged: ``kvpool.tables.snapshot`` has made
        it, to fit the table. Raises DeviceError.
        """

    @abstractmethod
    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: write staged numbers into vectors, as ``kvpool.device.tables.write_vectors`` does.

        The rest is as in ``stage_rows``. When this raises DeviceError, some of the pieces may have been enqueued.
        """

    @abstractmethod
    def stage_step(self, targets: StepTargets, staged: StagedStep, stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: write the tables of a staged step, as ``kvpool.device.steps.write_step`` does.

        ``targets`` is a result of ``as_step``. The rest is as in ``stage_rows``.
        """

    @abstractmethod
    def create_stream(self, name: str) -> Stream:
        """Make a stream for the pool itself. No default stream waits for it. ``name`` is for people."""

    def exists(self, stream: Stream) -> bool:
        """Whether ``stream`` still exists. Its owner may have destroyed it, if the driver knows it by a number only."""
        return True

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """Make an event that is complete once everything enqueued on ``stream`` so far is done. Raises DeviceError
        where the device fails."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Have all work that is enqueued on ``stream`` from now on wait for ``event``. The caller does not wait. Raises
        DeviceError."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Whether ``event`` is complete. Does not wait. Raises DeviceError."""

    @abstractmethod
    def synchronize(self, event: Event | None = None) -> None:
        """Wait until ``event`` is complete; without one, until everything enqueued is done. Raises DeviceError."""

    def calibrate(self) -> Any:
        """Measure which way of copying is the fastest here, and use it from now on.

        Returns a ``calibration.Calibration``, or None where there is nothing to choose. Raises DeviceError,
        MemoryError.
        """
        return None

    def host_access(
        self, *, reads: Any = None, writes: Any = None, loads: Sequence[NDArray[Any]] = (),
        stores: Sequence[NDArray[Any]] = (), outside: bool = False,
    ) -> AbstractContextManager[Any]:  # fmt: skip
        """Declare what the calling thread reads and writes itself while the context is open. Devices that look for
        races check it; for others it does nothing.

        ``reads``, ``writes``: int64[n, 3] rows (block id, first token, end of tokens), or None. The tokens are at most
        those of a block of the region. ``loads``, ``stores``: arrays outside the pools that are read and written, such
        as staging buffers and tables.

        ``outside``: another process reads and writes, instead of this thread. It has seen everything that this thread
        has waited for.
        """
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Let go of the memory of the pool. A second call does nothing. All other calls raise PoolClosed from then
        on."""


def stream_argument(stream: Any) -> Stream:
    """``as_stream`` for devices that need only the handle."""
    if stream is None:
        return NULL_STREAM
    if type(stream) is Stream and type(stream.handle) is int:
        return stream
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        # The protocol specifies a method. Some packages have a plain attribute.
        pair = stream.__cuda_stream__() if callable(stream.__cuda_stream__) else stream.__cuda_stream__
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TypeError(f"stream={stream!r}: __cuda_stream__ must give (version, handle), not {pair!r}")
        handle = pair[1]
    else:
        for attribute in ("cuda_stream", "ptr"):
            if hasattr(stream, attribute):
                handle = getattr(stream, attribute)
                break
    try:
        return Stream(integer_argument("stream", handle, 0, 2**64 - 1), stream)
    except TypeError:
        raise TypeError(
            f"stream={stream!r}: None, an integer handle, or an object with __cuda_stream__, cuda_stream or ptr is "
            "needed"
        ) from None


def tier_argument(tier: Any) -> None:
    """Raise ValueError unless ``tier`` names one."""
    if tier not in TIERS:
        raise ValueError(f"tier={tier!r}: must be 'device' or 'host'")


def moves_argument(moves: Any) -> NDArray[np.int64]:
    """``moves`` as a private int64[n, 4]. The ids and counts in it are not checked."""
    if not isinstance(moves, np.ndarray) or moves.dtype != np.int64:
        found = moves.dtype if isinstance(moves, np.ndarray) else type(moves).__name__
        raise TypeError(f"moves: an int64 array is needed, not {found}")
    own = np.array(moves, np.int64, order="C")
    if own.ndim != 2 or own.shape[1] != 4:
        raise ValueError(f"moves: shape [n, 4] is needed, not {list(own.shape)}")
    return own

"""Device: the interface of whatever owns the memory of the two tiers and copies blocks in and between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool import dlpack
from kvpool.device.tables import StagedRows, StagedVectors, Table, host_table
from kvpool.layout import BlockLayout, integer_argument
from kvpool.strided import StridedArray

TIERS = ("device", "host")
ALIGNMENT = 4096
"""Bytes: allocations start at a multiple of it, so that blocks of whole pages are whole pages."""

SOURCE, TARGET, TOKENS, TICKET = range(4)
"""Columns of a batch of moves."""


@dataclass(frozen=True)
class Stream:
    """A stream of the caller. ``handle`` is what the driver knows it by, ``owner`` keeps it alive."""

    handle: int
    owner: Any = field(default=None, compare=False, repr=False)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which other packages take a stream: its version, and the handle."""
        return 0, self.handle


NULL_STREAM = Stream(0)
"""The stream of a caller that names none."""


class Event:
    """A point on a stream: what ``record`` gave. It is *complete* once all work enqueued there before it is done."""

    __slots__ = ("__weakref__",)


NULL_EVENT = Event()
"""Complete from the start, on every device."""


class Part(NamedTuple):
    """Memory of some layers of a region: both tiers in ``layout``, as flat bytes."""

    layout: BlockLayout
    device_pool: Any
    host_pool: Any


class Region(NamedTuple):
    """Blocks of one kind, which lie in one or more parts: a copy of a block copies it in every part.

    All parts have as many blocks, and blocks of as many tokens.
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

    One device serves one pool: ``bind`` tells it where the regions of the pool lie in both tiers, and ``copy_blocks`` then works on block
    ids. These count the device blocks of all regions, in the order of the regions, then the host blocks of all regions: with one region,
    ``[0, device_blocks)`` on the device and ``[device_blocks, device_blocks + host_blocks)`` on the host.

    Work is *enqueued* on a stream when a call returns and *done* at some time after it. Work on one stream is done in
    the order in which it was enqueued; work on two streams is ordered by events and by nothing else. A *synchronous*
    device does everything before the call returns, so that its streams and events mean nothing.

    Thread-safety: one thread at a time enqueues (``copy_blocks``, ``move_tokens``, ``stage_rows``, ``stage_vectors``, ``record``, ``wait``:
    whoever holds the transfer lock); ``query``, ``synchronize``, ``as_table``, ``allocate`` and ``free`` of memory that is not bound may be
    called by any thread at any time, everything else while no copy is being enqueued.
    """

    name: str
    synchronous: bool
    """Whether everything is done when the call returns."""
    one_memory: bool
    """Whether both tiers are taken from the same memory, so that only their sum has to fit."""

    @abstractmethod
    def allocate(self, nbytes: int, tier: str) -> Any:
        """Zeroed memory of a tier: uint8[nbytes], starting at a multiple of ``ALIGNMENT``.

        A NumPy array for the host; for the device, what its packages have for one, with ``__cuda_array_interface__`` and DLPack where it
        is not main memory. Pages are not touched where the system gives memory on first use. Raises MemoryError.
        """

    @abstractmethod
    def free(self, array: Any) -> None:
        """Give back what ``allocate`` gave. A device that was bound to it is unbound; views stay readable on the CPU."""

    def adopt(self, memory: StridedArray, tier: str) -> Any:
        """Memory of the caller's, uint8[nbytes], as what ``allocate`` gives for that tier. It is kept alive until it is freed, never given
        back, and may hold anything. Raises ValueError where this device cannot have it."""
        raise ValueError(f"{tier}_memory: the {self.name} device takes no memory of the caller's; accepted is None")

    def as_array(self, memory: StridedArray) -> Any:
        """The same elements as an array of the kind that ``allocate`` gives for that memory, which keeps ``owner`` alive."""
        return memory.host_view()

    def dlpack_device(self, tier: str) -> tuple[int, int]:
        """What DLPack calls the place of a tier: the type of the device, and its index."""
        return dlpack.CPU, 0

    @abstractmethod
    def available_bytes(self, tier: str) -> int | None:
        """Bytes that ``allocate`` can be expected to find in a tier, or None where nobody knows."""

    @abstractmethod
    def as_stream(self, stream: Any) -> Stream:
        """The stream that an argument of a public call means.

        Accepted are None, an integer handle, a Stream, and objects with ``__cuda_stream__``, ``cuda_stream`` or
        ``ptr``. Raises TypeError for anything else and ValueError for a handle that is no address.
        """

    @abstractmethod
    def bind(self, regions: Sequence[Region]) -> None:
        """Learn where the blocks lie: the memory of one or more regions, kept alive until any of it is freed.

        Raises TypeError or ValueError for what are no regions, for memory of another size or type, and where the device is bound already.
        """

    @abstractmethod
    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        """Enqueue block copies on ``stream``.

        ``moves`` is int64[n, 4] with rows (source id, target id, tokens, ticket), any tier to any tier inside one region; the rows may be
        of several regions. They do not depend on each other: none writes a block that another one reads or writes, and they may be
        made in any order and at the same time; the caller sees to it. ``tokens`` is 1 to the tokens of a block of the region; fewer than
        those copies the first ``tokens`` tokens of every layer, plane and head, and leaves the rest of the target as it is.
        The ticket is the caller's.

        Raises TypeError or ValueError, before anything is copied, for rows that are no moves of this pool, and
        DeviceError where the device fails: then the first ``completed`` rows have been enqueued, and of the others any may have
        been. Copying those again does no harm.
        """

    @abstractmethod
    def move_tokens(self, moves: NDArray[np.int64], starts: NDArray[np.int64], stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: tokens of device blocks, all parts, layers, planes and heads, go to other slots of device blocks.

        ``moves`` is int64[n, 2] with rows (source, target) inside one region; a slot is block id * width + token, where width is the most
        tokens that a block of any region has. Tokens of regions whose blocks have fewer do not move. Group g is the rows
        [starts[g], starts[g + 1]), ``starts`` int64[groups + 1] from 0 to n. Rows of a group are made in order: one may write what an
        earlier one reads, none reads what an earlier one writes. No group writes what another one reads or writes; the caller sees to it.

        Raises TypeError or ValueError, before anything is moved, for rows that are no token moves of this pool, and DeviceError where the
        device fails: then any target may have been written.
        """

    def as_table(self, target: Any, name: str = "target", vector: bool = False) -> Table:
        """The memory that a public call means by its argument ``name``: int32[..., rows, columns] that this device can write.

        The elements of a row follow each other. A ``vector`` is int32[n] without gaps; n may be 0. Raises TypeError or ValueError, which
        name the argument, for anything else.
        """
        return host_table(target, name, vector)

    @abstractmethod
    def stage_rows(self, table: Table, staged: StagedRows, stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: write staged block ids into rows of a table, as ``kvpool.device.tables.write_rows`` does.

        The buffer is read when the work is done, not before; the caller leaves it alone until then, and keeps it and the table alive.
        What is staged fits the table, and was made by ``kvpool.hand_over``, which has checked it. Raises DeviceError.
        """

    @abstractmethod
    def stage_vectors(self, staged: StagedVectors, stream: Stream = NULL_STREAM) -> None:
        """Enqueue on ``stream``: write staged numbers into vectors, as ``kvpool.device.tables.write_vectors`` does.

        The rest is as in ``stage_rows``. Where DeviceError is raised, some of the pieces may have been enqueued.
        """

    @abstractmethod
    def create_stream(self, name: str) -> Stream:
        """A stream of the pool's own, which no default stream waits for. ``name`` is for people."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """The point behind everything enqueued on ``stream`` so far. Raises DeviceError where the device fails."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Have work enqueued on ``stream`` from now on wait for ``event``; the caller does not. Raises DeviceError."""

    @abstractmethod
    def query(self, event: Event) -> bool:
        """Whether ``event`` is complete. Does not wait. Raises DeviceError."""

    @abstractmethod
    def synchronize(self, event: Event | None = None) -> None:
        """Return when ``event``, or (None) everything enqueued, is done. Raises DeviceError."""

    def calibrate(self) -> Any:
        """Measure which way of copying is the fastest here, and take it from now on.

        What was found, a ``calibration.Calibration``; None where there is nothing to choose. Raises DeviceError, MemoryError.
        """
        return None

    def host_access(
        self, *, reads: Any = None, writes: Any = None, loads: Sequence[NDArray[Any]] = (), stores: Sequence[NDArray[Any]] = ()
    ) -> AbstractContextManager[Any]:
        """Say what the calling thread itself reads and writes while the context is open, for devices that watch.

        ``reads``, ``writes``: int64[n, 3] rows (block id, first token, end of tokens), or None; tokens are at most those of the block's
        region. ``loads``, ``stores``: arrays outside the pools, such as staging buffers and tables, that are read and written. Costs
        nothing elsewhere.
        """
        return nullcontext()

    @abstractmethod
    def close(self) -> None:
        """Let go of the pools. Closing twice is fine; anything else afterwards raises PoolClosed."""


def stream_argument(stream: Any) -> Stream:
    """What ``as_stream`` promises, for devices that need nothing more than the handle."""
    if stream is None:
        return NULL_STREAM
    if isinstance(stream, Stream):
        return stream
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        # The protocol says a method; some packages have a plain attribute.
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
            f"stream={stream!r}: None, an integer handle, or an object with __cuda_stream__, cuda_stream or ptr is needed"
        ) from None


def tier_argument(tier: Any) -> None:
    """Raise ValueError unless ``tier`` names one."""
    if tier not in TIERS:
        raise ValueError(f"tier={tier!r}: must be 'device' or 'host'")


def moves_argument(moves: Any) -> NDArray[np.int64]:
    """``moves`` as contiguous int64[n, 4]; the ids and counts in it are not looked at."""
    if not isinstance(moves, np.ndarray) or moves.dtype != np.int64:
        found = moves.dtype if isinstance(moves, np.ndarray) else type(moves).__name__
        raise TypeError(f"moves: an int64 array is needed, not {found}")
    if moves.ndim != 2 or moves.shape[1] != 4:
        raise ValueError(f"moves: shape [n, 4] is needed, not {list(moves.shape)}")
    return np.ascontiguousarray(moves)

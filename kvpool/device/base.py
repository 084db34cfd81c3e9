"""Device: the interface of what owns the memory of the two tiers and copies blocks in and between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from kvpool.common.arrays import Array, Int64s, dlpack
from kvpool.common.arrays.layout import Tier, integer_argument
from kvpool.common.arrays.strided import StridedArray
from kvpool.device.memory.main_memory import GpuMemory, MainMemory, handle_of
from kvpool.device.regions import ALL_LAYERS, Layers, Region
from kvpool.device.work import StepTargets, Table, host_table
from kvpool.errors import DeviceError

if TYPE_CHECKING:
    from kvpool.device.work import Work


Item = TypeVar("Item")
TIERS: tuple[Tier, Tier] = ("device", "host")
STAGING = "staging"
BOUND_ALREADY = "device: already bound to a pool; every pool needs a device of its own"
NOT_BOUND = "device: not bound to a pool"


@dataclass(frozen=True)
class Stream:
    """A stream of the caller. ``handle`` is the driver's number for it. ``owner`` keeps it alive."""

    handle: int
    owner: Any = field(default=None, compare=False, repr=False)

    def __cuda_stream__(self) -> tuple[int, int]:
        """The protocol by which other packages take a stream: the version of the protocol, and the handle."""
        return 0, self.handle


class DeviceArray(Protocol):
    """What a tier of the device is: a NumPy array in main memory, else an array of the device's own package, such as
    CuPy. What both can do."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> Any: ...
    def tobytes(self) -> bytes: ...


class CudaStream(Protocol):
    """A stream of CuPy, cuda.core and others."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A stream of PyTorch."""

    @property
    def cuda_stream(self) -> int: ...


class PtrStream(Protocol):
    """A stream of older CuPy."""

    @property
    def ptr(self) -> int: ...


StreamLike: TypeAlias = Stream | int | CudaStream | TorchStream | PtrStream | None
"""What public calls take as ``stream``. None: that of the sequence, or of the caller that names none."""


NULL_STREAM = Stream(0)
"""The stream of a caller that names no stream."""


class DeviceEvent:
    """A point on a stream, made by ``record``. It is *complete* once all work that was enqueued there before it is
    done."""

    __slots__ = ("__weakref__",)


NULL_EVENT = DeviceEvent()
"""Complete from the start, on every device."""


class StreamGone(DeviceError, ValueError):
    """A stream was destroyed by its owner. Its work goes on; no more comes on it. As an argument it is a wrong one."""


class Retired(Generic[Item]):
    """Items by the stream that uses them, oldest first. The order of two streams is not known.

    ``query`` returns whether an event is complete. If it raises, the exception goes on to the caller, and no item is
    forgotten. Not thread-safe.
    """

    def __init__(self, query: Callable[[Any], bool]) -> None:
        self._query = query
        self._streams: dict[int, deque[tuple[Any, Item]]] = {}

    def add(self, stream: int, event: Any, item: Item) -> None:
        """Add an item that is in use until ``event``. The event is later than those of all earlier items of that
        stream. An item that was added last gets another event."""
        items = self._streams.setdefault(stream, deque())
        if items and items[-1][1] is item:
            items[-1] = event, item
        else:
            items.append((event, item))

    def reclaim(self) -> Iterator[Item]:
        """Forget the items whose events are complete, and yield each. Iterate to the end."""
        for stream, items in list(self._streams.items()):
            while items and self._query(items[0][0]):
                yield items.popleft()[1]
            if not items:
                del self._streams[stream]

    def count(self, stream: int) -> int:
        """How many items of a stream are not forgotten yet."""
        return len(self._streams.get(stream, ()))

    def oldest(self, stream: int) -> Any:
        """The event of the first item of a stream. There is at least one."""
        return self._streams[stream][0][0]

    def pending(self) -> int:
        """How many items are in use now. Changes nothing, so that a destructor may ask in the middle of a change."""
        streams = [list(items) for items in list(self._streams.values())]
        return sum(len(list(dropwhile(lambda item: self._query(item[0]), items))) for items in streams)

    def __iter__(self) -> Iterator[tuple[Any, Item]]:
        for items in list(self._streams.values()):
            yield from list(items)

    def __len__(self) -> int:
        return sum(map(len, self._streams.values()))

    def clear(self) -> None:
        self._streams.clear()


class HostViews:
    """Views of a device whose tiers are main memory. Devices with memory of their own replace what differs.
    Thread-safe."""

    places = {"device": (dlpack.CPU, 0), "host": (dlpack.CPU, 0)}
    """Where a tier is, in the terms of DLPack: the type of the device, and its index."""

    def array(self, memory: StridedArray) -> Any:
        """The same elements as an array of the type that ``Device.allocate`` returns for that memory. The array keeps
        ``owner`` alive."""
        return memory.host_view()

    def pinned(self, memory: StridedArray) -> Any:
        """Pinned memory of this device, bytes without gaps, as an object of the device's own package. It keeps
        ``owner`` alive. Raises TypeError for a device that has none."""
        raise TypeError("this device has no pinned memory")

    def handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        """The handle by which another process opens memory of a tier. Raises DeviceError, and ValueError for memory
        that no other process can open."""
        return handle_of(array)

    def table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        """The memory that a public call names by its argument ``name``: integers of ``itemsize`` bytes,
        [..., rows, columns], that the device can write.

        The elements of a row follow each other without gaps. A ``vector`` is [n] without gaps; n may be 0. Raises
        TypeError or ValueError, which name the argument, for anything else.
        """
        return host_table(target, name, vector, itemsize)

    def step(self, arrays: Any) -> StepTargets:
        """The memory that a public call names by ``arrays``, a ``StepTables``; attributes that are None are left out.

        Also loads the kernel that will write it. Raises DeviceError, and the errors of ``table``.
        """
        targets: StepTargets = arrays.targets(host_table)
        return targets


class Device(ABC):
    """Memory for one pool, and the copies of its blocks.

    One device serves one pool. ``bind`` gives the device the places of the pool's regions in both tiers. After that,
    ``copy_blocks`` works on block ids. These count the device blocks of all regions, in the order of the regions, then
    the host blocks of all regions. With one region, the device has ``[0, device_blocks)`` and the host has
    ``[device_blocks, device_blocks + host_blocks)``.

    Work is *enqueued* on a stream when a call returns, and *done* some time later. Work on one stream is done in the
    order in which it was enqueued. Only events order the work of two streams. A *synchronous* device does everything
    before the call returns, so its streams and events mean nothing.

    Thread-safety. One thread at a time enqueues: the one that holds the transfer lock. The calls that enqueue are
    ``copy_blocks``, ``enqueue``, ``record`` and ``wait``. On a synchronous device, several threads may copy at a time.
    Any thread may call ``query``, ``synchronize``, ``allocate`` and ``views`` at any time, and ``free`` for memory that
    is not bound. Everything else may be called only while nothing is being enqueued.

    What is copied and written is not checked: the pool has made it. After ``close``, all calls but ``close`` and
    ``query`` raise PoolClosed.
    """

    name: str
    synchronous: bool
    """Whether everything is done when the call returns."""
    one_memory: bool
    """Whether both tiers are taken from the same memory. Then only their sum has to fit."""
    at_once: int | None = None
    """How many copy ops ``copy_blocks`` is meant to enqueue in about 100 us, once the device is bound; None where
    no caller waits for that."""
    copies = True
    """Whether ``copy_blocks`` copies anything. Without that, only the decisions of a pool are used."""
    in_memory = False
    """Whether this thread itself may write, at any time, to what ``views.table`` has found."""
    views: HostViews = HostViews()
    """Arrays on the memory of this device, and of arrays the memory that it can write."""

    @abstractmethod
    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Any:
        """Take zeroed memory for a tier: uint8[nbytes] that starts at a multiple of ``ALIGNMENT``.

        The host tier is a NumPy array. The device tier is an array of the device's own package; where it is not main
        memory, it has ``__cuda_array_interface__`` and DLPack. Pages are not touched where the system gives memory on
        first use. ``views.handle`` accepts memory that is ``shared``.

        The tier ``STAGING`` is main memory for small buffers that copies and kernels read: uint8[nbytes] with any
        content. Neither this call nor ``free`` of such a buffer waits for the device, once as many buffers exist as are
        used at a time.

        Raises MemoryError, DeviceError, and ValueError for shared memory on a device that cannot share any.
        """

    @abstractmethod
    def free(self, array: Any) -> None:
        """Give back memory of ``allocate`` or ``adopt``. If the device was bound to it, the device is unbound. Views
        stay readable on the CPU."""

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> Any:
        """Use existing memory, uint8[nbytes], for a tier; returns what ``allocate`` would return.

        The device keeps the memory alive until ``free``, and never gives it back to the system. Its content stays. With
        ``pin``, it is main memory from the start of a page, which the device may pin until ``free``; without, it is the
        caller's, for either tier. Raises ValueError where this device cannot use it, DeviceError, MemoryError.
        """
        raise ValueError(
            f"{tier}_memory: expected None, since the {self.name} device takes no memory of the caller's, got an array"
        )

    @abstractmethod
    def available_bytes(self, tier: str) -> int | None:
        """The bytes that ``allocate`` can be expected to find in a tier, or None if it is unknown."""

    @abstractmethod
    def as_stream(self, stream: Any) -> Stream:
        """The stream that an argument of a public call means.

        Accepted are None, an integer handle, a Stream, and objects with ``__cuda_stream__``, ``cuda_stream`` or
        ``ptr``. Raises TypeError for anything else. Raises ValueError for a handle that is not an address, and for a
        stream on which no work can be enqueued now because it was destroyed or is being captured.
        """

    @abstractmethod
    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        """Make a stream for the pool itself. No default stream waits for it. ``name`` is for people. Kernels and copies
        of an ``urgent`` stream go first where several wait for the device."""

    @abstractmethod
    def bind(self, regions: Sequence[Region]) -> None:
        """Learn where the blocks lie: in the memory of one or more regions. That memory is kept alive until any of it
        is freed. Raises ValueError for a device that is bound already, DeviceError."""

    @abstractmethod
    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        """Enqueue copies of blocks on ``stream``, of some ``layers`` of each region.

        ``copy_ops`` is int64[n, 4] with rows (source id, target id, tokens, ticket). A row copies from any tier to any
        tier inside one region; different rows may be of different regions. The caller ensures that the rows are
        independent: no row writes a block that another row reads or writes. The device may make them in any order, and
        at the same time.

        ``tokens`` is 1 to the tokens of a block of the region. If it is less than a whole block, the first ``tokens``
        tokens of every layer, plane and head are copied, and the rest of the target keeps its content. The device
        ignores the ticket.

        Raises DeviceError where the device fails: the first ``completed`` rows have been enqueued, and any of the
        others may have been. It does no harm to copy those again.
        """

    @abstractmethod
    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        """Enqueue anything but copies of blocks on ``stream``. Its effect is that of ``work.run``.

        The arrays of ``work.Fragments`` and ``work.TokenMoves`` may be changed when this returns. A staging buffer is
        read when the work is done, not before. Until then the caller does not change the buffer, and keeps alive the
        buffer and what is written. Raises DeviceError where the device fails: any part of the work may have been done.
        Raises ValueError for a device that is not bound.

        ``captured``: the stream is being captured, and each replay of the graph does the work, with what the buffer has
        then. That is for staged rows and steps. Raises ValueError, with nothing enqueued, for a stream that is not
        being captured, and for a device without graphs.
        """

    @abstractmethod
    def record(self, stream: Stream) -> DeviceEvent:
        """Make an event that is complete once everything enqueued on ``stream`` so far is done. Raises DeviceError
        where the device fails, StreamGone for a stream that its owner has destroyed."""

    @abstractmethod
    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Have all work that is enqueued on ``stream`` from now on wait for ``event``. The caller does not wait. Raises
        DeviceError, StreamGone."""

    @abstractmethod
    def query(self, event: DeviceEvent) -> bool:
        """Whether ``event`` is complete. Does not wait. Raises DeviceError."""

    @abstractmethod
    def synchronize(self, event: DeviceEvent | None = None) -> None:
        """Wait until ``event`` is complete; without one, until everything enqueued is done. Raises DeviceError."""

    def calibrate(self) -> Any:
        """Measure which way of copying is the fastest here, and use it from now on.

        Returns a ``calibration.Calibration``, or None where there is nothing to choose. Raises DeviceError,
        MemoryError.
        """
        return None

    def host_access(
        self,
        *,
        reads: Any = None,
        writes: Any = None,
        loads: Sequence[Array] = (),
        stores: Sequence[Array] = (),
        outside: bool = False,
    ) -> AbstractContextManager[Any]:
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
            raise TypeError(f"stream: expected (version, handle) from __cuda_stream__, got {pair!r:.80}")
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
            "stream: expected None, an integer handle, or an object with __cuda_stream__, cuda_stream or ptr, got "
            f"{stream!r:.80}"
        ) from None


def tier_argument(tier: object) -> Tier:
    """Return the tier that ``tier`` names. Raises ValueError for anything else."""
    if tier not in TIERS:
        raise ValueError(f"tier: expected 'device' or 'host', got {tier!r:.80}")
    return TIERS[TIERS.index(tier)]


def _forwarded(name: str) -> Any:
    def call(self: WrappedDevice, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*args, **named)

    return call


class WrappedDevice(Device):
    """Forwards to ``inner``, under the name of that device. Subclasses override what they change."""

    def __init__(self, inner: Device) -> None:
        self.inner = inner
        self.name, self.synchronous, self.one_memory = inner.name, inner.synchronous, inner.one_memory
        self.views = inner.views

    @property
    def at_once(self) -> int | None:  # type: ignore[override]
        return self.inner.at_once

    allocate, adopt, free = map(_forwarded, ("allocate", "adopt", "free"))
    available_bytes, as_stream, create_stream = map(_forwarded, ("available_bytes", "as_stream", "create_stream"))
    bind, copy_blocks, enqueue = map(_forwarded, ("bind", "copy_blocks", "enqueue"))
    record, wait, query = map(_forwarded, ("record", "wait", "query"))
    synchronize, calibrate, host_access, close = map(_forwarded, ("synchronize", "calibrate", "host_access", "close"))

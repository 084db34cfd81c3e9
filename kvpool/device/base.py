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
    """A stream of work on the device.

    Parameters
    ----------
    handle : int
        The driver's number for it. 0 is the default stream.
    owner : object, optional
        Keeps the stream alive.
    """

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


class CopyChoice(Protocol):
    """What ``Device.calibrate`` has measured: a ``Calibration``."""

    @property
    def device(self) -> str: ...
    @property
    def driver(self) -> int: ...
    def choose(self, direction: str, nbytes: int, count: int, /) -> str: ...


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


_NO_ACCESS = nullcontext()


class DeviceEvent:
    """A point on a stream, which is *complete* once all work enqueued there before it is done.

    ``Device.record`` returns it.
    """

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

    Notes
    -----
    Thread-safety: one thread at a time enqueues, the one that holds the transfer lock. The calls that enqueue are
    ``copy_blocks``, ``enqueue``, ``upload``, ``record`` and ``wait``. On a synchronous device, several threads may copy
    at a time. Any thread may call ``query``, ``synchronize``, ``allocate`` and ``views`` at any time, and ``free`` for
    memory that is not bound. Everything else may be called only while nothing is being enqueued.

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
    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> DeviceArray:
        """Allocate zeroed memory for a tier.

        Parameters
        ----------
        nbytes : int
            The number of bytes.
        tier : {"device", "host", "staging"}
            The tier. "staging" is main memory, with any content, for small buffers that copies and kernels read.
        shared : bool, default False
            Whether other processes can attach the memory, by ``views.handle``.

        Returns
        -------
        array of uint8, shape (nbytes,)
            It starts at a multiple of ``ALIGNMENT``. The host tier is a NumPy array. The device tier is an array of the
            device's own package; if it is not main memory, it has ``__cuda_array_interface__`` and DLPack.

        Raises
        ------
        MemoryError, DeviceError
            Where the memory or the device fails.
        ValueError
            For shared memory on a device that cannot share any.

        Notes
        -----
        Pages are not touched where the system gives memory on first use. Neither this call nor ``free`` of a staging
        buffer waits for the device, once as many buffers exist as are used at a time.
        """

    @abstractmethod
    def free(self, array: DeviceArray) -> None:
        """Give back memory of ``allocate`` or ``adopt``. A device that was bound to it is then unbound.

        Parameters
        ----------
        array : array of uint8
            The memory. In main memory, views of it stay readable.
        """

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> DeviceArray:
        """Use existing memory for a tier.

        Parameters
        ----------
        memory : StridedArray of uint8, shape (nbytes,)
            The memory, whose content stays. The device keeps it alive until ``free``, and never gives it back to the
            system.
        tier : {"device", "host"}
            The tier.
        pin : bool, default False
            Whether it is main memory from the start of a page, which the device may pin until ``free``.

        Returns
        -------
        array of uint8, shape (nbytes,)
            An array as of ``allocate``.

        Raises
        ------
        ValueError
            Where this device cannot use the memory.
        DeviceError, MemoryError
            Where the device or the memory fails.
        """
        raise ValueError(
            f"{tier}_memory: expected None, since the {self.name} device takes no memory of the caller's, got an array"
        )

    @abstractmethod
    def available_bytes(self, tier: str) -> int | None:
        """Return the bytes that ``allocate`` can be expected to find in a tier.

        Parameters
        ----------
        tier : {"device", "host"}
            The tier.

        Returns
        -------
        int or None
            Bytes; None if they are not known.
        """

    @abstractmethod
    def as_stream(self, stream: StreamLike) -> Stream:
        """Return the stream that an argument of a public call means.

        Parameters
        ----------
        stream : Stream, int, object with ``__cuda_stream__``, ``cuda_stream`` or ``ptr``, or None
            A stream of any package, or its handle. None is the default stream.

        Returns
        -------
        Stream
            The stream.

        Raises
        ------
        TypeError
            For anything else.
        ValueError
            For a handle that is not an address, and for a stream on which no work can be enqueued now because it was
            destroyed or is being captured.
        """

    @abstractmethod
    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        """Make a stream for the pool itself, for which no default stream waits.

        Parameters
        ----------
        name : str
            A name for people.
        urgent : bool, default False
            Whether its kernels and copies go first where several streams wait for the device.

        Returns
        -------
        Stream
            The stream.
        """

    @abstractmethod
    def bind(self, regions: Sequence[Region]) -> None:
        """Set the memory of the blocks, which is kept alive until any of it is freed.

        Parameters
        ----------
        regions : sequence of Region
            The memory of each group of layers.

        Raises
        ------
        ValueError
            For a device that is bound already.
        DeviceError
            Where the device fails.
        """

    @abstractmethod
    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        """Enqueue copies of blocks.

        Parameters
        ----------
        copy_ops : ndarray of int64, shape (n, 4)
            Rows (source id, target id, tokens, ticket). A row copies the first 1 to ``tokens_per_block`` tokens, of
            every layer, plane and head, from any tier to any tier of one region. The rest of the target keeps its
            content. Rows may be of different regions. No row writes a block that another row reads or writes, so the
            device can make them in any order. The device ignores the ticket.
        stream : Stream, optional
            The stream. By default the default stream.
        layers : Layers, optional
            The layers of each region to copy. By default all.

        Raises
        ------
        DeviceError
            Where the device fails: the first ``completed`` rows have been enqueued, and any of the others may have
            been. Those can be copied again.
        """

    @abstractmethod
    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        """Enqueue other work than copies of blocks. Its effect is that of ``work.run``.

        Parameters
        ----------
        work : Work
            The work. The caller may change the arrays of ``Fragments`` and ``TokenMoves`` when the call returns. A
            staging buffer is read when the work is done. Until then the caller does not change it, and keeps it and the
            targets alive.
        stream : Stream, optional
            The stream. By default the default stream.
        captured : bool, default False
            Whether the stream is being captured. Each replay of the graph then does the work, with the content that the
            buffer has at that time. Only for staged rows and steps.

        Raises
        ------
        DeviceError
            Where the device fails: any part of the work may have been done.
        ValueError
            For a device that is not bound. With ``captured``, for a stream that is not being captured, and for a device
            without graphs. Nothing is enqueued then.
        """

    def upload(self, work: Work, stream: Stream) -> DeviceEvent:
        """Enqueue staged tables, and record an event after them.

        Parameters
        ----------
        work : Work
            Staged tables, as for ``enqueue``.
        stream : Stream
            The stream that writes the tables.

        Returns
        -------
        DeviceEvent
            Complete once the tables are written.

        Raises
        ------
        DeviceError
            If the device fails: any part of the work may be enqueued then.
        """
        self.enqueue(work, stream)
        return self.record(stream)

    @abstractmethod
    def record(self, stream: Stream) -> DeviceEvent:
        """Record an event on a stream.

        Parameters
        ----------
        stream : Stream
            The stream.

        Returns
        -------
        DeviceEvent
            It is complete once all work enqueued on the stream so far is done.

        Raises
        ------
        DeviceError
            Where the device fails.
        StreamGone
            For a stream that its owner has destroyed.
        """

    @abstractmethod
    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Have all work that is enqueued on a stream from now on wait for an event. The caller does not wait.

        Parameters
        ----------
        stream : Stream
            The stream.
        event : DeviceEvent
            The event.

        Raises
        ------
        DeviceError, StreamGone
            As for ``record``.
        """

    @abstractmethod
    def query(self, event: DeviceEvent) -> bool:
        """Return whether an event is complete, without waiting.

        Parameters
        ----------
        event : DeviceEvent
            The event.

        Returns
        -------
        bool
            Whether all work before it is done.

        Raises
        ------
        DeviceError
            Where the device fails.
        """

    @abstractmethod
    def synchronize(self, event: DeviceEvent | None = None) -> None:
        """Wait until an event is complete.

        Parameters
        ----------
        event : DeviceEvent, optional
            The event. By default the call waits until all enqueued work is done.

        Raises
        ------
        DeviceError
            Where the device fails.
        """

    def calibrate(self) -> CopyChoice | None:
        """Measure which way of copying is the fastest here, and use it from now on.

        Returns
        -------
        Calibration or None
            The measurements, or None for a device that has only one way.

        Raises
        ------
        DeviceError, MemoryError
            Where the device or the memory fails.
        """
        return None

    def host_access(
        self,
        *,
        reads: Int64s | None = None,
        writes: Int64s | None = None,
        loads: Sequence[Array] = (),
        stores: Sequence[Array] = (),
        outside: bool = False,
    ) -> AbstractContextManager[None]:
        """Declare that this thread reads and writes memory directly, while a context is open.

        Devices that detect races check it. For others it does nothing.

        Parameters
        ----------
        reads : ndarray of int64, shape (n, 3), optional
            The tokens that it reads: block id, first token, and end of the tokens.
        writes : ndarray of int64, shape (n, 3), optional
            The tokens that it writes.
        loads : sequence of ndarray, optional
            Arrays outside the pools that it reads, such as staging buffers and tables.
        stores : sequence of ndarray, optional
            Arrays outside the pools that it writes.
        outside : bool, default False
            Whether another process accesses the memory instead of this thread, after all work that this thread has
            waited for.

        Returns
        -------
        context manager
            The access lasts while it is open.
        """
        return _NO_ACCESS

    @abstractmethod
    def close(self) -> None:
        """Release the memory of the pool. A second call does nothing. All other calls raise PoolClosed afterwards."""


def stream_argument(stream: Any) -> Stream:
    """``as_stream`` for devices that need only the handle."""
    if stream is None:
        return NULL_STREAM
    if type(stream) is Stream and type(stream.handle) is int:
        return stream
    if type(stream) is int and 0 <= stream < 1 << 64:
        return Stream(stream, stream)
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

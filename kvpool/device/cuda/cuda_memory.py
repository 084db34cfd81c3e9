"""Memory of both tiers: pinned main memory, memory of a GPU, arrays on them, and handles for other processes."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvpool.common.arrays import Int64s, Uint8s, dlpack
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.common.progress import shown_progress
from kvpool.device.base import HostViews
from kvpool.device.cuda.registrations import Hold, Registrar, Registration, Span, chunk_rows, pinned_ends, whole_pages
from kvpool.device.cuda.runtime import SYSFS, Driver, RuntimeCalls, is_registered_already
from kvpool.device.memory.main_memory import ALIGNMENT, GpuMemory, MainMemory, available_ram, in_huge_pages
from kvpool.device.work import StepTargets, Table, make_table
from kvpool.errors import DeviceError

CHUNK_BYTES = 1 << 30
"""How many bytes are registered at once: whole pages. Some drivers refuse more, and progress could not be shown."""
_TOUCHED_BYTES = 64 << 20
_QUIET_SECONDS = 2


class PinnedRange:
    """Pinned main memory: ``array`` uint8[nbytes]. No copy may cross from one registration into another; ``rows``
    int64[n, 3] has where they end, as ``fragments.cut`` takes it.

    It stays pinned until ``free``. If that is not called, it happens when the last reference to this object is gone,
    after ``idle``, which waits for all that may use the memory. The memory exists until the last view of ``array`` is
    gone. Chunks that a driver refuses to unregister stay mapped until the process ends. Not thread-safe.
    """

    rows: Int64s

    def __init__(self, array: Uint8s, idle: Callable[[], None]) -> None:
        self.array, self._hold = array, Hold(array)
        weakref.finalize(self, _let_go, self._hold, idle).atexit = False

    def free(self) -> None:
        """Unregister what nothing else in this process needs. Nothing that uses it may be pending. A second call does
        nothing."""
        self._hold.release()


def _let_go(hold: Hold, idle: Callable[[], None]) -> None:
    """Release memory that was not freed. Unregistering does not wait for work that may still use it, and neither does
    its owner."""
    with suppress(Exception):
        if not hold.released and hold.array.nbytes:
            idle()
            hold.release()


def _pin(
    array: Uint8s,
    span: Span,
    registration: Registration,
    touch: Callable[[Uint8s, int], object],
    processors: Collection[int] | None,
) -> None:
    """Touch the pages of ``span``, whole pages with bytes of ``array``, on several threads, and register each chunk as
    soon as it is touched. The threads run on ``processors``, if this process may use any of them. Raises MemoryError if
    the driver refuses a chunk."""
    nbytes = span[1] - span[0]
    own = os.sched_getaffinity(0)
    near = own & set(processors or ())
    # This sets the affinity of the calling thread, not of the process.
    stay = partial(os.sched_setaffinity, 0, near) if near else None
    count = max(1, min(len(near or own), -(-nbytes // _TOUCHED_BYTES)))
    first = max(0, span[0] - array.ctypes.data)
    workers = ThreadPoolExecutor(count, "kvpool-touch", initializer=stay)
    try:
        touched = [workers.submit(touch, array, first + begin) for begin in range(0, nbytes, _TOUCHED_BYTES)]
        with shown_progress(nbytes, "B", desc="pinning host memory", unit_scale=True, delay=_QUIET_SECONDS) as show:
            for begin in range(0, nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, nbytes - begin)
                for pages in touched[begin // _TOUCHED_BYTES : -(-(begin + size) // _TOUCHED_BYTES)]:
                    pages.result()
                try:
                    registration.register(span[0] + begin, size)
                except Exception as error:
                    raise MemoryError(
                        f"the driver pinned {begin} of {nbytes} bytes and refused the next {size}: {error} ({limits()})"
                    ) from error
                show(size)
    finally:
        workers.shutdown(cancel_futures=True)


class _RangeBlock:
    """A part of a registered range, as CuPy's pools keep it. It refers to the mapping."""

    def __init__(self, ptr: int, size: int, registration: Registration) -> None:
        self.ptr, self.size, self.registration = ptr, size, registration


class _RangeAllocator:
    """The allocator of one CuPy pool: it hands out a registered range from its beginning to its end. ``cuda`` is
    ``cupy.cuda``."""

    def __init__(self, cuda: Any, span: Span, registration: Registration) -> None:
        self._cuda, (self._next, self._end), self._registration = cuda, span, registration

    def __call__(self, nbytes: int) -> Any:
        begin = self._next
        if begin + nbytes > self._end:
            raise MemoryError(f"CuPy's pool asks for {nbytes} bytes, and {self._end - begin} are reserved")
        self._next += nbytes
        return self._cuda.PinnedMemoryPointer(_RangeBlock(begin, nbytes, self._registration), 0)


class PinnedMemory(PinnedRange):
    """Zeroed pinned memory, at the start of a page, that belongs to ``pool``, a ``cupy.cuda.PinnedMemoryPool`` of its
    own. ``cuda`` is ``cupy.cuda``.

    One range is reserved: the bytes, rounded up to whole pages. The pool is asked for it in descending powers of two,
    which it does not round up, so ``blocks`` follow each other without gaps: 22 GiB are 16, 4 and 2 GiB. The last block
    is the lowest power of two in the number of bytes, one page at least.

    The range is registered first, in chunks of ``CHUNK_BYTES``, whatever the blocks. ``take`` returns zeroed memory at
    the start of a page; by default, private memory of the system. The threads that touch the pages run on
    ``processors``, if this process may use any of them.

    Raises MemoryError if the machine has no room or the driver refuses; nothing stays pinned then.
    """

    def __init__(
        self,
        nbytes: int,
        registrar: Registrar,
        cuda: Any,
        *,
        processors: Collection[int] | None = None,
        take: Callable[[int], Uint8s] | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        # If a process touches more memory than there is, the system ends it instead of raising an error.
        room = available_ram()
        if room is not None and nbytes > room:
            raise MemoryError(f"{nbytes} bytes of pinned memory are asked for, {room} can be taken ({limits()})")
        super().__init__((take or _map)(nbytes), idle)
        begin = self.array.ctypes.data
        self.rows = np.array([[begin, begin + nbytes, CHUNK_BYTES]], np.int64)
        span, registration = whole_pages(begin, begin + nbytes), self._hold.new(registrar)
        self.blocks: list[Any] = []
        self.pool: Any = None
        try:
            _pin(self.array, span, registration, _touch, processors)
            self.pool = cuda.PinnedMemoryPool(_RangeAllocator(cuda, span, registration))
            self.blocks += map(self.pool.malloc, descending_powers(span[1] - span[0]))
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Return the blocks to the pool, have it free them, and unregister them. Nothing that uses the memory may be
        pending. A second call does nothing."""
        self.blocks.clear()
        try:
            if self.pool is not None:
                self.pool.free_all_blocks()
        finally:
            super().free()


def descending_powers(number: int) -> Iterator[int]:
    """The different powers of two whose sum a number is, the greatest first."""
    for bit in reversed(range(number.bit_length())):
        if number >> bit & 1:
            yield 1 << bit


class AdoptedMemory(PinnedRange):
    """Memory of another owner, which ``array`` keeps alive. Its content stays.

    What CUDA reports as pinned is used as it is: the owner keeps it pinned until ``free``, and registrations of this
    process stay until the last memory that uses them is freed. What is not pinned is registered in chunks of
    ``CHUNK_BYTES``, in whole pages, until ``free``.

    ``name`` is that of the argument. Raises ValueError, MemoryError; nothing stays registered then.
    """

    def __init__(
        self,
        array: Uint8s,
        registrar: Registrar,
        name: str,
        *,
        processors: Collection[int] | None = None,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(array, idle)
        begin, end = array.ctypes.data, array.ctypes.data + array.nbytes
        try:
            first, last = pinned_ends(registrar, begin, end, self._hold)
            gap = first[-1][1] if first else begin, last[0][0] if last else end
            if gap[0] < gap[1]:
                registration = self._hold.new(registrar)
                _pin(array, whole_pages(*gap), registration, _read, processors)
                chunks = registration.chunks.items()
                first += [(max(start, gap[0]), min(start + nbytes, gap[1])) for start, nbytes in chunks]
            self.rows = chunk_rows([*first, *last])
        except BaseException as error:
            self.free()
            if is_registered_already(error):
                raise ValueError(
                    f"{name}: expected memory that is pinned as a whole, from one of its ends or not at all, got "
                    f"{end - begin} bytes at {begin:#x} with registered pages in between"
                ) from error
            raise


def _map(nbytes: int) -> Uint8s:
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system gives no range of {nbytes} bytes: {error}") from None
    # A page that is shared with a forked process is copied when it is written. The driver would keep the other copy.
    mapping.madvise(mmap.MADV_DONTFORK)
    return in_huge_pages(mapping)


def _touch(array: Uint8s, start: int) -> None:
    """Have the system allocate the pages now, by several threads here instead of one by one inside the driver."""
    array[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0


def _read(array: Uint8s, start: int) -> None:
    """``_touch`` of memory that others may be using."""
    array[start : start + _TOUCHED_BYTES : mmap.PAGESIZE].max(initial=0)


def limits() -> str:
    """What may keep memory from being pinned here, in words."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lockable = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    room = available_ram()
    left = "unknown" if room is None else f"{room} bytes"
    return f"locked memory (ulimit -l): {lockable}; left by the system and its control groups: {left}"


def processors_near(pci: str, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """The processors of the memory node of a PCI device ("0000:3B:00.0"). None if there is one node only, or if
    it is unknown."""
    nodes = sysfs / "devices/system/node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        processors = _numbers((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return None
    return processors or None


def _numbers(text: str) -> frozenset[int]:
    """The numbers that a list such as "0-3,8" means."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


_UUID_BYTES = 16
_SHARED_PIECE = 2 << 20
"""In bytes. NVIDIA recommends it for memory that other processes open (cudaIpcGetMemHandle)."""


class DeviceMemory:
    """Memory of a GPU at ``ptr``, freed with the last reference. CuPy's own class frees in the current context; this
    one frees in the context that the memory belongs to, on any thread, also while another thread captures."""

    def __init__(self, calls: RuntimeCalls, nbytes: int) -> None:
        self._calls = calls
        with calls("cudaMalloc", unsafe=True) as runtime:
            self.ptr = int(runtime.malloc(nbytes))

    def __del__(self) -> None:
        if hasattr(self, "ptr") and not sys.is_finalizing():
            # A GPU that has failed cannot free memory.
            with suppress(DeviceError), self._calls("cudaFree", unsafe=True) as runtime:
                runtime.free(self.ptr)


def check_adopted(calls: RuntimeCalls, memory: StridedArray, tier: str) -> None:
    """Raise ValueError unless memory of the caller lies on the GPU of ``calls``, or is for the host tier. Waits for
    everything enqueued, which may still write it. Raises DeviceError."""
    with calls("cudaPointerGetAttributes", unsafe=True) as runtime:
        attributes = runtime.pointerGetAttributes(memory.address)
        runtime.deviceSynchronize()
    if tier == "host":
        return
    if (
        attributes.type not in (calls.runtime.memoryTypeDevice, calls.runtime.memoryTypeManaged)
        or attributes.device != calls.index
    ):
        raise ValueError(f"device_memory: expected memory of GPU {calls.index}, got {memory.address:#x}")


def gpu_array(cupy: Any, memory: StridedArray, index: int) -> Any:
    """The elements as a ``cupy.ndarray`` of integers or floats of that size. It keeps ``owner`` alive."""
    nbytes = (
        sum((extent - 1) * abs(step) for extent, step in zip(memory.shape, memory.steps, strict=True)) + memory.itemsize
    )
    unowned = cupy.cuda.UnownedMemory(memory.address, nbytes, memory.owner, index)
    dtype = np.dtype(f"{memory.kind}{memory.itemsize}")
    return cupy.ndarray(memory.shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0), strides=memory.steps)


def pinned_memory(calls: RuntimeCalls, make: Callable[..., PinnedRange], idle: Callable[[], None]) -> PinnedRange:
    """What ``make``, a PinnedRange that lacks only ``processors`` and ``idle``, makes of processors near the GPU of
    ``calls``. Raises MemoryError, ValueError, DeviceError."""
    with calls("cudaDeviceGetPCIBusId") as runtime:
        near = processors_near(runtime.deviceGetPCIBusId(calls.index))
    try:
        with calls("cudaHostRegister", unsafe=True):
            return make(processors=near, idle=idle)
    except MemoryError as error:
        if isinstance(error.__cause__, DeviceError) and error.__cause__.sticky:
            raise error.__cause__ from None
        raise


def zeroed_array(cupy: Any, calls: RuntimeCalls, nbytes: int, stream: int) -> Any:
    """Allocate uint8[nbytes] of zeros, at a multiple of ``ALIGNMENT``. It does not come from CuPy's pool, which would
    keep it: the memory is freed with the last array that refers to it.

    The driver takes small allocations from larger pieces, and a handle for another process opens a piece. So the memory
    is rounded up to whole pieces, and nothing else lies in them.
    """
    whole = -(-(nbytes + ALIGNMENT) // _SHARED_PIECE) * _SHARED_PIECE
    memory = DeviceMemory(calls, whole)
    address = memory.ptr + -memory.ptr % ALIGNMENT
    with calls("cudaMemsetAsync", unsafe=True) as runtime:
        array = gpu_array(
            cupy, StridedArray(address, (nbytes,), 1, memory="device", kind="u", owner=memory), calls.index
        )
        runtime.memsetAsync(memory.ptr, 0, whole, stream)
        runtime.streamSynchronize(stream)
    return array


def allocatable(free: int) -> int:
    """How many of ``free`` bytes ``zeroed_array`` can take at once."""
    return max(0, free // _SHARED_PIECE * _SHARED_PIECE - ALIGNMENT)


def gpu_table(target: Any, name: str, vector: bool, itemsize: int) -> Table:
    """An array on the GPU as a table, by ``__cuda_array_interface__`` or DLPack. Raises TypeError or ValueError."""
    place = _usual_place(target, itemsize)
    if place is not None:
        return make_table(name, *place, target, vector, itemsize)
    array = as_strided(name, target)
    if array.memory != "device" or (array.kind, array.itemsize) != ("i", itemsize):
        actual = f"{array.kind}{8 * array.itemsize} in {array.memory} memory"
        raise TypeError(f"{name}: expected an int{8 * itemsize} array of a GPU, got {actual}")
    if not array.writable:
        raise ValueError(f"{name}: expected an array that can be written, got a read-only one")
    return make_table(name, array.address, array.shape, array.steps, target, vector, itemsize)


def _usual_place(target: Any, itemsize: int) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Address, shape and strides of an array of a GPU whose interface is as usual, in a fraction of the time of
    ``as_strided``. None for any other, which may be valid."""
    try:
        interface: dict[str, Any] = target.__cuda_array_interface__
        shape, strides, (address, read_only) = interface["shape"], interface.get("strides"), interface["data"]
        numbers = (address, *shape, *(strides or ()))
        usual = interface["typestr"] == _TYPES[itemsize] and not read_only and interface.get("mask") is None
        if not usual or {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) >= 1 << 62:
            return None
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return None
    if strides is None:
        steps = [itemsize]
        for extent in shape[:0:-1]:
            steps.append(steps[-1] * extent)
        strides = steps[::-1]
    return (address, tuple(shape), tuple(strides)) if len(strides) == len(shape) else None


_TYPES = {size: np.dtype(f"i{size}").str for size in (4, 8)}


def _uuid(runtime: Any, index: int) -> bytes:
    # CuPy cuts the UUID at a zero byte, in the same way in every process.
    return bytes(runtime.getDeviceProperties(index)["uuid"][:_UUID_BYTES])


def _gpu_with(runtime: Any, uuid: bytes) -> int:
    """The GPU with a UUID, as this process counts GPUs. Raises ValueError."""
    seen = [_uuid(runtime, index) for index in range(runtime.getDeviceCount())]
    if uuid not in seen:
        uuids = [other.hex() for other in seen]
        raise ValueError(f"description: the memory is on the GPU with UUID {uuid.hex()}, and this process sees {uuids}")
    return seen.index(uuid)


class _Opened:
    """An allocation of another process. It stays open while it is referenced."""

    def __init__(self, calls: RuntimeCalls, handle: bytes) -> None:
        with calls("cudaIpcOpenMemHandle") as runtime:
            self.pointer = int(runtime.ipcOpenMemHandle(handle))
        # A finalizer runs in the middle of anything, also of a capture. The driver closes what is left at the end of
        # the process.
        weakref.finalize(self, _unused.append, (calls, self.pointer)).atexit = False


_unused: deque[tuple[RuntimeCalls, int]] = deque()


def close_unused() -> None:
    """Close the allocations of other processes that are not referenced any more, once all that this process has
    enqueued on their GPU is done. No stream may be captured meanwhile: CUDA refuses to wait for a GPU then, and the
    capture is lost. Raises DeviceError; a later call tries again. Thread-safe."""
    while True:
        try:
            calls, pointer = _unused.popleft()
        except IndexError:
            return
        try:
            with calls("cudaIpcCloseMemHandle", unsafe=True) as runtime:
                runtime.deviceSynchronize()
                runtime.ipcCloseMemHandle(pointer)
        except DeviceError:
            _unused.append((calls, pointer))
            raise


def open_memory(cupy: Any, driver: Driver, memory: GpuMemory, nbytes: int) -> Any:
    """Open memory of another process as a ``cupy.ndarray`` uint8[nbytes]. It stays open until the last view is gone.

    Raises DeviceError, and ValueError for a GPU that this process does not see. Thread-safe.
    """
    close_unused()
    calls = RuntimeCalls(cupy.cuda.runtime, _gpu_with(cupy.cuda.runtime, memory.uuid), driver)
    opened = _Opened(calls, memory.handle)
    place = StridedArray(opened.pointer + memory.offset, (nbytes,), 1, None, "device", "u", owner=opened)
    return gpu_array(cupy, place, calls.index)


class CudaViews(HostViews):
    """Views of the memory of one GPU, as CuPy's arrays. ``owned`` has the identities of the arrays of the device,
    ``load`` loads a kernel that writes tables."""

    def __init__(
        self, cupy: Any, calls: RuntimeCalls, owned: Mapping[int, object], load: Callable[[str], object]
    ) -> None:
        self._cupy, self._calls, self._owned, self._load = cupy, calls, owned, load
        self.places = {"device": (dlpack.CUDA, calls.index), "host": (dlpack.CUDA_HOST, 0)}

    def array(self, memory: StridedArray) -> Any:
        return memory.host_view() if memory.memory == "host" else gpu_array(self._cupy, memory, self._calls.index)

    def pinned(self, memory: StridedArray) -> Any:
        # As much of a block of CuPy's as the pointer asks for, and a reference to the owner.
        block = SimpleNamespace(ptr=memory.address, size=memory.shape[0], owner=memory.owner)
        return self._cupy.cuda.PinnedMemoryPointer(block, 0)

    def handle(self, array: Any, tier: str) -> MainMemory | GpuMemory:
        if tier == "host":
            return super().handle(array, tier)
        # CUDA's handle is that of the allocation, and the array begins inside it. Of memory that is not the device's
        # own it might open other data too.
        if id(array) not in self._owned:
            raise ValueError(
                "device_memory: expected memory that the pool took itself, which alone can be shared, got the caller's"
            )
        with self._calls("cudaIpcGetMemHandle") as runtime:
            base, address = self._calls.driver.start_of(array.data.ptr), array.data.ptr
            handle = bytes(runtime.ipcGetMemHandle(base))
            return GpuMemory(_uuid(runtime, self._calls.index), handle, address - base)

    def table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        """See ``HostViews.table``. A Numba kernel writes tables that are not vectors, so DeviceError is also raised if
        numba-cuda is not installed."""
        checked = gpu_table(target, name, vector, itemsize)
        if not vector:
            self._load("stage_rows")
        return checked

    def step(self, arrays: Any) -> StepTargets:
        """See ``HostViews.step``. The kernel is Numba's, as for ``table``."""
        self._load("step_tables")
        targets: StepTargets = arrays.targets(gpu_table)
        return targets

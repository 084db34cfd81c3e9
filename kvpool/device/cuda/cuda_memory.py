"""Memory of both tiers: pinned main memory, memory of a GPU, arrays on them, and handles for other processes."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from kvpool.arrays import Uint8s, dlpack
from kvpool.arrays.strided import StridedArray, as_strided
from kvpool.device.base import HostViews
from kvpool.device.cuda.runtime import Driver, RuntimeCalls
from kvpool.device.main_memory import ALIGNMENT, GpuMemory, MainMemory, available_ram
from kvpool.device.work import StepTargets, Table, make_table
from kvpool.errors import DeviceError
from kvpool.progress import shown_progress

SYSFS = Path("/sys")
CHUNK_BYTES = 1 << 30
"""How many bytes are registered at once. Some drivers refuse more, and progress could not be shown."""
_TOUCHED_BYTES = 64 << 20
_QUIET_SECONDS = 2


class Registrar(Protocol):
    """The part of the CUDA runtime that pins memory. It raises its own errors."""

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin whole pages."""

    def hostUnregister(self, address: int) -> None:
        """Unpin them."""


class _Registered:
    """A mapping, and the addresses of its registered chunks. The module refers to it until no chunk is registered: if
    the system gave memory that a driver believes to be pinned to another use, copies would miss that."""

    def __init__(self, array: Uint8s, registrar: Registrar) -> None:
        self.array, self.addresses = array, list[int]()
        self._registrar = registrar
        _registered.add(self)

    def register(self, address: int, nbytes: int) -> None:
        self._registrar.hostRegister(address, nbytes, 0)
        self.addresses.append(address)

    def unregister(self) -> None:
        """Unregister all chunks. If the driver refuses some, the others are still tried, and the first error is
        raised."""
        errors, left = [], []
        while self.addresses:
            address = self.addresses.pop()
            try:
                self._registrar.hostUnregister(address)
            except Exception as error:
                errors.append(error)
                left.append(address)
        self.addresses = left
        if errors:
            raise errors[0]
        _registered.discard(self)


_registered: set[_Registered] = set()


def _let_go(registered: _Registered, idle: Callable[[], None]) -> None:
    """Unregister memory that nobody has freed. To unregister does not wait for what may still use it."""
    with suppress(Exception):
        if registered.addresses:
            idle()
            registered.unregister()


class PinnedMemory:
    """Zeroed memory for ``array`` uint8[nbytes], at the start of a page. ``registrar`` has registered all of it.

    The memory is one range, but it is registered in chunks of ``chunk_bytes``, whole pages (default: ``CHUNK_BYTES``).
    A copy must not cross from one chunk into the next. ``take`` returns zeroed memory at the start of a page; without
    it the memory is private memory of the system. With ``kept``, the memory of ``take`` has a content, which stays. The
    threads that touch the pages run on ``processors``, if this process may use any of them.

    After ``free`` the memory is no longer pinned. It exists until the last view of ``array`` is gone. If nobody calls
    ``free``, it happens when nobody refers to this object any more, behind ``idle``, which waits for all that may use
    the memory. What a driver refuses to unregister stays mapped until the process ends.

    Not thread-safe. Raises MemoryError if the machine has no room or the driver refuses; nothing stays pinned then.
    """

    def __init__(
        self,
        nbytes: int,
        registrar: Registrar,
        *,
        chunk_bytes: int | None = None,
        processors: Collection[int] | None = None,
        take: Callable[[int], Uint8s] | None = None,
        kept: bool = False,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        # If a process touches more memory than there is, the system ends it instead of raising an error.
        room = None if kept else available_ram()
        if room is not None and nbytes > room:
            raise MemoryError(f"{nbytes} bytes of pinned memory are asked for, {room} can be taken ({limits()})")
        self.array, self._touch = (take or _map)(nbytes), _read if kept else _touch
        self._registered = _Registered(self.array, registrar)
        weakref.finalize(self, _let_go, self._registered, idle).atexit = False
        try:
            self._pin(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, set(processors or ()) & os.sched_getaffinity(0))
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Unregister all of it. Nothing that uses it may be pending. A second call does nothing."""
        self._registered.unregister()

    def _pin(self, nbytes: int, near: set[int]) -> None:
        """Touch the pages on several threads, on the processors ``near`` if there are any. Register each chunk as soon
        as it is touched."""
        base, usable = self.array.ctypes.data, near or os.sched_getaffinity(0)
        count = max(1, min(len(usable), -(-nbytes // _TOUCHED_BYTES)))
        # This sets the affinity of the calling thread, not of the process.
        stay = partial(os.sched_setaffinity, 0, near) if near else None
        workers = ThreadPoolExecutor(count, "kvpool-touch", initializer=stay)
        with shown_progress(nbytes, "B", desc="pinning host memory", unit_scale=True, delay=_QUIET_SECONDS) as pinned:
            try:
                touched = [workers.submit(self._touch, self.array, start) for start in range(0, nbytes, _TOUCHED_BYTES)]
                for start in range(0, nbytes, self.chunk_bytes):
                    size = min(self.chunk_bytes, nbytes - start)
                    for one in touched[start // _TOUCHED_BYTES : -(-(start + size) // _TOUCHED_BYTES)]:
                        one.result()
                    self._register(base + start, size, nbytes)
                    pinned(size)
            finally:
                workers.shutdown(cancel_futures=True)

    def _register(self, address: int, size: int, whole: int) -> None:
        try:
            self._registered.register(address, size)
        except Exception as error:
            done = len(self._registered.addresses) * self.chunk_bytes
            raise MemoryError(
                f"the driver pinned {done} of {whole} bytes and refused the next {size}: {error} ({limits()})"
            ) from error


def _map(nbytes: int) -> Uint8s:
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system gives no range of {nbytes} bytes: {error}") from None
    # A page that is shared with a forked process is copied when it is written. The driver would keep the other copy.
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # A kernel without huge pages.
    return np.frombuffer(mapping, np.uint8)


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
    """The processors of the memory node of a PCI device ("0000:3B:00.0"). None if there is one node only, or if nobody
    knows."""
    nodes = sysfs / "devices/system/node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        found = _numbers((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return None
    return found or None


def _numbers(text: str) -> frozenset[int]:
    """The numbers that a list such as "0-3,8" means."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


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


def check_adopted(calls: RuntimeCalls, memory: StridedArray, tier: str, index: int) -> None:
    """Raise ValueError unless memory of the caller lies on GPU ``index``. Waits for everything enqueued. Raises
    DeviceError."""
    if tier == "host":
        raise ValueError("host_memory: the cuda device pins memory of its own; accepted is None")
    with calls("cudaPointerGetAttributes", unsafe=True) as runtime:
        found = runtime.pointerGetAttributes(memory.address)
        runtime.deviceSynchronize()
    if found.type not in (calls.runtime.memoryTypeDevice, calls.runtime.memoryTypeManaged) or found.device != index:
        raise ValueError(
            f"device_memory: {memory.address:#x} is no memory of GPU {index}, which is the one that this device is"
        )


def gpu_array(cupy: Any, memory: StridedArray, index: int) -> Any:
    """The elements as a ``cupy.ndarray`` of integers or floats of that size. It keeps ``owner`` alive."""
    nbytes = (
        sum((extent - 1) * abs(step) for extent, step in zip(memory.shape, memory.steps, strict=True)) + memory.itemsize
    )
    unowned = cupy.cuda.UnownedMemory(memory.address, nbytes, memory.owner, index)
    dtype = np.dtype(f"{memory.kind}{memory.itemsize}")
    return cupy.ndarray(memory.shape, dtype, memptr=cupy.cuda.MemoryPointer(unowned, 0), strides=memory.steps)


def pinned_memory(calls: RuntimeCalls, nbytes: int, take: Any, kept: bool, idle: Callable[[], None]) -> PinnedMemory:
    """Allocate pinned memory near the GPU of ``calls``, as ``PinnedMemory``. Raises MemoryError, DeviceError."""
    with calls("cudaDeviceGetPCIBusId") as runtime:
        near = processors_near(runtime.deviceGetPCIBusId(calls.index))
    try:
        return PinnedMemory(nbytes, calls, processors=near, take=take, kept=kept, idle=idle)
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
    """How much ``zeroed_array`` can take of so many free bytes at once."""
    return max(0, free // _SHARED_PIECE * _SHARED_PIECE - ALIGNMENT)


def gpu_table(target: Any, name: str, vector: bool, itemsize: int) -> Table:
    """An array on the GPU as a table, by ``__cuda_array_interface__`` or DLPack. Raises TypeError or ValueError."""
    found = as_strided(name, target)
    if found.memory != "device" or (found.kind, found.itemsize) != ("i", itemsize):
        given = f"{found.kind}{8 * found.itemsize} in {found.memory} memory"
        raise TypeError(f"{name}: accepted is an int{8 * itemsize} array of a GPU, not {given}")
    if not found.writable:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return make_table(name, found.address, found.shape, found.steps, target, vector, itemsize)


def _uuid(runtime: Any, index: int) -> bytes:
    # CuPy cuts the UUID at a zero byte, in the same way in every process.
    return bytes(runtime.getDeviceProperties(index)["uuid"][:_UUID_BYTES])


def _gpu_with(runtime: Any, uuid: bytes) -> int:
    """The GPU with a UUID, as this process counts GPUs. Raises ValueError."""
    seen = [_uuid(runtime, index) for index in range(runtime.getDeviceCount())]
    if uuid not in seen:
        found = [one.hex() for one in seen]
        raise ValueError(f"description: the memory is on the GPU with UUID {uuid.hex()}, and this process sees {found}")
    return seen.index(uuid)


class _Opened:
    """An allocation of another process. It stays open while somebody refers to it."""

    def __init__(self, calls: RuntimeCalls, handle: bytes) -> None:
        with calls("cudaIpcOpenMemHandle") as runtime:
            self.pointer = int(runtime.ipcOpenMemHandle(handle))
        # A finalizer runs in the middle of anything, also of a capture. The driver closes what is left at the end of
        # the process.
        weakref.finalize(self, _unused.append, (calls, self.pointer)).atexit = False


_unused: deque[tuple[RuntimeCalls, int]] = deque()


def close_unused() -> None:
    """Close the allocations of other processes to which nobody refers any more, once all that this process has enqueued
    on their GPU is done. No stream may be captured meanwhile: CUDA refuses to wait for a GPU then, and the capture is
    lost. Raises DeviceError; a later call tries again. Thread-safe."""
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
    """Views of the memory of one GPU, as CuPy's arrays. ``is_own`` says whether the device allocated an array,
    ``load_step`` loads the kernel of step tables."""

    def __init__(
        self, cupy: Any, calls: RuntimeCalls, is_own: Callable[[Any], bool], load_step: Callable[[], object]
    ) -> None:
        self._cupy, self._calls, self._is_own, self._load_step = cupy, calls, is_own, load_step
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
        if not self._is_own(array):
            raise ValueError(
                "device_memory is the caller's and cannot be shared: accepted is memory that the pool took itself"
            )
        with self._calls("cudaIpcGetMemHandle") as runtime:
            base, address = self._calls.driver.start_of(array.data.ptr), array.data.ptr
            handle = bytes(runtime.ipcGetMemHandle(base))
            return GpuMemory(_uuid(runtime, self._calls.index), handle, address - base)

    def table(self, target: Any, name: str = "target", vector: bool = False, itemsize: int = 4) -> Table:
        return gpu_table(target, name, vector, itemsize)

    def step(self, arrays: Any) -> StepTargets:
        """See ``HostViews.step``. The kernel is Numba's: DeviceError is raised also if numba-cuda is not installed."""
        self._load_step()
        found: StepTargets = arrays.targets(gpu_table)
        return found

"""Calls of CUDA: the driver where CuPy offers too little of it, and the runtime on the GPU of a pool. Also what errors
mean for a pool, and which streams it can use."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.device.base import NULL_STREAM, Stream, StreamGone, stream_argument
from kvpool.device.cuda import native
from kvpool.device.regions import BYTES, FROM, TO
from kvpool.errors import DeviceError

LIBRARY = "libcuda.so.1"
"""The library of the driver."""
SYSFS = Path("/sys")
# The version number asks for the interface of this CUDA version. Later drivers keep it.
_CUDA_VERSION = 12080
_LEGACY_STREAM_FLAG = 1
# Read sources in stream order. In any other order, a copy from the host could read before the copy to the host that its
# stream waits for.
_SOURCE_IN_STREAM_ORDER = 1

# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, _RANGE_START_ADDR and _RANGE_SIZE
_DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE = 9, 11, 12
_pointer, _int = ctypes.c_void_p, ctypes.c_int

Batch = Callable[[Int64s, int], int]


def find_batch(library: Any) -> Batch | None:
    """A function of (fragments int64[n, 3], stream) that enqueues all copies and returns the CUresult. None if the
    driver, whose library this is, has no batched copy.

    The copies must not depend on each other. The stream must not be the null stream, and a context must be current.
    """
    get = getattr(library, "cuGetProcAddress_v2", None)
    if get is None:
        return None
    address, status = ctypes.c_void_p(), ctypes.c_int()
    version, flags = ctypes.c_int(_CUDA_VERSION), ctypes.c_uint64(_LEGACY_STREAM_FLAG)
    if get(b"cuMemcpyBatchAsync", ctypes.byref(address), version, flags, ctypes.byref(status)) or not address.value:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    arguments = (pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer)
    function = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(address.value)
    # CUmemcpyAttributes_v1: the order of sources, two hints for managed memory, and flags.
    attributes = (ctypes.c_int * 6)(_SOURCE_IN_STREAM_ORDER)

    def batch(fragments: Int64s, stream: int) -> int:
        columns = np.ascontiguousarray(fragments.T)
        first, failed = size(0), size(0)
        targets, sources, sizes = (columns[column].ctypes.data for column in (TO, FROM, BYTES))
        of_all = ctypes.byref(attributes), ctypes.byref(first), 1
        return int(function(targets, sources, sizes, len(fragments), *of_all, ctypes.byref(failed), stream))

    return batch


class CopySettings(NamedTuple):
    """The settings of copies in the environment. Each variable is ``KVPOOL_`` and the name of a field in capitals."""

    load_priority: int
    """Of streams that load what a request waits for. CUDA takes the highest that there is, which is the lowest
    number."""
    save_priority: int
    batch_fragments: int
    """The most fragments in one batched copy. Drivers have crashed with tens of thousands."""
    copy_thread_blocks: int
    """Thread blocks of a kernel that copies over the link; 0 for as many as the kind of link needs."""
    self_test: int
    """0: kernels are used without a test on this GPU."""
    copy_kernels: tuple[str, ...] | None = None
    """The kernels that may be chosen. None: all. The word "none" means no kernel."""

    @classmethod
    def read(cls, kernels: Collection[str], environment: Mapping[str, str] = os.environ) -> CopySettings:
        """The settings of a device that is made now, and knows these kernels. Raises ValueError, which names the
        variable."""
        fields = {
            "load_priority": (-100, -999, 0),
            "save_priority": (0, -999, 0),
            "batch_fragments": (8192, 1, 2**31 - 1),
            "copy_thread_blocks": (0, 0, 65535),
            "self_test": (1, 0, 1),
        }
        text = environment.get("KVPOOL_COPY_KERNELS")
        asked = tuple(text.split(",")) if text and text != "none" else ()
        if not set(asked) <= set(kernels):
            raise ValueError(
                f"KVPOOL_COPY_KERNELS: expected none, or some of {', '.join(kernels)} with commas, got {text!r}"
            )
        settings = {name: _setting(environment, name, *of) for name, of in fields.items()}
        return cls(**settings, copy_kernels=asked if text else None)


def _setting(environment: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    variable = f"KVPOOL_{name.upper()}"
    text = environment.get(variable)
    if text is None:
        return default
    if not re.fullmatch(r"-?\d{1,10}", text) or not low <= int(text) <= high:
        raise ValueError(f"{variable}: expected a number from {low} to {high}, got {text!r}")
    return int(text)


class Driver:
    """Contexts and the capture mode of the calling thread. Methods return the CUresult, 0 for success, and their other
    results.

    A function that the driver does not have does nothing and succeeds. Thread-safe.
    """

    def __init__(self, library: Callable[[str], Any] = ctypes.CDLL) -> None:
        try:
            driver = library(LIBRARY)
        except OSError:
            driver = None
        self._retain = _function(driver, "cuDevicePrimaryCtxRetain", _pointer, _int)
        self._state = _function(driver, "cuDevicePrimaryCtxGetState", _int, _pointer, _pointer)
        self._current = _function(driver, "cuCtxGetCurrent", _pointer)
        self._push = _function(driver, "cuCtxPushCurrent_v2", _pointer)
        self._pop = _function(driver, "cuCtxPopCurrent_v2", _pointer)
        self._attribute = _function(driver, "cuPointerGetAttribute", _pointer, _int, ctypes.c_uint64)
        self._exchange = _function(driver, "cuThreadExchangeStreamCaptureMode", _pointer)
        self.library = driver

    def primary_context(self, index: int) -> tuple[int, int | None]:
        """The context that the runtime uses on a GPU. It is created if it does not exist. It is kept until the process
        ends, as the runtime's own calls keep it."""
        context = ctypes.c_void_p()
        return self._retain(ctypes.byref(context), index), context.value

    def gpu_of(self, address: int, count: int) -> int | None:
        """Which of the ``count`` GPUs some memory belongs to. Creates no context: where there is GPU memory, there is a
        context."""
        ordinal = self._ordinal(address)
        for index in range(count) if ordinal is None else ():
            flags, active = ctypes.c_uint(), ctypes.c_int()
            self._state(index, ctypes.byref(flags), ctypes.byref(active))
            if active.value and ordinal is None:
                if self.push(self.primary_context(index)[1]) == 0:
                    ordinal = self._ordinal(address)
                    self.pop()
        return ordinal

    def _ordinal(self, address: int) -> int | None:
        """The GPU of an address, in the current context."""
        number = ctypes.c_int(-1)
        status = self._attribute(ctypes.byref(number), _DEVICE_ORDINAL, address)
        return None if status or number.value < 0 else number.value

    def start_of(self, address: int) -> int:
        """Where the allocation begins that has this address of the current context."""
        start = ctypes.c_uint64(address)
        self._attribute(ctypes.byref(start), _RANGE_START, address)
        return start.value

    def span_of(self, address: int) -> tuple[int, int] | None:
        """Where the allocation or registration begins and ends that has this address of the current context. None if
        the driver does not say."""
        start, size = ctypes.c_uint64(), ctypes.c_uint64()
        self._attribute(ctypes.byref(start), _RANGE_START, address)
        self._attribute(ctypes.byref(size), _RANGE_SIZE, address)
        end = start.value + size.value
        return (start.value, end) if start.value <= address < end else None

    def current(self) -> int | None:
        """The context of the calling thread. Destructors call it, which may run in the middle of anything: it keeps
        nothing between two calls."""
        context = ctypes.c_void_p()
        self._current(ctypes.byref(context))
        return context.value

    def push(self, context: int | None) -> int:
        """Make a context current. After success, ``pop`` has to undo it."""
        return self._push(context)

    def pop(self) -> None:
        """Restore what was current before ``push``: another context, or none."""
        self._pop(ctypes.byref(ctypes.c_void_p()))

    def relax(self) -> ctypes.c_int:
        """Let calls of this thread pass while other threads capture, without ending a capture. Returns the argument of
        ``restore``."""
        mode = ctypes.c_int(native.CAPTURE_RELAXED)
        self._exchange(ctypes.byref(mode))
        return mode

    def restore(self, mode: ctypes.c_int) -> None:
        self._exchange(ctypes.byref(mode))


def _function(library: Any, name: str, *arguments: Any) -> Callable[..., int]:
    function = getattr(library, name, None)
    if function is None:
        return lambda *ignored: 0
    function.argtypes, function.restype = arguments, _int
    return function


OUT_OF_MEMORY = 2
NOT_READY = 600
INVALID_HANDLE = 400
ALREADY_REGISTERED = 712
LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2
CAPTURING = range(900, 909)
"""cudaErrorStreamCaptureUnsupported and the errors after it."""

# By the documentation of cudaError_t, after each of these the process must be relaunched, or the driver or the context
# is gone.
STICKY = frozenset(
    {
        4,  # cudaErrorCudartUnloading
        35,  # cudaErrorInsufficientDriver
        100,  # cudaErrorNoDevice
        214,  # cudaErrorECCUncorrectable
        220,  # cudaErrorNvlinkUncorrectable
        226,  # cudaErrorContained
        700,  # cudaErrorIllegalAddress
        702,  # cudaErrorLaunchTimeout
        709,  # cudaErrorContextIsDestroyed
        710,  # cudaErrorAssert
        714,  # cudaErrorHardwareStackError
        715,  # cudaErrorIllegalInstruction
        716,  # cudaErrorMisalignedAddress
        717,  # cudaErrorInvalidAddressSpace
        718,  # cudaErrorInvalidPc
        719,  # cudaErrorLaunchFailure
        721,  # cudaErrorTensorMemoryLeak
        803,  # cudaErrorSystemDriverMismatch
        810,  # cudaErrorMpsClientTerminated
        911,  # cudaErrorExternalDevice
        999,  # cudaErrorUnknown
    }
)


class Gpu(NamedTuple):
    """The driver's description of a GPU. Memory is in bytes; the driver's CUDA version is a number such as 13010 for
    13.1; the compute capability is a text such as "9.0"; the link is that of ``link_of``."""

    number: int
    name: str
    memory: int
    driver: int
    capability: str
    multiprocessors: int
    """Fewer than its name says for a part of a GPU."""
    link: str
    compiler: str
    """The version of NVRTC, which compiles the kernels."""


def gpus(cuda: Any) -> list[Gpu]:
    """All GPUs that this process sees. ``cuda`` is CuPy's module of that name. No context is created."""
    runtime = cuda.runtime
    visible, driver = list[Gpu](), int(runtime.driverGetVersion())
    try:
        compiler = "{}.{}".format(*cuda.nvrtc.getVersion())
    except (ImportError, OSError, RuntimeError):
        compiler = "unknown"
    for number in range(runtime.getDeviceCount()):
        gpu, link = runtime.getDeviceProperties(number), link_of(runtime.deviceGetPCIBusId(number))
        size = int(gpu["totalGlobalMem"]), driver, f"{gpu['major']}.{gpu['minor']}", int(gpu["multiProcessorCount"])
        visible.append(Gpu(number, gpu["name"].decode(), *size, link, compiler))
    return visible


def link_of(pci: str, sysfs: Path = SYSFS) -> str:
    """The lanes of a PCI device, and the most that both ends of them can do. "unknown" where the system does not say:
    the present speed is no answer, since an idle link is slow."""
    device = (sysfs / "bus/pci/devices" / pci.lower()).resolve()
    try:
        lanes = (device / "current_link_width").read_text().strip()
        speeds = {(end / "max_link_speed").read_text().strip() for end in (device, device.parent)}
    except OSError:
        return "unknown"
    return f"x{lanes} {' and '.join(sorted(speeds))}"


def status_of(error: BaseException | None) -> int | None:
    """The cudaError_t or CUresult of an error that CuPy raised; both have the same numbers. None for another error."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def is_registered_already(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory to register is registered already."""
    return error is not None and (status_of(error) == ALREADY_REGISTERED or is_registered_already(error.__cause__))


class RuntimeCalls:
    """The runtime of one device. ``runtime`` is CuPy's ``cuda.runtime``. ``functions`` are those of the driver for
    ``native``. Thread-safe."""

    def __init__(self, runtime: Any, index: int, driver: Driver) -> None:
        self.runtime, self.index, self.driver = runtime, index, driver
        self.threads = _Thread()
        status, self.context = driver.primary_context(index)
        with _Call(self, "cuDevicePrimaryCtxRetain", False):
            runtime.check_status(status)
        self.functions = native.find_functions(driver.library, self.context)

    def __call__(self, what: str, *, unsafe: bool = False) -> AbstractContextManager[Any]:
        """A context manager in which the calling thread can use the runtime, on its device. At the end the thread has
        the context that it had before. Errors of the runtime become DeviceError, or MemoryError if memory is exhausted.

        ``unsafe`` is for calls that CUDA calls unsafe: while another thread captures a stream, such a call fails and
        ends the capture. Inside this context it does neither.
        """
        return _Call(self, what, unsafe)

    def pinned_span(self, address: int) -> tuple[int, int] | None:
        """See ``registrations.Registrar``. Raises ValueError if the driver does not say how far the memory goes."""
        with self("cudaPointerGetAttributes", unsafe=True) as runtime:
            if runtime.pointerGetAttributes(address).type != runtime.memoryTypeHost:
                return None
            span = self.driver.span_of(address)
        if span is None:
            raise ValueError(f"pinned memory at {address:#x}: expected its start and size from the driver, got neither")
        return span

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin memory, for ``registrations.Registrar``. Any thread may call it, also in a destructor."""
        with self("cudaHostRegister", unsafe=True) as runtime:
            runtime.hostRegister(address, nbytes, flags)

    def hostUnregister(self, address: int) -> None:
        with self("cudaHostUnregister", unsafe=True) as runtime:
            runtime.hostUnregister(address)


class _Thread(threading.local):
    """Whether a call of this thread is under way: the context of the device is current."""

    inside = False


class _Call:
    """The context manager of one call. It is a class because a generator would cost more than the call."""

    __slots__ = ("_calls", "_mode", "_outer", "_pushed", "_what")

    def __init__(self, calls: RuntimeCalls, what: str, unsafe: bool) -> None:
        self._calls, self._what, self._outer, self._pushed = calls, what, False, False
        self._mode = calls.driver.relax() if unsafe else None

    def __enter__(self) -> Any:
        calls = self._calls
        runtime = calls.runtime
        try:
            if calls.threads.inside:
                return runtime
            current = calls.driver.current()
            if current is None and runtime.getDevice() == calls.index:
                # Functions of the driver need a context. The runtime makes it current with the first call that uses it.
                runtime.setDevice(calls.index)
            elif current != calls.context:
                # Another GPU's, or another one of this GPU. Choosing the caller's device again at the end would create
                # a context there if it has none, of half a gigabyte.
                status = calls.driver.push(calls.context)
                self._pushed = status == 0
                runtime.check_status(status)
            self._outer = calls.threads.inside = True
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._outer:
            self._calls.threads.inside = False
        if self._pushed:
            self._calls.driver.pop()
        if self._mode is not None:
            self._calls.driver.restore(self._mode)
        if isinstance(error, RuntimeError):
            status = status_of(error)
            if status == OUT_OF_MEMORY:
                raise MemoryError(f"{self._what}: {error}") from error
            if status is not None:
                raise DeviceError(f"{self._what}: {error}", sticky=status in STICKY) from error


def own_name(stream: Stream) -> Stream:
    """The one name that each stream has here. Raises ValueError for a handle that can be no stream."""
    if stream.handle == _PER_THREAD_STREAM:
        raise ValueError(
            "stream: the per-thread default stream (2) is another one in every thread; create a stream and name that"
        )
    if stream.handle >= 1 << 63:
        raise ValueError(f"stream: expected the handle of a stream of the driver, got {stream.handle:#x}")
    return NULL_STREAM if stream.handle == LEGACY_STREAM else stream


USABLE, CAPTURED, GONE = "usable", "captured", "gone"
"""What a stream is: work can be enqueued, it would be recorded instead, or the driver says that it was destroyed."""


def state_of(calls: RuntimeCalls, stream: Stream) -> str:
    """One of ``USABLE``, ``CAPTURED`` and ``GONE``. Nothing is promised for a stream that was destroyed: its handle may
    be another stream's by now. Changes no capture. Raises DeviceError."""
    result = native.is_capturing(calls.functions, stream.handle)
    if result <= 0:
        return CAPTURED if result else USABLE
    status = native.failure(result)[1]
    if status == INVALID_HANDLE:
        return GONE
    # The default stream has a status that says so.
    if status not in CAPTURING:
        native.check(calls, result)
    return CAPTURED


def usable_stream(calls: RuntimeCalls, stream: Any) -> Stream:
    """Return a stream, or raise as ``Device.as_stream`` says. A stream that is being captured is refused: the graph
    would repeat what the pool enqueues, and its events would pull the pool's own streams into the graph."""
    checked = own_name(stream_argument(stream))
    state = state_of(calls, checked)
    if state == GONE:
        raise StreamGone(f"stream: expected one that exists, got {stream!r:.80}, which has been destroyed")
    if state == CAPTURED:
        raise ValueError(
            f"stream: expected one that is not being captured, got {stream!r}: call before the capture or after it; "
            "capture_block_offsets and capture_step_tables upload in a graph"
        )
    return checked


def captured_stream(calls: RuntimeCalls, stream: Stream) -> int:
    """The handle of a stream that is being captured. Raises ValueError for any other."""
    if state_of(calls, own_name(stream)) != CAPTURED:
        raise ValueError(f"stream: expected one that is being captured, got {stream!r:.80}")
    return stream.handle

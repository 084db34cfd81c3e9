"""Calls of the CUDA runtime: on which device they are made, what their errors mean for a pool, and which streams of
callers a pool can use."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NamedTuple

from kvpool.device.base import NULL_STREAM, Stream, stream_argument
from kvpool.device.cuda.driver import Driver
from kvpool.errors import DeviceError

OUT_OF_MEMORY = 2
NOT_READY = 600
INVALID_HANDLE = 400
_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2
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
    """What the driver says about a GPU. Memory is in bytes; the driver's CUDA version is a number such as 13010 for
    13.1."""

    number: int
    name: str
    memory: int
    driver: int


def gpus(runtime: Any) -> list[Gpu]:
    """All GPUs that this process sees."""
    driver = int(runtime.driverGetVersion())
    found = [runtime.getDeviceProperties(number) for number in range(runtime.getDeviceCount())]
    return [Gpu(number, one["name"].decode(), int(one["totalGlobalMem"]), driver) for number, one in enumerate(found)]


def status_of(error: BaseException | None) -> int | None:
    """The cudaError_t or CUresult of an error that CuPy raised; both have the same numbers. None for another error."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


class RuntimeCalls:
    """The runtime of one device. ``runtime`` is CuPy's ``cuda.runtime``. Thread-safe."""

    def __init__(self, runtime: Any, index: int, driver: Driver) -> None:
        self.runtime, self.index, self.driver = runtime, index, driver
        self.threads = _Thread()
        status, self.context = driver.primary_context(index)
        with _Call(self, "cuDevicePrimaryCtxRetain", False):
            runtime.check_status(status)

    def __call__(self, what: str, *, unsafe: bool = False) -> AbstractContextManager[Any]:
        """A context manager in which the calling thread can use the runtime, on its device. At the end the thread has
        the context that it had before. Errors of the runtime become DeviceError, or MemoryError if memory is exhausted.

        ``unsafe`` is for calls that CUDA calls unsafe: while another thread captures a stream, such a call fails and
        ends the capture. Inside this context it does neither.
        """
        return _Call(self, what, unsafe)

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin memory, for ``pinned.Registrar``. Any thread may call it, also in a destructor."""
        with self("cudaHostRegister", unsafe=True) as runtime:
            runtime.hostRegister(address, nbytes, flags)

    def hostUnregister(self, address: int) -> None:
        with self("cudaHostUnregister", unsafe=True) as runtime:
            runtime.hostUnregister(address)


class _Thread(threading.local):
    """The state of the calling thread: whether its own context is that of the device, or whether a call has made it
    current."""

    ready = pushed = False


class _Call:
    """The context manager of one call. It is a class because a generator would cost more than the call."""

    __slots__ = ("_calls", "_mode", "_pushed", "_what")

    def __init__(self, calls: RuntimeCalls, what: str, unsafe: bool) -> None:
        self._calls, self._what, self._pushed = calls, what, False
        self._mode = calls.driver.relax() if unsafe else None

    def __enter__(self) -> Any:
        calls = self._calls
        runtime = calls.runtime
        try:
            if calls.threads.pushed:
                return runtime
            if runtime.getDevice() != calls.index:
                # Choosing the caller's device again would create a context there if it has none, of half a gigabyte.
                status, self._pushed = calls.driver.push(calls.context)
                runtime.check_status(status)
                calls.threads.pushed = True
            elif not calls.threads.ready:
                # Functions of the driver need a context. The runtime makes it current with the first call that uses it.
                runtime.setDevice(calls.index)
                runtime.memGetInfo()
                calls.threads.ready = True
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return runtime

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pushed:
            self._calls.driver.pop()
            self._calls.threads.pushed = False
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
        raise ValueError(f"stream={stream.handle:#x}: no stream of the driver has such a handle")
    return NULL_STREAM if stream.handle == _LEGACY_STREAM else stream


def usable_stream(calls: RuntimeCalls, stream: Any) -> Stream:
    """Return a stream, or raise as ``Device.as_stream`` says. A stream that is being captured is refused: the graph
    would repeat what the pool enqueues, and its events would pull the pool's own streams into the graph."""
    found = own_name(stream_argument(stream))
    with calls("cudaStreamIsCapturing") as runtime:
        try:
            capturing = runtime.streamIsCapturing(found.handle)
        except RuntimeError as error:
            if status_of(error) == INVALID_HANDLE:
                raise ValueError(
                    f"stream={stream!r}: it has been destroyed; accepted is a stream that lives"
                ) from error
            # A capture that has failed has no status. The default stream has a status that says so.
            if status_of(error) not in (None, *CAPTURING):
                raise
            capturing = True
    if capturing:
        raise ValueError(
            f"stream={stream!r}: it is being captured; call before the capture begins or behind its end, "
            "and capture what reads block tables, not what hands them over"
        )
    return found


def stream_exists(calls: RuntimeCalls, stream: Stream) -> bool:
    """See ``StreamGone``."""
    with calls("cudaStreamIsCapturing") as runtime:
        try:
            runtime.streamIsCapturing(own_name(stream).handle)
        except RuntimeError as error:
            return status_of(error) != INVALID_HANDLE
    return True

"""Calls of the CUDA runtime: on which device they are made, and what their errors mean for a pool."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvpool.errors import DeviceError

OUT_OF_MEMORY = 2
NOT_READY = 600

# After these, by the documentation of cudaError_t, the process must be relaunched, or the driver or the context is gone.
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
    """What the driver says of a GPU: memory in bytes, and the driver's CUDA version as in 13010 for 13.1."""

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
    """The cudaError_t or CUresult, which have the same numbers, of an error of CuPy's; None for another error."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


class Calls:
    """The runtime of one device. ``runtime`` is CuPy's ``cuda.runtime``. Thread-safe."""

    def __init__(self, runtime: Any, index: int) -> None:
        self.runtime, self.index = runtime, index
        self._threads = threading.local()

    @contextmanager
    def __call__(self, what: str) -> Iterator[Any]:
        """The runtime, with its device current for this thread. Its errors become DeviceError, or MemoryError where there is no more."""
        try:
            before = self.runtime.getDevice()
            if before != self.index or not hasattr(self._threads, "ready"):
                self.runtime.setDevice(self.index)
                # The driver's own functions need a context, which the runtime makes current with the first call that uses it.
                self.runtime.memGetInfo()
                self._threads.ready = True
            try:
                yield self.runtime
            finally:
                if before != self.index:
                    self.runtime.setDevice(before)
        except RuntimeError as error:
            status = status_of(error)
            if status is None:
                raise
            if status == OUT_OF_MEMORY:
                raise MemoryError(f"{what}: {error}") from error
            raise DeviceError(f"{what}: {error}", sticky=status in STICKY) from error

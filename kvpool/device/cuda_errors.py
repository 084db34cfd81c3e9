"""What errors of the CUDA runtime mean for a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvpool.errors import DeviceError

OUT_OF_MEMORY = 2

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


def status_of(error: BaseException | None) -> int | None:
    """The cudaError_t or CUresult, which have the same numbers, of an error of CuPy's; None for another error."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def device_error(what: str, error: Exception) -> DeviceError:
    """The error that says that the device refused ``what``."""
    return DeviceError(f"{what}: {error}", sticky=status_of(error) in STICKY)


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Errors of the runtime and driver become DeviceError."""
    try:
        yield
    except RuntimeError as error:
        if status_of(error) is None:
            raise
        raise device_error(what, error) from error

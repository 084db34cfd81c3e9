"""StepKernel: a Numba kernel that writes the tables of a step on one GPU."""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

from kvpool.device.cuda.runtime import RuntimeCalls
from kvpool.device.steps import StagedStep
from kvpool.errors import DeviceError

_INSTALL = "pip install 'kvpool[cuda12]' or 'kvpool[cuda13]', by the CUDA version of the driver"


class StepKernel:
    """The kernel is compiled at the first ``load``, so a pool that is never asked for a step does not need numba-cuda.
    Thread-safe."""

    def __init__(self, calls: RuntimeCalls) -> None:
        self._calls, self._lock = calls, threading.Lock()
        self._kernel: Any = None
        self._arguments: Any = None

    def load(self) -> None:
        """Compile and load the kernel completely. Raises DeviceError, also if numba-cuda is not installed."""
        with self._lock:
            if self._kernel is not None:
                return
            try:
                from numba import cuda

                from kvpool.device.kernels.step_launches import step_arguments, step_kernel
            except ImportError as error:
                raise DeviceError(f"step tables on a GPU need numba-cuda ({error}): {_INSTALL}") from error
            with self._calls("step_tables", unsafe=True):
                try:
                    self._kernel = step_kernel(tuple(cuda.get_current_device().compute_capability))
                except Exception as error:  # Numba, its compiler and the driver have own errors.
                    raise DeviceError(f"step_tables cannot be compiled: {type(error).__name__}: {error}") from error
            self._arguments = step_arguments

    def launch(self, staged: StagedStep, address: int, stream: int) -> None:
        """Enqueue the kernel. ``address`` is that of the buffer, for kernels. Raises DeviceError. If the error is
        permanent, the next call finds out."""
        thread_blocks, threads, arguments = self._arguments(staged, address)
        with self._calls("step_tables"):
            try:
                self._kernel[thread_blocks, threads, _stream(stream)](*arguments)
            except Exception as error:
                raise DeviceError(f"step_tables: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    """A stream for Numba, made of its number only."""
    from numba import cuda

    return cuda.external_stream(handle) if handle else 0

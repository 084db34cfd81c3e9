"""The cuda device: GPUs through CuPy. ``device`` composes it of the other modules, none of which imports a GPU
package."""

from __future__ import annotations

from kvpool.device.cuda.cuda_device import (
    COPY_PATH,
    CudaDevice,
    describe_gpus,
    device_at,
    launcher_at,
    open_gpu_memory,
    unusable,
)
from kvpool.device.cuda.cuda_memory import close_unused

__all__ = [
    "COPY_PATH",
    "CudaDevice",
    "close_unused",
    "describe_gpus",
    "device_at",
    "launcher_at",
    "open_gpu_memory",
    "unusable",
]

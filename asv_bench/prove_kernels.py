"""Test the kernels that copy on this GPU: ``python -m asv_bench.prove_kernels``."""

from __future__ import annotations

import sys

from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.cuda.calibration import KERNELS
from kvpool.device.cuda.cuda_device import wrong_bytes


def prove_kernels() -> list[str]:
    """A line for each kernel: that it copies the right bytes, or what is wrong with it."""
    device = CudaDevice()
    name, index = device.device_name, device.index
    device.close()
    return [f"{path}: {wrong_bytes(index, path) or f'copies the right bytes on {name}'}" for path in KERNELS]


def main() -> None:
    missing = unusable()
    if missing is not None:
        sys.exit(f"nothing was proven: {missing}")
    print(*prove_kernels(), sep="\n")


if __name__ == "__main__":
    main()

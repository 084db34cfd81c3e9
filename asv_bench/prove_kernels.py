"""Record the kernels that copy the right bytes on this GPU: ``python -m asv_bench.prove_kernels``."""

from __future__ import annotations

import sys

from kvpool.device.cuda import CudaDevice, unusable
from kvpool.device.cuda.calibration import KERNELS, difference, prove


def prove_kernels() -> list[str]:
    """Record each kernel that copies the right bytes, and return a line for each, with what is wrong with it."""
    device, lines = CudaDevice(), []
    device.kernels = set(KERNELS)
    try:
        stream = device.create_stream("proof")
        for path in device._load_kernels():
            wrong = difference(device, stream, path)
            if not wrong:
                prove(path, device.capability, device.device_name, device.driver)
            lines.append(f"{path}: {wrong or f'proven for compute capability {device.capability}'}")
    finally:
        device.close()
    return lines


def main() -> None:
    missing = unusable()
    if missing is not None:
        sys.exit(f"nothing was proven: {missing}")
    print(*prove_kernels(), sep="\n")


if __name__ == "__main__":
    main()

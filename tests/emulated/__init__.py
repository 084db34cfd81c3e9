"""An emulated CUDA driver over main memory, and real CuPy and numba-cuda over it. See README.md."""

from __future__ import annotations

import os
import random
import sys

SEED = "EMU_SEED"


def running() -> bool:
    """Whether this process has the emulated driver in the place of NVIDIA's."""
    return "KVPOOL_EMULATED" in os.environ


def start_again(arguments: list[str]) -> None:
    """Replace this process by Python over the emulated driver. Raises RuntimeError if that is not built."""
    from tests.emulated import build

    if not build.built():
        raise RuntimeError("the emulated driver is not built: python -m tests.emulated build")
    seed = os.environ.get(SEED) or str(random.SystemRandom().randrange(1 << 32))
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **build.environment(), SEED: seed})


def header() -> str:
    return f"emulated driver, not a GPU: {SEED}={os.environ.get(SEED, '(by the clock)')}"

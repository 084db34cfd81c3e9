"""Launches as data: what to run on a GPU, decided without one, and the interface of whatever runs it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.kernels import cuda_sources

OPTIONS = ("-std=c++17",)
"""What every source is compiled with."""
THREADS = 512
"""Threads of a block."""
HOST_THREAD_BLOCKS = 8
"""Enough to keep a bus busy; the other multiprocessors stay with the model."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""Of ``THREADS`` threads: as many as fit with the registers that the kernels use."""


class Launch(NamedTuple):
    """One launch of a kernel of ``source`` with a one-dimensional grid.

    ``record`` is its only argument, passed by value: an array of one element, whose type mirrors the kernel's struct.
    """

    source: str
    kernel: str
    thread_blocks: int
    threads: int
    record: npt.NDArray[Any]


class Launcher(Protocol):
    """What runs launches: a GPU through a driver package, or a test on the CPU. ``stream`` is a handle."""

    @property
    def multiprocessors(self) -> int:
        """Of the device."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue it on the stream. The record may be changed when this returns."""

    def device_address(self, address: int) -> int:
        """The address at which kernels reach memory of the device or pinned memory; ValueError for any other memory."""

    def upload(self, array: npt.NDArray[Any], stream: int) -> int:
        """The address of a copy of a contiguous array that kernels enqueued on ``stream`` from now on can read.

        It stays until the kernels are done that this thread enqueues before its next call of ``upload`` on that stream. The array
        may be changed when this returns.
        """


def cuda_source(name: str) -> str:
    """A file of the CUDA sources with its own includes put in place: all that a compiler, or a cache of one, has to see."""
    folder = cuda_sources()
    text = (folder / name).read_text(encoding="utf-8")
    return re.sub(r'^#include "(.*)"$', lambda match: cuda_source(match[1]).replace("#pragma once\n", ""), text, flags=re.MULTILINE)


def word_bytes(*numbers: Any) -> int:
    """The widest machine word, 16 to 1 bytes, that divides all numbers or arrays of numbers."""
    together = int(np.bitwise_or.reduce([np.bitwise_or.reduce(np.asarray(n, dtype=np.int64), axis=None) for n in numbers])) | 16
    return together & -together


def thread_blocks(needed: int, chosen: int | None, host: bool, multiprocessors: int) -> int:
    """How many thread blocks to launch for work that keeps ``needed`` busy once. ``chosen`` is what the caller asks for."""
    most = chosen or (HOST_THREAD_BLOCKS if host else BLOCKS_PER_MULTIPROCESSOR * multiprocessors)
    return max(1, min(needed, most))

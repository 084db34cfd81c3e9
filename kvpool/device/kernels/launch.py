"""Launches as data: what to run on a GPU, decided without one, and the interface of what runs it."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvpool.device.block_copy import cuda_plan

OPTIONS = ("-std=c++17",)
"""The options with which every source is compiled."""
THREADS = 512
"""Threads of a thread block."""
BUS_THREAD_BLOCKS, CHIP_THREAD_BLOCKS = 8, 24
"""Thread blocks that keep the link to the host busy, for a bus and for a link from chip to chip. The words that so many
thread blocks have requested fill the link. The other multiprocessors stay with the model."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""How many thread blocks of ``THREADS`` threads fit on a multiprocessor, with the registers that the kernels use."""


class Grid(NamedTuple):
    """How many thread blocks a GPU gets: all that fit on its ``multiprocessors``, or ``host_thread_blocks`` for work
    that a link limits."""

    multiprocessors: int
    host_thread_blocks: int = BUS_THREAD_BLOCKS

    def thread_blocks(self, needed: int, host: bool = False, chosen: int | None = None) -> int:
        """Thread blocks for work that fills ``needed`` of them once. ``host``: the work crosses the link. ``chosen`` is
        the caller's own number."""
        most = chosen or (self.host_thread_blocks if host else BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors)
        return max(1, min(needed, most))


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
    """The interface of what runs launches: a GPU through a driver package, or a test on the CPU. ``stream`` is a
    handle."""

    @property
    def grid(self) -> Grid:
        """The grid of the device."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue a launch on the stream. When this returns, the record may be changed."""

    def device_addresses(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The addresses by which kernels reach memory of the device or pinned memory. Raises ValueError for any other
        memory."""

    def uploaded(self, array: npt.NDArray[Any], stream: int, *, host: bool) -> AbstractContextManager[int]:
        """A context manager that gives the address, a multiple of 16, of a copy of a contiguous array. It is for
        kernels that are enqueued on ``stream`` inside the context.

        The copy stays until those kernels are done. With ``host``, for kernels that cross the link to the host anyway,
        it lies in pinned memory, else in memory of the device. The array may be changed inside the context.
        """


def cuda_sources() -> Path:
    """The folder with the ``.cu`` and ``.cuh`` files, installed or in a checkout.

    Raises
    ------
    FileNotFoundError
        Neither place has it.
    """
    package = Path(__file__).resolve().parents[2]
    places = package / "cuda", package.parent / "cuda"
    for place in places:
        # A folder alone proves nothing: beside an installed package, `cuda` is NVIDIA's.
        if (place / "README.md").is_file():
            return place
    raise FileNotFoundError(f"no CUDA sources of kvpool in {places[0]} or {places[1]}")


def cuda_source(name: str) -> str:
    """A file of the CUDA sources with its own includes inserted: the whole text that a compiler, or a cache of compiled
    code, has to see. ``plan.cuh`` is no file: it is what ``block_copy.CopyPlan`` says."""
    text = cuda_plan() if name == "plan.cuh" else (cuda_sources() / name).read_text(encoding="utf-8")
    return re.sub(
        r'^#include "(.*)".*$',
        lambda match: cuda_source(match[1]).replace("#pragma once\n", ""),
        text,
        flags=re.MULTILINE,
    )


def kernels(source: str) -> dict[str, str]:
    """The kernels in the text of a source, and the type of their argument. If there is a kernel for each word size, its
    name ends in the bytes of the word."""
    found = re.findall(r"__global__.* (\w+)(##bytes)?\(const __grid_constant__ (\w+) ", source)
    return {
        f"{kernel}{word}": record
        for kernel, several, record in found
        for word in ((16, 8, 4, 2, 1) if several else ("",))
    }


def word_bytes(*numbers: Any) -> int:
    """The widest machine word, of 16 to 1 bytes, that divides all numbers or arrays of numbers."""
    together = (
        int(np.bitwise_or.reduce([np.bitwise_or.reduce(np.asarray(n, dtype=np.int64), axis=None) for n in numbers]))
        | 16
    )
    return together & -together

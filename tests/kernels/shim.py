"""Builds the CUDA sources for the CPU with g++ and launches their kernels there."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvpool.device.base import stream_argument
from kvpool.device.launches import Grid, Launch, cuda_source

SANITIZE = "KVPOOL_SHIM_SANITIZE"
"""Environment variable: what to give to the compiler's -fsanitize. The address sanitizer has to be loaded before Python
is."""


def kernels(source: str) -> dict[str, str]:
    """The kernels in the text of a source, and the type of their argument. If there is a kernel for each word size, its
    name ends in the bytes of the word."""
    declared = re.findall(r"__global__.* (\w+)(##bytes)?\(const __grid_constant__ (\w+) ", source)
    words = re.findall(r"^[A-Z_]+\((\d+), ", source, flags=re.M) or (16, 8, 4, 2, 1)
    return {f"{kernel}{word}": record for kernel, several, record in declared for word in (words if several else ("",))}


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """A source of ``cuda/`` as a shared library: ``run_<kernel>(record, thread_blocks, threads)`` gives the size of the
    record."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; the kernels are built with it for the CPU")
    source = cuda_source(name)
    wrappers = "".join(f"SHIM({kernel}, {record})\n" for kernel, record in kernels(source).items())
    options = [f"-fsanitize={os.environ[SANITIZE]}", "-fno-sanitize-recover=all"] if SANITIZE in os.environ else []
    with tempfile.TemporaryDirectory() as folder:
        file, built = Path(folder) / "source.cpp", Path(folder) / "library.so"
        waits = "true" if "__sync" in source else "false"
        file.write_text(f'#include "shim.h"\n#define WAITS {waits}\n{source}\n{wrappers}', encoding="utf-8")
        command = [
            compiler,
            "-std=c++17",
            "-O1",
            "-g",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            f"-I{Path(__file__).parent}",
            *options,
        ]
        done = subprocess.run([*command, str(file), "-o", str(built)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(built))


class ShimLauncher:
    """A Launcher that runs kernels on the CPU before ``launch`` returns. ``launches`` is what it was given,
    ``table_loads`` how often their threads have read a table."""

    def __init__(self, grid: Grid | None = None) -> None:
        self.grid = grid or Grid(2)
        self.launches: list[Launch] = []
        self.table_loads = 0

    def stream(self, stream: object, captured: bool) -> int:
        return stream_argument(stream).handle

    def load(self, source: str, kernel: str) -> None:
        self.loaded = source, kernel

    def launch(self, launch: Launch, stream: int) -> None:
        self.launches.append(launch)
        run = getattr(library(launch.source), f"run_{launch.kernel}")
        record = launch.record.copy()
        assert run(None, 0, 0) == record.nbytes, "the struct of the kernel and its record differ"
        run(ctypes.c_void_p(record.ctypes.data), launch.thread_blocks, launch.threads)
        self.table_loads += library(launch.source).take_table_loads()

    def device_addresses(self, addresses: np.ndarray) -> np.ndarray:
        return addresses

    @contextmanager
    def uploaded(self, array: np.ndarray, stream: int, *, host: bool) -> Iterator[int]:
        copy = array.copy()
        yield int(copy.ctypes.data)
        copy[...] = np.iinfo(copy.dtype).max

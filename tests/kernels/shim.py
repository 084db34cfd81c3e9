"""Builds the CUDA sources for the CPU with g++ and launches their kernels there."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.kernels.launch import Launch, cuda_source

SANITIZE = "KVPOOL_SHIM_SANITIZE"
"""Environment variable: what to give to the compiler's -fsanitize. The address sanitizer has to be loaded before Python is."""


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """A source of ``cuda/`` as a shared library: ``run_<kernel>(record, thread_blocks, threads)`` gives the size of the record."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed; the kernels are built with it for the CPU")
    source = cuda_source(name)
    wrappers = "".join(f"SHIM({kernel}, {record})\n" for kernel, record in kernels(source).items())
    options = [f"-fsanitize={os.environ[SANITIZE]}", "-fno-sanitize-recover=all"] if SANITIZE in os.environ else []
    with tempfile.TemporaryDirectory() as folder:
        file, built = Path(folder) / "source.cpp", Path(folder) / "library.so"
        file.write_text(f'#include "shim.h"\n{source}\n{wrappers}', encoding="utf-8")
        command = [compiler, "-std=c++17", "-O1", "-g", "-fno-strict-aliasing", "-shared", "-fPIC", f"-I{Path(__file__).parent}", *options]
        done = subprocess.run([*command, str(file), "-o", str(built)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(built))


def kernels(source: str) -> dict[str, str]:
    """The kernels of a source, and the type of their argument; where there is one for each word, names end in its bytes."""
    found = re.findall(r"__global__.* (\w+)(##bytes)?\(const __grid_constant__ (\w+) ", source)
    return {f"{kernel}{word}": record for kernel, several, record in found for word in ((16, 8, 4, 2, 1) if several else ("",))}


class ShimLauncher:
    """A Launcher that runs kernels on the CPU before ``launch`` returns. ``launches`` is what it was given."""

    def __init__(self, multiprocessors: int = 2) -> None:
        self.multiprocessors = multiprocessors
        self.launches: list[Launch] = []
        self._uploaded: Any = None

    def launch(self, launch: Launch, stream: int) -> None:
        self.launches.append(launch)
        run = getattr(library(launch.source), f"run_{launch.kernel}")
        record = launch.record.copy()
        assert run(None, 0, 0) == record.nbytes, "the struct of the kernel and its record differ"
        run(ctypes.c_void_p(record.ctypes.data), launch.thread_blocks, launch.threads)

    def device_address(self, address: int) -> int:
        return address

    def upload(self, array: np.ndarray, stream: int) -> int:
        self._uploaded = array.copy()
        return int(self._uploaded.ctypes.data)

"""Numba kernels whose threads need each other, rightly or wrongly."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda import types


def reversed_with_a_barrier(values: Any, out: Any) -> None:
    shared = cuda.shared.array(4, types.int64)
    shared[cuda.threadIdx.x] = values[cuda.threadIdx.x]
    cuda.syncthreads()
    out[cuda.threadIdx.x] = shared[3 - cuda.threadIdx.x]


def reversed_without_a_barrier(values: Any, out: Any) -> None:
    shared = cuda.shared.array(4, types.int64)
    shared[cuda.threadIdx.x] = values[cuda.threadIdx.x]
    out[cuda.threadIdx.x] = shared[3 - cuda.threadIdx.x]


def waiting_in_part(values: Any, out: Any) -> None:
    if cuda.threadIdx.x:
        cuda.syncthreads()
    out[cuda.threadIdx.x] = values[cuda.threadIdx.x]

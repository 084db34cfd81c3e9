"""Numba CUDA kernels around block tables. Import this only where kernels are launched: it needs the extra ``cuda12`` or ``cuda13``.

They take arrays that the device can read, pinned memory too, and any one-dimensional grid. ``device.reference`` says the same in NumPy.
"""

from __future__ import annotations

from typing import Any

from numba import cuda


@cuda.jit
def gather_rows(table: Any, rows: Any, affine: Any, out: Any) -> None:
    """Rows of a block table as engines want them: ``out[k, i, j]`` is ``table[rows[i], j] * affine[k, 0] + affine[k, 1]``, or -1 for -1.

    ``table`` int32[sequences, columns], ``rows`` int32 or int64[n] within it, ``affine`` int64[outputs, 2], ``out``
    int32[outputs, n, width], ``width`` at most ``columns``. An output is a pool, or K or V of one. Every value has to fit
    into an int32: nothing checks it.
    """
    for i in range(cuda.blockIdx.x, out.shape[1], cuda.gridDim.x):
        row = rows[i]
        for j in range(cuda.threadIdx.x, out.shape[2], cuda.blockDim.x):
            block = table[row, j]
            for k in range(out.shape[0]):
                out[k, i, j] = block if block == -1 else block * affine[k, 0] + affine[k, 1]


@cuda.jit
def slot_mapping(table: Any, rows: Any, first_tokens: Any, indptr: Any, tokens_per_block: Any, out: Any) -> None:
    """The slots of tokens of several sequences: ``out[t]`` for the tokens ``indptr[i] <= t < indptr[i + 1]`` of sequence ``i``.

    They are the tokens from ``first_tokens[i]`` on of the row ``rows[i]`` of ``table`` int32[sequences, columns]; a slot is
    ``block * tokens_per_block`` and the place inside the block. Beyond the row, and where there is no block, it is -1, which copies leave
    out. ``rows``, ``first_tokens`` [n] and ``indptr`` [n + 1], ascending from 0, are int32 or int64; ``out`` is int64[indptr[n]].
    """
    for t in range(cuda.grid(1), out.shape[0], cuda.gridsize(1)):
        # The last sequence that starts at or before t; empty ones end there too.
        low, high = 0, rows.shape[0] - 1
        while low < high:
            middle = (low + high + 1) // 2
            if indptr[middle] <= t:
                low = middle
            else:
                high = middle - 1
        token = first_tokens[low] + t - indptr[low]
        column = token // tokens_per_block
        slot = -1
        if column < table.shape[1]:
            block = table[rows[low], column]
            if block != -1:
                slot = block * tokens_per_block + token % tokens_per_block
        out[t] = slot

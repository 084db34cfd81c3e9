"""The launches of the kernel that moves tokens inside the device tier."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvpool.device.kernels.launch import THREADS, Grid, Launch, word_bytes

Int64s = npt.NDArray[np.int64]

MOVES = 320
"""The most moves of one launch. They travel in its argument, which may have 4,096 bytes."""
_PLACES = (
    "base",
    "block_stride",
    "outer_stride",
    "inner_stride",
    "tokens_per_block",
    "outer",
    "inner",
    "token_bytes",
    "groups",
)
# The struct of cuda/token_moves.cu, field by field.
TOKEN_MOVES = np.dtype(
    [*((name, np.int64) for name in _PLACES), *((name, np.uint32, MOVES) for name in ("ends", "source", "target"))]
)


def token_moves(plan: Int64s, moves: Int64s, starts: Int64s, grid: Grid) -> Iterator[Launch]:
    """The launches that do what ``Device.move_tokens`` does, each with up to ``MOVES`` moves, in order.

    ``plan`` is int64[19], ``device.block_copy.Plan.vector()`` of the pools. The moves have been checked. Raises
    ValueError for pools of more slots than the kernel can count.
    """
    base, block_stride, _, outer_stride, inner_stride = plan[:5].tolist()
    width, outer, inner, token_bytes = (int(plan[i]) for i in (12, 16, 17, 18))
    if int(plan[10]) * width >= 2**32:
        raise ValueError(f"device_blocks: {int(plan[10])} of {width} tokens; a GPU takes fewer than 2**32 slots")
    word = word_bytes(base, block_stride, outer_stride, inner_stride, token_bytes)
    for first in range(0, len(moves), MOVES):
        some = moves[first : first + MOVES]
        ends = np.unique(np.clip(starts - first, 0, len(some)))[1:]
        record = np.zeros(1, TOKEN_MOVES)
        record[list(_PLACES)] = (
            base,
            block_stride,
            outer_stride,
            inner_stride,
            width,
            outer,
            inner,
            token_bytes,
            len(ends),
        )
        record["ends"][0, : len(ends)] = ends
        record["source"][0, : len(some)], record["target"][0, : len(some)] = some.T
        needed = -(-len(ends) * outer * inner * (token_bytes // word) // THREADS)
        yield Launch("token_moves.cu", f"move_tokens_{word}", grid.thread_blocks(needed), THREADS, record)

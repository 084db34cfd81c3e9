"""Token moves on the CPU, and the checks of token moves for every device. A token move copies KV to another slot of the
device tier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvpool.device.regions import Regions
from kvpool.jit import jit
from kvpool.jit.intrinsics import memcpy

Int64s = NDArray[np.int64]


class TokenMoves(NamedTuple):
    """Checked token moves. ``moves`` is int64[n, 2] of slots (source, target), in groups [starts[g], starts[g + 1]).
    The arrays are contiguous and private."""

    moves: Int64s
    starts: Int64s

    @classmethod
    def of(cls, moves: Any, starts: Any, regions: Regions) -> TokenMoves:
        """Copy and check the arguments of ``Device.move_tokens``. Raises TypeError or ValueError for rows that are no
        token moves of this pool."""
        for name, given in (("moves", moves), ("starts", starts)):
            if not isinstance(given, np.ndarray) or given.dtype != np.int64:
                found = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
                raise TypeError(f"{name}: an int64 array is needed, not {found}")
        moves, starts = np.array(moves, np.int64, order="C"), np.array(starts, np.int64, order="C")
        if moves.ndim != 2 or moves.shape[1] != 2:
            raise ValueError(f"moves: shape [n, 2] is needed, not {list(moves.shape)}")
        if (
            starts.ndim != 1
            or not len(starts)
            or starts[0] != 0
            or starts[-1] != len(moves)
            or (np.diff(starts) < 0).any()
        ):
            raise ValueError(f"starts: rising numbers from 0 to {len(moves)} are needed, not {starts.tolist()!r:.80}")
        found, slots = cls(moves, starts), regions.device_blocks * regions.width
        wrong = (found.moves < 0).any(1) | (found.moves >= slots).any(1) | (found.moves[:, 0] == found.moves[:, 1])
        together = ""
        if len(regions.all) > 1:
            inside = np.flatnonzero(~wrong)
            blocks = found.moves[inside] // regions.width
            region, _ = regions.pool_ids.place(blocks)
            wrong[inside] = (region[:, 0] != region[:, 1]) | (regions.widths[region[:, 0]] != regions.width)
            together = f" of one region with {regions.width} tokens in a block"
        if wrong.any():
            bad = int(wrong.argmax())
            raise ValueError(
                f"moves[{bad}]: {found.moves[bad].tolist()} must be two different slots in [0, {slots}){together}"
            )
        return found

    def by_region(self, regions: Regions) -> Iterator[tuple[int, TokenMoves]]:
        """The moves of each region that has any, in their groups, with the slots of the region."""
        if len(regions.all) == 1:
            yield 0, self
            return
        region, _ = regions.pool_ids.place(self.moves[:, 0] // regions.width)
        for one in np.unique(region).tolist():
            mine = region == one
            before = np.concatenate([[0], np.cumsum(mine)])
            yield (
                one,
                TokenMoves(self.moves[mine] - regions.pool_ids.first(one)[0] * regions.width, before[self.starts]),
            )

    def rows(self, width: int) -> tuple[Int64s, Int64s]:
        """What the moves read and write: rows (block id, first token, end of tokens), for devices that look for
        races."""
        blocks, tokens = np.divmod(self.moves.T, width)
        reads, writes = np.stack([blocks, tokens, tokens + 1], axis=2)
        return reads, writes


@jit
def move_tokens(moves, plan_vector):  # type: ignore[no-untyped-def]
    """Move tokens in all layers, planes and heads, one after the other. The moves have been checked."""
    v = plan_vector
    base, block_stride, outer_stride, inner_stride, width = v[0], v[1], v[3], v[4], v[12]
    outer, inner, token_bytes = v[16], v[17], v[18]
    for i in range(moves.shape[0]):
        source = base + moves[i, 0] // width * block_stride + moves[i, 0] % width * token_bytes
        target = base + moves[i, 1] // width * block_stride + moves[i, 1] % width * token_bytes
        for o in range(outer):
            for j in range(inner):
                place = o * outer_stride + j * inner_stride
                memcpy(target + place, source + place, token_bytes)

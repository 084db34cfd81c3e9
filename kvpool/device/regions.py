"""Regions: which region a block id belongs to, which block of it, and the moves of a batch by region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.layout import BlockLayout, integer_argument
from kvpool.arrays.pool_ids import PoolIds
from kvpool.arrays.strided import as_strided
from kvpool.device.base import SOURCE, TARGET, TICKET, TOKENS, Part, Region
from kvpool.device.block_copy import first_bad_move
from kvpool.jit import jit

Int64s = NDArray[np.int64]

BLOCKS_MAX = 2**31 - 1
"""The most blocks of all regions and tiers together. Ids are int32."""
_EDGE, _SHIFT, _WIDTH = range(3)


class Regions:
    """The regions of one pool, checked, and the map from pool ids to the ids of each region. Immutable.

    Attributes
    ----------
    all
        The regions in order: one for each group.
    pool_ids
        The map: the region of a block has the number of its group.
    device_blocks, host_blocks, blocks
        Of all regions together.
    width
        The most tokens that a block of any region has; ``widths`` int64[regions] are those of each region.
    """

    def __init__(self, regions: Sequence[Region], device_memory: str = "host") -> None:
        """Raises TypeError or ValueError unless everything fits together. ``device_memory`` says where the device tier
        lies, as in ``StridedArray``."""
        self.all = _checked(regions, device_memory)
        self.pool_ids = PoolIds(
            [region.device_blocks for region in self.all], [region.host_blocks for region in self.all]
        )
        self.device_blocks, self.blocks = self.pool_ids.device_blocks, self.pool_ids.blocks
        self.host_blocks = self.blocks - self.device_blocks
        self.widths: Int64s = np.array([region.tokens_per_block for region in self.all], np.int64)
        self.width = int(self.widths.max())
        # For jitted code, each range of ids has its first id, the shift to the region's ids, and the tokens of a block.
        # The last column is the end.
        self._map = np.zeros((3, len(self.pool_ids.edges)), np.int64)
        self._map[_EDGE], self._map[_SHIFT, :-1] = self.pool_ids.edges, self.pool_ids.shifts
        self._map[_WIDTH, :-1] = np.tile(self.widths, 2)

    @property
    def pools(self) -> tuple[Any, ...]:
        """The memory of both tiers of all parts."""
        return tuple(
            pool for region in self.all for part in region.parts for pool in (part.device_pool, part.host_pool)
        )

    @cached_property
    def lengths(self) -> Int64s:
        """int64[blocks]: the tokens of each block, for devices that look for races."""
        return np.repeat(self._map[_WIDTH, :-1], np.diff(self._map[_EDGE]))

    def host_blocks_at(self, address: int, nbytes: int) -> range | None:
        """The ids of the host blocks that have some of these bytes; None unless they begin in a host tier."""
        for number, region in enumerate(self.all):
            for part in region.parts:
                start = address - as_strided("pool", part.host_pool).address
                if 0 <= start < part.host_pool.nbytes:
                    size, first = part.layout.block_bytes, int(self._map[_EDGE, len(self.all) + number])
                    return range(first + start // size, first + (start + nbytes - 1) // size + 1)
        return None

    def split(self, moves: Int64s) -> list[tuple[int, Int64s]]:
        """The moves of each region, in their order, with the ids of the region. Raises ValueError, which names a row
        that is no move."""
        if len(self.all) == 1:
            bad = first_bad_move(moves, self.blocks, self.width)
            if bad < 0:
                return [(0, moves)]
            raise ValueError(self.describe_bad_move(bad, moves[bad]))
        out, ends = np.empty_like(moves), np.zeros(len(self.all), np.int64)
        bad = _split(moves, self._map, out, ends)
        if bad >= 0:
            raise ValueError(self.describe_bad_move(bad, moves[bad]))
        return [
            (region, out[first:end]) for region, (first, end) in enumerate(pairwise([0, *ends.tolist()])) if end > first
        ]

    def describe_bad_move(self, index: int, move: Int64s) -> str:
        """Why a row is no move, in words."""
        source, target, tokens = int(move[SOURCE]), int(move[TARGET]), int(move[TOKENS])
        width = int(self.widths[self.pool_ids.place(move[SOURCE])[0]]) if 0 <= source < self.blocks else self.width
        together = " of one region" if len(self.all) > 1 else ""
        return (
            f"moves[{index}]: source={source} and target={target} must be two different ids in [0, "
            f"{self.blocks}){together}, "
            f"tokens={tokens} must be 1 to {width}"
        )


@jit
def _column(places, block):  # type: ignore[no-untyped-def]
    """The column of the map that a block is in, or -1."""
    if not 0 <= block < places[_EDGE, -1]:
        return -1
    column = 0
    while places[_EDGE, column + 1] <= block:
        column += 1
    return column


@jit
def _split(moves, places, out, ends):  # type: ignore[no-untyped-def]
    """Check all moves, then write them to ``out``, region after region. ``ends`` is all 0 at first; it gets the end of
    each region's moves.

    Returns -1, or the index of the first bad move.
    """
    regions = ends.shape[0]
    for i in range(moves.shape[0]):
        source, target, tokens = moves[i, SOURCE], moves[i, TARGET], moves[i, TOKENS]
        s, t = _column(places, source), _column(places, target)
        if s < 0 or t < 0 or s % regions != t % regions or source == target or not 1 <= tokens <= places[_WIDTH, s]:
            return i
        ends[s % regions] += 1
    begin = 0
    for region in range(regions):
        begin, ends[region] = begin + ends[region], begin
    for i in range(moves.shape[0]):
        s, t = _column(places, moves[i, SOURCE]), _column(places, moves[i, TARGET])
        to = ends[s % regions]
        out[to, SOURCE] = moves[i, SOURCE] + places[_SHIFT, s]
        out[to, TARGET] = moves[i, TARGET] + places[_SHIFT, t]
        out[to, TOKENS], out[to, TICKET] = moves[i, TOKENS], moves[i, TICKET]
        ends[s % regions] += 1
    return -1


def _checked(regions: Any, device_memory: str) -> tuple[Region, ...]:
    """The regions, checked, with counts that are ints."""
    if not isinstance(regions, Sequence) or not all(isinstance(region, Region) for region in regions):
        raise TypeError(f"regions={regions!r:.80}: a sequence of Region is needed")
    if not regions:
        raise ValueError("regions=[]: at least one is needed")
    found = []
    for i, region in enumerate(regions):
        counts = [
            integer_argument(f"regions[{i}].{name}", getattr(region, name), 0, BLOCKS_MAX)
            for name in ("device_blocks", "host_blocks")
        ]
        parts = tuple(region.parts)
        if not parts or not all(isinstance(part, Part) and isinstance(part.layout, BlockLayout) for part in parts):
            raise TypeError(f"regions[{i}].parts: at least one Part with a BlockLayout is needed")
        if len({part.layout.tokens_per_block for part in parts}) > 1:
            raise ValueError(
                f"regions[{i}].parts: tokens_per_block must be equal, not "
                f"{[part.layout.tokens_per_block for part in parts]}"
            )
        for j, part in enumerate(parts):
            for name, blocks, memory in (("device_pool", counts[0], device_memory), ("host_pool", counts[1], "host")):
                _check_pool(
                    f"regions[{i}].parts[{j}].{name}", getattr(part, name), blocks * part.layout.block_bytes, memory
                )
        found.append(Region(parts, *counts))
    blocks = sum(region.device_blocks + region.host_blocks for region in found)
    if blocks > BLOCKS_MAX:
        raise ValueError(f"regions: {blocks} blocks; together they must be at most {BLOCKS_MAX}")
    return tuple(found)


def _check_pool(name: str, pool: Any, nbytes: int, memory: str) -> None:
    """Raise ValueError unless ``pool`` is ``nbytes`` flat bytes of the right kind of memory."""
    try:
        found = as_strided(name, pool)
    except TypeError as error:
        raise ValueError(str(error)) from None
    kind = (found.memory, found.kind, found.itemsize, len(found.shape))
    if kind != (memory, "u", 1, 1) or (found.shape[0] > 1 and found.steps != (1,)):
        raise ValueError(f"{name}: a contiguous uint8 array of one dimension in {memory} memory is needed")
    if found.shape[0] != nbytes or not found.writable:
        raise ValueError(
            f"{name}: {nbytes} writable bytes are needed, not {found.shape[0]} with writable={found.writable}"
        )

"""Regions: which region a block id belongs to, which block of it, and the moves of a batch by region."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from kvpool.arrays import Int64s
from kvpool.arrays.pool_ids import PoolIds
from kvpool.arrays.strided import as_strided
from kvpool.device.base import SOURCE, TARGET, TICKET, TOKENS, Region
from kvpool.jit import jit

BLOCKS_MAX = 2**31 - 1
"""The most blocks of all regions and tiers together. Ids are int32."""
_EDGE, _SHIFT = range(2)


class Regions:
    """The regions of one pool, and the map from pool ids to the ids of each region. Immutable.

    Attributes
    ----------
    all
        The regions in order: one for each group.
    pool_ids
        The map: the region of a block has the number of its group.
    device_blocks, host_blocks, blocks
        Of all regions together.
    width
        The most tokens that a block of any region has.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.all = tuple(regions)
        self.pool_ids = PoolIds(
            [region.device_blocks for region in self.all], [region.host_blocks for region in self.all]
        )
        self.device_blocks, self.blocks = self.pool_ids.device_blocks, self.pool_ids.blocks
        self.host_blocks = self.blocks - self.device_blocks
        self._widths = np.array([region.tokens_per_block for region in self.all], np.int64)
        self.width = int(self._widths.max())
        # For jitted code, each range of ids has its first id, and the shift to the region's ids. The last column is the
        # end.
        self._map = np.zeros((2, len(self.pool_ids.edges)), np.int64)
        self._map[_EDGE], self._map[_SHIFT, :-1] = self.pool_ids.edges, self.pool_ids.shifts

    @property
    def pools(self) -> tuple[Any, ...]:
        """The memory of both tiers of all parts."""
        return tuple(
            pool for region in self.all for part in region.parts for pool in (part.device_pool, part.host_pool)
        )

    @cached_property
    def lengths(self) -> Int64s:
        """int64[blocks]: the tokens of each block, for devices that look for races."""
        return np.repeat(np.tile(self._widths, 2), np.diff(self.pool_ids.edges))

    @cached_property
    def layers(self) -> Int64s:
        """int64[blocks]: the layers of each block, likewise."""
        return np.repeat(np.tile([region.layers for region in self.all], 2), np.diff(self.pool_ids.edges))

    def host_blocks_at(self, address: int, nbytes: int) -> range | None:
        """The ids of the host blocks that have some of these bytes; None unless they begin in a host tier."""
        for number, region in enumerate(self.all):
            for part in region.parts:
                start = address - as_strided("pool", part.host_pool).address
                if 0 <= start < part.host_pool.nbytes:
                    size, first = part.layout.block_bytes, self.pool_ids.first(number)[1]
                    return range(first + start // size, first + (start + nbytes - 1) // size + 1)
        return None

    def split(self, moves: Int64s) -> list[tuple[int, Int64s]]:
        """The moves of each region, in their order, with the ids of the region."""
        if len(self.all) == 1:
            return [(0, moves)]
        out, ends = np.empty_like(moves), np.zeros(len(self.all), np.int64)
        _split(moves, self._map, out, ends)
        return [
            (region, out[first:end]) for region, (first, end) in enumerate(pairwise([0, *ends.tolist()])) if end > first
        ]


@jit
def _column(places, block):  # type: ignore[no-untyped-def]
    """The column of the map that a block is in."""
    column = 0
    while places[_EDGE, column + 1] <= block:
        column += 1
    return column


@jit
def _split(moves, places, out, ends):  # type: ignore[no-untyped-def]
    """Write moves to ``out``, region after region. ``ends`` is all 0 at first; it gets the end of each region's
    moves."""
    regions = ends.shape[0]
    for i in range(moves.shape[0]):
        ends[_column(places, moves[i, SOURCE]) % regions] += 1
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

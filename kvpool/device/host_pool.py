"""HostPool: a bound pool whose tiers are both main memory, and all that is done to its bytes there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvpool.device.block_copy import CACHED_BYTES_MAX, copy_fragments, copy_moves, make_plan, move_tokens
from kvpool.device.regions import Regions
from kvpool.device.work import TokenMoves

Int64s = NDArray[np.int64]


class HostPool:
    """The memory of ``regions``, which this keeps alive: a copy gets addresses only. Several threads may copy."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._plans = [
            [make_plan(*part, region.device_blocks, region.host_blocks).vector() for part in region.parts]
            for region in regions.all
        ]
        self._streaming = sum(pool.nbytes for pool in regions.pools) > CACHED_BYTES_MAX
        self._only = self._plans[0][0] if len(self._plans) == len(self._plans[0]) == 1 else None

    def planned(self, moves: Int64s) -> list[tuple[Int64s, Int64s]]:
        """The moves of each part of each region, and the vector of its plan, for ``copy_moves``."""
        if self._only is not None:
            return [(moves, self._only)]
        return [(rows, plan) for region, rows in self.regions.split(moves) for plan in self._plans[region]]

    def copy_blocks(self, moves: Int64s) -> None:
        """Make moves, as in ``Device.copy_blocks``."""
        for rows, plan in self.planned(moves):
            copy_moves(rows, plan)

    def copy_fragments(self, rows: Int64s) -> None:
        copy_fragments(rows, self._streaming)

    def move_tokens(self, work: TokenMoves) -> None:
        for region, found in work.by_region(self.regions):
            for plan in self._plans[region]:
                move_tokens(found.moves, plan)

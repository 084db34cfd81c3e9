"""Work: what ``Device.enqueue`` takes. Staged tables are in ``tables`` and ``steps``; what concerns blocks is here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvpool.device.regions import Regions
from kvpool.device.steps import StagedStep
from kvpool.device.tables import StagedRows, StagedVectors

if TYPE_CHECKING:
    from kvpool.device.host_pool import HostPool

Int64s = NDArray[np.int64]


class Fragments(NamedTuple):
    """Contiguous bytes to copy: ``rows`` int64[n, 3] of (source address, target address, bytes).

    None writes what another one reads or writes, so the device may make them in any order and at the same time. Each
    lies in memory that the device can reach: memory that ``bind`` got, memory of its GPU, pinned memory, or, on a
    device without a GPU, any main memory. The caller keeps that memory alive as long as the device is bound. The array
    may be changed when ``enqueue`` returns.
    """

    rows: Int64s

    def run(self, pool: HostPool) -> None:
        pool.copy_fragments(self.rows)


class TokenMoves(NamedTuple):
    """Tokens that move to other slots of device blocks, in all parts, layers, planes and heads.

    ``moves`` is int64[n, 2] with rows (source, target) inside one region. A slot is block id * width + token, where
    width is the most tokens that a block of any region has. Tokens of regions whose blocks have fewer tokens than that
    do not move.

    Group g of the rows is [starts[g], starts[g + 1]); ``starts`` is int64[groups + 1], from 0 to n. The rows of a group
    are made in order. Inside a group, a row may write what an earlier row reads, but may not read what an earlier row
    writes. No group writes what another group reads or writes.
    """

    moves: Int64s
    starts: Int64s

    def run(self, pool: HostPool) -> None:
        pool.move_tokens(self)

    def by_region(self, regions: Regions) -> Iterator[tuple[int, TokenMoves]]:
        """The moves of each region that has any, in their groups, with the slots of the region."""
        if len(regions.all) == 1:
            yield 0, self
            return
        region, _ = regions.pool_ids.place(self.moves[:, 0] // regions.width)
        for one in np.unique(region).tolist():
            mine = region == one
            before = np.concatenate([[0], np.cumsum(mine)])
            first = regions.pool_ids.first(one)[0] * regions.width
            yield one, TokenMoves(self.moves[mine] - first, before[self.starts])

    def reads_and_writes(self, width: int) -> tuple[Int64s, Int64s]:
        """What the moves read and write: rows (block id, first token, end of tokens), for devices that look for
        races."""
        blocks, tokens = np.divmod(self.moves.T, width)
        reads, writes = np.stack([blocks, tokens, tokens + 1], axis=2)
        return reads, writes


Work: TypeAlias = Fragments | TokenMoves | StagedRows | StagedVectors | StagedStep
"""Each has ``run(pool)``, which does it at once in main memory. ``pool`` is the HostPool that a device is bound to."""

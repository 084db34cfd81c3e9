"""Pool ids: one numbering of the blocks of all groups. First come all device blocks, group after group, then all host
blocks.

Inside a group, ids are as if the group were alone: its device blocks from 0 on, then its host blocks. The state and
block tables use ids of a group. Copies, devices and leases use pool ids. A group of the state is a region of the
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvpool.arrays import Int64s


class PoolIds:
    """The numbering of one pool. Immutable.

    ``edges`` int64[2 * groups + 1] has the first pool id of the device blocks of each group, then that of the host
    blocks of each group, and the end. ``shifts`` int64[2 * groups] is added to a pool id between two edges to make it
    an id of its group.
    """

    def __init__(self, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
        counts = np.array([device_blocks, host_blocks], np.int64)
        self.groups, self.device_blocks, self.blocks = counts.shape[1], int(counts[0].sum()), int(counts.sum())
        self.edges: Int64s = np.concatenate([[0], np.cumsum(counts)])
        self.shifts: Int64s = np.concatenate([np.zeros_like(counts[0]), counts[0]]) - self.edges[:-1]

    def place(self, ids: Int64s) -> tuple[Int64s, Int64s]:
        """The group of each block, and the block's id there. The ids must be of this pool."""
        if self.groups == 1:
            return np.zeros_like(ids), ids
        columns = np.searchsorted(self.edges, ids, "right") - 1
        return columns % self.groups, ids + self.shifts[columns]

    def of(self, group: int, blocks: Int64s) -> Int64s:
        """The pool ids of blocks of a group: the reverse of ``place``."""
        host = blocks >= self.edges[group + 1] - self.edges[group]
        found: Int64s = blocks - self.shifts[group + host * self.groups]
        return found

    def first(self, group: int) -> tuple[int, int]:
        """The pool ids of the first device block and of the first host block of a group."""
        return int(self.edges[group]), int(self.edges[self.groups + group])

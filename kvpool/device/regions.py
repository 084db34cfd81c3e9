"""Regions: the blocks of one kind in both tiers, the parts that they lie in, and the columns of copy ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import BlockLayout, PoolIds
from kvpool.common.arrays.strided import as_strided
from kvpool.common.jit import jit

SOURCE, TARGET, TOKENS, TICKET = range(4)
"""Columns of a batch of copy ops."""


FROM, TO, BYTES = range(3)
"""Columns of fragments: contiguous bytes from one address to another."""


class Layers(NamedTuple):
    """Some layers: part number ``part`` of ``parts``, which follow each other and are about equal."""

    part: int
    parts: int

    def of(self, total: int) -> range:
        """Which of ``total`` layers."""
        return range(total * self.part // self.parts, total * (self.part + 1) // self.parts)

    @staticmethod
    def that_has(layer: int, total: int, parts: int) -> int:
        """The part that has this one of ``total`` layers."""
        return ((layer + 1) * parts - 1) // total


ALL_LAYERS = Layers(0, 1)


class Part(NamedTuple):
    """Memory of some layers of a region. Both tiers have the same ``layout`` and are given as flat bytes."""

    layout: BlockLayout
    device_pool: Any
    host_pool: Any


class Region(NamedTuple):
    """Blocks of one kind. They lie in one or more parts, and a copy of a block copies it in every part.

    All parts have the same number of blocks, and as many tokens in a block.
    """

    parts: tuple[Part, ...]
    device_blocks: int
    host_blocks: int

    @classmethod
    def of(cls, layout: BlockLayout, device_pool: Any, host_pool: Any, device_blocks: int, host_blocks: int) -> Region:
        """A region of one part."""
        return cls((Part(layout, device_pool, host_pool),), device_blocks, host_blocks)

    @property
    def tokens_per_block(self) -> int:
        return self.parts[0].layout.tokens_per_block

    @property
    def layers(self) -> int:
        """The layers of all parts together."""
        return sum(part.layout.layers for part in self.parts)

    def parts_of(self, layers: Layers) -> Iterator[tuple[Part, range]]:
        """The parts that have some of these layers, and which of its own layers each has."""
        wanted, first = layers.of(self.layers), 0
        for part in self.parts:
            part_layers = range(max(wanted.start - first, 0), min(wanted.stop - first, part.layout.layers))
            first += part.layout.layers
            if part_layers:
                yield part, part_layers


BLOCKS_MAX = 2**31 - 1
"""The most blocks of all regions and tiers together. Ids are int32."""


_EDGE, _SHIFT = range(2)


@jit
def _column(places, block):  # type: ignore[no-untyped-def]
    """The column of the map that a block is in."""
    column = 0
    while places[_EDGE, column + 1] <= block:
        column += 1
    return column


@jit(nogil=False)
def _split(copy_ops, places, out, ends):  # type: ignore[no-untyped-def]
    """Write copy ops to ``out``, region after region. ``ends`` is all 0 at first; it gets the end of each region's
    copy ops."""
    regions = ends.shape[0]
    for i in range(copy_ops.shape[0]):
        ends[_column(places, copy_ops[i, SOURCE]) % regions] += 1
    begin = 0
    for region in range(regions):
        begin, ends[region] = begin + ends[region], begin
    for i in range(copy_ops.shape[0]):
        s, t = _column(places, copy_ops[i, SOURCE]), _column(places, copy_ops[i, TARGET])
        to = ends[s % regions]
        out[to, SOURCE] = copy_ops[i, SOURCE] + places[_SHIFT, s]
        out[to, TARGET] = copy_ops[i, TARGET] + places[_SHIFT, t]
        out[to, TOKENS], out[to, TICKET] = copy_ops[i, TOKENS], copy_ops[i, TICKET]
        ends[s % regions] += 1


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

    def have(self, array: Any) -> bool:
        """Whether an array is the memory of a tier of a part."""
        return any(array is pool for pool in self.pools)

    @cached_property
    def lengths(self) -> Int64s:
        """int64[blocks]: the tokens of each block, for devices that look for races."""
        return self.pool_ids.each(self._widths)

    @cached_property
    def layers(self) -> Int64s:
        """int64[blocks]: the layers of each block, likewise."""
        return self.pool_ids.each([region.layers for region in self.all])

    def host_blocks_at(self, address: int, nbytes: int) -> range | None:
        """The ids of the host blocks that have some of these bytes; None unless they begin in a host tier."""
        for number, region in enumerate(self.all):
            for part in region.parts:
                start = address - as_strided("pool", part.host_pool).address
                if 0 <= start < part.host_pool.nbytes:
                    size, first = part.layout.block_bytes, self.pool_ids.first(number)[1]
                    return range(first + start // size, first + (start + nbytes - 1) // size + 1)
        return None

    def split(self, copy_ops: Int64s) -> list[tuple[int, Int64s]]:
        """The copy ops of each region, in their order, with the ids of the region."""
        if len(self.all) == 1:
            return [(0, copy_ops)]
        out, ends = np.empty_like(copy_ops), np.zeros(len(self.all), np.int64)
        _split(copy_ops, self._map, out, ends)
        return [
            (region, out[first:end]) for region, (first, end) in enumerate(pairwise([0, *ends.tolist()])) if end > first
        ]

"""The plan of a copy of blocks. It is made once from the layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvpool.arrays import Int64s, Uint8s
from kvpool.arrays.layout import BlockLayout, PoolIds
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


@jit(nogil=False)
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


# Bytes. If the pools together are no larger, they may live in a cache, where libc's memcpy is best. In larger pools,
# copies bypass the caches, as one memcpy of so many bytes would: a target line is then never read before it is written.
CACHED_BYTES_MAX = 32 << 20
LINE = 64


class Tier(NamedTuple):
    """Where a tier lies, and its strides, in bytes."""

    base: int
    block_stride: int
    run_stride: int
    outer_stride: int
    inner_stride: int


class CopyPlan(NamedTuple):
    """How blocks are copied. A whole block is ``runs`` contiguous runs of ``run_bytes``. The first n tokens of a block
    are ``outer * inner`` runs of ``n * token_bytes``. In each tier, the strides say how far apart the runs lie.

    All who copy blocks have the plan from here: jitted functions by ``plan_of``, kernels by ``cuda_plan``.

    Jitted functions pass a plan by value. An array argument would change a reference count, and an atomic instruction
    waits for all streamed lines.
    """

    device: Tier
    host: Tier
    device_blocks: int
    blocks: int
    block_tokens: int
    streaming: int
    runs: int
    run_bytes: int
    outer: int
    inner: int
    token_bytes: int

    def vector(self) -> Int64s:
        """All fields in order. One array is the cheapest argument of a jitted call."""
        return np.array([*self.device, *self.host, *self[2:]], dtype=np.int64)


PLAN_FIELDS = 2 * len(Tier._fields) + len(CopyPlan._fields) - 2
RUNS, RUN_BYTES = (PLAN_FIELDS - len(CopyPlan._fields) + CopyPlan._fields.index(name) for name in ("runs", "run_bytes"))


def cuda_plan() -> str:
    """``CopyPlan`` as a struct of the CUDA sources: its vector."""
    return (
        f"struct Tier {{ Int {', '.join(Tier._fields)}; }};\n"
        f"struct Plan {{ Tier {', '.join(CopyPlan._fields[:2])}; Int {', '.join(CopyPlan._fields[2:])}; }};\n"
    )


def make_plan(
    layout: BlockLayout,
    device_pool: Any,
    host_pool: Uint8s,
    device_blocks: int,
    host_blocks: int,
    layers: range | None = None,
) -> CopyPlan:
    """Merge the contiguous dimensions of some layers of a block, and choose how to copy. Done once."""
    layers = range(layout.layers) if layers is None else layers
    strides = [layout.device_strides(device_blocks), layout.host_strides(host_blocks)]
    layers_planes = [(len(layers), *(s.layer for s in strides)), (layout.planes, *(s.plane for s in strides))]
    whole, run_bytes = _merge(layers_planes, layout.segment_bytes)
    ((runs, *run_strides),) = whole or [(1, 0, 0)]
    heads = [(layout.kv_heads, *(s.head for s in strides))] if layout.tokens == "HND" else []
    # The run grows with the number of tokens, so no dimension can be merged into it.
    part, _ = _merge(layers_planes + heads, 0)
    (outer, *outer_strides), (inner, *inner_strides) = [(1, 0, 0)] * (2 - len(part)) + part
    bases = [
        as_strided("pool", pool).address + layers.start * s.layer
        for pool, s in zip((device_pool, host_pool), strides, strict=True)
    ]
    device, host = (
        Tier(bases[i], strides[i].block, run_strides[i], outer_strides[i], inner_strides[i]) for i in range(2)
    )
    lined_up = [*bases, run_bytes, *run_strides, *(s.block for s in strides)]
    streaming = device_pool.nbytes + host_pool.nbytes > CACHED_BYTES_MAX and all(n % LINE == 0 for n in lined_up)
    blocks, token_bytes = device_blocks + host_blocks, strides[0].token  # Heads that were not merged have own runs.
    numbers = blocks, layout.tokens_per_block, int(streaming), runs, run_bytes, outer, inner, token_bytes
    return CopyPlan(device, host, device_blocks, *numbers)


def _merge(dimensions: list[tuple[int, ...]], run: int) -> tuple[list[tuple[int, ...]], int]:
    """Merge dimensions (extent, device stride, host stride), outermost first, where the strides of both tiers allow it.

    ``run`` is the number of contiguous bytes below them, or 0 for a run into which nothing can be merged. Returns the
    dimensions that are left, and the run.
    """
    left: list[tuple[int, ...]] = []
    for extent, device, host in dimensions:
        if left and left[-1][1:] == (extent * device, extent * host):
            left[-1] = (left[-1][0] * extent, device, host)
        elif extent > 1:
            left.append((extent, device, host))
    if left and left[-1][1:] == (run, run):
        run *= left.pop()[0]
    return left, run

"""The plan of a copy of blocks. It is made once from the layout."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided

# Bytes. If the pools together are no larger, they may live in a cache, where libc's memcpy is best. In larger pools,
# copies bypass the caches, as one memcpy of as many bytes would: a target line is then never read before it is written.
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
    are ``outer * inner`` runs of ``n * token_bytes``. The strides are the distances of the runs in each tier.

    All copies of blocks use this plan: jitted functions by ``plan_of``, kernels by ``cuda_plan``.

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
    has_pending = [*bases, run_bytes, *run_strides, *(s.block for s in strides)]
    streaming = device_pool.nbytes + host_pool.nbytes > CACHED_BYTES_MAX and all(n % LINE == 0 for n in has_pending)
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

"""Block copies on the CPU: a plan that is made once from the layout, and jitted functions that carry out batches of
moves."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Context, Signature

from kvpool.arrays import Int64s, Uint8s
from kvpool.arrays.layout import BlockLayout
from kvpool.arrays.strided import as_strided
from kvpool.device.base import ALL_LAYERS, BYTES, FROM, SOURCE, TARGET, TO, TOKENS, Layers
from kvpool.device.regions import Regions
from kvpool.device.work import TokenMoves
from kvpool.jit import intrinsic, jit
from kvpool.jit.intrinsics import memcpy

# Bytes. If the pools together are no larger, they may live in a cache, where libc's memcpy is best. In larger pools,
# copies bypass the caches, as one memcpy of so many bytes would: a target line is then never read before it is written.
CACHED_BYTES_MAX = 32 << 20
LINE = 64
_CHUNK = 16 * LINE
# How many bytes ahead of the copy the source is fetched. Blocks lie at random, so the hardware cannot guess the next.
AHEAD = 4096


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


@jit(forceinline=True)
def plan_of(v):  # type: ignore[no-untyped-def]
    """The plan that has this vector."""
    device = Tier(v[0], v[1], v[2], v[3], v[4])
    host = Tier(v[5], v[6], v[7], v[8], v[9])
    return CopyPlan(device, host, v[10], v[11], v[12], v[13], v[14], v[15], v[16], v[17], v[18])


PLAN_FIELDS = 2 * len(Tier._fields) + len(CopyPlan._fields) - 2


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


@intrinsic(lambda address: None)
def _prefetch(typingctx: Context, address: types.Type) -> Any:
    """Fetch a cache line. An address that is not mapped does no harm."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, i32, i32, i32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], function_type)
        # Fetch data, for reading, into the second-level cache. The first level is too small for all that is fetched at
        # a time.
        read, level_two, data = i32(0), i32(2), i32(1)
        builder.call(function, [builder.inttoptr(args[0], cgutils.voidptr_t), read, level_two, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic(lambda target, source: ctypes.memmove(int(target), int(source), LINE))
def _stream_line(typingctx: Context, target: types.Type, source: types.Type) -> Any:
    """Copy one cache line with a store that bypasses the caches. The target is a multiple of the line's size."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        store = builder.store(value, builder.inttoptr(args[0], line), align=LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic(lambda: None)
def fence(typingctx: Context) -> Any:
    """Make streamed lines visible to other threads before any later write."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


@jit
def copy_moves(moves, plan_vector):  # type: ignore[no-untyped-def]
    """Copy moves in order."""
    plan, count = plan_of(plan_vector), moves.shape[0]
    # Fetching starts `AHEAD` bytes before the copy: that is so many runs, and so many whole blocks.
    runs_ahead = max(1, AHEAD // plan.run_bytes)
    blocks_ahead, first_run_ahead = runs_ahead // plan.runs, runs_ahead % plan.runs
    for i in range(count):
        source, target, tokens = moves[i, SOURCE], moves[i, TARGET], moves[i, TOKENS]
        whole = tokens >= plan.block_tokens
        if whole and plan.streaming:
            near = moves[min(i + blocks_ahead, count - 1), SOURCE]
            far = moves[min(i + blocks_ahead + 1, count - 1), SOURCE]
            _stream_full(source, target, near, far, first_run_ahead, plan)
            continue
        source, source_tier = locate(source, plan)
        target, target_tier = locate(target, plan)
        # Of a part, only the first tokens are copied. The rest of the target keeps its content.
        outer, inner, nbytes = plan.outer, plan.inner, tokens * plan.token_bytes
        source_step, target_step = source_tier.inner_stride, target_tier.inner_stride
        if whole:
            outer, inner, nbytes = 1, plan.runs, plan.run_bytes
            source_step, target_step = source_tier.run_stride, target_tier.run_stride
        for o in range(outer):
            for r in range(inner):
                memcpy(
                    target + o * target_tier.outer_stride + r * target_step,
                    source + o * source_tier.outer_stride + r * source_step,
                    nbytes,
                )
    if plan.streaming:
        fence()


@jit
def locate(block, plan):  # type: ignore[no-untyped-def]
    """The address of a block, and its tier."""
    if block < plan.device_blocks:
        return plan.device.base + block * plan.device.block_stride, plan.device
    return plan.host.base + (block - plan.device_blocks) * plan.host.block_stride, plan.host


@jit
def _stream_full(source_block, target_block, near, far, first_run_ahead, plan):  # type: ignore[no-untyped-def]
    """Copy a whole block past the caches. At the same pace, fetch bytes that will be copied later.

    The bytes that are fetched are the runs of block `near` from `first_run_ahead` on, then the first runs of
    block `far`. A block of which only a part is copied is fetched as if it were whole. That costs little and changes
    nothing.
    """
    source, source_tier = locate(source_block, plan)
    target, target_tier = locate(target_block, plan)
    ahead, ahead_tier = locate(near, plan)
    ahead += first_run_ahead * ahead_tier.run_stride
    # A long run fetches ahead inside itself. Only near its end does it fetch from another run.
    within = max(0, plan.run_bytes - AHEAD)
    for run in range(plan.runs):
        if run == plan.runs - first_run_ahead:
            ahead, ahead_tier = locate(far, plan)
        if within > 0:
            stream_run(target, source, source + AHEAD, within)
        stream_run(target + within, source + within, ahead, plan.run_bytes - within)
        source += source_tier.run_stride
        target += target_tier.run_stride
        ahead += ahead_tier.run_stride


@jit
def stream_run(target, source, ahead, nbytes):  # type: ignore[no-untyped-def]
    """Copy `nbytes` past the caches, and fetch as many bytes at `ahead`. `nbytes` is a number of whole lines, and the
    target starts at a line. The caller calls `fence` after the last run."""
    done = 0
    while nbytes - done >= _CHUNK:
        for line in range(0, _CHUNK, LINE):
            _prefetch(ahead + done + line)
        for line in range(0, _CHUNK, LINE):
            _stream_line(target + done + line, source + done + line)
        done += _CHUNK
    for line in range(done, nbytes, LINE):
        _prefetch(ahead + line)
        _stream_line(target + line, source + line)


@jit
def stream_bytes(target, source, ahead, nbytes):  # type: ignore[no-untyped-def]
    """Copy around the caches, but for the lines at both ends of the target that are not its own."""
    head = min(-target % LINE, nbytes)
    lines = (nbytes - head) // LINE * LINE
    memcpy(target, source, head)
    # A long run looks ahead inside itself, and only from its end into another one.
    within = max(0, lines - AHEAD)
    stream_run(target + head, source + head, source + head + AHEAD, within)
    stream_run(target + head + within, source + head + within, ahead, lines - within)
    memcpy(target + head + lines, source + head + lines, nbytes - head - lines)


@jit
def copy_fragments(fragments, streaming):  # type: ignore[no-untyped-def]
    """Copy ``work.Fragments``, with ``streaming`` around the caches."""
    count, total = fragments.shape[0], 0
    if not streaming:
        for i in range(count):
            memcpy(fragments[i, TO], fragments[i, FROM], fragments[i, BYTES])
        return
    for i in range(count):
        total += fragments[i, BYTES]
    # So many fragments later is what is fetched meanwhile.
    later = max(1, AHEAD * count // max(total, 1))
    for i in range(count):
        ahead = fragments[min(i + later, count - 1), FROM]
        stream_bytes(fragments[i, TO], fragments[i, FROM], ahead, fragments[i, BYTES])
    fence()


@jit
def move_tokens(moves, plan_vector):  # type: ignore[no-untyped-def]
    """Move tokens as in ``work.TokenMoves``, in all layers, planes and heads, one after the other."""
    plan = plan_of(plan_vector)
    for i in range(moves.shape[0]):
        source, target = _token(moves[i, 0], plan), _token(moves[i, 1], plan)
        for outer in range(plan.outer):
            for inner in range(plan.inner):
                place = outer * plan.device.outer_stride + inner * plan.device.inner_stride
                memcpy(target + place, source + place, plan.token_bytes)


@jit
def _token(slot, plan):  # type: ignore[no-untyped-def]
    """The address of a token of the device tier."""
    block, token = slot // plan.block_tokens, slot % plan.block_tokens
    return plan.device.base + block * plan.device.block_stride + token * plan.token_bytes


class HostPool:
    """The memory of ``regions``, which this keeps alive: a copy gets addresses only. Several threads may copy."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._known: dict[Layers, list[list[Int64s]]] = {}
        self._streaming = sum(pool.nbytes for pool in regions.pools) > CACHED_BYTES_MAX

    def _plans(self, layers: Layers = ALL_LAYERS) -> list[list[Int64s]]:
        """The vectors of the plans of each region's parts."""
        if layers not in self._known:
            self._known[layers] = [
                [
                    make_plan(*part, region.device_blocks, region.host_blocks, own).vector()
                    for part, own in region.parts_of(layers)
                ]
                for region in self.regions.all
            ]
        return self._known[layers]

    def planned(self, moves: Int64s, layers: Layers) -> list[tuple[Int64s, Int64s]]:
        """The moves of each part of each region, and the vector of its plan, for ``copy_moves``."""
        plans = self._plans(layers)
        if len(plans) == 1:
            return [(moves, plan) for plan in plans[0]]
        return [(rows, plan) for region, rows in self.regions.split(moves) for plan in plans[region]]

    def copy_blocks(self, moves: Int64s, layers: Layers = ALL_LAYERS) -> None:
        """Make moves, as in ``Device.copy_blocks``."""
        for rows, plan in self.planned(moves, layers):
            copy_moves(rows, plan)

    def copy_fragments(self, rows: Int64s) -> None:
        copy_fragments(rows, self._streaming)

    def move_tokens(self, work: TokenMoves) -> None:
        for region, found in work.by_region(self.regions):
            for plan in self._plans()[region]:
                move_tokens(found.moves, plan)

"""CpuDevice: both tiers in NumPy memory. The calling thread copies, without the GIL, by jitted functions that carry out
batches of copy ops."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvpool.common.arrays import Int64s, Uint8s
from kvpool.common.arrays.strided import StridedArray
from kvpool.common.jit import inline, jit
from kvpool.common.jit.intrinsics import Code, memcpy, prefetch_at, primitive
from kvpool.device import copy_plan
from kvpool.device.base import (
    BOUND_ALREADY,
    NOT_BOUND,
    NULL_EVENT,
    NULL_STREAM,
    Device,
    DeviceArray,
    DeviceEvent,
    Stream,
    stream_argument,
)
from kvpool.device.copy_plan import LINE, RUN_BYTES, RUNS, CopyPlan, Tier, make_plan
from kvpool.device.memory.main_memory import allocate_ram, allocate_shared, available_ram, free_shared
from kvpool.device.regions import ALL_LAYERS, BYTES, FROM, SOURCE, TARGET, TO, TOKENS, Layers, Region, Regions
from kvpool.device.work import TokenMoves, Work
from kvpool.errors import PoolClosed

_CHUNK = 16 * LINE
# How many bytes ahead of the copy the source is fetched. Blocks lie at random, so the hardware cannot guess the next.
AHEAD = 4096


@inline
def plan_of(v):  # type: ignore[no-untyped-def]
    """The plan that has this vector."""
    device = Tier(v[0], v[1], v[2], v[3], v[4])
    host = Tier(v[5], v[6], v[7], v[8], v[9])
    return CopyPlan(device, host, v[10], v[11], v[12], v[13], v[14], v[15], v[16], v[17], v[18])


@primitive(lambda address: None, lambda address: types.none)
def _prefetch(code: Code) -> None:
    """Fetch a cache line. An address that is not mapped does no harm."""
    # Into the second-level cache: the first level is too small for all that is fetched at a time.
    prefetch_at(code, code.builder.inttoptr(code.word(0), cgutils.voidptr_t), 2)


@primitive(
    lambda target, source: ctypes.memmove(int(target), int(source), LINE),
    lambda target, source: types.none,
)
def _stream_line(code: Code) -> None:
    """Copy one cache line with a store that bypasses the caches. The target is a multiple of the line's size."""
    line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
    target, source = (code.builder.inttoptr(code.word(i), line) for i in range(2))
    store = code.builder.store(code.builder.load(source, align=1), target, align=LINE)
    store.set_metadata("nontemporal", code.builder.module.add_metadata([ir.IntType(32)(1)]))


@primitive(lambda: None, lambda: types.none)
def fence(code: Code) -> None:
    """Make streamed lines visible to other threads before any later write."""
    code.builder.fence("seq_cst")


@jit
def copy_in_order(copy_ops, plan_vector):  # type: ignore[no-untyped-def]
    """Make copy ops in order."""
    plan, count = plan_of(plan_vector), copy_ops.shape[0]
    # Fetching starts `AHEAD` bytes before the copy, which is a number of runs and of whole blocks.
    runs_ahead = max(1, AHEAD // plan.run_bytes)
    blocks_ahead, first_run_ahead = runs_ahead // plan.runs, runs_ahead % plan.runs
    for i in range(count):
        source = copy_ops[i, SOURCE]
        target = copy_ops[i, TARGET]
        tokens = copy_ops[i, TOKENS]
        whole = tokens >= plan.block_tokens
        if whole and plan.streaming:
            near = copy_ops[min(i + blocks_ahead, count - 1), SOURCE]
            far = copy_ops[min(i + blocks_ahead + 1, count - 1), SOURCE]
            _stream_full(source, target, near, far, first_run_ahead, plan)
            continue
        source, source_tier = locate(source, plan)
        target, target_tier = locate(target, plan)
        # Of a part, only the first tokens are copied. The rest of the target keeps its content.
        outer, inner, nbytes = plan.outer, plan.inner, tokens * plan.token_bytes
        source_step, target_step = source_tier.inner_stride, target_tier.inner_stride
        if whole:
            outer = 1
            inner = plan.runs
            nbytes = plan.run_bytes
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
    # The fragment that is fetched meanwhile comes this many later.
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


KEEP_GIL_BYTES = 256 << 10
"""To copy no more is over before another thread would give the interpreter's lock back."""


def copier(copy_ops: Int64s, plan: Int64s) -> Callable[[Int64s, Int64s], None]:
    """The function that makes copy ops by the vector of a plan."""
    nbytes = len(copy_ops) * int(plan[RUNS]) * int(plan[RUN_BYTES])
    return getattr(copy_in_order, "keep_gil", copy_in_order) if nbytes <= KEEP_GIL_BYTES else copy_in_order


class HostPool:
    """The memory of ``regions``, which this keeps alive: a copy gets addresses only. Several threads may copy."""

    def __init__(self, regions: Regions) -> None:
        self.regions = regions
        self._known: dict[Layers, list[list[Int64s]]] = {}
        self._streaming = sum(pool.nbytes for pool in regions.pools) > copy_plan.CACHED_BYTES_MAX

    def _plans(self, layers: Layers = ALL_LAYERS) -> list[list[Int64s]]:
        """The vectors of the plans of each region's parts."""
        if layers not in self._known:
            self._known[layers] = [
                [
                    make_plan(*part, region.device_blocks, region.host_blocks, part_layers).vector()
                    for part, part_layers in region.parts_of(layers)
                ]
                for region in self.regions.all
            ]
        return self._known[layers]

    def planned(self, copy_ops: Int64s, layers: Layers) -> list[tuple[Int64s, Int64s]]:
        """The copy ops of each part of each region, and the vector of its plan, for ``copy_in_order``."""
        plans = self._plans(layers)
        if len(plans) == 1:
            return [(copy_ops, plan) for plan in plans[0]]
        return [(rows, plan) for region, rows in self.regions.split(copy_ops) for plan in plans[region]]

    def copy_blocks(self, copy_ops: Int64s, layers: Layers = ALL_LAYERS) -> None:
        """Make copy ops, as in ``Device.copy_blocks``."""
        for rows, plan in self.planned(copy_ops, layers):
            copier(rows, plan)(rows, plan)

    def copy_fragments(self, rows: Int64s) -> None:
        copy_fragments(rows, self._streaming)

    def move_tokens(self, work: TokenMoves) -> None:
        for region, of_region in work.by_region(self.regions):
            for plan in self._plans()[region]:
                move_tokens(of_region.moves, plan)


class CpuDevice(Device):
    """The device of machines without a GPU. Every copy is done when the call returns."""

    name = "cpu"
    synchronous = True
    one_memory = True
    in_memory = True

    def __init__(self) -> None:
        self._bound: HostPool | None = None
        self._closed = False

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Uint8s:
        self._check_open()
        return (allocate_shared if shared else allocate_ram)(nbytes)

    def free(self, array: DeviceArray) -> None:
        # The memory itself is freed with the last view of it.
        memory = cast(Uint8s, array)
        free_shared(memory)
        if self._bound is not None and self._bound.regions.have(memory):
            self._bound = None

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> Uint8s:
        self._check_open()
        return memory.host_view()

    def available_bytes(self, tier: str) -> int | None:
        return available_ram()

    def as_stream(self, stream: Any) -> Stream:
        if stream is not NULL_STREAM:
            stream_argument(stream)
        return NULL_STREAM

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        return NULL_STREAM

    def bind(self, regions: Sequence[Region]) -> None:
        self._check_open()
        if self._bound is not None:
            raise ValueError(BOUND_ALREADY)
        self._bound = HostPool(Regions(regions))

    def _pool(self) -> HostPool:
        if self._bound is None:
            self._check_open()
            raise ValueError(NOT_BOUND)
        return self._bound

    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        self._pool().copy_blocks(copy_ops, layers)

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        if captured:
            raise ValueError("stream: the cpu device has no graphs, so that none is being captured")
        work.run(self._pool())

    def record(self, stream: Stream) -> DeviceEvent:
        return NULL_EVENT

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        """Return at once: nothing is ever pending here."""

    def query(self, event: DeviceEvent) -> bool:
        return True

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        self._check_open()

    def close(self) -> None:
        self._bound, self._closed = None, True

    def _check_open(self) -> None:
        if self._closed:
            raise PoolClosed("the cpu device is closed")

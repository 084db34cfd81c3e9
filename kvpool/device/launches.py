"""Launches as data: what to run on a GPU, decided without one; the records that kernels take, and how work is split."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.device.copy_plan import PLAN_FIELDS, CopyPlan, cuda_plan
from kvpool.device.work import TokenMoves

OPTIONS = ("-std=c++17",)
"""The options with which every source is compiled."""
THREADS = 512
"""Threads of a thread block."""
BUS_THREAD_BLOCKS, CHIP_THREAD_BLOCKS = 8, 24
"""Thread blocks that keep the link to the host busy, for a bus and for a link from chip to chip. The words that this
many thread blocks have requested fill the link. The other multiprocessors stay with the model."""
BLOCKS_PER_MULTIPROCESSOR = 2
"""How many thread blocks of ``THREADS`` threads fit on a multiprocessor, with the registers that the kernels use."""


class Grid(NamedTuple):
    """How many thread blocks a GPU gets: all that fit on its ``multiprocessors``, or ``host_thread_blocks`` for work
    that a link limits."""

    multiprocessors: int
    host_thread_blocks: int = BUS_THREAD_BLOCKS

    def thread_blocks(self, needed: int, host: bool = False, chosen: int | None = None) -> int:
        """Thread blocks for work that fills ``needed`` of them once. ``host``: the work crosses the link. ``chosen`` is
        the caller's own number."""
        most = chosen or (self.host_thread_blocks if host else BLOCKS_PER_MULTIPROCESSOR * self.multiprocessors)
        return max(1, min(needed, most))


class Launch(NamedTuple):
    """One launch of a kernel of ``source`` with a one-dimensional grid.

    ``record`` is its only argument, passed by value: an array of one element, whose type mirrors the kernel's struct.
    """

    source: str
    kernel: str
    thread_blocks: int
    threads: int
    record: Array


class Launcher(Protocol):
    """The interface of what runs launches: a GPU through a driver package, or a test on the CPU. ``stream`` is a
    handle."""

    @property
    def grid(self) -> Grid:
        """The grid of the device."""

    def stream(self, stream: Any, captured: bool) -> int:
        """The handle of a stream that a caller names; with ``captured``, it may be captured. Raises TypeError,
        ValueError."""

    def load(self, source: str, kernel: str) -> None:
        """Compile a kernel, so that its first launch does not."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Enqueue a launch on the stream. When this returns, the record may be changed."""

    def device_addresses(self, addresses: Int64s) -> Int64s:
        """The addresses by which kernels reach memory of the device or pinned memory. Raises ValueError for any other
        memory."""

    def uploaded(self, array: Array, stream: int, *, host: bool) -> AbstractContextManager[int]:
        """A context manager that gives the address, a multiple of 16, of a copy of a contiguous array. It is for
        kernels that are enqueued on ``stream`` inside the context.

        The copy stays until those kernels are done. With ``host``, for kernels that cross the link to the host anyway,
        it lies in pinned memory, else in memory of the device. The array may be changed inside the context.
        """


def cuda_sources() -> Path:
    """The folder with the ``.cu`` and ``.cuh`` files, installed or in a checkout.

    Raises
    ------
    FileNotFoundError
        Neither place has it.
    """
    package = Path(__file__).resolve().parents[1]
    places = package / "cuda", package.parent / "cuda"
    for place in places:
        # A folder alone proves nothing: beside an installed package, `cuda` is NVIDIA's.
        if (place / "README.md").is_file():
            return place
    raise FileNotFoundError(f"no CUDA sources of kvpool in {places[0]} or {places[1]}")


def cuda_source(name: str) -> str:
    """A file of the CUDA sources with its own includes inserted: the whole text that a compiler, or a cache of compiled
    code, has to see. ``plan.cuh`` is not a file: it is made from ``copy_plan.CopyPlan``."""
    text = cuda_plan() if name == "plan.cuh" else (cuda_sources() / name).read_text(encoding="utf-8")
    return re.sub(
        r'^#include "(.*)".*$',
        lambda match: cuda_source(match[1]).replace("#pragma once\n", ""),
        text,
        flags=re.MULTILINE,
    )


def kernel_source(source: str, kernel: str) -> str:
    """The text of a source with one kernel for words, instead of one for each width: it compiles in a fifth of the
    time."""
    text, word = cuda_source(source), kernel.rpartition("_")[2]
    types = dict(re.findall(r"kernel\((\d+), ([\w ]+)\)", text))
    return re.sub(r"^FOR_EACH_WORD\((\w+)\)", lambda match: f"{match[1]}({word}, {types[word]})", text, flags=re.M)


def word_bytes(*numbers: Any) -> int:
    """The widest machine word, of 16 to 1 bytes, that divides all numbers or arrays of numbers."""
    together = (
        int(np.bitwise_or.reduce([np.bitwise_or.reduce(np.asarray(n, dtype=np.int64), axis=None) for n in numbers]))
        | 16
    )
    return together & -together


_KV_IN_FLIGHT, WARP = 4, 32
# With this many units for each thread, threads that get one more take little longer.
_UNITS_PER_THREAD = 4
ROW_BYTES, HEADER_BYTES = 32, 16
"""Of a row of a table of fragments, and of what is before rows that are in the argument of a launch."""
FEW_ROWS, SOME_ROWS = 15, 127
"""How many rows fit into an argument of half a kilobyte, and of four, the most that all drivers take."""
COUNT_MAX = 2**31 - 1
PIECE_WORDS = 256
"""How many words of a fragment a warp copies at a time."""


class KvPlane(NamedTuple):
    """One plane of a copy between paged memory and staging. Strides and ``run_bytes`` (of one head of one token) are
    bytes."""

    block_stride: int
    token_stride: int
    head_stride: int
    staging: int
    """Address of its layer 0, first token to copy, head 0."""
    staging_layer_stride: int
    staging_token_stride: int
    staging_head_stride: int
    heads: int
    run_bytes: int

    def merged(self) -> KvPlane:
        """The same plane with one long head, if heads follow each other on both sides."""
        if self.heads > 1 and not self.head_stride == self.staging_head_stride == self.run_bytes:
            return self
        return self._replace(head_stride=0, staging_head_stride=0, heads=1, run_bytes=self.heads * self.run_bytes)


class KvTokens(NamedTuple):
    """The tokens of a copy between paged memory and staging."""

    slots: int
    """Address of the slot of the first token to copy."""
    slot_bytes: int
    """4 or 8."""
    slot_end: int
    """How many slots the paged memory has."""
    tokens: int
    """How many tokens to copy, at least 1."""
    tokens_per_block: int


def _record(*fields: Any) -> np.dtype[Any]:
    return np.dtype([(name, np.int64) if isinstance(name, str) else name for name in fields])


# The structs of the CUDA sources, field by field. They travel in the argument of a launch, which may have 4,096 bytes.
PLANES, BASES, MOVES = 4, 384, 320
_DIGITS = _record("chunk", "token", "head", "word")
_PLANE = _record(*KvPlane._fields[:-1], "words", "chunk_layers", ("step", _DIGITS))
KV_COPY = _record(
    *KvTokens._fields, "layers", "planes", "gather", ("plane", _PLANE, PLANES), ("bases", np.int64, BASES)
)
TOKEN_MOVES = _record(
    ("plan", np.int64, PLAN_FIELDS), "groups", *((name, np.uint32, MOVES) for name in ("ends", "source", "target"))
)


def kv_copy(
    bases: Int64s,
    planes: list[KvPlane],
    tokens: KvTokens,
    *,
    gather: bool,
    host: bool,
    grid: Grid,
    chosen: int | None = None,
) -> Launch:
    """The launch that copies tokens between paged memory and staging, all layers and planes.

    Parameters
    ----------
    bases
        int64[planes, layers]: addresses in the paged memory.
    gather
        From paged memory to staging; else the other way.
    host
        Whether one of both is host memory, for which few thread blocks are enough.
    chosen
        The most thread blocks to launch, if the caller limits them.

    Raises
    ------
    ValueError
        For more layers times planes, tokens or slots than the kernel counts.

    Notes
    -----
    A thread reads the slot of a token once for a word of it, whatever the number of layers that it walks.
    """
    layers = bases.shape[1]
    if bases.size > BASES:
        raise ValueError(
            f"cache: {len(planes)} planes of {layers} layers; one launch takes {BASES} together: split the layers"
        )
    if tokens.tokens > COUNT_MAX or tokens.slot_end >= 2**32:
        raise ValueError(
            f"cache: {tokens.slot_end} slots and {tokens.tokens} tokens; a GPU takes fewer than 2**32 and 2**31"
        )
    planes = [plane.merged() for plane in planes]
    kernel = kv_kernel(bases, planes)
    width = int(kernel.rpartition("_")[2])
    extents = [(tokens.tokens, plane.heads, plane.run_bytes // width) for plane in planes]
    most = max(prod(extent) for extent in extents)
    thread_blocks = grid.thread_blocks(-(-layers * most // (THREADS * _KV_IN_FLIGHT)), host, chosen)
    threads = thread_blocks * THREADS
    rows = [
        (*plane[:-1], extent[2], _chunk_layers(layers, prod(extent), threads), _digits(threads, *extent))
        for plane, extent in zip(planes, extents, strict=True)
    ]
    record = np.zeros(1, KV_COPY)
    record[[*KvTokens._fields, "layers", "planes", "gather"]] = (*tokens, layers, len(planes), gather)
    record["plane"][0, : len(planes)] = rows
    record["bases"][0, : bases.size] = bases.ravel()
    return Launch("kv_copy.cu", kernel, thread_blocks, THREADS, record)


def kv_kernel(bases: Int64s, planes: list[KvPlane]) -> str:
    """The kernel of a copy between these merged planes: that of the widest word that fits."""
    # All fields but the number of heads.
    return f"kv_copy_{word_bytes(bases, *((*plane[:-2], plane.run_bytes) for plane in planes))}"


def _chunk_layers(layers: int, words: int, threads: int) -> int:
    """How many layers a thread copies with one slot. As many as possible, such that every thread still gets some of the
    ``words`` of a layer, and all threads get about as many layers."""
    chunks = min(-(-_UNITS_PER_THREAD * threads // words), -(-layers // _KV_IN_FLIGHT))
    return -(-layers // chunks)


def _digits(step: int, tokens: int, heads: int, words: int) -> tuple[int, int, int, int]:
    """A number of units as (chunks of layers, tokens, heads, words)."""
    step, word = divmod(step, words)
    step, head = divmod(step, heads)
    chunk, token = divmod(step, tokens)
    return chunk, token, head, word


def _token_word(plan: CopyPlan) -> int:
    tier = plan.device
    return word_bytes(tier.base, tier.block_stride, tier.outer_stride, tier.inner_stride, plan.token_bytes)


def move_kernel(plan: CopyPlan) -> tuple[str, str]:
    """Source and kernel of the moves of tokens that a pool enqueues."""
    return "token_moves.cu", f"move_tokens_{_token_word(plan)}"


COPY_FRAGMENTS = "copy_fragments.cu", "copy_fragments"
BULK_FRAGMENTS = "bulk_fragments.cu", "bulk_fragments"
SIZES = "", "_few", "_some"
"""What the names of their kernels end in: those of a table in memory, and those of ``FEW_ROWS`` and ``SOME_ROWS``."""
BULK_CAPABILITY = 9
"""The first compute capability that has bulk copies."""


def token_moves(plan: CopyPlan, work: TokenMoves, grid: Grid) -> Iterator[Launch]:
    """The launches that move tokens, each with up to ``MOVES`` moves, in order. Raises ValueError for pools of more
    slots than the kernel can count."""
    if plan.device_blocks * plan.block_tokens >= 2**32:
        raise ValueError(
            f"device_blocks: {plan.device_blocks} of {plan.block_tokens} tokens; a GPU takes fewer than 2**32 slots"
        )
    word = _token_word(plan)
    for first in range(0, len(work.moves), MOVES):
        some = work.moves[first : first + MOVES]
        ends = np.unique(np.clip(work.starts - first, 0, len(some)))[1:]
        record = np.zeros(1, TOKEN_MOVES)
        record["plan"], record["groups"], record["ends"][0, : len(ends)] = plan.vector(), len(ends), ends
        record["source"][0, : len(some)], record["target"][0, : len(some)] = some.T
        needed = -(-len(ends) * plan.outer * plan.inner * (plan.token_bytes // word) // THREADS)
        yield Launch(*move_kernel(plan), grid.thread_blocks(needed), THREADS, record)

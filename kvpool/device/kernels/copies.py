"""Launches of the copy kernels: the records that the kernels take, and how the work is split."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.device.kernels.launch import THREADS, Grid, Launch, word_bytes

Int64s = npt.NDArray[np.int64]

PLANES, BASES = 4, 384
_KV_IN_FLIGHT, _PIECE_BYTES, _WARP = 4, 4096, 32
# With so many units for each thread, nobody waits long for threads that get one more.
_UNITS_PER_THREAD = 4
_PLAN_FIELDS = 19
_MOVE_BYTES = 16
_COUNT_MAX = 2**31 - 1


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


# The structs of cuda/kv_copy.cu and cuda/block_copy.cu, field by field.
_DIGITS = _record("chunk", "token", "head", "word")
_PLANE = _record(*KvPlane._fields[:-1], "words", "chunk_layers", ("step", _DIGITS))
KV_COPY = _record(
    *KvTokens._fields, "layers", "planes", "gather", ("plane", _PLANE, PLANES), ("bases", np.int64, BASES)
)
BLOCK_COPY = _record(("plan", np.int64, _PLAN_FIELDS), "moves", "count", "pieces")


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
        The most thread blocks to launch, if the caller says it.

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
    if tokens.tokens > _COUNT_MAX or tokens.slot_end >= 2**32:
        raise ValueError(
            f"cache: {tokens.slot_end} slots and {tokens.tokens} tokens; a GPU takes fewer than 2**32 and 2**31"
        )
    planes = [plane.merged() for plane in planes]
    # All fields but the number of heads.
    width = word_bytes(bases, *((*plane[:-2], plane.run_bytes) for plane in planes))
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
    return Launch("kv_copy.cu", f"kv_copy_{width}", thread_blocks, THREADS, record)


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


def move_table(moves: Int64s) -> npt.NDArray[np.uint32]:
    """Moves int64[n, 4] in the form that the kernel reads, a row in one load of 16 bytes. The moves are as in
    ``Device.copy_blocks`` and have been checked.

    The ticket is cut to some bits. The kernel does not read it.
    """
    return moves.astype(np.uint32)


def block_copies(
    plan: Int64s, moves: int, count: int, *, whole: bool, host: bool, grid: Grid, chosen: int | None = None
) -> Iterator[Launch]:
    """The launches, one unless there are very many moves, that make block copies which do not depend on each other.

    Parameters
    ----------
    plan
        int64[19], ``device.block_copy.Plan.vector()`` of the pools, with the addresses at which kernels reach them.
    moves
        Address of ``move_table`` of so many moves, at a multiple of 16, that kernels can read.
    whole
        Whether every move is of a whole block; else words are no longer than the runs of single tokens allow.
    host, chosen
        As in ``kv_copy``.
    """
    if plan.shape != (_PLAN_FIELDS,):
        raise ValueError(f"plan: shape [{_PLAN_FIELDS}] is needed, not {list(plan.shape)}")
    tiers, block_tokens = plan[:10].reshape(2, 5), int(plan[12])
    runs, run_bytes, outer, inner, token_bytes = (int(number) for number in plan[14:])
    pieces = runs * -(-run_bytes // _PIECE_BYTES)
    if whole:
        width = word_bytes(tiers[:, :3], run_bytes)
    else:
        width = word_bytes(tiers, run_bytes, token_bytes)
        pieces = max(pieces, outer * inner * -(-block_tokens * token_bytes // _PIECE_BYTES))
    per_launch = max(1, _COUNT_MAX // pieces)
    for first in range(0, count, per_launch):
        some = min(per_launch, count - first)
        record = np.zeros(1, BLOCK_COPY)
        record[0] = (plan, moves + first * _MOVE_BYTES, some, pieces)
        thread_blocks = grid.thread_blocks(-(-some * pieces * _WARP // THREADS), host, chosen)
        yield Launch("block_copy.cu", f"block_copy_{width}", thread_blocks, THREADS, record)

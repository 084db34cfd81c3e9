"""Where the bytes of an engine's blocks lie in a host block, and the fragments of a copy between the two."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.arrays.paged import PagedKV, Plane
from kvpool.device.base import BYTES, FROM, TO
from kvpool.jit import jit

Int64s = npt.NDArray[np.int64]
# Columns of the table of planes: strides in the engine's memory, extents, and offset and strides in a host block.
_BLOCK, _TOKEN, _HEAD, _HEADS, _RUN, _OFFSET, _HOST_BLOCK, _HOST_TOKEN, _HOST_HEAD = range(9)


class Span(NamedTuple):
    """The bytes of blocks that a copy concerns, for jitted code."""

    tokens_per_block: int
    blocks_per_host_block: int
    first_token: int
    end_token: int
    host: int
    """Address of the first byte of the first host block."""
    host_stride: int
    layer_stride: int
    """In a host block."""
    into_host: bool


class Pages:
    """One group of layers of an engine. A host block has ``blocks_per_host_block`` of its blocks.

    They lie there without gaps: [layers, planes, blocks, tokens, heads, bytes], or heads before tokens if the engine
    has that order. ``nbytes`` is their size.
    """

    def __init__(self, cache: PagedKV, blocks_per_host_block: int) -> None:
        self.cache, self.blocks = cache, blocks_per_host_block
        rows, offset = [], 0
        for plane in cache.planes:
            tokens, heads, run = cache.tokens_per_block, plane.heads, plane.run_bytes
            inner = (heads * run, run) if plane.token_stride >= plane.head_stride else (run, tokens * run)
            strides = (plane.block_stride, plane.token_stride, plane.head_stride)
            rows.append((*strides, heads, run, offset, tokens * heads * run, *inner))
            offset += blocks_per_host_block * tokens * heads * run
        self._planes = np.array(rows, np.int64)
        self._layer_bytes, self.nbytes = offset, cache.layers * offset
        self._pieces = cache.layers * sum(
            _pieces_of(plane, cache.tokens_per_block, row[-1] > row[-2])
            for plane, row in zip(cache.planes, rows, strict=True)
        )

    def fragments(
        self, blocks: Int64s, host_blocks: Int64s, first: int, end: int, host: int, host_stride: int, into_host: bool
    ) -> Int64s:
        """Fragments int64[n, 3] of the tokens [first, end), as few as possible.

        Engine block i, of ``blocks``, is in ``host_blocks[i // blocks_per_host_block]``. A block below zero is left
        out. ``host`` is the address of the first byte of the group in the first host block. All ids have been checked.
        """
        span = Span(
            self.cache.tokens_per_block, self.blocks, first, end, host, host_stride, self._layer_bytes, into_host
        )
        out, cursor = np.empty((len(blocks) * self._pieces, 3), np.int64), np.zeros(3, np.int64)
        return out[: _cut(self.cache.bases, self._planes, blocks, host_blocks, span, out, cursor)]


def _pieces_of(plane: Plane, tokens: int, heads_first: bool) -> int:
    """The most fragments of one plane of a block, as ``_add_block`` adds them."""
    if heads_first:
        return plane.heads if plane.token_stride == plane.run_bytes else plane.heads * tokens
    if plane.heads > 1 and plane.head_stride != plane.run_bytes:
        return tokens * plane.heads
    return 1 if plane.token_stride == plane.heads * plane.run_bytes else tokens


@jit
def _add(out: Any, cursor: Any, engine: int, host: int, nbytes: int, into_host: bool) -> None:
    """Append bytes as a fragment, or to the last fragment if they follow it. ``cursor``: the number of fragments, and
    where the last one ends."""
    source, target = (engine, host) if into_host else (host, engine)
    n = cursor[0]
    if n == 0 or source != cursor[1] or target != cursor[2]:
        if n == out.shape[0]:
            raise RuntimeError("more fragments than blocks can have")
        out[n, FROM], out[n, TO], out[n, BYTES] = source, target, 0
        n += 1
        cursor[0] = n
    out[n - 1, BYTES] += nbytes
    cursor[1], cursor[2] = source + nbytes, target + nbytes


@jit
def _cut(bases: Any, planes: Any, blocks: Any, host_blocks: Any, span: Any, out: Any, cursor: Any) -> int:
    """Fill ``out``, in the order of the host's bytes. Returns how many fragments there are."""
    width, per_host = span.tokens_per_block, span.blocks_per_host_block
    first_block, end_block = span.first_token // width, -(-span.end_token // width)
    for k in range(first_block // per_host, -(-end_block // per_host)):
        begin, end = max(first_block, k * per_host), min(end_block, (k + 1) * per_host)
        for layer in range(bases.shape[1]):
            for p in range(bases.shape[0]):
                host = span.host + host_blocks[k] * span.host_stride + layer * span.layer_stride + planes[p, _OFFSET]
                for i in range(begin, end):
                    if blocks[i] >= 0:
                        tokens = max(span.first_token - i * width, 0), min(span.end_token - i * width, width)
                        engine = bases[p, layer] + blocks[i] * planes[p, _BLOCK]
                        place = host + (i - k * per_host) * planes[p, _HOST_BLOCK]
                        _add_block(out, cursor, engine, place, planes[p], tokens, span.into_host)
    return cursor[0]


@jit
def _add_block(out: Any, cursor: Any, engine: int, host: int, plane: Any, tokens: Any, into_host: bool) -> None:
    """Add some tokens of one plane of a block."""
    first, end = tokens
    token, head, run, heads = plane[_TOKEN], plane[_HEAD], plane[_RUN], plane[_HEADS]
    host_token, host_head = plane[_HOST_TOKEN], plane[_HOST_HEAD]
    if host_head > host_token:  # heads before tokens
        for h in range(heads):
            if token == run:
                source, target = engine + h * head + first * run, host + h * host_head + first * run
                _add(out, cursor, source, target, (end - first) * run, into_host)
                continue
            for t in range(first, end):
                _add(out, cursor, engine + h * head + t * token, host + h * host_head + t * host_token, run, into_host)
        return
    joined = heads == 1 or head == run
    if joined and token == host_token:
        _add(out, cursor, engine + first * token, host + first * token, (end - first) * token, into_host)
        return
    for t in range(first, end):
        for h in range(1 if joined else heads):
            nbytes = heads * run if joined else run
            _add(out, cursor, engine + t * token + h * head, host + t * host_token + h * host_head, nbytes, into_host)

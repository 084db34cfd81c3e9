"""Which prefixes carry the reuse: runs of blocks that requests reuse together, and how few blocks serve how many
hits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.planner.stack import trace_back


class Prefix(NamedTuple):
    """A run of blocks of a prompt that is reused together: its tokens from ``start`` on, after all tokens before
    them."""

    first_request: int
    """Index of the first request that had it."""
    start: int
    """Tokens before it."""
    tokens: int
    reuses: int
    """Requests that would have found it with unbounded memory."""
    hit_tokens: int
    share: float
    """Its share of all hit tokens."""


@dataclass(frozen=True)
class Prefixes:
    """The prefixes that carry the most reuse, and how reuse is spread over blocks. With a sample, all figures are
    estimates."""

    top: list[Prefix]
    reused_blocks: int
    """Distinct blocks that were ever reused."""
    distinct_blocks: int
    blocks_for_half: int
    """The fewest distinct blocks that carry half of the hits."""
    blocks_for_most: int
    """The same for nine tenths of the hits."""


def find_prefixes(
    hits: npt.NDArray[np.int32],
    parent: npt.NDArray[np.int32],
    blocks_before: npt.NDArray[np.int64],
    tokens_per_block: int,
    sample: float,
    count: int = 10,
) -> Prefixes:
    """Return the ``count`` runs with the most hits.

    ``hits[b]`` and ``parent[b]`` (-1: none) belong to block b. ``blocks_before[r]`` are the distinct blocks seen before
    request r.
    """
    head, depth = np.empty(len(hits), np.int32), np.empty(len(hits), np.int32)
    trace_back(hits, parent, head, depth)
    (reused,) = np.nonzero(hits)
    heads, lengths = np.unique(head[reused], return_counts=True)
    carried = lengths * hits[heads].astype(np.int64)
    total = max(int(carried.sum()), 1)
    order = np.argsort(-carried, kind="stable")[:count]
    top = [
        Prefix(
            first_request=int(np.searchsorted(blocks_before, heads[i], side="right")) - 1,
            start=round(int(depth[heads[i]]) / sample) * tokens_per_block,
            tokens=round(int(lengths[i]) / sample) * tokens_per_block,
            reuses=int(hits[heads[i]]),
            hit_tokens=round(int(carried[i]) / sample) * tokens_per_block,
            share=int(carried[i]) / total,
        )
        for i in order
    ]
    growth = np.cumsum(np.sort(hits[reused])[::-1], dtype=np.int64)
    half, most = (int(np.searchsorted(growth, part * total)) + 1 if len(reused) else 0 for part in (0.5, 0.9))
    return Prefixes(
        top, round(len(reused) / sample), round(len(hits) / sample), round(half / sample), round(most / sample)
    )

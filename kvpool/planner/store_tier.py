"""A store behind the tiers: what a store of each capacity would have found, read, written and saved on a trace."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import BlockLayout
from kvpool.planner.survey import Survey

GIB = 1 << 30
SAVES = ("commit", "evict")
STORE_BANDWIDTH = 1.0
"""GB/s, both ways, if nothing is said."""
STORE_LATENCY = 1_000.0
"""Microseconds, if nothing is said."""


def check_above_0(name: str, value: float) -> None:
    """Raise ValueError for what is no finite number above 0."""
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name}={value}: must be a number above 0")


def check_latency(name: str, value: float) -> None:
    """Raise ValueError for what is no finite number of at least 0."""
    if not (isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value}: must be a number of at least 0")


def doublings(first: int, last: int, block_bytes: int) -> list[int]:
    """Capacities in blocks that are powers of two in bytes, from ``first`` to ``last`` blocks or a little more."""
    low, high = (ceil(log2(max(blocks, 1) * block_bytes)) for blocks in (first, last))
    return [(1 << power) // block_bytes for power in range(low, max(low, high) + 1)]


@dataclass(frozen=True)
class StoreTier:
    """A store. Raises ValueError for an argument out of range."""

    capacity: int | None = None
    """Blocks of the one that is asked about, besides the table of all capacities."""
    save: str = "commit"
    """One of SAVES. "commit": the store has the blocks that were used last, also those that are in the tiers. "evict":
    it has what the tiers have evicted, and what it gives back to them leaves it."""
    bandwidth: float = STORE_BANDWIDTH
    """GB/s."""
    latency: float = STORE_LATENCY
    """Microseconds from the beginning of a load to its first byte."""

    def __post_init__(self) -> None:
        if self.capacity is not None and self.capacity < 0:
            raise ValueError(f"capacity={self.capacity}: must be at least 0")
        if self.save not in SAVES:
            raise ValueError(f"save={self.save!r:.80}: accepted are {', '.join(SAVES)}")
        check_above_0("store_bandwidth", self.bandwidth)
        check_latency("store_latency", self.latency)


class StorePlan:
    """The figures of stores of all capacities behind ``tier_blocks`` blocks of device and host together.

    Tiers and store are LRU, and know each use of a block, wherever it was found. So all blocks lie in one list by their
    last use. The tiers have the first ``tier_blocks`` of it. With "commit", the store has the first ``capacity`` of the
    same list. With "evict", it has the ``capacity`` blocks that follow those of the tiers.

    ``prefill`` in tokens per second, or None. With it, a request loads what the store has for it if that is faster than
    to compute it. Without it, it loads all. Loads do not wait for each other.
    """

    def __init__(
        self, survey: Survey, layout: BlockLayout, store: StoreTier, tier_blocks: int, prefill: float | None
    ) -> None:
        self.survey, self.layout, self.store = survey, layout, store
        self.tier_blocks, self.prefill = tier_blocks, prefill

    def row(self, capacity: int) -> dict[str, Any]:
        """The figures of a store of ``capacity`` blocks."""
        survey, size = self.survey, self.layout.block_bytes
        found = self.hits(capacity)
        loads, read, saved = self._loads(capacity, found)
        written = self._written(capacity)
        return {
            "blocks": capacity,
            "gib": capacity * size / GIB,
            "hit_tokens": found * survey.tokens_per_block,
            "token_rate": found * survey.tokens_per_block / max(survey.prompt_tokens, 1),
            "loads": loads,
            "read_bytes": read * size,
            "written_bytes": written * size,
            "read_bytes_per_second": self._per_second(read * size),
            "written_bytes_per_second": self._per_second(written * size),
            "saved_seconds_per_request": saved,
        }

    def table(self) -> list[int]:
        """The capacities of the table, in blocks: powers of two in bytes, from the first that finds something the tiers
        do not have, or that of the longest request, up to everything that is ever found."""
        size, curve = self.layout.block_bytes, self.survey.curve
        needed = curve.capacity_for(curve.ceiling)
        if self.store.save == "evict":
            lowest, needed = self.survey.longest_blocks, needed - self.tier_blocks
        else:
            lowest = self.tier_blocks + 1
        return doublings(lowest, needed, size)

    def as_dict(self) -> dict[str, Any]:
        """Everything, as nested dictionaries, lists, numbers, strings and None only."""
        store = self.store
        return {
            "save": store.save,
            "gb_per_second": store.bandwidth,
            "latency_us": store.latency,
            "tier_blocks": self.tier_blocks,
            "asked": None if store.capacity is None else self.row(store.capacity),
            "table": [self.row(capacity) for capacity in self.table()],
        }

    def hits(self, capacity: int) -> int:
        """Prompt blocks that a store of ``capacity`` blocks finds and the tiers do not."""
        curve = self.survey.curve
        return max(round(curve.hits(self._end(capacity))) - round(curve.hits(self.tier_blocks)), 0)

    def _end(self, capacity: int) -> int:
        """How much of the list tiers and store have together."""
        return self.tier_blocks + capacity if self.store.save == "evict" else max(self.tier_blocks, capacity)

    def _written(self, capacity: int) -> int:
        """Blocks saved: those used that the store does not have, or those that the tiers evict."""
        uses = self.survey.uses
        if self.store.save == "commit":
            return uses.lookups - round(uses.hits(capacity))
        taken_in = uses.lookups - round(uses.hits(self.tier_blocks))
        return max(taken_in - min(self.tier_blocks, self.survey.distinct_blocks), 0)

    def _loads(self, capacity: int, found: int) -> tuple[int, int, float | None]:
        """Requests that load, blocks that they load, and the mean time that it saves each of all requests."""
        survey, store, size = self.survey, self.store, self.layout.block_bytes
        blocks = self._of_requests(capacity)
        if not survey.curve.exact and len(blocks):
            blocks = blocks * (found / blocks.sum())
        if self.prefill is None:
            return len(blocks), round(blocks.sum()), None
        gain = survey.tokens_per_block / self.prefill - size / (store.bandwidth * 1e9)
        gains = blocks * gain - store.latency * 1e-6
        worth = gains > 0
        saved = float(gains[worth].sum()) / max(survey.requests, 1)
        return int(worth.sum()), round(blocks[worth].sum()), saved

    def _of_requests(self, capacity: int) -> npt.NDArray[np.float64]:
        """How many blocks the store has for each request for which it has some, of the sample."""
        sample, runs = self.survey.curve.sample, self.survey.runs
        begin, end = (int(blocks * sample + 1e-9) for blocks in (self.tier_blocks, self._end(capacity)))
        first, last = runs[:, 1], runs[:, 1] + runs[:, 2] - 1
        inside = np.maximum(np.minimum(last, end) - np.maximum(first, begin + 1) + 1, 0)
        found = np.bincount(runs[:, 0], inside).astype(np.float64)
        return found[found > 0]

    def _per_second(self, nbytes: int) -> float | None:
        seconds = self.survey.seconds
        return nbytes / seconds if seconds else None

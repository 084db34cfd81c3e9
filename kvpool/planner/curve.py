"""Curve: how many prompt blocks an LRU cache finds, by its capacity."""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot, nan

import numpy as np
import numpy.typing as npt

from kvpool.planner.stack import STEPS, bucket_of

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Curve:
    """Hits of all capacities at once, exact or estimated from a sample of the blocks. Immutable.

    A sample is read by its misses: the misses are scaled up, and the rest of all lookups are hits. This is SHARDS-adj.
    A few blocks carry many of the hits, and it is luck whether the sample has them. But each distinct block misses
    about once.
    """

    cumulative: Counts
    """[n]: sampled lookups found at a distance up to ``limits[i]``, or up to i if there are no limits."""
    followed: int
    """Sampled lookups."""
    lookups: int
    """All lookups of blocks, sampled or not."""
    sample: float = 1.0
    limits: Counts | None = None
    """The largest distance of each place, ascending."""
    missed: Counts | None = None
    """[groups, len(coarse_limits)]: the sampled lookups of each part of the sample that miss at that capacity."""

    @property
    def exact(self) -> bool:
        """Whether the sample has every block."""
        return self.sample == 1.0

    @property
    def ceiling(self) -> float:
        """Hits with unbounded memory, blocks."""
        return self._hits(len(self.cumulative) - 1)

    def hits(self, capacity: int) -> float:
        """Hits of a cache of ``capacity`` blocks, in blocks. They never fall as the capacity grows."""
        return self._hits(self._place(capacity))

    def error(self, capacity: int) -> float:
        """Standard error of ``hits``, in blocks. 0 if the curve is exact, NaN if there are no parts of the sample.

        Two things are luck. The first is which lookups are sampled: the differences between the parts of the sample
        show it. The second is how many sampled blocks lie above one in the list. It is the same for all parts, and it
        matters where the curve is steep.
        """
        if self.exact:
            return 0.0
        if self.missed is None:
            return nan
        bucket = bucket_of(max(int(capacity * self.sample), 1))
        missed = self.missed[:, min(bucket, self.missed.shape[1] - 1)]
        followed = float(np.std(missed, ddof=1) * len(missed) ** 0.5 / self.sample)
        shift = round((capacity * (1 - self.sample) / self.sample) ** 0.5)
        return hypot(followed, (self.hits(capacity + shift) - self.hits(max(capacity - shift, 0))) / 2)

    def capacity_for(self, hits: float) -> int:
        """The smallest capacity, in blocks, with at least so many hits. If no capacity has so many, that of the
        ceiling."""
        found = min(hits, self.ceiling)
        if found <= 0:
            return 0
        total = self.cumulative
        needed = found - self.lookups + self.followed / self.sample
        place = int(np.searchsorted(total, needed * self.sample - 1e-6))
        # If a sample hit less than its share, the missing hits are added at the first place.
        place = max(1, min(place, int(np.searchsorted(total, total[-1]))))
        distance = place if self.limits is None else int(self.limits[place])
        return max(1, int(np.ceil(distance / self.sample)))

    def _hits(self, place: int) -> float:
        if self.exact:
            return float(self.cumulative[place])
        missed = (self.followed - int(self.cumulative[place])) / self.sample
        return min(max(self.lookups - missed, 0.0), float(self.lookups)) if place else 0.0

    def _place(self, capacity: int) -> int:
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: must be at least 0 blocks")
        reach = int(capacity * self.sample + 1e-9)
        last = len(self.cumulative) - 1
        return min(reach, last) if self.limits is None else int(np.searchsorted(self.limits, reach, side="right")) - 1


def coarse_limits(buckets: int) -> Counts:
    """The largest distance of each bucket of ``stack.bucket_of``."""
    number = np.arange(buckets, dtype=np.int64)
    shift = np.maximum(number // STEPS - 1, 0)
    return ((number - shift * STEPS + 1) << shift) - 1

"""A survey of a trace: one pass over its requests, and everything about their reuse that does not depend on a model."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.arrays.layout import integer_argument
from kvpool.entry.interrupt import DeferSignals
from kvpool.planner.curve import Curve, coarse_limits
from kvpool.planner.distances import BUCKETS, GROUPS, StackDistances
from kvpool.planner.prefixes import Prefixes, find_prefixes
from kvpool.planner.stack import REQUEST_EDGES, RUNS, SECOND_EDGES
from kvpool.replay.tokens import Request

TENANTS_MAX = 64
"""How many tenants have a curve of their own. Later ones share one curve."""
OTHERS, NOBODY = "(others)", "(none)"
SAMPLE_MIN = 1e-6
BLOCKS_MIN = 4 * GROUPS
"""The fewest distinct prompt blocks that a sample needs. With fewer, even its error is unknown."""


@dataclass(frozen=True)
class Tenant:
    """What one tenant finds in a cache that all tenants share."""

    name: str
    requests: int
    prompt_tokens: int
    curve: Curve
    """The capacities are those of the whole cache. Values below 1 % of a capacity are left out."""


@dataclass(frozen=True)
class Gaps:
    """Reused blocks by the time since their last use: rows (below, count). A row begins where the one before ends; None
    means without end."""

    requests: list[tuple[float | None, int]]
    seconds: list[tuple[float | None, int]]
    """Empty if the trace has no times."""


@dataclass(frozen=True)
class Survey:
    """What a trace reuses. Blocks are full blocks of ``tokens_per_block`` tokens, except for ``prompt_blocks``."""

    tokens_per_block: int
    sample: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    prompt_blocks: int
    """Blocks of all prompts, with unfull last ones."""
    longest_blocks: int
    """Blocks of the longest request, prompt and answer. A smaller cache cannot run it."""
    distinct_blocks: int
    """Distinct blocks of everything, with answers."""
    curve: Curve
    tenants: list[Tenant]
    gaps: Gaps
    prefixes: Prefixes
    uses: Curve
    """Of all blocks that requests use: those looked up, and those that are computed whether they are found or not. Its
    misses are the blocks that a cache of that capacity takes in."""
    runs: npt.NDArray[np.int64]
    """int64[n, 3]: a request, a distance, and how many of its lookups one after another were found at that distance and
    the ones that follow it. Of the sample."""
    seconds: float | None
    """From the first request to the last. None if the trace has no times."""

    def hit_tokens(self, capacity: int) -> int:
        """Prompt tokens found by a cache of ``capacity`` blocks."""
        return round(self.curve.hits(capacity)) * self.tokens_per_block

    @property
    def ceiling_tokens(self) -> int:
        """Prompt tokens found with unbounded memory."""
        return round(self.curve.ceiling) * self.tokens_per_block


class Surveyor:
    """Takes requests in the order of their admission, and returns a survey of all so far.

    A request touches its blocks once, when it is admitted, its last block first. This gives the order of a pool that
    holds the blocks while the request runs and then releases them tail first, if requests end in order. Only full
    blocks count. The last token of a prompt is never found. An answer takes memory. If the trace has its tokens, the
    next request can find them, since no chat goes on before it has its answer. Namespaces are those of the replay.

    Parameters
    ----------
    tokens_per_block
        At least 1.
    sample
        Share of the blocks in the sample, 1e-6 to 1.

    Not thread-safe.
    """

    def __init__(self, tokens_per_block: int, sample: float = 1.0) -> None:
        self.tokens_per_block = integer_argument("tokens_per_block", tokens_per_block, 1, 2**31 - 1)
        if not SAMPLE_MIN <= sample <= 1:
            raise ValueError(f"sample={sample}: must be {SAMPLE_MIN} to 1")
        self.sample = sample
        self._distances = StackDistances(tokens_per_block, sample)
        self._blocks_before = array("q")
        self._tokens = np.zeros(2, np.int64)
        self._lookups = self._prompt_blocks = self._longest = self._used = 0
        self._tenants: dict[str | None, int] = {}
        self._of_tenants = np.zeros((TENANTS_MAX + 1, 4), np.int64)

    @property
    def requests(self) -> int:
        """Requests recorded so far."""
        return self._distances.requests

    def record(self, request: Request) -> None:
        """Record the next request. Signal handlers wait until it is complete. Raises OverflowError for too many
        distinct blocks."""
        with DeferSignals():
            self._record(request)

    def _record(self, request: Request) -> None:
        size, before = self.tokens_per_block, self._distances.blocks
        name = request.salt if request.tenant is None else request.tenant
        tenant = self._tenants.setdefault(name, min(len(self._tenants), TENANTS_MAX))
        lookups = (request.input_length - 1) // size
        followed, _, _ = self._distances.record(request, tenant)
        self._blocks_before.append(before)
        self._of_tenants[tenant] += (1, request.input_length, lookups, followed)
        self._tokens += (request.input_length, request.output_length)
        self._lookups += lookups
        self._prompt_blocks += -(-request.input_length // size)
        self._longest = max(self._longest, -(-request.length // size))
        self._used += request.length // size

    def survey(self) -> Survey:
        """Return the figures of all requests so far. Call it once, as the last call: the result takes over the
        histograms.

        Raises ValueError if a sample has fewer than ``BLOCKS_MIN`` distinct blocks.
        """
        distances, tables = self._distances, self._distances.tables
        requests, blocks = distances.requests, distances.blocks
        if self.sample < 1 and self._lookups and blocks < BLOCKS_MIN:
            raise ValueError(
                f"sample={self.sample} follows {blocks} distinct blocks of these prompts: at least {BLOCKS_MIN} are "
                "needed"
            )
        cumulative, again = tables.distances[: distances.live + 2], tables.again[: distances.live + 2]
        np.cumsum(cumulative, out=cumulative)
        np.cumsum(again, out=again)
        again += cumulative
        times = tables.times[:requests]
        found = np.cumsum(tables.groups, axis=1)
        missed = (tables.cold + found[:, -1])[:, None] - found
        followed = int(cumulative[-1] + tables.cold.sum())
        curve = Curve(cumulative, followed, self._lookups, self.sample, missed=missed)
        before = np.array(self._blocks_before, np.int64)
        return Survey(
            tokens_per_block=self.tokens_per_block,
            sample=self.sample,
            requests=requests,
            prompt_tokens=int(self._tokens[0]),
            output_tokens=int(self._tokens[1]),
            prompt_blocks=self._prompt_blocks,
            longest_blocks=self._longest,
            distinct_blocks=round(distances.live / self.sample),
            curve=curve,
            tenants=self._tenant_curves(),
            gaps=Gaps(_rows(tables.gaps[0], REQUEST_EDGES), _rows(tables.gaps[1], SECOND_EDGES)),
            prefixes=find_prefixes(
                tables.hits[:blocks], tables.parent[:blocks], before, self.tokens_per_block, self.sample
            ),
            uses=Curve(again, distances.used, self._used, self.sample),
            runs=tables.runs[: distances.tables.counts[RUNS]],
            seconds=float(times.max() - times.min()) if requests and not np.isnan(times).any() else None,
        )

    def _tenant_curves(self) -> list[Tenant]:
        """The curves of tenants. Empty if the trace does not tell tenants apart."""
        if set(self._tenants) <= {None}:
            return []
        names: dict[int, str] = {}
        for name, number in self._tenants.items():
            names[number] = OTHERS if number == TENANTS_MAX else NOBODY if name is None else name
        limits = coarse_limits(BUCKETS)
        result = []
        for number, name in names.items():
            requests, tokens, lookups, followed = (int(n) for n in self._of_tenants[number])
            cumulative = np.cumsum(self._distances.tables.coarse[number])
            curve = Curve(cumulative, followed, lookups, self.sample, limits)
            result.append(Tenant(name, requests, tokens, curve))
        return sorted(result, key=lambda tenant: -tenant.prompt_tokens)


def survey_of(
    requests: Iterable[Request],
    *,
    tokens_per_block: int = 16,
    sample: float = 1.0,
    progress: Callable[[int], Any] | None = None,
) -> Survey:
    """Survey requests, which are read once. ``progress`` is called with 1 after each. Arguments and errors are those of
    `Surveyor`."""
    surveyor = Surveyor(tokens_per_block, sample)
    for request in requests:
        surveyor.record(request)
        if progress is not None:
            progress(1)
    return surveyor.survey()


def _rows(counts: npt.NDArray[np.int64], edges: Sequence[float]) -> list[tuple[float | None, int]]:
    """The bars of a histogram, without the empty ones at its end."""
    used = int(np.max(np.nonzero(counts)[0], initial=-1)) + 1
    return list(zip((*edges, None), counts[:used].tolist(), strict=False))

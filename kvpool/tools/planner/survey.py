"""A survey of a trace: one pass over its requests, and everything about their reuse that does not depend on a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, nan
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.tools.planner import stack
from kvpool.tools.planner.stack import BUCKETS, GROUPS, REQUEST_EDGES, SECOND_EDGES, STEPS, UsedBlocks
from kvpool.tools.replay.content import Progress, Request, namespace_digest

TENANTS_MAX = 64
"""How many tenants have a curve of their own. Later ones share one curve."""
OTHERS, NOBODY = "(others)", "(none)"
SAMPLE_MIN = 1e-6
PREFIXES = 10
"""How many prefixes are named."""
BLOCKS_MIN = 4 * GROUPS
"""The fewest distinct prompt blocks that a sample needs. With fewer, even its error is unknown."""


@dataclass(frozen=True, eq=False)
class Curve:
    """Hits of all capacities at once, exact or estimated from a sample of the blocks.

    Attributes
    ----------
    cumulative : numpy.ndarray of int64, shape (n,)
        Sampled lookups found at a distance up to ``limits[i]``, or up to i if there are no limits.
    followed : int
        Sampled lookups.
    lookups : int
        All lookups of blocks, sampled or not.
    sample : float, default 1.0
        The share of the blocks that is followed.
    limits : numpy.ndarray of int64, shape (n,), or None
        The largest distance of each place, ascending.
    missed : numpy.ndarray of int64, shape (groups, buckets), or None
        The sampled lookups of each part of the sample that miss at each capacity of ``coarse_limits``.

    Notes
    -----
    A sample is read by its misses: the misses are scaled up, and the rest of all lookups are hits. This is SHARDS-adj.
    A few blocks carry many of the hits, and it is luck whether the sample has them. But each distinct block misses
    about once. Immutable, and safe to share between threads.
    """

    cumulative: Int64s
    followed: int
    lookups: int
    sample: float = 1.0
    limits: Int64s | None = None
    missed: Int64s | None = None

    @property
    def exact(self) -> bool:
        """Whether the sample has every block."""
        return self.sample == 1.0

    @property
    def ceiling(self) -> float:
        """Hits with unbounded memory, blocks."""
        return self._hits(len(self.cumulative) - 1)

    def hits(self, capacity: int) -> float:
        """Return the hits of a cache, which never fall as the capacity grows.

        Parameters
        ----------
        capacity : int
            Its blocks.

        Returns
        -------
        float
            Blocks.
        """
        return self._hits(self._place(capacity))

    def error(self, capacity: int) -> float:
        """Return the standard error of ``hits``.

        Parameters
        ----------
        capacity : int
            Blocks of the cache.

        Returns
        -------
        float
            Blocks. 0 if the curve is exact, NaN if there are no parts of the sample.

        Notes
        -----
        Two things are luck. The first is which lookups are sampled: the differences between the parts of the sample
        show it. The second is how many sampled blocks lie above one in the list. It is the same for all parts, and it
        matters where the curve is steep.
        """
        if self.exact:
            return 0.0
        if self.missed is None:
            return nan
        bucket = stack.bucket_of(max(int(capacity * self.sample), 1))
        missed = self.missed[:, min(bucket, self.missed.shape[1] - 1)]
        followed = float(np.std(missed, ddof=1) * len(missed) ** 0.5 / self.sample)
        shift = round((capacity * (1 - self.sample) / self.sample) ** 0.5)
        return hypot(followed, (self.hits(capacity + shift) - self.hits(max(capacity - shift, 0))) / 2)

    def capacity_for(self, hits: float) -> int:
        """Return the smallest capacity with at least this many hits.

        Parameters
        ----------
        hits : float
            Blocks. More than the ceiling count as the ceiling.

        Returns
        -------
        int
            Blocks.
        """
        target = min(hits, self.ceiling)
        if target <= 0:
            return 0
        total = self.cumulative
        needed = target - self.lookups + self.followed / self.sample
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
            raise ValueError(f"capacity: expected 0 blocks or more, got {capacity}")
        reach = int(capacity * self.sample + 1e-9)
        last = len(self.cumulative) - 1
        return min(reach, last) if self.limits is None else int(np.searchsorted(self.limits, reach, side="right")) - 1


class Prefix(NamedTuple):
    """A run of blocks of a prompt that is reused together.

    Attributes
    ----------
    first_request : int
        Index of the first request that had it.
    start : int
        Tokens of the prompt before it.
    tokens : int
        Its tokens.
    reuses : int
        Requests that would have found it with unbounded memory.
    hit_tokens : int
        Tokens that they would have found.
    share : float
        Its share of all hit tokens.
    """

    first_request: int
    start: int
    tokens: int
    reuses: int
    hit_tokens: int
    share: float


@dataclass(frozen=True)
class Prefixes:
    """The prefixes that carry the most reuse, and how reuse is spread over blocks.

    Attributes
    ----------
    top : list of Prefix
        Those with the most hits.
    reused_blocks : int
        Distinct blocks that were ever reused.
    distinct_blocks : int
        Distinct blocks with a key.
    blocks_for_half : int
        The fewest distinct blocks that carry half of the hits.
    blocks_for_most : int
        The same for nine tenths of the hits.

    Notes
    -----
    With a sample, all figures are estimates.
    """

    top: list[Prefix]
    reused_blocks: int
    distinct_blocks: int
    blocks_for_half: int
    blocks_for_most: int


@dataclass(frozen=True)
class Tenant:
    """What one tenant finds in a cache that all tenants share.

    Attributes
    ----------
    name : str
        The value of the column ``tenant``, or else the salt.
    requests : int
        Its requests.
    prompt_tokens : int
        Tokens of their prompts.
    curve : Curve
        The capacities are those of the whole cache. Values below 1 % of a capacity are left out.
    """

    name: str
    requests: int
    prompt_tokens: int
    curve: Curve


@dataclass(frozen=True)
class Gaps:
    """Reused blocks by the time since their last use.

    Attributes
    ----------
    requests : list of (float or None, int)
        Rows of an upper edge, in requests, and a count. A row begins where the one before ends. None: no edge.
    seconds : list of (float or None, int)
        The same in seconds. Empty if the trace has no times.
    """

    requests: list[tuple[float | None, int]]
    seconds: list[tuple[float | None, int]]

    def bars(self) -> tuple[str, list[tuple[str, float]]]:
        """Return the histogram to show.

        Returns
        -------
        tuple of str and list of (str, float)
            The unit of its edges, "requests" or "time", and for each bar a label such as "< 20", which is short enough
            for the axis of a chart, and its share of all.
        """
        rows, unit, name = (
            (self.seconds, "time", duration) if self.seconds else (self.requests, "requests", "{:,}".format)
        )
        total = sum(count for _, count in rows)
        return unit, [("longer" if edge is None else f"< {name(edge)}", count / total) for edge, count in rows if total]


@dataclass(frozen=True)
class Survey:
    """What a trace reuses.

    Attributes
    ----------
    tokens_per_block : int
        Tokens of a block. All blocks are full ones, except for ``prompt_blocks``.
    sample : float
        The share of the blocks that was followed.
    requests : int
        Requests.
    prompt_tokens : int
        Tokens of their prompts.
    output_tokens : int
        Tokens of their answers.
    prompt_blocks : int
        Blocks of all prompts, with last ones that are not full.
    longest_blocks : int
        Blocks of the longest request, prompt and answer. A smaller cache cannot run it.
    distinct_blocks : int
        Distinct blocks of everything, with answers.
    curve : Curve
        Hits of prompts by capacity.
    tenants : list of Tenant
        Empty if the trace does not tell tenants apart.
    gaps : Gaps
        When reused blocks come back.
    prefixes : Prefixes
        What is reused most.
    uses : Curve
        Of all blocks that requests use: those looked up, and those that are computed whether they are found or not. Its
        misses are the blocks that a cache of that capacity takes in.
    runs : numpy.ndarray of int64, shape (n, 3)
        A request, a distance, and how many of its lookups one after another were found at that distance and the ones
        that follow it. Of the sample.
    seconds : float or None
        From the first request to the last. None if the trace has no times.
    """

    tokens_per_block: int
    sample: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    prompt_blocks: int
    longest_blocks: int
    distinct_blocks: int
    curve: Curve
    tenants: list[Tenant]
    gaps: Gaps
    prefixes: Prefixes
    uses: Curve
    runs: Int64s
    seconds: float | None

    def hit_tokens(self, capacity: int) -> int:
        """Return the number of prompt tokens that a cache finds.

        Parameters
        ----------
        capacity : int
            Its blocks.

        Returns
        -------
        int
            Tokens.
        """
        return round(self.curve.hits(capacity)) * self.tokens_per_block

    @property
    def ceiling_tokens(self) -> int:
        """Prompt tokens found with unbounded memory."""
        return round(self.curve.ceiling) * self.tokens_per_block


class Use(NamedTuple):
    """One request, by the numbers of its blocks.

    Attributes
    ----------
    request : Request
        The request.
    blocks : numpy.ndarray of int32, shape (n,)
        Those that another request can repeat.
    prompt : int
        How many of them, from the first on, are of the prompt. The rest is of the answer.
    lookups : int
        How many of them, from the first on, may be found.
    private : int
        How many more blocks it fills, which nobody repeats.
    """

    request: Request
    blocks: Int32s
    prompt: int
    lookups: int
    private: int


class Surveyor:
    """Take requests in the order of their admission, and survey them.

    Parameters
    ----------
    tokens_per_block : int
        At least 1.
    sample : float, default 1.0
        Share of the blocks to follow, 1e-6 to 1.
    keep : bool, default False
        Keep what each request uses, in ``uses``. This needs all blocks, and takes 4 bytes for each use of one.

    Raises
    ------
    ValueError
        For an argument out of range.

    Notes
    -----
    A request touches its blocks once, when it is admitted, its last block first. This gives the order of a pool that
    holds the blocks while the request runs and then releases them tail first, if requests end in order. Only full
    blocks count. The last token of a prompt is never found. An answer takes memory. If the trace has its tokens, the
    next request can find them, since no chat goes on before it has its answer. Namespaces are those of the replay.

    Memory grows by about 60 bytes for each distinct block in the sample, by 56 bytes for each request, and by 24 for
    each run of blocks that it finds. Contents are distinguished by 64-bit keys. Not thread-safe.
    """

    def __init__(self, tokens_per_block: int, sample: float = 1.0, *, keep: bool = False) -> None:
        self.tokens_per_block = integer_argument("tokens_per_block", tokens_per_block, 1, 2**31 - 1)
        if not SAMPLE_MIN <= sample <= 1:
            raise ValueError(f"sample: expected {SAMPLE_MIN} to 1, got {sample}")
        if keep and sample != 1:
            raise ValueError(f"sample: expected 1 to keep what each request uses, got {sample}")
        self.sample = sample
        self.tables = stack.new_tables(1 if sample == 1 else GROUPS)
        self._keep = keep
        self._found: list[tuple[Request, Int32s]] = []
        self._threshold = np.uint64(round(sample * 2**32))
        self._tenants: dict[str | None, int] = {}

    @property
    def requests(self) -> int:
        """Requests recorded so far."""
        return int(self.tables.counts[stack.REQUESTS])

    @property
    def uses(self) -> list[Use]:
        """What each request uses, if that is kept."""
        size, counts = self.tokens_per_block, self.tables.requests[: self.requests, stack.FOUND].tolist()
        return [
            Use(
                request,
                blocks[:count],
                prompt=min(count, request.input_length // size),
                lookups=(request.input_length - 1) // size,
                private=request.length // size - count,
            )
            for (request, blocks), count in zip(self._found, counts, strict=False)
        ]

    def record(self, request: Request) -> None:
        """Record the next request, wholly or, if an exception comes first, not at all.

        Parameters
        ----------
        request : Request
            The next one.

        Raises
        ------
        ValueError
            It has fewer ids than tokens.
        OverflowError
            There are too many distinct blocks.
        """
        size = self.tokens_per_block
        ids, tokens_per_id, keyed_tokens = _content(request)
        if request.output_length < 0 or len(ids) * tokens_per_id < keyed_tokens:
            covered = f"{len(ids)} ids of {tokens_per_id} tokens for {keyed_tokens} and {request.output_length} tokens"
            raise ValueError(f"{request.name}: expected ids for all, and numbers from 0 on, got {covered}")
        name = request.salt if request.tenant is None else request.tenant
        tenant = self._tenants.setdefault(name, min(len(self._tenants), TENANTS_MAX))
        full, keyed, lookups = request.length // size, keyed_tokens // size, (request.input_length - 1) // size
        number = self.requests
        self.tables = tables = stack.with_room(self.tables, full, number, tenant)
        tables.times[number] = nan if request.timestamp is None else request.timestamp
        blocks = tables.counts[stack.BLOCKS]
        tables.requests[number] = request.input_length, request.output_length, tenant, blocks, 0, 0
        seed = np.frombuffer(namespace_digest(request.salt, request.adapter_id)[:8], np.uint64)[0]
        access = UsedBlocks(tokens_per_id, size, lookups, keyed, full, seed, self._threshold, number, tenant)
        found = np.empty(keyed, np.int32)
        if self._keep:
            self._found[number:] = [(request, found)]
        stack.record(tables, access, ids, found)

    def survey(self) -> Survey:
        """Return the figures of all requests so far.

        Returns
        -------
        Survey
            The figures. It takes over the histograms, so this is the last call.

        Raises
        ------
        ValueError
            A sample has fewer than 128 distinct blocks.
        """
        tables, requests, size = self.tables, self.requests, self.tokens_per_block
        blocks, live, used_blocks, runs = tables.counts[[stack.BLOCKS, stack.LIVE, stack.USED, stack.RUNS]].tolist()
        inputs, outputs, _, blocks_before, *_ = tables.requests[:requests].T
        lookups = int(((inputs - 1) // size).sum())
        if self.sample < 1 and lookups and blocks < BLOCKS_MIN:
            raise ValueError(
                f"sample: expected one that follows at least {BLOCKS_MIN} distinct blocks of these prompts, got "
                f"{self.sample}, which follows {blocks}"
            )
        cumulative, again = tables.distances[: live + 2], tables.again[: live + 2]
        np.cumsum(cumulative, out=cumulative)
        np.cumsum(again, out=again)
        again += cumulative
        times = tables.times[:requests]
        tenant_hits = np.cumsum(tables.groups, axis=1)
        missed = (tables.cold + tenant_hits[:, -1])[:, None] - tenant_hits
        followed = int(cumulative[-1] + tables.cold.sum())
        curve = Curve(cumulative, followed, lookups, self.sample, missed=missed)
        return Survey(
            tokens_per_block=size,
            sample=self.sample,
            requests=requests,
            prompt_tokens=int(inputs.sum()),
            output_tokens=int(outputs.sum()),
            prompt_blocks=int((-(-inputs // size)).sum()),
            longest_blocks=int((-(-(inputs + outputs) // size)).max(initial=0)),
            distinct_blocks=round(live / self.sample),
            curve=curve,
            tenants=self._tenant_curves(),
            gaps=Gaps(_rows(tables.gaps[0], REQUEST_EDGES), _rows(tables.gaps[1], SECOND_EDGES)),
            prefixes=find_prefixes(tables.hits[:blocks], tables.parent[:blocks], blocks_before, size, self.sample),
            uses=Curve(again, used_blocks, int(((inputs + outputs) // size).sum()), self.sample),
            runs=tables.runs[:runs],
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
        inputs, _, tenants, _, followed, _ = self.tables.requests[: self.requests].T
        for number, name in names.items():
            (mine,) = np.nonzero(tenants == number)
            if not len(mine):
                continue  # Its first one was interrupted.
            cumulative, lookups = np.cumsum(self.tables.coarse[number]), (inputs[mine] - 1) // self.tokens_per_block
            curve = Curve(cumulative, int(followed[mine].sum()), int(lookups.sum()), self.sample, limits)
            result.append(Tenant(name, len(mine), int(inputs[mine].sum()), curve))
        return sorted(result, key=lambda tenant: -tenant.prompt_tokens)


def survey_of(
    requests: Iterable[Request],
    *,
    tokens_per_block: int = 16,
    sample: float = 1.0,
    progress: Progress = lambda count: None,
) -> Survey:
    """Survey requests.

    Parameters
    ----------
    requests : iterable of Request
        The requests in the order of their admission. They are read once.
    tokens_per_block : int, default 16
        At least 1.
    sample : float, default 1.0
        Share of the blocks to follow, 1e-6 to 1.
    progress : callable
        Called with 1 after each request.

    Returns
    -------
    Survey
        What they reuse.

    Raises
    ------
    ValueError
        As by `Surveyor`.
    OverflowError
        As by `Surveyor.record`.
    """
    surveyor = Surveyor(tokens_per_block, sample)
    for request in requests:
        surveyor.record(request)
        progress(1)
    return surveyor.survey()


def _content(request: Request) -> tuple[Uint64s, int, int]:
    """The ids of a request's content, the tokens that each id covers, and the number of tokens that another request can
    repeat."""
    if request.hash_ids is not None:
        try:
            ids = np.array(request.hash_ids, np.uint64)
        except OverflowError:
            raise ValueError(f"hash_ids: expected numbers from 0 to 2**64 - 1, got {request.hash_ids!r:.80}") from None
        if ids.ndim != 1:
            raise ValueError(f"hash_ids: expected one dimension, got shape {ids.shape}")
        return ids, request.tokens_per_id, request.input_length
    assert request.tokens is not None
    if request.outputs is None:
        return request.tokens.astype(np.uint64), 1, request.input_length
    return np.concatenate([request.tokens, request.outputs]).astype(np.uint64), 1, request.length


def duration(seconds: float) -> str:
    """A round time in its largest unit."""
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:g} {unit}"
    return f"{seconds:g} s"


def _rows(counts: Int64s, edges: Sequence[float]) -> list[tuple[float | None, int]]:
    """The bars of a histogram, without the empty ones at its end."""
    length = int(np.max(np.nonzero(counts)[0], initial=-1)) + 1
    return list(zip((*edges, None), counts[:length].tolist(), strict=False))


def coarse_limits(buckets: int) -> Int64s:
    """The largest distance of each bucket of ``stack.bucket_of``."""
    number = np.arange(buckets, dtype=np.int64)
    shift = np.maximum(number // STEPS - 1, 0)
    return ((number - shift * STEPS + 1) << shift) - 1


def find_prefixes(
    hits: Int32s,
    parent: Int32s,
    blocks_before: Int64s,
    tokens_per_block: int,
    sample: float,
) -> Prefixes:
    """Return the runs with the most hits.

    ``hits[b]`` and ``parent[b]`` (-1: none) belong to block b. ``blocks_before[r]`` are the distinct blocks seen before
    request r.
    """
    head, depth = np.empty(len(hits), np.int32), np.empty(len(hits), np.int32)
    stack.trace_back(hits, parent, head, depth)
    (reused,) = np.nonzero(hits)
    heads, lengths = np.unique(head[reused], return_counts=True)
    carried = lengths * hits[heads].astype(np.int64)
    total = max(int(carried.sum()), 1)
    order = np.argsort(-carried, kind="stable")[:PREFIXES]
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

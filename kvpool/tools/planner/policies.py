"""Hit rates of the pool's policies on a trace, beside LRU and two ceilings that know the future.

Every policy runs in a real pool of the capacity that is asked about. Requests are instantaneous there: each is
admitted, committed and released before the next one comes, at its own time. So the figures of LRU are those of the
curve. The ceilings are:

``MIN``: what Belady's rule finds. The block goes whose next use is last, if need be the one that has just come. No
cache of this capacity finds more.

``session oracle``: a ``SessionOracle``, for traces with sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from kvpool.common.arrays import Int32s, Int64s, Uint8s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.cpu import CpuDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.pool.manager import KVCacheManager
from kvpool.state.arrays import PolicyName
from kvpool.tools.planner.stack import belady, follow
from kvpool.tools.planner.survey import Survey, Use
from kvpool.tools.replay.content import Progress, Request

LRU = "lru"
MIN = "MIN"
ORACLE = "session oracle"
Said: TypeAlias = Literal["nothing", "stop", "future"]
"""What an engine says with each release: nothing, why the model stopped, or when the next request comes."""
_STOPS = ("tool_use", "end_turn")
FRESH = 1 << 30
"""Tokens from here on are in no prompt."""
_SHOWN = 6
_LEFT_AFTER = 3
"""A block that so many requests of its session have not used is left behind."""


@dataclass(frozen=True)
class PolicyTable:
    """Hits of each policy, in blocks, at some capacities.

    Attributes
    ----------
    said : {"nothing", "stop", "future"}
        What the engine says with each release.
    capacities : list of int
        Blocks of the cache.
    hits : dict of str to list of int
        By the name of a policy or a ceiling, for each capacity.
    lookups : int
        Blocks that were looked up.
    as_lru : dict of str to list of int
        For each policy, the blocks with which LRU finds as many.
    """

    said: Said
    capacities: list[int]
    hits: dict[str, list[int]]
    lookups: int
    as_lru: dict[str, list[int]]

    def rate(self, name: str, place: int) -> float:
        """Return the share of the blocks looked up that are found.

        Parameters
        ----------
        name : str
            A policy or a ceiling.
        place : int
            The index of a capacity.

        Returns
        -------
        float
            From 0 to 1.
        """
        return self.hits[name][place] / max(self.lookups, 1)

    def memory(self, policy: str, place: int) -> float:
        """Return with which share of LRU's memory a policy finds as many.

        Parameters
        ----------
        policy : str
            A key of ``as_lru``.
        place : int
            The index of a capacity.

        Returns
        -------
        float
            Below 1 if the policy needs less memory than LRU.
        """
        return self.capacities[place] / max(self.as_lru[policy][place], 1)


def compare(
    uses: Sequence[Use],
    survey: Survey,
    capacities: Sequence[int],
    policies: Sequence[PolicyName],
    *,
    said: Said = "nothing",
    progress: Progress = lambda count: None,
) -> PolicyTable:
    """Run each policy at each capacity, beside LRU and ceilings that know the future.

    Parameters
    ----------
    uses : sequence of Use
        Those of an exact survey, in order.
    survey : Survey
        The survey.
    capacities : sequence of int
        Blocks, each at least those of the longest request.
    policies : sequence of {"lru", "reuse", "agent", "adaptive"}
        Policies of a pool.
    said : {"nothing", "stop", "future"}, default "nothing"
        What the engine says with each release: nothing, why the model stopped, or when the session goes on.
    progress : callable
        Called with 1 after each run.

    Returns
    -------
    PolicyTable
        The hits.

    Raises
    ------
    ValueError
        For a capacity that does not hold the longest request, and for a policy that no pool has.
    """
    if said not in get_args(Said):
        raise ValueError(f"said: expected {', '.join(get_args(Said))}, got {said!r}")
    if min(capacities, default=0) < survey.longest_blocks:
        raise ValueError(
            f"capacities: expected {survey.longest_blocks} blocks or more, as the longest request has, got "
            f"{list(capacities)}"
        )
    runs: dict[str, Callable[[int], int]] = {LRU: lambda capacity: round(survey.curve.hits(capacity))}
    for policy in policies:
        runs[policy] = partial(through_pool, uses, survey.longest_blocks, policy=policy, said=said)
    if any(use.request.session is not None for use in uses):
        runs[ORACLE] = lambda capacity: sum(map(SessionOracle(uses, capacity).find, uses))
    runs[MIN] = partial(min_hits, *next_uses(uses))
    hits: dict[str, list[int]] = {name: [] for name in runs}
    for capacity in capacities:
        for name, run in runs.items():
            hits[name].append(run(capacity))
            progress(1)
    as_lru: dict[str, list[int]] = {
        name: [survey.curve.capacity_for(count) for count in hits[name]] for name in policies
    }
    return PolicyTable(said, list(capacities), hits, sum(use.lookups for use in uses), as_lru)


def choose_capacities(survey: Survey) -> list[int]:
    """Return six capacities that show a trace.

    Parameters
    ----------
    survey : Survey
        What the trace reuses.

    Returns
    -------
    list of int
        Blocks, from the longest request to what the ceiling needs, evenly spaced on a logarithmic scale.
    """
    last = survey.curve.capacity_for(survey.curve.ceiling)
    first = max(survey.longest_blocks, last // 32, 1)
    return sorted({int(capacity) for capacity in np.geomspace(first, max(first, last), _SHOWN)})


# -- a pool --------------------------------------------------------------------------------------


class DecidingDevice(CpuDevice):
    """A device whose pool decides only: it copies nothing."""

    copies = False

    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        """Copy nothing."""


def deciding_pool(
    device_blocks: int, host_blocks: int, active: int, longest: int, policy: PolicyName, clock: Callable[[], int]
) -> KVCacheManager:
    """A pool without KV bytes, whose blocks are one token each. ``longest``: the most blocks of a sequence."""
    return KVCacheManager(
        BlockLayout(layers=1, kv_heads=1, head_dim=1, tokens_per_block=1, dtype="uint8", planes=1),
        device_blocks=device_blocks,
        host_blocks=host_blocks,
        device=DecidingDevice(),
        max_sequences=active,
        max_sequence_tokens=longest,
        policy=policy,
        partial_reuse=False,
        clock=clock,
        secret=bytes(32),
    )


def hints(request: Request, said: Said) -> dict[str, Any]:
    """What an engine says when it releases a request, as arguments of ``release``."""
    if said == "stop" and request.stop in _STOPS:
        return {"stop": request.stop}
    if said == "future" and request.returns is not None and request.timestamp is not None:
        ends = request.returns == inf
        return {"ends": True} if ends else {"returns_in_ms": int((request.returns - request.timestamp) * 1000)}
    return {}


def through_pool(uses: Iterable[Use], longest: int, capacity: int, policy: PolicyName, said: Said = "nothing") -> int:
    """How many prompt blocks are found when requests of up to ``longest`` blocks are played through a pool of
    ``capacity`` device blocks."""
    now_ms = [0]
    hits = 0
    fresh = FRESH
    # One block more is for the last token of a prompt, which is never found.
    with deciding_pool(capacity + 1, 0, 1, longest + 1, policy, clock=lambda: now_ms[0]) as cache:
        for request, blocks, prompt, lookups, private in uses:
            now_ms[0] = request.arrival_ms
            admitted = cache.add_sequence_batch([cache.block_keys(np.append(blocks[:prompt] + 1, 0))])
            hits += min(int(admitted.cached_tokens[0]), lookups)
            cache.commit(admitted.ids, np.array([prompt]))
            cache.rewind(admitted.ids, np.array([1]))
            answer = np.append(blocks[prompt:] + 1, np.arange(fresh, fresh + private))
            if len(answer):
                cache.append_tokens(admitted.ids, answer, np.array([len(answer)]))
                cache.commit(admitted.ids)
                fresh += private
            cache.release(admitted.ids, **hints(request, said))
    return hits


# -- ceilings ------------------------------------------------------------------------------------


def next_uses(uses: Sequence[Use]) -> tuple[Int64s, Uint8s]:
    """For each use of a block, in order, the place of the next use of the same block (beyond the end: none), and
    whether it counts when it is found."""
    lengths = [len(use.blocks) for use in uses]
    blocks, counted = np.empty(sum(lengths), np.int32), np.zeros(sum(lengths), np.uint8)
    first = 0
    for use, length in zip(uses, lengths, strict=True):
        blocks[first : first + length] = use.blocks
        counted[first : first + use.lookups] = 1
        first += length
    following = np.empty(len(blocks), np.int64)
    follow(blocks, np.full(int(blocks.max(initial=-1)) + 1, len(blocks)), following)
    return following, counted


def min_hits(following: Int64s, counted: Uint8s, capacity: int) -> int:
    """How many uses of blocks a cache finds that evicts the block whose next use is last."""
    held, heap = np.zeros(len(following), np.uint8), np.empty(len(following), np.int64)
    return int(belady(following, counted, capacity, held, heap))


class SessionOracle:
    """A cache of some blocks that knows when each session comes back, but not with what.

    What the last requests of a session have not used is left behind. It goes first, in the order in which it was left.
    Then go blocks of the session that comes back last, the end of its prompt first, even if it has just come.
    """

    def __init__(self, uses: Sequence[Use], capacity: int) -> None:
        distinct = max((int(use.blocks.max(initial=-1)) for use in uses), default=-1) + 1
        self.capacity, self.size = capacity, 0
        self.held, self.left = np.zeros(distinct, np.bool_), np.zeros(distinct, np.bool_)
        self.used = np.zeros(distinct, np.int32)
        """When each block was last used, in requests of its session."""
        self.sessions: dict[int, tuple[Int32s, float, int]] = {}
        """Of each session that may come back: its blocks, the last one goes first; its return; its requests."""
        self.queue: deque[Int32s] = deque()

    def find(self, use: Use) -> int:
        """How many blocks of a prompt are found. Then the cache has all of the request, as far as it fits."""
        request = use.request
        blocks = use.blocks
        session = -1 if request.session is None else request.session
        hits = int(np.append(self.held[blocks[: use.lookups]], False).argmin())
        before, _, number = self.sessions.get(session, (blocks[:0], 0.0, 0))
        self.used[blocks], self.left[blocks] = number + 1, False
        age = number + 1 - self.used[before]
        old = before[age > _LEFT_AFTER]
        if len(old):
            self.left[old] = True
            self.queue.append(old)
        returns = inf if request.returns is None else request.returns
        self.sessions[session] = np.concatenate([blocks, before[(age > 0) & (age <= _LEFT_AFTER)]]), returns, number + 1
        self.size += int((~self.held[blocks]).sum())
        self.held[blocks] = True
        while self.size > self.capacity:
            self._evict()
        return hits

    def _evict(self) -> None:
        """Evict blocks of one kind, as many as there are too many."""
        if self.queue:
            old = self.queue.popleft()
            gone = old[self.left[old]]
            self.left[gone] = False
        else:
            last = max(self.sessions, key=lambda session: self.sessions[session][1])
            blocks, returns, number = self.sessions.pop(last)
            kept = max(len(blocks) - (self.size - self.capacity), 0)
            gone = blocks[kept:]
            if kept:
                self.sessions[last] = blocks[:kept], returns, number
        self.held[gone] = False
        self.size -= len(gone)

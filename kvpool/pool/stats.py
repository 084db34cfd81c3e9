"""Statistics of a pool and of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.pool.core import Core
from kvpool.pool.transfer.transfer import Transfer
from kvpool.state.arrays import State, States
from kvpool.state.records import (
    BINS,
    CLEAN,
    COUNTERS,
    EMPTY,
    HOST_IDLE,
    HOST_LIFETIME,
    IDLE,
    LIFETIME,
    LISTS_PER_TIER,
    LIVE,
    OFFLOAD,
    ONBOARD,
    RESERVED,
    REUSE_GAP,
    SWAPPED,
    WITHIN,
)


@dataclass(frozen=True)
class TierStats:
    """The blocks of one tier by their use: capacity = free + used, and free = empty + evictable.

    Attributes
    ----------
    capacity : int
        Number of blocks.
    free : int
        Blocks that nobody holds, which the next calls can take.
    used : int
        Blocks held by sequences, reservations or leases.
    evictable : int
        Free blocks with content, which can be reused until it is evicted.
    pinned : int
        Blocks held by leases, whether or not sequences hold them too.
    empty : int
        Free blocks without content.
    redundant : int
        Free host blocks whose content is on the device too. 0 for the device tier.
    """

    capacity: int
    free: int
    used: int
    evictable: int
    pinned: int
    empty: int
    redundant: int


@dataclass(frozen=True, eq=False)
class Histogram:
    """A histogram of times on the pool's clock.

    Attributes
    ----------
    bins : ndarray of int64, shape (33,)
        The number of times in each bin: below 1 ms in bin 0, from ``2**(i - 1)`` to below ``2**i`` ms in bin i.
    total_ms : int, default 0
        The sum of the times, in milliseconds.
    """

    bins: Int64s = field(default_factory=lambda: np.zeros(BINS, np.int64))
    total_ms: int = 0

    @property
    def count(self) -> int:
        """The number of times."""
        return int(self.bins.sum())


@dataclass(frozen=True)
class GroupStats:
    """The figures of one group of layers.

    ``Stats.groups`` has them. The figures are totals since the pool was made, except those of the tiers.

    Attributes
    ----------
    device : TierStats
        The device blocks now.
    host : TierStats
        The host blocks now.
    offloaded_blocks : int
        Blocks that were copied to the host.
    onboarded_blocks : int
        Blocks that were copied to the device.
    forgotten_device_blocks : int
        Contents that had their only copy on the device, and left the cache.
    forgotten_host_blocks : int
        Contents that had their only copy on the host, and left the cache.
    offloads_saved : int
        Evictions from the device that needed no copy, because the host had one.
    evicted_offloaded_blocks : int
        Evictions from the device that moved the content to the host.
    evicted_by_rule_blocks : int
        Evictions from the device of content that is not worth an offload (a block that is not full, a low priority, too
        few uses), and all evictions that need a copy in a pool without a host tier.
    evicted_host_full_blocks : int
        Evictions from the device of content that was worth an offload, but the host had no room.
    evicted_host_blocks : int
        Evictions from the host of content that had no other copy.
    copied_blocks : int
        Blocks that were copied in part, or to give a sequence a private copy.
    lost_blocks : int
        Blocks whose bytes never came, because the device refused the copy.
    redundant_dropped : int
        Host copies that were dropped while the content was on the device.
    expired_blocks : int
        Blocks whose time to live has passed.
    passed_blocks : int
        Blocks that live sequences released when the window had passed them.
    forgotten_by_call_blocks : int
        Contents that ``forget`` removed from the index. Those without another copy count as forgotten too.
    offloaded_bytes : int
        Bytes of the copies to the host that the device accepted.
    onboarded_bytes : int
        Bytes of the copies to the device, likewise.
    within_bytes : int
        Bytes of the copies inside a tier, likewise.
    offload_seconds : float or None
        Time of the copies to the host. None on a device that copies after the call has returned.
    onboard_seconds : float or None
        Time of the copies to the device, likewise.
    within_seconds : float or None
        Time of the copies inside a tier, likewise.
    lifetime_ms : Histogram
        From storing to eviction from the device.
    idle_ms : Histogram
        From the last use to eviction from the device.
    host_lifetime_ms : Histogram
        From storing to eviction from the host, of content that had no other copy.
    host_idle_ms : Histogram
        From the last use to such an eviction from the host.
    reuse_gap_ms : Histogram
        From one use to the next, of each block that a prompt hit in full.
    """

    device: TierStats
    host: TierStats
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    forgotten_device_blocks: int = 0
    forgotten_host_blocks: int = 0
    offloads_saved: int = 0
    evicted_offloaded_blocks: int = 0
    evicted_by_rule_blocks: int = 0
    evicted_host_full_blocks: int = 0
    evicted_host_blocks: int = 0
    copied_blocks: int = 0
    lost_blocks: int = 0
    redundant_dropped: int = 0
    expired_blocks: int = 0
    passed_blocks: int = 0
    forgotten_by_call_blocks: int = 0
    offloaded_bytes: int = 0
    onboarded_bytes: int = 0
    within_bytes: int = 0
    offload_seconds: float | None = None
    onboard_seconds: float | None = None
    within_seconds: float | None = None
    lifetime_ms: Histogram = field(default_factory=Histogram)
    idle_ms: Histogram = field(default_factory=Histogram)
    host_lifetime_ms: Histogram = field(default_factory=Histogram)
    host_idle_ms: Histogram = field(default_factory=Histogram)
    reuse_gap_ms: Histogram = field(default_factory=Histogram)


@dataclass(frozen=True)
class Stats(GroupStats):
    """The figures of a pool: those of ``GroupStats``, summed over the groups of layers, and those of requests.

    ``KVCacheManager.stats`` returns it. ``str`` prints the most important figures. The figures are totals since the
    pool was made, unless they say "now".

    Attributes
    ----------
    prompt_tokens : int
        Tokens of the prompts that were added.
    reused_device_tokens : int
        Of those, tokens in full blocks that were on the device, or that a window had passed.
    reused_host_tokens : int
        Of those, tokens in full blocks that were on the host only.
    partial_tokens : int
        Of those, tokens that were copied from blocks that matched in part.
    reused_device_blocks : int
        The blocks of ``reused_device_tokens``.
    reused_host_blocks : int
        The blocks of ``reused_host_tokens``.
    partial_blocks : int
        Blocks that matched in part.
    missed_blocks : int
        Blocks of prompts that were not full hits.
    bypassed_tokens : int
        Tokens of prompts with ``reuse=False``, which no other figure of prompts counts.
    appended_tokens : int
        Tokens that were appended to sequences.
    dropped_tokens : int
        Tokens that were rewound, and draft tokens that were rejected.
    recomputed_tokens : int
        Tokens of full blocks whose content was cached already when a sequence committed them.
    events_dropped : int
        Events for which there was no room.
    sequences : int
        Running sequences now.
    swapped : int
        Sequences that are swapped out now.
    leases : int
        Open leases now.
    oldest_lease_ms : int
        Age of the oldest lease that is open now, in milliseconds; 0 if there is none.
    reservations : int
        Open reservations now.
    expired_reservations : int
        Reservations that were not committed before their deadline.
    overdue_reservations : int
        Expired reservations that were not aborted yet, now. Their blocks are out of use.
    uploads : int
        Uploads of block tables that the device has not finished reading now. Each retains a staging buffer.
    most_uploads : int
        The most such uploads at any time.
    groups : tuple of GroupStats
        The figures of each group of layers.

    Notes
    -----
    A prompt counts once, since all groups reuse the same tokens of it. The tier and the blocks of those tokens are
    those of the first group that is not for cross attention.
    """

    prompt_tokens: int = 0
    reused_device_tokens: int = 0
    reused_host_tokens: int = 0
    partial_tokens: int = 0
    reused_device_blocks: int = 0
    reused_host_blocks: int = 0
    partial_blocks: int = 0
    missed_blocks: int = 0
    bypassed_tokens: int = 0
    appended_tokens: int = 0
    dropped_tokens: int = 0
    recomputed_tokens: int = 0
    events_dropped: int = 0
    sequences: int = 0
    swapped: int = 0
    leases: int = 0
    oldest_lease_ms: int = 0
    reservations: int = 0
    expired_reservations: int = 0
    overdue_reservations: int = 0
    uploads: int = 0
    most_uploads: int = 0
    groups: tuple[GroupStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """The share of the blocks of prompts that were full hits, from 0 to 1."""
        reused = self.reused_device_blocks + self.reused_host_blocks
        return reused / max(1, reused + self.missed_blocks)

    def __str__(self) -> str:
        """The most important figures, in a few lines. ``repr`` has every field."""
        reused = self.reused_device_tokens + self.reused_host_tokens + self.partial_tokens
        lines = [f"{'blocks':<8} {'capacity':>12} {'used':>12} {'evictable':>12} {'empty':>12} {'pinned':>12}"]
        for name, tier in (("device", self.device), ("host", self.host)):
            counts = (tier.capacity, tier.used, tier.evictable, tier.empty, tier.pinned)
            lines.append(f"{name:<8} " + " ".join(f"{count:>12,}" for count in counts))
        lines += [
            f"prompts  {self.prompt_tokens:,} tokens, {reused:,} reused: {self.reused_device_tokens:,} on the device, "
            f"{self.reused_host_tokens:,} on the host, {self.partial_tokens:,} in part",
            f"blocks   {self.hit_rate:.1%} of prompts' blocks found, {self.missed_blocks:,} missed",
            f"copies   {self.offloaded_blocks:,} blocks offloaded, {self.onboarded_blocks:,} onboarded, "
            f"{self.copied_blocks:,} inside a tier",
            f"lost     {self.lost_blocks:,} blocks, {self.events_dropped:,} events",
            f"now      {self.sequences:,} sequences, {self.swapped:,} swapped out, "
            f"{self.reservations:,} reservations, {self.leases:,} leases",
        ]
        return "\n".join(lines)


class RequestStats(NamedTuple):
    """The figures of live sequences, in tokens.

    ``KVCacheManager.request_stats`` returns it: with arrays for n ids, with ints if ``ids`` is an int.

    Attributes
    ----------
    prompt : int or ndarray of int32, shape (n,)
        Tokens that the sequence was added with.
    device : int or ndarray of int32, shape (n,)
        Of those, tokens that were reused in full blocks from the device.
    host : int or ndarray of int32, shape (n,)
        Of those, tokens that were reused in full blocks from the host.
    partial : int or ndarray of int32, shape (n,)
        Of those, tokens that were copied from a block that matched in part.
    decoded : int or ndarray of int32, shape (n,)
        Tokens after the prompt now.
    committed : int or ndarray of int32, shape (n,)
        Tokens whose KV is written.
    dropped : int or ndarray of int32, shape (n,)
        Tokens that were rewound, and draft tokens that were rejected.
    recomputed : int or ndarray of int32, shape (n,)
        Tokens of full blocks whose content was cached already when the sequence committed them, so that computing them
        was wasted. It happens to requests that share a prefix and run at the same time.

    Notes
    -----
    With several groups of layers, ``host`` is that of the group with the most, and ``recomputed`` that of the first
    group that is not for cross attention. A fork begins with the figures of its parent, and a beam takes them over with
    the tokens. A rewind into the prompt makes ``prompt`` smaller.
    """

    prompt: int | Int32s
    device: int | Int32s
    host: int | Int32s
    partial: int | Int32s
    decoded: int | Int32s
    committed: int | Int32s
    dropped: int | Int32s
    recomputed: int | Int32s


_OF_GROUPS = [field.name for field in fields(GroupStats) if field.name in COUNTERS]
_OF_PROMPTS = [name for name in COUNTERS if name not in (*_OF_GROUPS, "events_dropped")]


def _tier(state: State, tier: int, capacity: int, pinned: int) -> TierStats:
    lengths = state.lists[tier * LISTS_PER_TIER : (tier + 1) * LISTS_PER_TIER, 2]
    free, empty = int(lengths.sum()), int(lengths[EMPTY])
    return TierStats(capacity, free, capacity - free, free - empty, pinned, empty, int(lengths[CLEAN]))


def _group(state: State, pinned: Int64s, nbytes: list[int], seconds: Sequence[float | None]) -> GroupStats:
    """Return the figures of one group. ``pinned`` has the id of a block once for each pin of it. The index of
    ``nbytes`` and ``seconds`` is the direction."""
    device, pinned = int(state.header.device_blocks), np.unique(pinned)
    pinned_device = int(np.searchsorted(pinned, device))
    counters = dict(zip(COUNTERS, state.counters.tolist(), strict=True))
    histograms = [Histogram(row[:BINS], int(row[BINS])) for row in state.histograms.copy()]
    evicted = histograms[LIFETIME].count
    kept = counters["offloads_saved"] + counters["evicted_by_rule_blocks"] + counters["evicted_host_full_blocks"]
    return GroupStats(
        device=_tier(state, 0, device, pinned_device),
        host=_tier(state, 1, len(state.blocks) - device, len(pinned) - pinned_device),
        evicted_offloaded_blocks=evicted - kept,
        evicted_host_blocks=histograms[HOST_LIFETIME].count,
        offloaded_bytes=nbytes[OFFLOAD],
        onboarded_bytes=nbytes[ONBOARD],
        within_bytes=nbytes[WITHIN],
        offload_seconds=seconds[OFFLOAD],
        onboard_seconds=seconds[ONBOARD],
        within_seconds=seconds[WITHIN],
        lifetime_ms=histograms[LIFETIME],
        idle_ms=histograms[IDLE],
        host_lifetime_ms=histograms[HOST_LIFETIME],
        host_idle_ms=histograms[HOST_IDLE],
        reuse_gap_ms=histograms[REUSE_GAP],
        **{name: counters[name] for name in _OF_GROUPS},
    )


def _sum(parts: Sequence[Any]) -> Any:
    """Return the sum of figures of one kind, or None if they are unknown."""
    first = parts[0]
    if isinstance(first, (TierStats, Histogram)):
        return type(first)(*(_sum([getattr(part, field.name) for part in parts]) for field in fields(first)))
    return None if first is None else sum(parts[1:], first)


def snapshot(
    states: States,
    lead: State,
    transfer: Transfer,
    pinned: Int64s,
    lease_ages: list[int],
    uploads: tuple[int, int],
    late: tuple[int, int],
) -> Stats:
    """Return the figures of a pool now. ``lead`` is the first group that is not for cross attention.

    ``pinned`` has the pool id of a block once for each pin of it. ``uploads`` is the number now in flight, and the
    most at any time. ``late`` is the number of reservations that have expired, and of those that are overdue. The
    caller holds the state lock, so nothing here loops over all blocks.
    """
    pins = {int(state.group): ids for state, _, ids in states.split(pinned)}
    times = transfer.moved.nanoseconds
    groups = tuple(
        _group(
            state,
            pins.get(g, pinned[:0]),
            nbytes,
            [None] * 3 if transfer.order is not None else [ns / 1e9 for ns in times[g]],
        )
        for g, (state, nbytes) in enumerate(zip(states, transfer.moved.nbytes, strict=True))
    )
    counters = dict(zip(COUNTERS, lead.counters.tolist(), strict=True))
    sums = dict(vars(groups[0]))
    for name in sums if len(groups) > 1 else ():
        sums[name] = _sum([getattr(group, name) for group in groups])
    return Stats(
        **sums | {name: counters[name] for name in _OF_PROMPTS},
        # A lost event is counted in the group whose event took its place.
        events_dropped=sum(int(state.counters[COUNTERS.index("events_dropped")]) for state in states),
        sequences=int(np.count_nonzero(lead.sequences["live"] == LIVE)),
        swapped=int(np.count_nonzero(lead.sequences["live"] == SWAPPED)),
        reservations=int(np.count_nonzero(lead.sequences["live"] == RESERVED)),
        expired_reservations=late[0],
        overdue_reservations=late[1],
        leases=len(lease_ages),
        oldest_lease_ms=max([0, *lease_ages]),
        uploads=uploads[0],
        most_uploads=uploads[1],
        groups=groups,
    )


def requests(core: Core, rows: Int64s, single: bool) -> RequestStats:
    """Return the figures of live rows, or of a ``single`` one. The caller holds the state lock."""
    sequences = core.tokens.sequences[rows]
    host = np.max([state.sequences["from_host"][rows] for state in core.states], axis=0)
    partial = sequences["cached"] % core.config.tokens_per_block
    figures = (
        sequences["prompt"].copy(),
        sequences["cached"] - partial - host,
        host,
        partial,
        sequences["length"] - sequences["prompt"],
        sequences["committed"].copy(),
        sequences["dropped"].copy(),
        sequences["recomputed"].copy(),
    )
    return RequestStats(*(int(figure[0]) for figure in figures) if single else figures)

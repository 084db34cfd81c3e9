"""Statistics of a pool, as a snapshot with documented fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
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
    """Blocks of one tier. free + used = capacity; free = empty + evictable."""

    capacity: int
    free: int
    """blocks that nobody holds, so the next calls can take them"""
    used: int
    """blocks that sequences, reservations or pins hold"""
    evictable: int
    """free blocks with content that can be reused until it is evicted"""
    pinned: int
    """blocks that leases hold, whether or not sequences hold them too"""
    empty: int
    redundant: int
    """host copies of content that is on the device as well"""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Times on the pool's clock. ``bins`` int64[33] counts them: bin 0 is below 1 ms, bin i is [2**(i-1), 2**i) ms.
    ``total_ms`` is the sum of the times."""

    bins: Int64s = field(default_factory=lambda: np.zeros(BINS, np.int64))
    total_ms: int = 0

    @property
    def count(self) -> int:
        return int(self.bins.sum())


@dataclass(frozen=True)
class GroupStats:
    """The figures of one group of layers. They are totals since the pool was made, unless their text says "now"."""

    device: TierStats
    host: TierStats
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    forgotten_device_blocks: int = 0
    forgotten_host_blocks: int = 0
    offloads_saved: int = 0
    """evictions from the device that needed no copy because the host had one"""
    evicted_offloaded_blocks: int = 0
    """evictions from the device that moved the content to the host"""
    evicted_by_rule_blocks: int = 0
    """evictions from the device of content that a rule does not offload (not full, low priority, too few uses), or in
    a pool without a host tier"""
    evicted_host_full_blocks: int = 0
    """evictions from the device of content that should have been offloaded, but the host had no room"""
    evicted_host_blocks: int = 0
    """evictions from the host of content that had no other copy"""
    copied_blocks: int = 0
    """blocks that were copied in part, or to give a sequence a private copy"""
    lost_blocks: int = 0
    """blocks whose bytes never came, because the device failed"""
    redundant_dropped: int = 0
    """host copies that were dropped while the content was on the device"""
    expired_blocks: int = 0
    passed_blocks: int = 0
    """blocks that live sequences released when the window had passed them"""
    forgotten_by_call_blocks: int = 0
    """blocks that ``forget`` made unfindable. Those without any copy left also count as forgotten"""
    offloaded_bytes: int = 0
    """bytes of the copies to the host that the device accepted"""
    onboarded_bytes: int = 0
    within_bytes: int = 0
    """bytes that were copied inside a tier"""
    offload_seconds: float | None = None
    """time of those copies. None on devices that copy after the call has returned, since nobody waits for them"""
    onboard_seconds: float | None = None
    within_seconds: float | None = None
    lifetime_ms: Histogram = field(default_factory=Histogram)
    """time from storing to eviction from the device"""
    idle_ms: Histogram = field(default_factory=Histogram)
    """time from the last use to eviction from the device"""
    host_lifetime_ms: Histogram = field(default_factory=Histogram)
    """time from storing to eviction from the host, for content that had no other copy"""
    host_idle_ms: Histogram = field(default_factory=Histogram)
    """time from the last use to such an eviction from the host"""
    reuse_gap_ms: Histogram = field(default_factory=Histogram)
    """time from the last use to the next, for each block that a prompt hit in full"""


@dataclass(frozen=True)
class Stats(GroupStats):
    """The figures of a pool. ``groups`` has a ``GroupStats`` for each group of layers. The same fields here are their
    sums.

    A prompt counts once, since all groups reuse the same tokens of it. The tier and the blocks of those tokens are
    counted in the first group that is not for cross attention.
    """

    prompt_tokens: int = 0
    reused_device_tokens: int = 0
    """tokens in full blocks that were on the device, or that a window had passed"""
    reused_host_tokens: int = 0
    """tokens in full blocks that were on the host"""
    partial_tokens: int = 0
    """tokens that were copied out of blocks that matched in part"""
    reused_device_blocks: int = 0
    reused_host_blocks: int = 0
    partial_blocks: int = 0
    missed_blocks: int = 0
    """blocks of prompts that were not full hits"""
    bypassed_tokens: int = 0
    """tokens of prompts that were not allowed to reuse anything. No other figure of prompts counts them"""
    appended_tokens: int = 0
    dropped_tokens: int = 0
    """tokens that were rewound, and draft tokens that were not kept"""
    recomputed_tokens: int = 0
    """tokens of full blocks whose content was already cached when a sequence committed them"""
    events_dropped: int = 0
    sequences: int = 0
    """running now"""
    swapped: int = 0
    """sequences that wait on the host now"""
    leases: int = 0
    """open now"""
    oldest_lease_ms: int = 0
    """age of the oldest lease that is open now, 0 without any"""
    reservations: int = 0
    """open now"""
    expired_reservations: int = 0
    """reservations that were not committed before their deadline"""
    overdue_reservations: int = 0
    """open now, after their deadline: their blocks wait for ``abort``"""
    uploads: int = 0
    """uploads of block tables that the device has not finished reading now. Each retains a staging buffer"""
    most_uploads: int = 0
    """the most uploads that there ever were at once"""
    groups: tuple[GroupStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """The share of prompts' blocks that were reused as full blocks."""
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
    """Of each sequence, int32[n] in the order of the ids; int for one id.

    ``prompt``: tokens that it was added with, without those that were appended later. Of those, ``device`` and
    ``host`` were reused in full blocks and ``partial`` were copied out of a block that matched in part. ``decoded``:
    tokens that it has now after its prompt. ``committed``: tokens whose KV is written. ``dropped``: tokens that were
    rewound, and drafts that were not kept. ``recomputed``: tokens of full blocks whose content was cached already
    when this sequence committed them, so that computing them was wasted, as by requests that share a prefix and run
    at the same time.

    With several groups of layers, ``host`` is of the group that has the most; ``recomputed`` of the first group that is
    not for cross attention. A fork begins with its parent's figures, and a beam takes them over with the tokens. A
    rewind into the prompt makes ``prompt`` smaller.
    """

    prompt: Any
    device: Any
    host: Any
    partial: Any
    decoded: Any
    committed: Any
    dropped: Any
    recomputed: Any


_OF_GROUPS = [field.name for field in fields(GroupStats) if field.name in COUNTERS]
_OF_PROMPTS = [name for name in COUNTERS if name not in (*_OF_GROUPS, "events_dropped")]


def _tier(state: State, tier: int, capacity: int, pinned: int) -> TierStats:
    lengths = state.lists[tier * LISTS_PER_TIER : (tier + 1) * LISTS_PER_TIER, 2]
    free, empty = int(lengths.sum()), int(lengths[EMPTY])
    return TierStats(capacity, free, capacity - free, free - empty, pinned, empty, int(lengths[CLEAN]))


def _group(state: State, pinned: Int64s, nbytes: list[int], seconds: Sequence[float | None]) -> GroupStats:
    """The figures of one group. ``pinned`` has the id of a block once for each pin of it. The index of ``nbytes`` and
    ``seconds`` is the direction."""
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
    """The sum of figures of one kind, or None if they are unknown."""
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
    """The figures of a pool now. ``lead`` is the first group that is not for cross attention.

    ``pinned`` has the pool id of a block once for each pin of it. ``uploads`` is the number now under way, and the
    most that there ever were at once. ``late`` is the number of reservations that have expired, and of those of them
    that are still open. The caller holds the state lock, so nothing here loops over all blocks.
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


def requests(core: Core, rows: Int64s) -> RequestStats:
    """The figures of live rows. The caller holds the state lock."""
    sequences = core.tokens.sequences[rows]
    host = np.max([state.sequences["from_host"][rows] for state in core.states], axis=0)
    partial = sequences["cached"] % core.config.tokens_per_block
    return RequestStats(
        sequences["prompt"].copy(),
        sequences["cached"] - partial - host,
        host,
        partial,
        sequences["length"] - sequences["prompt"],
        sequences["committed"].copy(),
        sequences["dropped"].copy(),
        sequences["recomputed"].copy(),
    )

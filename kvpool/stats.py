"""Statistics of a pool as a snapshot whose fields are sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.order import OFFLOAD, ONBOARD, WITHIN
from kvpool.state.blocks import (
    BINS,
    C_DROPPED,
    COUNTERS,
    DEVICE_BLOCKS,
    EMPTY,
    GROUP,
    HOST_IDLE,
    HOST_LIFETIME,
    IDLE,
    LIFETIME,
    LISTS_PER_TIER,
    LIVE,
    REDUNDANT,
    RESERVED,
    REUSE_GAP,
)
from kvpool.state.states import State, States
from kvpool.transfer import Transfer


@dataclass(frozen=True)
class TierStats:
    """Blocks of one tier. free + used = capacity; free = empty + evictable."""

    capacity: int
    free: int
    """nobody holds them: the next calls can have them"""
    used: int
    """held by sequences, reservations or pins"""
    evictable: int
    """free with content that is reusable until it is evicted"""
    pinned: int
    """held by leases, whether or not by sequences too"""
    empty: int
    redundant: int
    """host copies of content that is on the device as well"""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Times on the pool's clock. ``bins`` int64[33]: bin 0 is below 1 ms, bin i is [2**(i-1), 2**i) ms; ``total_ms`` is their sum."""

    bins: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    total_ms: int = 0

    @property
    def count(self) -> int:
        return int(self.bins.sum())


@dataclass(frozen=True)
class GroupStats:
    """Of one group of layers. Totals since the pool was made, unless they say "now"."""

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
    """evictions from the device of what is not to be offloaded (unfull, of low priority, of little use), or without a host tier"""
    evicted_host_full_blocks: int = 0
    """evictions from the device of what should have been offloaded, but the host had no room"""
    evicted_host_blocks: int = 0
    """evictions from the host of content that was nowhere else"""
    copied_blocks: int = 0
    """partial and private copies"""
    lost_blocks: int = 0
    """blocks whose bytes a failing device never brought"""
    redundant_dropped: int = 0
    """host copies given up while the content was on the device"""
    expired_blocks: int = 0
    passed_blocks: int = 0
    """that live sequences gave back when their window had passed them"""
    offloaded_bytes: int = 0
    """that the device was told to copy to the host, and took"""
    onboarded_bytes: int = 0
    within_bytes: int = 0
    """copied inside a tier"""
    offload_seconds: float | None = None
    """that those copies took; None on devices that copy behind their callers, where nobody waits for them"""
    onboard_seconds: float | None = None
    within_seconds: float | None = None
    lifetime_ms: Histogram = field(default_factory=Histogram)
    """from storing to eviction from the device"""
    idle_ms: Histogram = field(default_factory=Histogram)
    """from the last use to eviction from the device"""
    host_lifetime_ms: Histogram = field(default_factory=Histogram)
    """from storing to eviction from the host of content that was nowhere else"""
    host_idle_ms: Histogram = field(default_factory=Histogram)
    """from the last use to that"""
    reuse_gap_ms: Histogram = field(default_factory=Histogram)
    """from the last use to the next, per block that a prompt hit in full"""


@dataclass(frozen=True)
class Stats(GroupStats):
    """Of a pool: ``groups``, a ``GroupStats`` for each group of layers; their sums, in the same fields; and what concerns them all.

    A prompt counts once: all groups reuse the same tokens of it. On which tier these were, and their blocks, is told of the first group
    that is not for cross attention.
    """

    prompt_tokens: int = 0
    reused_device_tokens: int = 0
    """in full blocks that were on the device, or that a window had passed"""
    reused_host_tokens: int = 0
    """in full blocks that were on the host"""
    partial_tokens: int = 0
    """copied out of blocks that matched in part"""
    reused_device_blocks: int = 0
    reused_host_blocks: int = 0
    partial_blocks: int = 0
    missed_blocks: int = 0
    """blocks of prompts that were not full hits"""
    events_dropped: int = 0
    sequences: int = 0
    """live now"""
    leases: int = 0
    """open now"""
    oldest_lease_ms: int = 0
    """age of the oldest lease that is open now, 0 without any"""
    reservations: int = 0
    """open now"""
    hand_overs: int = 0
    """of block tables, that the device has not finished reading now; each retains a staging buffer"""
    most_hand_overs: int = 0
    """at once, ever"""
    groups: tuple[GroupStats, ...] = ()

    @property
    def hit_rate(self) -> float:
        """Full blocks of prompts that were reused, of all blocks of prompts."""
        reused = self.reused_device_blocks + self.reused_host_blocks
        return reused / max(1, reused + self.missed_blocks)


_OF_GROUPS = [one.name for one in fields(GroupStats) if one.name in COUNTERS]
_OF_PROMPTS = [name for name in COUNTERS if name not in (*_OF_GROUPS, "events_dropped")]


def _tier(state: State, tier: int, capacity: int, pinned: int) -> TierStats:
    lengths = state.lists[tier * LISTS_PER_TIER : (tier + 1) * LISTS_PER_TIER, 2]
    free, empty = int(lengths.sum()), int(lengths[EMPTY])
    return TierStats(capacity, free, capacity - free, free - empty, pinned, empty, int(lengths[REDUNDANT]))


def _group(state: State, pinned: npt.NDArray[np.int64], nbytes: list[int], seconds: Sequence[float | None]) -> GroupStats:
    """``pinned`` names a block of the group for each of its pins; bytes and seconds are by direction."""
    device, pinned = int(state.header[DEVICE_BLOCKS]), np.unique(pinned)
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
    """The sum of figures of one kind; None where they are not told."""
    first = parts[0]
    if isinstance(first, (TierStats, Histogram)):
        return type(first)(*(_sum([getattr(part, one.name) for part in parts]) for one in fields(first)))
    return None if first is None else sum(parts[1:], first)


def snapshot(
    states: States, lead: State, transfer: Transfer, pinned: npt.NDArray[np.int64], lease_ages: list[int], hand_overs: tuple[int, int]
) -> Stats:
    """``lead`` is the first group that is not for cross attention.

    ``pinned`` names a block for each of its pins, by the ids that all behind the state knows; ``hand_overs`` are under way now, and were
    at most. The state lock is held by the caller, so nothing here looks at every block.
    """
    pins = {int(state.header[GROUP]): ids for state, _, ids in states.split(pinned)}
    times = transfer.moved.nanoseconds
    groups = tuple(
        _group(state, pins.get(g, pinned[:0]), nbytes, [None] * 3 if transfer.order is not None else [ns / 1e9 for ns in times[g]])
        for g, (state, nbytes) in enumerate(zip(states, transfer.moved.nbytes, strict=True))
    )
    counters = dict(zip(COUNTERS, lead.counters.tolist(), strict=True))
    sums = dict(vars(groups[0]))
    for name in sums if len(groups) > 1 else ():
        sums[name] = _sum([getattr(group, name) for group in groups])
    return Stats(
        **sums | {name: counters[name] for name in _OF_PROMPTS},
        # An event that is lost is counted where the one that took its place came from.
        events_dropped=sum(int(state.counters[C_DROPPED]) for state in states),
        sequences=int(np.count_nonzero(lead.sequences["live"] == LIVE)),
        reservations=int(np.count_nonzero(lead.sequences["live"] == RESERVED)),
        leases=len(lease_ages),
        oldest_lease_ms=max([0, *lease_ages]),
        hand_overs=hand_overs[0],
        most_hand_overs=hand_overs[1],
        groups=groups,
    )

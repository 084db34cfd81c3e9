"""Statistics of a pool as a snapshot whose fields are sentences."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvpool.state.blocks import COUNTERS, DEVICE_BLOCKS, EMPTY, IDLE, LIFETIME, LISTS_PER_TIER, LIVE, REDUNDANT, RESERVED, REUSE_GAP, State


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


@dataclass(frozen=True)
class Stats:
    """Totals since the pool was made. ``*_ms`` are histograms int64[33]: bin 0 is below 1 ms, bin i is [2**(i-1), 2**i) ms."""

    device: TierStats
    host: TierStats
    prompt_tokens: int = 0
    reused_device_tokens: int = 0
    """in full blocks that were on the device"""
    reused_host_tokens: int = 0
    """in full blocks that were on the host"""
    partial_tokens: int = 0
    """copied out of blocks that matched in part"""
    reused_device_blocks: int = 0
    reused_host_blocks: int = 0
    partial_blocks: int = 0
    missed_blocks: int = 0
    """blocks of prompts that were not full hits"""
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    forgotten_device_blocks: int = 0
    forgotten_host_blocks: int = 0
    offloads_saved: int = 0
    """evictions from the device that needed no copy because the host had one"""
    copied_blocks: int = 0
    """partial and private copies"""
    lost_blocks: int = 0
    """blocks whose bytes a failing device never brought"""
    events_dropped: int = 0
    redundant_dropped: int = 0
    """host copies given up while the content was on the device"""
    expired_blocks: int = 0
    offloaded_bytes: int = 0
    onboarded_bytes: int = 0
    sequences: int = 0
    """live now"""
    leases: int = 0
    """open now"""
    reservations: int = 0
    """open now"""
    hand_overs: int = 0
    """of block tables, that the device has not finished reading now; each retains a staging buffer"""
    most_hand_overs: int = 0
    """at once, ever"""
    lifetime_ms: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """from storing to eviction from the device"""
    idle_ms: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """from the last use to eviction from the device"""
    reuse_gap_ms: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """from the last use to the next"""

    @property
    def hit_rate(self) -> float:
        """Full blocks of prompts that were reused, of all blocks of prompts."""
        reused = self.reused_device_blocks + self.reused_host_blocks
        return reused / max(1, reused + self.missed_blocks)


def _tier(state: State, tier: int, blocks: slice) -> TierStats:
    lengths = state.lists[tier * LISTS_PER_TIER : (tier + 1) * LISTS_PER_TIER, 2]
    capacity, free = len(state.blocks[blocks]), int(lengths.sum())
    pinned = int(np.count_nonzero(state.blocks["word"][blocks] >> 32))
    return TierStats(capacity, free, capacity - free, free - int(lengths[EMPTY]), pinned, int(lengths[EMPTY]), int(lengths[REDUNDANT]))


def snapshot(state: State, block_bytes: int, leases: int, hand_overs: tuple[int, int]) -> Stats:
    """The state lock is held by the caller."""
    device = int(state.header[DEVICE_BLOCKS])
    counters = dict(zip(COUNTERS, state.counters.tolist(), strict=True))
    histograms = state.histograms.copy()
    return Stats(
        device=_tier(state, 0, slice(0, device)),
        host=_tier(state, 1, slice(device, None)),
        offloaded_bytes=counters["offloaded_blocks"] * block_bytes,
        onboarded_bytes=counters["onboarded_blocks"] * block_bytes,
        sequences=int(np.count_nonzero(state.sequences["live"] == LIVE)),
        reservations=int(np.count_nonzero(state.sequences["live"] == RESERVED)),
        leases=leases,
        hand_overs=hand_overs[0],
        most_hand_overs=hand_overs[1],
        lifetime_ms=histograms[LIFETIME],
        idle_ms=histograms[IDLE],
        reuse_gap_ms=histograms[REUSE_GAP],
        **counters,
    )

"""The plan: a survey in bytes of a model and seconds of a machine, and of a store behind it."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, isfinite, log2
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays.layout import BlockLayout
from kvpool.tools.planner.policies import PolicyTable
from kvpool.tools.planner.survey import Curve, Survey, Tenant

GIB = 1 << 30
STORE_BANDWIDTH = 1.0
"""GB/s, both ways, if nothing is said."""
STORE_LATENCY = 1_000.0
"""Microseconds, if nothing is said."""
STEP_BYTES = 16 * GIB
"""The marginal hit rate is that of this much more memory."""
TARGETS = (0.5, 0.75, 0.9, 0.95, 0.99)
LINK_BANDWIDTH = 50.0
"""GB/s that a PCIe 5.0 link of 16 lanes gives."""
LINK_LATENCY = 50.0
"""Microseconds from the call of an onboard to its first byte: a launch and an event."""
_POINTS = 256


def _check_number(name: str, value: float | None, *, above_0: bool = False) -> None:
    """Raise ValueError for a number that is not finite, is below 0, or is 0 where it must be above."""
    if value is not None and not (isfinite(value) and (value > 0 if above_0 else value >= 0)):
        raise ValueError(f"{name}: expected a number {'above 0' if above_0 else 'from 0 on'}, got {value}")


def doublings(first: int, last: int, block_bytes: int) -> list[int]:
    """Capacities in blocks that are powers of two in bytes, from ``first`` to ``last`` blocks or a little more."""
    low, high = (ceil(log2(max(blocks, 1) * block_bytes)) for blocks in (first, last))
    return [(1 << power) // block_bytes for power in range(low, max(low, high) + 1)]


@dataclass(frozen=True)
class StoreTier:
    """A store behind the tiers.

    Parameters
    ----------
    capacity : int or None, default None
        Blocks of the store that is asked about, besides the table of all capacities.
    save : {"commit", "evict"}, default "commit"
        With ``"commit"``, the store has the blocks that were used last, including those in the tiers. With ``"evict"``,
        it has what the tiers have evicted, and a loaded block is removed from it.
    bandwidth : float, default STORE_BANDWIDTH
        GB/s, above 0.
    latency : float, default STORE_LATENCY
        Microseconds from the beginning of a load to its first byte.

    Raises
    ------
    ValueError
        For an argument out of range.
    """

    capacity: int | None = None
    save: Literal["commit", "evict"] = "commit"
    bandwidth: float = STORE_BANDWIDTH
    latency: float = STORE_LATENCY

    def __post_init__(self) -> None:
        if self.save not in ("commit", "evict"):
            raise ValueError(f"save: expected commit, evict, got {self.save!r:.80}")
        _check_number("store_capacity", self.capacity)
        _check_number("store_bandwidth", self.bandwidth, above_0=True)
        _check_number("store_latency", self.latency)


class StoreRow(NamedTuple):
    """What a store of one capacity adds to the tiers.

    Attributes
    ----------
    blocks : int
        The capacity.
    gib : float
        The same in GiB.
    hit_tokens : int
        Prompt tokens that the store has and the tiers do not.
    token_rate : float
        Their share of all prompt tokens.
    loads : int
        Requests that load.
    read_bytes : int
        Bytes that they load.
    written_bytes : int
        Bytes that are saved.
    read_bytes_per_second : float or None
        None for a trace without times.
    written_bytes_per_second : float or None
        None for a trace without times.
    saved_seconds_per_request : float or None
        Mean of all requests. None without a prefill speed.
    """

    blocks: int
    gib: float
    hit_tokens: int
    token_rate: float
    loads: int
    read_bytes: int
    written_bytes: int
    read_bytes_per_second: float | None
    written_bytes_per_second: float | None
    saved_seconds_per_request: float | None


class StorePlan:
    """The figures of stores of all capacities behind the tiers.

    Parameters
    ----------
    survey : Survey
        What the trace reuses.
    layout : BlockLayout
        Gives the bytes of a block.
    store : StoreTier
        How the store saves, and how fast it is.
    tier_blocks : int
        Blocks of device and host together.
    prefill : float or None
        Prompt tokens that the engine computes in a second. A request then loads what the store has for it if that is
        faster than to compute it. With None, it loads all.

    Notes
    -----
    Tiers and store are LRU, and know each use of a block, wherever it was found. So all blocks lie in one list by their
    last use. The tiers have the first ``tier_blocks`` of it. With ``"commit"``, the store has the first ``capacity`` of
    the same list. With ``"evict"``, it has the ``capacity`` blocks that follow those of the tiers. Loads do not wait
    for each other. Immutable, and safe to share between threads.
    """

    def __init__(
        self, survey: Survey, layout: BlockLayout, store: StoreTier, tier_blocks: int, prefill: float | None
    ) -> None:
        self.survey, self.layout, self.store = survey, layout, store
        self.tier_blocks, self.prefill = tier_blocks, prefill

    def row(self, capacity: int) -> StoreRow:
        """Return the figures of a store of one capacity.

        Parameters
        ----------
        capacity : int
            Blocks.

        Returns
        -------
        StoreRow
            The figures.
        """
        survey, size = self.survey, self.layout.block_bytes
        hit_blocks = self.hits(capacity)
        hit_tokens = hit_blocks * survey.tokens_per_block
        loads, read, saved = self._loads(capacity, hit_blocks)
        written, seconds = self._written(capacity), survey.seconds
        return StoreRow(
            blocks=capacity,
            gib=capacity * size / GIB,
            hit_tokens=hit_tokens,
            token_rate=hit_tokens / max(survey.prompt_tokens, 1),
            loads=loads,
            read_bytes=read * size,
            written_bytes=written * size,
            read_bytes_per_second=read * size / seconds if seconds else None,
            written_bytes_per_second=written * size / seconds if seconds else None,
            saved_seconds_per_request=saved,
        )

    def table(self) -> list[int]:
        """Return the capacities of the table: powers of two in bytes.

        Returns
        -------
        list of int
            Blocks, from the first capacity that finds something the tiers do not have, or that of the longest request,
            up to everything that is ever found.
        """
        curve = self.survey.curve
        lowest, needed = self.tier_blocks + 1, curve.capacity_for(curve.ceiling)
        if self.store.save == "evict":
            lowest, needed = self.survey.longest_blocks, needed - self.tier_blocks
        return doublings(lowest, needed, self.layout.block_bytes)

    def hits(self, capacity: int) -> int:
        """Return the number of prompt blocks that the store has and the tiers do not.

        Parameters
        ----------
        capacity : int
            Blocks of the store.

        Returns
        -------
        int
            Blocks.
        """
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

    def _loads(self, capacity: int, hit_blocks: int) -> tuple[int, int, float | None]:
        """Requests that load, blocks that they load, and the mean time that it saves each of all requests."""
        survey, store = self.survey, self.store
        blocks = self._of_requests(capacity)
        if not survey.curve.exact and len(blocks):
            blocks = blocks * (hit_blocks / blocks.sum())
        if self.prefill is None:
            return len(blocks), round(blocks.sum()), None
        gain = survey.tokens_per_block / self.prefill - self.layout.block_bytes / (store.bandwidth * 1e9)
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
        per_request = np.bincount(runs[:, 0], inside).astype(np.float64)
        return per_request[per_request > 0]


@dataclass(frozen=True)
class Machine:
    """The model and the machine.

    Parameters
    ----------
    layout : BlockLayout
        A block of the model's KV.
    prefill_tokens_per_second : float or None, default None
        Prompt tokens that the engine computes in a second. None leaves out all times.
    link_bandwidth : float, default LINK_BANDWIDTH
        GB/s from host to device.
    link_latency : float, default LINK_LATENCY
        Microseconds from the call of an onboard to its first byte.
    device_blocks : int or None, default None
        Blocks of the device tier that is asked about.
    host_blocks : int, default 0
        Blocks of its host tier.
    store : StoreTier or None, default None
        A store behind the tiers, which must be given too.

    Raises
    ------
    ValueError
        For an argument out of range.
    """

    layout: BlockLayout
    prefill_tokens_per_second: float | None = None
    link_bandwidth: float = LINK_BANDWIDTH
    link_latency: float = LINK_LATENCY
    device_blocks: int | None = None
    host_blocks: int = 0
    store: StoreTier | None = None

    def __post_init__(self) -> None:
        _check_number("prefill_tokens_per_second", self.prefill_tokens_per_second, above_0=True)
        _check_number("link_bandwidth", self.link_bandwidth, above_0=True)
        for name in ("link_latency", "device_blocks", "host_blocks"):
            _check_number(name, getattr(self, name))
        if self.store is not None and self.device_blocks is None:
            raise ValueError("device_blocks: expected a number with store=, got None")

    @property
    def seconds_per_token(self) -> float:
        """Seconds for one token to cross the link."""
        return self.layout.token_bytes / (self.link_bandwidth * 1e9)


class CapacityRow(NamedTuple):
    """What a cache of one capacity finds.

    Attributes
    ----------
    blocks : int
        The capacity.
    gib : float
        The same in GiB.
    hit_blocks : int
        Prompt blocks found.
    hit_tokens : int
        Prompt tokens found.
    token_rate : float
        Their share of all prompt tokens.
    block_rate : float
        The share of all prompt blocks.
    standard_error : float
        That of ``token_rate``, estimated from the sample. 0 if all blocks were followed.
    of_ceiling : float
        Share of what unbounded memory finds.
    next_16_gib : float
        What 16 GiB more add to ``token_rate``.
    saved_seconds_per_request : float or None
        Mean of all requests. None without a prefill speed.
    """

    blocks: int
    gib: float
    hit_blocks: int
    hit_tokens: int
    token_rate: float
    block_rate: float
    standard_error: float
    of_ceiling: float
    next_16_gib: float
    saved_seconds_per_request: float | None


class PoolPlan(NamedTuple):
    """The figures of the tiers that are asked about.

    Attributes
    ----------
    device : CapacityRow
        The device tier alone.
    both : CapacityRow
        Both tiers, which hit like one cache of the summed size.
    """

    device: CapacityRow
    both: CapacityRow


class BreakEven(NamedTuple):
    """When it is faster to onboard a prefix than to compute it again.

    Attributes
    ----------
    tokens : int or None
        From this hit length on. None: never.
    worthwhile_above_gb_per_second : float
        On a link with more than this bandwidth, some length is.
    """

    tokens: int | None
    worthwhile_above_gb_per_second: float


class CapacityPlan:
    """A survey with a model and a machine.

    Parameters
    ----------
    survey : Survey
        What the trace reuses.
    machine : Machine
        With as many tokens per block as the survey.
    policies : PolicyTable or None, default None
        Policies that were compared on the same trace.

    Raises
    ------
    ValueError
        Survey and layout have different tokens per block.

    Notes
    -----
    Immutable, and safe to share between threads.
    """

    def __init__(self, survey: Survey, machine: Machine, policies: PolicyTable | None = None) -> None:
        size = machine.layout.tokens_per_block
        if survey.tokens_per_block != size:
            raise ValueError(f"layout of {size} tokens per block, survey of {survey.tokens_per_block}")
        self.survey, self.machine, self.policies = survey, machine, policies

    @property
    def ceiling(self) -> CapacityRow:
        """The figures of the smallest cache that finds what unbounded memory finds."""
        return self.row(self.survey.curve.capacity_for(self.survey.curve.ceiling))

    def gib(self, blocks: float) -> float:
        """Return the memory of some blocks.

        Parameters
        ----------
        blocks : float
            How many.

        Returns
        -------
        float
            GiB.
        """
        return blocks * self.machine.layout.block_bytes / GIB

    def rate(self, capacity: int) -> float:
        """Return the share of all prompt tokens that a cache finds.

        Parameters
        ----------
        capacity : int
            Its blocks.

        Returns
        -------
        float
            From 0 to 1.
        """
        return self.survey.hit_tokens(capacity) / max(self.survey.prompt_tokens, 1)

    def tenant_rate(self, tenant: Tenant, capacity: int) -> float:
        """Return the share of a tenant's prompt tokens that a cache finds which all tenants share.

        Parameters
        ----------
        tenant : Tenant
            One of ``survey.tenants``.
        capacity : int
            Blocks of the cache.

        Returns
        -------
        float
            From 0 to 1.
        """
        return round(tenant.curve.hits(capacity)) * self.survey.tokens_per_block / max(tenant.prompt_tokens, 1)

    def saved_seconds(self, capacity: int, device_blocks: int) -> float | None:
        """Return the mean time that hits save a request.

        It is the time to compute what is found, less the time for the part beyond the device tier to cross the link.

        Parameters
        ----------
        capacity : int
            Blocks of the cache.
        device_blocks : int
            Those of them on the device.

        Returns
        -------
        float or None
            Seconds. None if no prefill speed is given.
        """
        speed = self.machine.prefill_tokens_per_second
        if speed is None:
            return None
        hit_tokens = self.survey.hit_tokens(capacity)
        crossing = hit_tokens - self.survey.hit_tokens(min(device_blocks, capacity))
        return (hit_tokens / speed - crossing * self.machine.seconds_per_token) / max(self.survey.requests, 1)

    def row(self, capacity: int) -> CapacityRow:
        """Return the figures of one capacity.

        Parameters
        ----------
        capacity : int
            Blocks.

        Returns
        -------
        CapacityRow
            The figures.
        """
        survey, tokens = self.survey, self.survey.hit_tokens(capacity)
        size, rate = survey.tokens_per_block, self.rate(capacity)
        return CapacityRow(
            blocks=capacity,
            gib=self.gib(capacity),
            hit_blocks=tokens // size,
            hit_tokens=tokens,
            token_rate=rate,
            block_rate=tokens / size / max(survey.prompt_blocks, 1),
            standard_error=survey.curve.error(capacity) * size / max(survey.prompt_tokens, 1),
            of_ceiling=tokens / survey.ceiling_tokens if survey.ceiling_tokens else 0.0,
            next_16_gib=self.rate(capacity + STEP_BYTES // self.machine.layout.block_bytes) - rate,
            saved_seconds_per_request=self.saved_seconds(capacity, self.machine.device_blocks or 0),
        )

    def table(self) -> list[int]:
        """Return the capacities of the table: powers of two in bytes.

        Returns
        -------
        list of int
            Blocks, from the longest request up to everything that is ever found.
        """
        curve = self.survey.curve
        needed = curve.capacity_for(curve.ceiling)
        return doublings(self.survey.longest_blocks, needed, self.machine.layout.block_bytes)

    def reach(self) -> dict[float, CapacityRow]:
        """Return the memory that finds given shares of what unbounded memory finds.

        Returns
        -------
        dict of float to CapacityRow
            By share: 0.5, 0.75, 0.9, 0.95 and 0.99.
        """
        curve = self.survey.curve
        return {share: self.row(curve.capacity_for(share * curve.ceiling)) for share in TARGETS}

    def break_even(self) -> BreakEven | None:
        """Return when it is faster to onboard a prefix than to compute it again.

        Returns
        -------
        BreakEven or None
            None if no prefill speed is given.
        """
        machine, speed = self.machine, self.machine.prefill_tokens_per_second
        if speed is None:
            return None
        gain = 1 / speed - machine.seconds_per_token
        tokens = floor(machine.link_latency * 1e-6 / gain) + 1 if gain > 0 else None
        return BreakEven(tokens, machine.layout.token_bytes * speed / 1e9)

    def pool(self) -> PoolPlan | None:
        """Return the figures of the tiers that are asked about.

        Returns
        -------
        PoolPlan or None
            None without tiers.
        """
        device, host = self.machine.device_blocks, self.machine.host_blocks
        return None if device is None else PoolPlan(self.row(device), self.row(device + host))

    def store(self) -> StorePlan | None:
        """Return the figures of a store behind the tiers.

        Returns
        -------
        StorePlan or None
            None without a store.
        """
        machine = self.machine
        if machine.store is None or machine.device_blocks is None:
            return None
        tiers = machine.device_blocks + machine.host_blocks
        return StorePlan(self.survey, machine.layout, machine.store, tiers, machine.prefill_tokens_per_second)

    def points(self, curve: Curve) -> list[tuple[int, int]]:
        """Return points of a curve, evenly spaced on a logarithmic scale.

        Parameters
        ----------
        curve : Curve
            That of the survey or of a tenant.

        Returns
        -------
        list of (int, int)
            Capacities in blocks, and the prompt tokens found.
        """
        highest = max(self.table()[-1], 2)
        capacities = np.unique(np.geomspace(1, highest, _POINTS).astype(np.int64)).tolist()
        return [(capacity, round(curve.hits(capacity)) * self.survey.tokens_per_block) for capacity in capacities]

"""The plan: a survey in bytes of a model and seconds of a machine, and of a store behind it, as a dictionary for
JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil, floor, isfinite, log2
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.common.arrays.layout import BlockLayout
from kvpool.tools.planner.policies import PolicyTable
from kvpool.tools.planner.survey import Curve, Survey, Tenant

GIB = 1 << 30
SAVES = ("commit", "evict")
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


def _check_number(name: str, value: float, *, above_0: bool = True) -> None:
    """Raise ValueError for what is no finite number above 0, or of at least 0."""
    if not (isfinite(value) and (value > 0 if above_0 else value >= 0)):
        raise ValueError(f"{name}: expected a number {'above 0' if above_0 else 'from 0 on'}, got {value}")


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
            raise ValueError(f"capacity: expected 0 or more, got {self.capacity}")
        if self.save not in SAVES:
            raise ValueError(f"save: expected {', '.join(SAVES)}, got {self.save!r:.80}")
        _check_number("store_bandwidth", self.bandwidth)
        _check_number("store_latency", self.latency, above_0=False)


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
        self.survey = survey
        self.layout = layout
        self.store = store
        self.tier_blocks, self.prefill = tier_blocks, prefill

    def row(self, capacity: int) -> dict[str, Any]:
        """The figures of a store of ``capacity`` blocks."""
        survey, size = self.survey, self.layout.block_bytes
        hit_blocks = self.hits(capacity)
        loads, read, saved = self._loads(capacity, hit_blocks)
        written = self._written(capacity)
        return {
            "blocks": capacity,
            "gib": capacity * size / GIB,
            "hit_tokens": hit_blocks * survey.tokens_per_block,
            "token_rate": hit_blocks * survey.tokens_per_block / max(survey.prompt_tokens, 1),
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

    def _loads(self, capacity: int, hit_blocks: int) -> tuple[int, int, float | None]:
        """Requests that load, blocks that they load, and the mean time that it saves each of all requests."""
        survey = self.survey
        store = self.store
        size = self.layout.block_bytes
        blocks = self._of_requests(capacity)
        if not survey.curve.exact and len(blocks):
            blocks = blocks * (hit_blocks / blocks.sum())
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
        per_request = np.bincount(runs[:, 0], inside).astype(np.float64)
        return per_request[per_request > 0]

    def _per_second(self, nbytes: int) -> float | None:
        seconds = self.survey.seconds
        return nbytes / seconds if seconds else None


@dataclass(frozen=True)
class Machine:
    """The model and the machine. Sizes are in blocks, times in seconds unless a field says otherwise.

    Raises ValueError for an argument out of range.
    """

    layout: BlockLayout
    prefill_tokens_per_second: float | None = None
    """Prompt tokens that the engine computes in a second. None leaves out all times."""
    link_bandwidth: float = LINK_BANDWIDTH
    """GB/s from host to device."""
    link_latency: float = LINK_LATENCY
    """Microseconds."""
    device_blocks: int | None = None
    host_blocks: int = 0
    store: StoreTier | None = None
    """Behind the tiers, which must be given too."""

    def __post_init__(self) -> None:
        if self.prefill_tokens_per_second is not None:
            _check_number("prefill_tokens_per_second", self.prefill_tokens_per_second)
        _check_number("link_bandwidth", self.link_bandwidth)
        _check_number("link_latency", self.link_latency, above_0=False)
        for name in ("device_blocks", "host_blocks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value}")
        if self.store is not None and self.device_blocks is None:
            raise ValueError("device_blocks: expected a number with store=, got None")

    @property
    def seconds_per_token(self) -> float:
        """Seconds for one token to cross the link."""
        return self.layout.token_bytes / (self.link_bandwidth * 1e9)


class CapacityPlan:
    """A survey with a model, a machine, and policies that were compared, if any. Every method is a pure function of
    them."""

    def __init__(self, survey: Survey, machine: Machine, policies: PolicyTable | None = None) -> None:
        size = machine.layout.tokens_per_block
        if survey.tokens_per_block != size:
            raise ValueError(f"layout of {size} tokens per block, survey of {survey.tokens_per_block}")
        self.survey = survey
        self.machine = machine
        self.policies = policies

    def gib(self, blocks: float) -> float:
        """The memory of some blocks, GiB."""
        return blocks * self.machine.layout.block_bytes / GIB

    def rate(self, capacity: int) -> float:
        """Share of all prompt tokens that a cache of ``capacity`` blocks finds."""
        return self.survey.hit_tokens(capacity) / max(self.survey.prompt_tokens, 1)

    def tenant_rate(self, tenant: Tenant, capacity: int) -> float:
        """Share of a tenant's prompt tokens that a cache of ``capacity`` blocks, shared by all, finds."""
        return round(tenant.curve.hits(capacity)) * self.survey.tokens_per_block / max(tenant.prompt_tokens, 1)

    def saved_seconds(self, capacity: int, device_blocks: int) -> float | None:
        """Mean time saved per request: the time to compute what is found, less the time for the part beyond the device
        tier to cross the link."""
        speed = self.machine.prefill_tokens_per_second
        if speed is None:
            return None
        hit_tokens = self.survey.hit_tokens(capacity)
        crossing = hit_tokens - self.survey.hit_tokens(min(device_blocks, capacity))
        return (hit_tokens / speed - crossing * self.machine.seconds_per_token) / max(self.survey.requests, 1)

    def row(self, capacity: int) -> dict[str, Any]:
        """The figures of one capacity, in blocks."""
        survey, tokens = self.survey, self.survey.hit_tokens(capacity)
        error = survey.curve.error(capacity) * survey.tokens_per_block / max(survey.prompt_tokens, 1)
        return {
            "blocks": capacity,
            "gib": self.gib(capacity),
            "hit_blocks": tokens // survey.tokens_per_block,
            "hit_tokens": tokens,
            "token_rate": self.rate(capacity),
            "block_rate": tokens / survey.tokens_per_block / max(survey.prompt_blocks, 1),
            "standard_error": error,
            "of_ceiling": tokens / survey.ceiling_tokens if survey.ceiling_tokens else 0.0,
            "next_16_gib": self.rate(capacity + STEP_BYTES // self.machine.layout.block_bytes) - self.rate(capacity),
            "saved_seconds_per_request": self.saved_seconds(capacity, self.machine.device_blocks or 0),
        }

    def table(self) -> list[int]:
        """The capacities of the table, in blocks: powers of two in bytes, from the longest request up to everything
        that is ever found."""
        needed = self.survey.curve.capacity_for(self.survey.curve.ceiling)
        return doublings(self.survey.longest_blocks, needed, self.machine.layout.block_bytes)

    def reach(self) -> list[dict[str, Any]]:
        """The memory that reaches each share of the ceiling."""
        rows, curve = [], self.survey.curve
        for share in TARGETS:
            blocks = curve.capacity_for(share * curve.ceiling)
            figures = {"blocks": blocks, "gib": self.gib(blocks), "token_rate": self.rate(blocks)}
            rows.append({"of_ceiling": share, **figures})
        return rows

    def break_even(self) -> dict[str, Any] | None:
        """The hit length from which it is faster to onboard a prefix than to compute it again. None if no prefill speed
        is given."""
        machine = self.machine
        if machine.prefill_tokens_per_second is None:
            return None
        gain = 1 / machine.prefill_tokens_per_second - machine.seconds_per_token
        tokens = floor(machine.link_latency * 1e-6 / gain) + 1 if gain > 0 else None
        return {
            "tokens": tokens,
            "worthwhile_above_gb_per_second": machine.layout.token_bytes * machine.prefill_tokens_per_second / 1e9,
        }

    def pool(self) -> dict[str, Any] | None:
        """The figures of the given tiers. Both together hit like one cache of the summed size."""
        machine = self.machine
        if machine.device_blocks is None:
            return None
        device, both = self.row(machine.device_blocks), self.row(machine.device_blocks + machine.host_blocks)
        return {
            "device_blocks": machine.device_blocks,
            "host_blocks": machine.host_blocks,
            "device": device,
            "both": both,
            "host_hit_tokens": both["hit_tokens"] - device["hit_tokens"],
        }

    def store(self) -> StorePlan | None:
        """The figures of a store behind the given tiers."""
        machine = self.machine
        if machine.store is None or machine.device_blocks is None:
            return None
        tiers = machine.device_blocks + machine.host_blocks
        return StorePlan(self.survey, machine.layout, machine.store, tiers, machine.prefill_tokens_per_second)

    def points(self, curve: Curve) -> list[tuple[int, int]]:
        """Capacities in blocks, evenly spaced on a logarithmic scale, with the hit tokens of a curve."""
        highest = max(self.table()[-1], 2)
        capacities = np.unique(np.geomspace(1, highest, _POINTS).astype(np.int64)).tolist()
        return [(capacity, round(curve.hits(capacity)) * self.survey.tokens_per_block) for capacity in capacities]

    def as_dict(self) -> dict[str, Any]:
        """Everything, as nested dictionaries, lists, numbers, strings and None only."""
        survey = self.survey
        machine = self.machine
        store = self.store()
        same = ("requests", "prompt_tokens", "output_tokens", "prompt_blocks", "tokens_per_block", "sample")
        return {
            **{name: getattr(survey, name) for name in same},
            "longest_request_blocks": survey.longest_blocks,
            "distinct_blocks": survey.distinct_blocks,
            "machine": {
                "block_bytes": machine.layout.block_bytes,
                "token_bytes": machine.layout.token_bytes,
                "prefill_tokens_per_second": machine.prefill_tokens_per_second,
                "link_gb_per_second": machine.link_bandwidth,
                "link_latency_us": machine.link_latency,
            },
            "ceiling": self.row(survey.curve.capacity_for(survey.curve.ceiling)),
            "table": [self.row(capacity) for capacity in self.table()],
            "reach": self.reach(),
            "pool": self.pool(),
            "store": None if store is None else store.as_dict(),
            "policies": None if self.policies is None else self.policies.as_dict(),
            "break_even": self.break_even(),
            "curve": [list(point) for point in self.points(survey.curve)],
            "reuse_gaps": asdict(survey.gaps),
            "prefixes": {**asdict(survey.prefixes), "top": [prefix._asdict() for prefix in survey.prefixes.top]},
            "tenants": [
                {
                    "name": tenant.name,
                    "requests": tenant.requests,
                    "prompt_tokens": tenant.prompt_tokens,
                    "ceiling_tokens": round(tenant.curve.ceiling) * survey.tokens_per_block,
                    "curve": [list(point) for point in self.points(tenant.curve)],
                }
                for tenant in survey.tenants
            ],
        }

"""Hits of policies in a replay: requests run at the same time, hold their blocks meanwhile, and use both tiers.

A block of the replay is one token here, which is the number of its content, and no KV bytes are written or copied. So a
policy takes seconds where ``Replay`` takes minutes. The hits are those of the full blocks of a ``Replay`` without
partial reuse, but the pool's clock has the times of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.cpu import CpuDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.pool.manager import KVCacheManager
from kvpool.state.arrays import PolicyName
from kvpool.tools.planner.policies import FRESH, LRU, MIN, min_hits, next_uses
from kvpool.tools.planner.survey import Surveyor, Use
from kvpool.tools.replay.content import Request
from kvpool.tools.replay.engine import Admit, Append, Finish, ReplayConfig, schedule, worst_blocks

_LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=1, tokens_per_block=1, dtype="uint8", planes=1)


class BlocksFound(NamedTuple):
    """Full blocks of prompts that were cached, by the tier that held them."""

    device: int
    host: int


@dataclass(frozen=True)
class ReplayTable:
    """What each policy finds in a replay of a trace."""

    requests: int
    """Those that were admitted. The others are larger than the device tier."""
    prompt_tokens: int
    tokens_per_block: int
    device_blocks: int
    host_blocks: int
    hits: dict[str, BlocksFound]
    """By policy, LRU first. An interrupted comparison has those that were replayed to the end."""
    optimum: int
    """Blocks that a cache of both tiers together finds that evicts the block whose next use is last."""

    def rate(self, blocks: int) -> float:
        """The share of the prompt tokens that these blocks have."""
        return blocks * self.tokens_per_block / max(self.prompt_tokens, 1)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as nested dictionaries and numbers, which ``json.dumps`` accepts."""
        policies = {
            name: {
                "device_tokens": hits.device * self.tokens_per_block,
                "host_tokens": hits.host * self.tokens_per_block,
                "hit_rate": self.rate(sum(hits)),
            }
            for name, hits in self.hits.items()
        }
        names = ("requests", "prompt_tokens", "tokens_per_block", "device_blocks", "host_blocks")
        optimum = {"tokens": self.optimum * self.tokens_per_block, "hit_rate": self.rate(self.optimum)}
        return {**{name: getattr(self, name) for name in names}, "policies": policies, MIN: optimum}

    def text(self) -> str:
        """Return the table for a terminal."""
        base = sum(self.hits[LRU]) if LRU in self.hits else 0
        lines = [
            f"requests  {self.requests:,} with {self.prompt_tokens:,} tokens in prompts",
            f"blocks    {self.device_blocks:,} device, {self.host_blocks:,} host, of {self.tokens_per_block} tokens",
            "",
            f"{'policy':<10} {'hits':>8} {'device':>8} {'host':>8} {'beside LRU':>11}",
        ]
        for name, hits in self.hits.items():
            rates = " ".join(f"{self.rate(blocks):>8.2%}" for blocks in (sum(hits), *hits))
            lines.append(f"{name:<10} {rates} {self._points(sum(hits) - base)}")
        lines.append(f"{MIN:<10} {self.rate(self.optimum):>8.2%} {'':>17} {self._points(self.optimum - base)}")
        return "\n".join(lines)

    def _points(self, blocks: int) -> str:
        return f"{100 * self.rate(blocks):>+7.2f} pts"


class DecidingDevice(CpuDevice):
    """A device whose pool decides only: it copies nothing."""

    copies = False

    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        """Copy nothing."""


def compare_replayed(
    requests: Sequence[Request],
    config: ReplayConfig,
    policies: Iterable[PolicyName],
    *,
    progress: Callable[[int], Any] = lambda count: None,
) -> tuple[ReplayTable, bool]:
    """Replay requests with LRU and with each of the policies.

    Parameters
    ----------
    requests
        Those of a trace, each with an index of its own.
    config
        The tiers, the tokens of a block and the most requests at the same time. Nothing else is used.
    policies
        Names of policies.
    progress
        A function that is called with 1 after every request that was admitted or skipped, in each policy.

    Returns
    -------
    tuple of ReplayTable and bool
        The table, and whether the user interrupted the comparison.
    """
    surveyor = Surveyor(config.layout.tokens_per_block, keep=True)
    for request in requests:
        if worst_blocks(request, config.layout.tokens_per_block) <= config.device_blocks:
            surveyor.record(request)
    uses = {use.request.index: use for use in surveyor.uses}
    hits: dict[str, BlocksFound] = {}
    interrupted = False
    try:
        for policy in dict.fromkeys(["lru", *policies]):
            hits[policy] = replay_hits(requests, uses, config, policy, progress)
    except KeyboardInterrupt:
        interrupted = True
    optimum = min_hits(*next_uses(surveyor.uses), config.device_blocks + config.host_blocks)
    table = ReplayTable(
        requests=len(uses),
        prompt_tokens=sum(use.request.input_length for use in surveyor.uses),
        tokens_per_block=config.layout.tokens_per_block,
        device_blocks=config.device_blocks,
        host_blocks=config.host_blocks,
        hits=hits,
        optimum=optimum,
    )
    return table, interrupted


class _HeldRequest(NamedTuple):
    """A request between admission and release: its sequence, and the numbers of all its blocks."""

    id: int
    blocks: Int32s


def replay_hits(
    requests: Iterable[Request],
    uses: Mapping[int, Use],
    config: ReplayConfig,
    policy: PolicyName,
    progress: Callable[[int], Any] = lambda count: None,
) -> BlocksFound:
    """Replay requests with one policy. ``uses`` are those of the requests that fit, by index."""
    size = config.layout.tokens_per_block
    now_ms, fresh = [0], FRESH
    hits: Int64s = np.zeros(2, np.int64)
    running: dict[int, _HeldRequest] = {}
    steps = schedule(requests, device_blocks=config.device_blocks, active=config.active, tokens_per_block=size)
    with KVCacheManager(
        _LAYOUT,
        device_blocks=config.device_blocks,
        host_blocks=config.host_blocks,
        device=DecidingDevice(),
        max_sequences=config.active,
        max_sequence_tokens=max((worst_blocks(use.request, size) for use in uses.values()), default=1),
        policy=policy,
        partial_reuse=False,
        clock=lambda: now_ms[0],
        secret=bytes(32),
    ) as cache:
        for step in steps:
            match step:
                case Admit(request):
                    arrival = request.index if request.timestamp is None else request.timestamp
                    now_ms[0] = max(now_ms[0], int(1000 * arrival))
                    keyed = uses[request.index].blocks
                    private = worst_blocks(request, size) - len(keyed)
                    blocks = np.append(keyed, np.arange(fresh, fresh + private, dtype=np.int32))
                    fresh += private
                    keys = cache.block_keys(blocks[: -(-request.input_length // size)])
                    admission = cache.add_sequence_batch([keys])
                    hits += (admission.device_tokens[0], admission.host_tokens[0])
                    # A last block that isn't full has no key.
                    cache.commit(admission.ids, np.array([request.input_length // size]))
                    running[request.index] = _HeldRequest(int(admission.ids[0]), blocks)
                case Append(items):
                    _append(
                        cache,
                        size,
                        [(running[request.index], request, start, count) for request, start, count in items],
                    )
                case Finish(request):
                    cache.release(running.pop(request.index).id)
            if not isinstance(step, (Append, Finish)):
                progress(1)
    return BlocksFound(*hits.tolist())


def _append(cache: KVCacheManager, size: int, items: Iterable[tuple[_HeldRequest, Request, int, int]]) -> None:
    """Append the blocks that output tokens ``[start, start + count)`` of each request begin, and commit those that they
    fill."""
    ids, full, growing, counts = [], [], [], []
    new: list[Int32s] = []
    for (number, blocks), request, start, count in items:
        first, end = (-(-(request.input_length + tokens) // size) for tokens in (start, start + count))
        ids.append(number)
        full.append((request.input_length + start + count) // size)
        if end > first:
            growing.append(number)
            counts.append(end - first)
            new.append(blocks[first:end])
    if growing:
        cache.append_tokens(np.array(growing), np.concatenate(new), np.array(counts))
    cache.commit(np.array(ids), np.array(full))

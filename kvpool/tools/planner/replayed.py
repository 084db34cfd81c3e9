"""Hits of policies in a replay: requests run at the same time, hold their blocks meanwhile, and use both tiers.

A block of the replay is one token here, which is the number of its content, and no KV bytes are written or copied. So a
policy takes seconds where ``Replay`` takes minutes. The hits are those of the full blocks of a ``Replay`` without
partial reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.pool.manager import KVCacheManager
from kvpool.state.arrays import PolicyName
from kvpool.tools.planner.policies import FRESH, LRU, MIN, deciding_pool, min_hits, next_uses
from kvpool.tools.planner.survey import Surveyor, Use
from kvpool.tools.replay.content import Progress, Request
from kvpool.tools.replay.engine import Admit, Append, Finish, ReplayConfig, schedule, worst_blocks
from kvpool.tools.replay.summary import aligned, table


class BlocksFound(NamedTuple):
    """Full blocks of prompts that were cached.

    Attributes
    ----------
    device : int
        Those that the device tier held.
    host : int
        Those that only the host tier held.
    """

    device: int
    host: int


@dataclass(frozen=True)
class ReplayTable:
    """What each policy finds in a replay of a trace.

    Attributes
    ----------
    requests : int
        Those that were admitted. The others are larger than the device tier.
    prompt_tokens : int
        Tokens of their prompts.
    tokens_per_block : int
        Tokens of a block.
    device_blocks : int
        Blocks of the device tier.
    host_blocks : int
        Blocks of the host tier.
    hits : dict of str to BlocksFound
        By policy, LRU first. An interrupted comparison has those that were replayed to the end.
    optimum : int
        Blocks that a cache of both tiers together finds that evicts the block whose next use is last.
    """

    requests: int
    prompt_tokens: int
    tokens_per_block: int
    device_blocks: int
    host_blocks: int
    hits: dict[str, BlocksFound]
    optimum: int

    def rate(self, blocks: int) -> float:
        """Return the share of the prompt tokens that some blocks have.

        Parameters
        ----------
        blocks : int
            How many.

        Returns
        -------
        float
            From 0 to 1.
        """
        return blocks * self.tokens_per_block / max(self.prompt_tokens, 1)

    def text(self) -> str:
        """Return the table for a terminal.

        Returns
        -------
        str
            Lines, without a line break at the end.
        """
        base = sum(self.hits.get(LRU, ()))
        rows = [("policy", "hits", "device", "host", "beside LRU")]
        for name, hits in (*self.hits.items(), (MIN, (self.optimum,))):
            found = [f"{self.rate(blocks):.2%}" for blocks in (sum(hits), *hits)]
            device, host = found[1:] if name != MIN else ("", "")
            rows.append((name, found[0], device, host, f"{100 * self.rate(sum(hits) - base):+.2f} pts"))
        tiers = f"{self.device_blocks:,} device, {self.host_blocks:,} host, of {self.tokens_per_block} tokens"
        head = {"requests": [f"{self.requests:,} with {self.prompt_tokens:,} tokens in prompts"], "blocks": [tiers]}
        return "\n".join([*aligned(head), "", *table(*rows)])


def compare_replayed(
    requests: Sequence[Request],
    config: ReplayConfig,
    policies: Iterable[PolicyName],
    *,
    progress: Progress = lambda count: None,
) -> tuple[ReplayTable, bool]:
    """Replay requests with LRU and with each of the policies.

    Parameters
    ----------
    requests : sequence of Request
        Those of a trace, each with an index of its own.
    config : ReplayConfig
        The tiers, the tokens of a block and the most requests at the same time. Nothing else is used.
    policies : iterable of {"lru", "reuse", "agent", "adaptive"}
        Policies of a pool.
    progress : callable
        Called with 1 after every request that was admitted or skipped, in each policy.

    Returns
    -------
    tuple of ReplayTable and bool
        The table, and whether the user interrupted the comparison.
    """
    surveyor = Surveyor(config.layout.tokens_per_block, keep=True)
    for request in requests:
        if worst_blocks(request, config.layout.tokens_per_block) <= config.device_blocks:
            surveyor.record(request)
    recorded = surveyor.uses
    uses = {use.request.index: use for use in recorded}
    hits: dict[str, BlocksFound] = {}
    interrupted = False
    try:
        for policy in dict.fromkeys(["lru", *policies]):
            hits[policy] = replay_hits(requests, uses, config, policy, progress)
    except KeyboardInterrupt:
        interrupted = True
    optimum = min_hits(*next_uses(recorded), config.device_blocks + config.host_blocks)
    table = ReplayTable(
        requests=len(uses),
        prompt_tokens=sum(use.request.input_length for use in recorded),
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
    progress: Progress = lambda count: None,
) -> BlocksFound:
    """Replay requests with one policy. ``uses`` are those of the requests that fit, by index."""
    size = config.layout.tokens_per_block
    now_ms, fresh = [0], FRESH
    hits: Int64s = np.zeros(2, np.int64)
    running: dict[int, _HeldRequest] = {}
    steps = schedule(requests, device_blocks=config.device_blocks, active=config.active, tokens_per_block=size)
    longest = max((worst_blocks(use.request, size) for use in uses.values()), default=1)
    with deciding_pool(
        config.device_blocks, config.host_blocks, config.active, longest, policy, clock=lambda: now_ms[0]
    ) as cache:
        for step in steps:
            match step:
                case Admit(request):
                    now_ms[0] = max(now_ms[0], request.arrival_ms)
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
                    growing = [(running[request.index], request, start, count) for request, start, count in items]
                    _append(cache, size, growing)
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

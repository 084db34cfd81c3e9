"""AgentCachePolicy: which chunk of vLLM's own CPU tier goes, for vLLM to load by module path. Only vLLM imports this
module.

A *chain* is what the turns of one conversation have in common and extend. The chain that is worth least goes, its end
first: so contexts that come back soon stay whole, where LRU throws each away just before it is needed. Worth is the
chance to come back for the time until then, learnt from the pauses so far (see ``kvpool.state``, policy ``agent``).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvpool.integrations.options import VLLM

with VLLM.imports():
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

_COMPARED, _NAMES = 256, 4
"""The most chains that are compared for a victim; and chunks, for each in the tier, whose chain is known."""


class _Pauses:
    """How long chains were away: what a chain is worth that has been for some time. As the policy ``agent`` of a pool
    sees it."""

    def __init__(self) -> None:
        # These import Numba, which vLLM must not meet when it starts.
        from kvpool.state.policies import agent, pauses

        self._table = np.zeros((pauses.TABLES, pauses.ROWS, pauses.PAUSE_BINS))
        self._learn, self._worth = pauses.learn, pauses.worth
        self.octaves, self._class_of = pauses.octaves, agent.class_of

    def _row(self, chain: _Chain) -> int:
        return int(self._class_of(0, chain.pauses, chain.mean, chain.length))

    def learn(self, chain: _Chain, seconds: float, came: bool) -> None:
        """A chain has come back after a pause, or was seen to be away for so long."""
        self._learn(self._table, self._row(chain), int(1000 * seconds), came)

    def worth(self, chain: _Chain, seconds: float) -> float:
        """The best ratio of the chance to come back to the time until then, over all times to wait."""
        return float(self._worth(self._table, self._row(chain), int(1000 * seconds)))


@dataclass(slots=True, eq=False)
class _Chain:
    """A conversation: the place of each of its chunks that is cached, and its pauses."""

    keys: dict[OffloadKey, int] = field(default_factory=dict)
    length: int = 0
    """how many chunks its last turn had"""
    used: float = 0.0
    pauses: int = 0
    mean: int = 0
    """of the logarithms of its pauses"""


@dataclass(slots=True)
class _Turn:
    """The chain of a request, for a policy since its last ``clear``."""

    of: object
    chain: _Chain
    places: int = 0


class AgentCachePolicy(CachePolicy):
    """For ``"eviction_policy": "AgentCachePolicy"`` with ``"cache_policy_module_path":
    "kvpool.integrations.vllm.cache_policy"``.

    It has the hooks of vLLM 0.32 (``on_request_finished``) and those of 0.33 (``on_request_access``), and warns of
    other versions. Not thread-safe: vLLM's scheduler calls it, and nothing waits. ``clock``: seconds, monotonic.
    """

    clock = staticmethod(time.monotonic)

    def __init__(self, cache_capacity: int) -> None:
        VLLM.checked_version()
        super().__init__(cache_capacity)
        self._pauses, self._random = _Pauses(), Random(0)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._evictable: set[OffloadKey] = set()
        self.clear()

    def clear(self) -> None:
        self._chunks.clear()
        self._evictable.clear()
        # The chains that have chunks, and the last chain of each chunk, also of some that are gone.
        self._chains: dict[_Chain, None] = {}
        self._chain_of: OrderedDict[OffloadKey, _Chain] = OrderedDict()
        self._era = object()

    # -- chunks --------------------------------------------------------------------------------------

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, *of_request: Any) -> None:
        self._chunks[key] = chunk
        if chunk.ref_cnt == 0:
            self._evictable.add(key)

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        self._evictable.discard(key)
        self._leave(key)

    def mark_evictable(self, key: OffloadKey) -> None:
        self._evictable.add(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        self._evictable.discard(key)

    # -- uses ----------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._use(list(keys), req_context)

    def on_request_access(self, keys: Iterable[OffloadKey], req_context: ReqContext, *, inserted: bool = False) -> None:
        self._use(list(keys), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: Collection[OffloadKey],
        reused_keys: Collection[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        keys = [key for group in key_groups for key in group]
        chain = self._use(keys, req_context)
        if chain is not None:
            # What the last turn had and this one has not is of no use any more.
            for key in chain.keys.keys() - set(keys):
                self._leave(key)

    def _use(self, keys: list[OffloadKey], context: ReqContext) -> _Chain | None:
        """A request uses chunks. Returns its chain."""
        if not keys:
            return None
        now, turn = self.clock(), context.get_state(_Turn)
        if turn is None or turn.of is not self._era:
            turn = _Turn(self._era, self._begin(keys, now))
            context.set_state(turn)
        chain = turn.chain
        for key in keys:
            place = context.get_offload_key_position(key)
            if place is None:
                place = turn.places = turn.places + 1
            self._leave(key, chain)
            chain.keys[key] = place
            self._chain_of[key] = chain
        chain.used, chain.length = now, max(chain.length, len(chain.keys))
        self._chains.pop(chain, None)
        self._chains[chain] = None
        while len(self._chain_of) > _NAMES * self.cache_capacity:
            self._leave(next(iter(self._chain_of)))
        return chain

    def _begin(self, keys: list[OffloadKey], now: float) -> _Chain:
        """The chain that a request continues: that of its deepest known chunk, if it has most of it."""
        known = {key: self._chain_of[key] for key in keys if key in self._chain_of}
        for key in reversed(known):
            chain = known[key]
            if 2 * sum(other is chain for other in known.values()) > len(chain.keys) or len(known) == len(keys):
                pause = now - chain.used
                self._pauses.learn(chain, pause, True)
                chain.pauses += 1
                chain.mean += (int(self._pauses.octaves(int(1000 * pause))) - chain.mean) // min(chain.pauses, 3)
                return chain
        return _Chain()

    def _leave(self, key: OffloadKey, but: _Chain | None = None) -> None:
        """A chunk is of no chain any more, or of this one."""
        chain = self._chain_of.pop(key, None)
        if chain is not None and chain is not but:
            chain.keys.pop(key, None)
            if not chain.keys and self._chains.pop(chain, False) is None:
                self._pauses.learn(chain, self.clock() - chain.used, False)

    # -- victims -------------------------------------------------------------------------------------

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        free = self._evictable - protected
        if len(free) < n:
            return None
        victims = [key for key in free if key not in self._chain_of][:n]
        now, chains = self.clock(), list(self._chains)
        while len(victims) < n:
            compared = chains if len(chains) <= _COMPARED else self._random.sample(chains, _COMPARED)
            least = min(compared, key=lambda chain: self._pauses.worth(chain, now - chain.used))
            chains.remove(least)
            ends = sorted((key for key in least.keys if key in free), key=least.keys.__getitem__, reverse=True)
            victims += ends[: n - len(victims)]
        self._evictable.difference_update(victims)
        return [(key, self._chunks.pop(key)) for key in victims]

"""AgentCachePolicy: which chunk of vLLM's own CPU tier goes, for vLLM to load by module path. Only vLLM imports this
module.

A *chain* is what the turns of one conversation have in common and extend. The chain that is worth least goes, its end
first: so contexts that come back soon stay whole, where LRU throws each away just before it is needed. Worth is the
chance to come back for the time until then, learnt from the pauses so far (see ``kvpool.state``, policy ``agent``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from kvpool.engines.options import VLLM

with VLLM.imports():
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext
    from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

_BINS, _LEVELS, _FIRST_S = 30, 8, 0.5
"""Pauses are counted in bins of half an octave, the first one up to half a second, by the level of a chain's own."""
_LEAN, _PRIOR, _MOST, _REFRESH = 8.0, 0.05, 512.0, 8
"""How many pauses those of all chains count for beside those of a level; the chance to come back in a bin that nobody
has seen; at how many pauses the old ones begin to count half; after how many the worth is computed anew."""
_COMPARED, _NAMES = 256, 4
"""The most chains that are compared for a victim; and chunks, for each in the tier, whose chain is known."""
_WIDTHS = np.concatenate([[_FIRST_S], _FIRST_S / 2 * 2.0 ** (np.arange(_BINS - 1) // 2)])


class _Pauses:
    """How long chains were away: what a chain is worth that has been for some time."""

    def __init__(self) -> None:
        self._away, self._back = np.zeros((_LEVELS + 1, _BINS)), np.zeros((_LEVELS + 1, _BINS))
        self._worth: dict[int, list[float]] = {}
        self._learnt = 0

    def learn(self, level: int, seconds: float, came: bool) -> None:
        """A chain has come back after a pause, or was seen to be away for so long."""
        last = _bin(seconds)
        for row in (level, _LEVELS):
            if self._away[row, 0] > _MOST:
                self._away[row] /= 2
                self._back[row] /= 2
            self._away[row, : last + came] += 1.0
            self._back[row, last] += came
        self._learnt += 1
        if self._learnt % _REFRESH == 1:
            self._worth.clear()

    def worth(self, level: int, seconds: float) -> float:
        """The best ratio of the chance to come back to the time until then, over all times to wait."""
        if level not in self._worth:
            self._worth[level] = self._compute(level)
        return self._worth[level][_bin(seconds)]

    def _compute(self, level: int) -> list[float]:
        chance = (self._back[_LEVELS] + _PRIOR) / (self._away[_LEVELS] + 1.0)
        chance = np.minimum((self._back[level] + _LEAN * chance) / (self._away[level] + _LEAN), 1.0)
        found = []
        for begin in range(_BINS):
            part, width = chance[begin:].copy(), _WIDTHS[begin:].copy()
            # A chain is in the middle of its first bin on average.
            part[0], width[0] = part[0] / 2, width[0] / 2
            away = np.concatenate([[1.0], np.cumprod(1.0 - part)[:-1]])
            spent = np.cumsum(away * width * (1.0 - part / 2))
            found.append(float((np.cumsum(away * part) / spent).max()))
        return found


@dataclass(slots=True, eq=False)
class _Chain:
    """A conversation: the place of each of its chunks that is cached, and its pauses."""

    keys: dict[OffloadKey, int] = field(default_factory=dict)
    length: int = 0
    """how many chunks its last turn had"""
    used: float = 0.0
    pauses: int = 0
    mean: float = 0.0
    """of the logarithms of its pauses"""

    @property
    def level(self) -> int:
        return 0 if not self.pauses else min(max(int(self.mean / 1.2) + 1, 1), _LEVELS - 1)


@dataclass(slots=True)
class _Turn:
    """The chain of a request, for a policy since its last ``clear``."""

    of: object
    chain: _Chain
    places: int = 0


class AgentCachePolicy(CachePolicy):
    """For ``"eviction_policy": "AgentCachePolicy", "cache_policy_module_path": "kvpool.engines.vllm_policy"``.

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
        self._chain_of: dict[OffloadKey, _Chain] = {}
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
                pause = max(now - chain.used, 1e-3)
                self._pauses.learn(chain.level, pause, True)
                chain.pauses += 1
                chain.mean += (math.log(pause) - chain.mean) / min(chain.pauses, 8)
                return chain
        return _Chain()

    def _leave(self, key: OffloadKey, but: _Chain | None = None) -> None:
        """A chunk is of no chain any more, or of this one."""
        chain = self._chain_of.pop(key, None)
        if chain is not None and chain is not but:
            chain.keys.pop(key, None)
            if not chain.keys and self._chains.pop(chain, False) is None:
                self._pauses.learn(chain.level, self.clock() - chain.used, False)

    # -- victims -------------------------------------------------------------------------------------

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        free = self._evictable - protected
        if len(free) < n:
            return None
        victims = [key for key in free if key not in self._chain_of][:n]
        now, chains = self.clock(), list(self._chains)
        while len(victims) < n:
            compared = chains if len(chains) <= _COMPARED else self._random.sample(chains, _COMPARED)
            least = min(compared, key=lambda chain: self._pauses.worth(chain.level, now - chain.used))
            chains.remove(least)
            ends = sorted((key for key in least.keys if key in free), key=least.keys.__getitem__, reverse=True)
            victims += ends[: n - len(victims)]
        self._evictable.difference_update(victims)
        return [(key, self._chunks.pop(key)) for key in victims]


def _bin(seconds: float) -> int:
    return 0 if seconds < _FIRST_S else min(int(2 * math.log2(seconds / _FIRST_S)) + 1, _BINS - 1)

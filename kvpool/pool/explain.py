"""Explain: why a prompt reuses no more than it does. Counts, times and names of reasons; no tokens and no salts.

The answer is for whoever runs the engine, and never for who has sent the prompt: "other namespace" says that somebody
else has sent the same tokens, which a salt is there to hide, and the counts say how far. All else is of the prompt's
own namespace, as the keys of another one differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arrays import Bools
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Match, Scope, key_rows
from kvpool.pool.prompts import NO_KEYS
from kvpool.state import control
from kvpool.state.records import N
from kvpool.state.tiers import EVICTED, EXPIRED, FORGOTTEN, LOSS

InStores: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, str], ...]]"
"""The fields of ``Missed`` that are of stores."""
NAMESPACES_MOST = 64
"""At most so many other namespaces are tried."""
NOT_KNOWN, _COMPUTED, _BYPASSED = "not known any more", "always computed", "bypassed"
_WHY = {int(EVICTED): "evicted", int(FORGOTTEN): "forgotten", int(EXPIRED): NOT_KNOWN, int(LOSS): "lost"}


class Missed(NamedTuple):
    """Consecutive tokens of a prompt that are not reused for one reason. ``first`` is the place of the first one.

    ``why``: "evicted" (by ``policy``) or "expired" (evicted after its time to live), "forgotten" (by a call, or because
    other content took its place), "lost" (a copy failed), "other namespace" (cached there), "behind a miss" (cached,
    but what comes before is not), "never seen", "not known any more", "always computed" (the last token, and a last
    block that is not full), "bypassed" (``reuse=False``). ``ago_ms``: how long ago the last of them left, or None.

    Of ``Keeper.explain`` alone: ``stores``, those that are known to have all of these tokens, and ``trouble``, what was
    last wrong with them, by store: why a load did not bring them, such as ``("disk", "damaged")``, "late" or "not worth
    loading", or why they were not saved, such as "evicted", "crowded" or "suspended".
    """

    first: int
    tokens: int
    why: str
    ago_ms: int | None = None
    policy: str | None = None
    stores: tuple[str, ...] = ()
    trouble: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        ago = "" if self.ago_ms is None else f" {self.ago_ms} ms ago"
        stores = [f"in {store}" for store in self.stores] + [f"{store}: {what}" for store, what in self.trouble]
        text = f"{self.tokens} {self.why}{ago}{f' by {self.policy}' if self.policy else ''}"
        return f"{text} ({', '.join(stores)})" if stores else text


class Explanation(NamedTuple):
    """Where the tokens of a prompt come from: the device, the host, a copy of a part of a block; and the others.
    ``str`` is one line, for logs."""

    tokens: int
    device_tokens: int
    host_tokens: int
    partial_tokens: int
    missed: tuple[Missed, ...]
    store_tokens: tuple[tuple[str, int], ...] = ()
    """What came from each store; of plug-ins alone."""

    @classmethod
    def of_request(cls, came: Mapping[str, int], missed: Iterable[Missed]) -> Explanation:
        """What a plug-in knows of a request: the tokens that came from the "device", the "host" and stores, by name,
        and blocks that did not come. Blocks with one reason are one."""
        reasons = dict[object, Missed]()
        for miss in missed:
            same = reasons.get(miss[2:3] + miss[4:], miss._replace(tokens=0))
            ago = min((ago for ago in (same.ago_ms, miss.ago_ms) if ago is not None), default=None)
            reasons[miss[2:3] + miss[4:]] = same._replace(tokens=same.tokens + miss.tokens, ago_ms=ago)
        tokens = sum(came.values()) + sum(miss.tokens for miss in reasons.values())
        stores = tuple((name, count) for name, count in came.items() if name not in ("device", "host"))
        return cls(tokens, came.get("device", 0), came.get("host", 0), 0, tuple(reasons.values()), stores)

    def __str__(self) -> str:
        where = f"{self.device_tokens} device, {self.host_tokens} host, {self.partial_tokens} in part"
        stores = [f"{count} {name}" for name, count in self.store_tokens]
        return "; ".join([f"{self.tokens} tokens: {', '.join([where, *stores])}", *map(str, self.missed)])

    def with_stores(self, width: int, of: Callable[[int], InStores]) -> Explanation:
        """The same, with what is so in stores of each block that is missed. ``width``: tokens of a block."""
        missed = list[Missed]()
        for miss in self.missed:
            first, end = miss.first, miss.first + miss.tokens
            places = range(first // width, end // width) if miss.why not in (_COMPUTED, _BYPASSED) else range(0)
            for (stores, trouble), same in groupby(places, of):
                after = (max(same) + 1) * width
                missed.append(miss._replace(first=first, tokens=after - first, stores=stores, trouble=trouble))
                first = after
            if first < end:
                missed.append(miss._replace(first=first, tokens=end - first))
        return self._replace(missed=tuple(missed))


def explained(core: Core, keys: BlockKeys, match: Match, lacks: Bools) -> Explanation:
    """Why a prompt that reuses ``match`` reuses no more. ``lacks`` bool[full blocks]: what is not cached."""
    width, place, missed = core.config.tokens_per_block, match.tokens, list[Missed]()
    first, end = place // width, (len(keys) - 1) // width if keys.reuse else 0
    reasons = _reasons(core, keys, first, lacks[:end]) if first < end else ()
    for why, same in groupby(reasons, key=lambda reason: reason[0]):
        times = [ago for _, ago in same]
        first += len(times)
        policy = core.config.settings.policy if why in ("evicted", "expired") else None
        ago = min((ago for ago in times if ago is not None), default=None)
        missed.append(Missed(place, first * width - place, why, ago, policy))
        place = first * width
    if place < len(keys):
        missed.append(Missed(place, len(keys) - place, _COMPUTED if keys.reuse else _BYPASSED))
    return Explanation(len(keys), match.device_tokens, match.host_tokens, match.partial_tokens, tuple(missed))


def _reasons(core: Core, keys: BlockKeys, first: int, lacks: Bools) -> Iterator[tuple[str, int | None]]:
    """Why each of the blocks from ``first`` on is not reused, and how many ms ago it left."""
    now_ms = core.now()
    with core.lock:
        core.check_open()
        ring, count = core.states.ring.gone.copy(), int(core.states.ring.numbers[N.gone])
        names = list(core.names.known.items())[:NAMESPACES_MOST]
    gone: dict[int, tuple[str, int]] = {}
    for place in range(max(0, count - len(ring)), count) if len(ring) else ():
        half, noted = ring[place % len(ring)].tolist()
        when, why = noted >> 2, noted & 3
        late = why == EVICTED and gone.get(half, ("", 0))[0] == NOT_KNOWN
        gone[half] = "expired" if late else _WHY[why], max(0, now_ms - when)
    elsewhere = np.zeros((len(core.states), len(keys) // core.config.tokens_per_block), np.bool_)
    for tag, name in names:
        if tag != keys.namespace:
            scope = Scope(name.salt, name.adapter_id, (tag, *name.root), keys.origin)
            other = BlockKeys.of_private(keys.tokens, NO_KEYS, keys.extra_ids, scope, core.states.heads)
            cached = np.empty_like(elsewhere)
            with core.lock:
                control.cached(core.states.heads, key_rows(other), control.ANY_TIER, cached)
            elsewhere |= cached
    halves = key_rows(keys)[:, 0].tolist()
    for i in range(first, len(lacks)):
        if not lacks[i]:
            yield "behind a miss", None
        elif halves[i] in gone:
            yield gone[halves[i]]
        elif elsewhere[:, i].any():
            yield "other namespace", None
        else:
            yield ("never seen" if count < len(ring) else NOT_KNOWN), None

"""Explain which tokens of a prompt are not reused: reason codes, counts and positions, without tokens and salts.

The result is for the operator of the engine, not for the sender of the prompt: "other_namespace" reveals that another
namespace has the same tokens, which a salt hides, and the counts reveal how many. All other reasons are about the
prompt's own namespace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kvpool.common.arrays import Bools
from kvpool.pool.core import Core
from kvpool.pool.keys import BlockKeys, Match, Scope, key_rows
from kvpool.pool.prompt_requests import NO_KEYS
from kvpool.state import control
from kvpool.state.records import N
from kvpool.state.tiers import EVICTED, EXPIRED, FORGOTTEN, LOSS

InStores: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, str], ...]]"
"""The fields ``stores`` and ``trouble`` of ``Missed``."""
MissReason: TypeAlias = Literal[
    "after_miss",
    "always_computed",
    "bypassed",
    "evicted",
    "expired",
    "forgotten",
    "lost",
    "never_seen",
    "other_namespace",
    "unknown",
]
"""Why tokens are not reused: see ``Missed``."""
NAMESPACES_MOST = 64
"""The most other namespaces that are tried."""
# Expired content is still cached until it is evicted. If it is gone without another note, a ``clear`` has dropped it.
_REASONS: dict[int, MissReason] = {EVICTED: "evicted", FORGOTTEN: "forgotten", EXPIRED: "unknown", LOSS: "lost"}


class Missed(NamedTuple):
    """Consecutive tokens of a prompt that are not reused, for one reason.

    Attributes
    ----------
    first : int
        The index of the first token in the prompt.
    tokens : int
        Number of tokens.
    reason : str
        Why they are not reused:

        - "evicted": the block was evicted; "expired": after its time to live.
        - "forgotten": a call dropped it, or other content took its place.
        - "lost": a copy into the block failed.
        - "other_namespace": only another namespace has it.
        - "after_miss": the block is cached, but one before it is not.
        - "never_seen": it was never cached.
        - "unknown": the history that the pool keeps is too short.
        - "always_computed": the last token, and the tokens of its block that are not reused.
        - "bypassed": the prompt has ``reuse=False``.
    ago_ms : int or None
        Time since the last of them left the cache, in milliseconds, if it is known.
    stores : tuple of str
        The stores that are known to have all of these tokens. Only ``StorageManager.explain`` sets it.
    trouble : tuple of (str, str)
        For each store with a failure, its name and the last one, such as ``("disk", "damaged")``: why a load did not
        bring the blocks ("late", "declined", ...), or why they were not saved ("evicted", "crowded", "suspended").
        Only ``StorageManager.explain`` sets it.
    """

    first: int
    tokens: int
    reason: MissReason
    ago_ms: int | None = None
    stores: tuple[str, ...] = ()
    trouble: tuple[tuple[str, str], ...] = ()


class Explanation(NamedTuple):
    """The tokens of a prompt that can be reused, and why the others cannot.

    ``CachedContent.explain`` returns it.

    Attributes
    ----------
    tokens : int
        Number of tokens of the prompt.
    device_tokens : int
        Tokens in full blocks on the device.
    host_tokens : int
        Tokens in full blocks on the host only.
    partial_tokens : int
        Tokens that can be copied from a block that matches in part.
    missed : tuple of Missed
        The other tokens, in the order of the prompt.
    """

    tokens: int
    device_tokens: int
    host_tokens: int
    partial_tokens: int
    missed: tuple[Missed, ...]

    def with_stores(self, width: int, of: Callable[[int], InStores]) -> Explanation:
        """Return the same, with the stores and the trouble of each missed block. ``width`` is ``tokens_per_block``."""
        missed = list[Missed]()
        for miss in self.missed:
            first, end = miss.first, miss.first + miss.tokens
            computed = miss.reason in ("always_computed", "bypassed")
            places = range(0) if computed else range(first // width, end // width)
            for (stores, trouble), same in groupby(places, of):
                after = (max(same) + 1) * width
                missed.append(miss._replace(first=first, tokens=after - first, stores=stores, trouble=trouble))
                first = after
            if first < end:
                missed.append(miss._replace(first=first, tokens=end - first))
        return self._replace(missed=tuple(missed))


def explained(core: Core, keys: BlockKeys, match: Match, lacks: Bools) -> Explanation:
    """Explain why a prompt that reuses ``match`` reuses no more. ``lacks`` bool[full blocks] is True where a block is
    not cached."""
    width, place, missed = core.config.tokens_per_block, match.tokens, list[Missed]()
    first, end = place // width, (len(keys) - 1) // width if keys.reuse else 0
    reasons = _reasons(core, keys, first, lacks[:end]) if first < end else ()
    for reason, same in groupby(reasons, key=lambda reason: reason[0]):
        times = [ago for _, ago in same]
        first += len(times)
        ago = min((ago for ago in times if ago is not None), default=None)
        missed.append(Missed(place, first * width - place, reason, ago))
        place = first * width
    if place < len(keys):
        missed.append(Missed(place, len(keys) - place, "always_computed" if keys.reuse else "bypassed"))
    return Explanation(len(keys), match.device_tokens, match.host_tokens, match.partial_tokens, tuple(missed))


def _reasons(core: Core, keys: BlockKeys, first: int, lacks: Bools) -> Iterator[tuple[MissReason, int | None]]:
    """Yield why each of the blocks from ``first`` on is not reused, and how many ms ago it left the cache."""
    now_ms = core.now()
    with core.lock, core.changes:
        core.check_open()
        ring, count = core.states.ring.gone.copy(), int(core.states.ring.numbers[N.gone])
        names = list(core.names.known.items())[:NAMESPACES_MOST]
    gone: dict[int, tuple[MissReason, int]] = {}
    for place in range(max(0, count - len(ring)), count) if len(ring) else ():
        half, noted = ring[place % len(ring)].tolist()
        left_ms, code = noted >> 2, noted & 3
        expired = code == EVICTED and half in gone and gone[half][0] == "unknown"
        gone[half] = "expired" if expired else _REASONS[code], max(0, now_ms - left_ms)
    elsewhere = np.zeros((len(core.states), len(keys) // core.config.tokens_per_block), np.bool_)
    for tag, name in names:
        if tag != keys.namespace:
            scope = Scope(name.salt, name.adapter_id, (tag, *name.root), keys.origin)
            other = BlockKeys.of_private(keys.tokens, NO_KEYS, keys.extra_ids, scope, core.states.groups)
            cached = np.empty_like(elsewhere)
            with core.lock, core.changes:
                control.cached(core.states.groups, key_rows(other), control.ANY_TIER, cached)
            elsewhere |= cached
    halves = key_rows(keys)[:, 0].tolist()
    for i in range(first, len(lacks)):
        if not lacks[i]:
            yield "after_miss", None
        elif halves[i] in gone:
            yield gone[halves[i]]
        elif elsewhere[:, i].any():
            yield "other_namespace", None
        else:
            yield ("never_seen" if count < len(ring) else "unknown"), None

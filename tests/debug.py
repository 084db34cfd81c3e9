"""Readable pictures of the state, for tests and for people."""

from __future__ import annotations

import numpy as np

from kvpool.state.arrays import State, States
from kvpool.state.records import CLEAN, EMPTY, HOST, LISTS_PER_TIER, NONE, PUBLISHED, SWAPPED


def lists(state: State) -> dict[str, list[int]]:
    """The evictable blocks of each tier in the order in which they would be taken."""
    result = {}
    for tier, name in enumerate(("device", "host")):
        order = [EMPTY, *([CLEAN] if tier == HOST else []), *range(EMPTY)]
        ids: list[int] = []
        for which in order:
            b = int(state.lists[tier * LISTS_PER_TIER + which, 0])
            while b != NONE:
                ids.append(b)
                b = int(state.blocks[b]["next"])
        result[name] = ids
    return result


def cached(state: State) -> dict[str, dict[bytes, int]]:
    """Key (16 bytes) -> block id of what is cached on each tier."""
    result: dict[str, dict[bytes, int]] = {"device": {}, "host": {}}
    for b, block in enumerate(state.blocks):
        if block["flags"] & PUBLISHED:
            tier = "device" if b < state.header.device_blocks else "host"
            result[tier][block["key0"].tobytes() + block["key1"].tobytes()] = b
    return result


def dump(state: State) -> bytes:
    """Every byte on which a decision depends: everything but the scalars and counters in the header, and where searches
    start."""
    arrays = (
        state.blocks,
        state.tokens,
        state.lists[:-2],
        state.index,
        state.children,
        state.heap,
        state.sequences,
        state.rows,
        state.swapped[state.sequences["live"] == SWAPPED],
    )
    extra = state.extra.tobytes() if state.extra.size > 1 else b""
    return (
        b"".join(a.tobytes() for a in (*arrays, state.table, state.counters, state.histograms, state.ring.events))
        + extra
    )


def book(state: State) -> list[bytes]:
    """Every byte that a policy knows, if there is one: of all its arrays, however it names them."""
    fields = {} if state.policy_state is None else vars(state.policy_state)
    return [value.tobytes() for value in fields.values() if isinstance(value, np.ndarray)]


def dump_all(states: States) -> bytes:
    """``dump`` of every group."""
    return b"".join(dump(state) for state in states)

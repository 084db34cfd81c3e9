"""Policies under sessions that pause and come back: a pool of two tiers, and a HostCache, both too small for them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvpool import HostCache
from kvpool.state.arrays import POLICIES
from tests.golden.pools import SECRET
from tests.golden.recorder import Recorder, record_batches
from tests.golden.stores import IDENTITY
from tests.grouped import T, pool_of

SESSIONS, TURNS, REQUESTS = 14, 12, 220
PAUSES_MS = ((1_000, 4_000), (40_000, 200_000))
"""Of quick and of slow sessions."""


class Turn(NamedTuple):
    now_ms: int
    session: int
    blocks: int
    """The prompt has this many full blocks, the first ones of its session."""
    hints: dict[str, Any]


def turns(seed: int) -> Iterator[Turn]:
    """Requests of sessions, each of which goes on after a pause and is replaced by another one in the end."""
    random = Random(seed)
    due: list[tuple[int, int, int, int]] = []
    for session in range(SESSIONS):
        heappush(due, (random.randrange(1_000), session, random.randint(3, 6), 0))
    started = SESSIONS
    for _ in range(REQUESTS):
        now_ms, session, blocks, turn = heappop(due)
        pause_ms = random.randint(*PAUSES_MS[session % 2])
        ends = turn == TURNS
        hints: list[dict[str, Any]] = [{}, {}, {"stop": "tool_use"}, {"stop": "end_turn"}]
        hints.append({"ends": True} if ends else {"returns_in_ms": pause_ms})
        yield Turn(now_ms, session, blocks, random.choice(hints))
        if ends:
            started += 1
            heappush(due, (now_ms + pause_ms, started - 1, random.randint(3, 6), 0))
        else:
            heappush(due, (now_ms + pause_ms, session, blocks + random.randint(1, 5), turn + 1))


def note_followed(recorder: Recorder, states: Any) -> None:
    policy_state = states[0].policy_state
    if policy_state is not None:
        recorder.line(f"follows {POLICIES[int(policy_state.policy_state['follows'][0])]}")


def drive_pool(policy: str, seed: int) -> Recorder:
    recorder, now = Recorder(), [0]
    options = {"max_sequences": 2, "max_sequence_tokens": 1024, "event_capacity": 1024, "partial_reuse": False}
    with pool_of("full", 96, 64, secret=SECRET, clock=lambda: now[0], policy=policy, **options) as cache:
        record_batches(cache, recorder)
        for turn in turns(seed):
            now[0] = turn.now_ms
            prompt = np.append(np.arange(turn.blocks * T) + 10_000 * (turn.session + 1), 1)
            admitted = recorder.outcome(
                "add", lambda p=prompt: cache.add_sequence_batch([p]), lambda a: a.cached_tokens
            )
            cache.commit(admitted.ids)
            cache.release(admitted.ids, **turn.hints)
            note_followed(recorder, cache.core.states)
            recorder.events(cache.events())
    return recorder


def drive_host(policy: str, seed: int) -> Recorder:
    recorder, now = Recorder(), [0]
    with HostCache(
        128, 64, identity=IDENTITY, secret=SECRET, clock=lambda: now[0], event_capacity=1024, policy=policy
    ) as cache:
        for turn in turns(seed):
            now[0] = turn.now_ms
            keys = [b"%d %d" % (turn.session, place) for place in range(turn.blocks)]
            hits = int(np.append(cache.lookup(keys) == cache.HERE, False).argmin())
            recorder.line("hits", hits)
            cache.pin(keys[:hits]).close()
            taken = recorder.outcome(
                "reserve",
                lambda new=keys[hits:]: cache.reserve(new),
                lambda reserved: [reserved.keys, reserved.evicted],
            )
            cache.publish(taken.keys)
            cache.touch(keys, turn=True)
            if policy != "lru":
                recorder.line(f"follows {cache.stats().follows}")
            for event in cache.events():
                recorder.line(f"event {event.kind}", event.number, event.keys)
    return recorder

"""Events of several groups of layers rebuild what each group has cached on each tier, and snapshots keep groups
apart."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from grouped import MIXES, Replay, cached, churn, pool_of, seed
from kvpool.pool import Event


@pytest.mark.parametrize("mix", MIXES)
def test_a_snapshot_alone_is_what_is_cached_in_all_groups(mix: str) -> None:
    with pool_of(mix, event_capacity=3) as cache:
        for _ in churn(cache, Random(5), 40):
            pass
        seed(cache, range(100, 109))
        cache.content.offload(list(range(100, 109)))
        assert cache.stats().events_dropped
        events = cache.events(snapshot=True)
        snapshot = events[events.before_snapshot :]
        assert [event.kind for event in snapshot].count("cleared") == 1 and snapshot[0].kind == "cleared"
        replay = Replay(len(cache.groups))
        replay.feed(snapshot)
        assert replay.cached == cached(cache) and all(
            keys for (g, _), keys in replay.cached.items() if cache.groups[g].kind != "cross"
        )
        assert [event.group for event in snapshot[1:]] == sorted(event.group for event in snapshot[1:])
        assert cache.events().number == events.next, "its reader goes on without a gap"


def chains(events: list[Event]) -> dict[tuple[int, str | None], list[tuple[bytes | None, bytes]]]:
    """(parent, key) of stored blocks in their order, by group and tier."""
    chains_of: dict[tuple[int, str | None], list[tuple[bytes | None, bytes]]] = {}
    for event in events:
        if event.kind == "stored":
            parent = None if event.parent is None else event.parent.tobytes()
            for key in np.asarray(event.keys):
                chains_of.setdefault((event.group, event.tier), []).append((parent, key.tobytes()))
                parent = key.tobytes()
    return chains_of


@pytest.mark.parametrize("mix", MIXES)
def test_a_snapshot_reports_parents_first_in_every_group_and_no_chain_leaves_its_group(mix: str) -> None:
    with pool_of(mix, device=30, host=0, event_capacity=4096) as cache:
        for _ in churn(cache, Random(2), 25):
            pass
        events = cache.events(snapshot=True)
        for (group, _), chain in chains(events[events.before_snapshot :]).items():
            keys, known = {key for _, key in chain}, set[bytes | None]()
            for parent, key in chain:
                assert parent not in keys or parent in known, f"a child comes before its parent in group {group}"
                known.add(key)
        for first, last in zip(events.bounds[:-1], events.bounds[1:], strict=True):
            assert len(set(events.records["group"][first:last].tolist())) == 1


@pytest.mark.parametrize("mix", MIXES)
def test_a_snapshot_says_of_each_block_what_storing_it_said(mix: str) -> None:
    def facts(events: list[Event]) -> set[object]:
        facts_stored = set[object]()
        for event in events:
            parent = event.parent
            for i, key in enumerate(np.asarray(event.keys)):
                assert event.tokens is not None
                extra = (
                    None if event.extra_ids is None or not event.extra_ids[i].any() else event.extra_ids[i].tobytes()
                )
                before = None if parent is None else parent.tobytes()
                names = event.group, event.tier, event.namespace, event.salt, event.adapter_id, event.priority
                facts_stored.add((key.tobytes(), before, event.tokens[i].tobytes(), extra, *names))
                parent = key
        return facts_stored

    with pool_of(mix, device=40, host=0, event_capacity=256) as cache:
        for names in ({}, {"salt": "s", "adapter_id": "a"}, {"extra_ids": [7] + [0] * 12}):
            seed(cache, range(13), **names)  # type: ignore[arg-type]
        events = cache.events(snapshot=True)
        reported = facts([event for event in events[: events.before_snapshot] if event.kind == "stored"])
        # Decoding blocks and windows may have removed some since.
        snapshot = facts(events[events.before_snapshot + 1 :])
        assert snapshot <= reported and {fact[4] for fact in snapshot} == {
            g.index for g in cache.groups if g.kind != "cross"
        }  # type: ignore[index]


def test_the_first_event_has_the_capacities_of_every_group_and_their_sums() -> None:
    with pool_of("full window cross", device=5, host=3, event_capacity=4) as cache:
        (created,) = cache.events()
        assert (created.kind, created.group, created.blocks) == ("created", 0, ((5, 3), (6, 4), (7, 5)))
        assert (created.device_blocks, created.host_blocks) == (18, 12) == (cache.device_blocks, cache.host_blocks)
    with pool_of("full", device=5, host=3, event_capacity=4) as cache:
        (created,) = cache.events()
        assert (created.device_blocks, created.host_blocks, created.blocks) == (5, 3, ((5, 3),))


def test_a_reset_is_one_event_for_all_groups() -> None:
    with pool_of("full window recurrent", event_capacity=64) as cache:
        seed(cache, range(9))
        assert {event.group for event in cache.events() if event.kind == "stored"} == {0, 1, 2}
        cache.clear()
        assert [(event.kind, event.group, event.keys) for event in cache.events()] == [("cleared", 0, None)]

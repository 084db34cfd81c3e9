"""Sequences that are swapped out: all that they had comes back, others keep what they share, and a refused call has
changed nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, EventReplay, Request
from failing import Rig
from group_engine import GroupsEngine
from kvpool import DeviceError, OutOfBlocks, OutOfSequences, PoolBusy
from tests import debug

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


def crowd(engine: Engine) -> None:
    """A request that needs the entire device, and leaves nothing."""
    engine.release(engine.add(range(7000, 7000 + engine.T * engine.cache.device_blocks)), store=False)


def picture(engine: Engine) -> bytes:
    return debug.dump_all(engine.cache.core.states)


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [0, 3, 8, 10])
def test_all_that_a_sequence_has_comes_back_after_a_request_for_the_entire_device(make: Make, committed: int) -> None:
    engine = make(P=3, S=3)
    sequence = engine.commit(engine.add(range(10)), committed)
    assert engine.swap_out(sequence) == 3 and engine.free() == 3
    crowd(engine)
    assert engine.resume(sequence) == 3
    told = [
        getattr(engine.cache, name)(sequence.id) for name in ("sequence_length", "committed_tokens", "cached_tokens")
    ]
    assert told == [10, committed, 0]
    engine.commit(engine.append(sequence, [1, 2]))
    engine.release(sequence)
    assert engine.reusable([*range(10), 1, 2, 3]) == 12


def test_what_is_on_both_tiers_is_copied_in_neither_direction(make: Make) -> None:
    engine = make(P=4, S=4)
    sequence = engine.commit(engine.add(range(9)))
    engine.cache.offload(list(range(8)))
    assert engine.swap_out(sequence) == 1
    assert engine.resume(sequence) == 1  # the unfull end; the rest was still on the device
    stats = engine.cache.stats()
    assert (stats.offloaded_blocks, stats.onboarded_blocks) == (3, 1)
    assert stats.offloaded_bytes == (2 * 4 + 1) * engine.cache.layout.token_bytes


def test_a_sequence_without_tokens_costs_nothing(make: Make) -> None:
    engine = make(P=2, S=0)
    sequence = engine.rewind(engine.add([1]), 1)
    assert engine.swap_out(sequence) == 0 and engine.resume(sequence) == 0
    engine.append(sequence, [4])


def test_a_swapped_sequence_counts_as_one(make: Make) -> None:
    engine = make(S=8, max_sequences=2)
    one, _ = engine.add(range(5)), engine.add([7])
    engine.swap_out(one)
    stats = engine.cache.stats()
    assert (stats.sequences, stats.swapped) == (1, 1) and "1 sequences, 1 swapped out" in str(stats)
    assert (stats.device.used, stats.host.used) == (1, 2)
    with pytest.raises(OutOfSequences):
        engine.add([9])


def test_drafts_come_back_and_a_path_of_them_is_kept(make: Make) -> None:
    engine = make(P=4, S=4)
    sequence = engine.draft(engine.commit(engine.add(range(6))), [1, 2, 3, 4], [-1, -1, 0, 2])
    engine.swap_out(sequence)
    crowd(engine)
    engine.resume(sequence)
    engine.commit(engine.keep(sequence, 4, [0, 2, 3]))


def test_content_on_the_host_is_found_while_its_sequence_waits(make: Make) -> None:
    engine = make(P=3, S=4)
    sequence = engine.commit(engine.add(range(10)))
    engine.swap_out(sequence)
    crowd(engine)
    other = engine.add([*range(8), 50])
    assert other.cached == 8
    engine.release(other)
    crowd(engine)
    engine.resume(sequence)


def test_what_a_swapped_sequence_holds_is_not_evicted(make: Make) -> None:
    engine = make(P=3, S=4)
    sequence = engine.commit(engine.add(range(10)), 8)
    engine.swap_out(sequence)
    for start in range(100, 200, 12):
        engine.seed(range(start, start + 12), committed=12, retention=[(0, None, 100, None)])
    assert engine.free("host") == 1
    assert engine.resume(sequence) == 3


def test_retention_and_extra_ids_come_back(make: Make) -> None:
    engine = make(P=4, S=4)
    names = {"salt": "s", "extra_ids": [0, 0, 0, 0, 7, 0, 0]}
    sequence = engine.add(range(7), retention=[(0, 4, 80, None)], **names)
    engine.swap_out(sequence)
    crowd(engine)
    engine.resume(sequence)
    assert engine.priorities(sequence) == [80, 35]
    engine.commit(engine.append(sequence, [1, 2]))
    engine.release(sequence)
    assert engine.reusable([*range(7), 1, 2, 3], salt="s", extra_ids=[0, 0, 0, 0, 7, 0, 0, 0, 0, 0]) == 9


def test_what_waited_to_be_published_is(make: Make) -> None:
    """Two compute the same; the one whose blocks are cached goes, and is forgotten."""
    engine = make(P=8, S=4)
    first, second = engine.add_batch([range(9), range(9)])
    engine.commit(first)
    engine.commit(second)
    engine.swap_out(second)
    engine.release(first, store=False)
    assert engine.reusable(range(9)) == 0
    engine.cache.release(second.id)
    assert engine.reusable(range(9)) == 8 and len(engine.cached("host")) == 2


def test_a_resumed_duplicate_is_published_when_the_other_has_gone(make: Make) -> None:
    engine = make(P=8, S=4)
    first, second = engine.add_batch([range(9), range(9)])
    engine.commit(first)
    engine.commit(second)
    engine.swap_out(second)
    engine.release(first, store=False)
    engine.resume(second)
    engine.release(second)
    assert engine.reusable(range(9)) == 8


# -- what is shared ----------------------------------------------------------------------------------------------------


def test_a_shared_prefix_stays_on_the_device_for_others(make: Make) -> None:
    engine = make(P=6, S=6)
    first = engine.commit(engine.add(range(8)))
    second = engine.add([*range(8), 50])
    table = engine.table(first)
    assert engine.swap_out(second) == 3 and engine.table(first) == table and engine.free() == 4
    assert engine.resume(second) == 1 and engine.table(second)[:2] == table


def test_forks_that_leave_together_share_on_the_host_and_when_they_are_back(make: Make) -> None:
    engine = make(P=3, S=3)
    parent = engine.commit(engine.add(range(10)), 5)
    family = [parent, *engine.fork(parent, 3)]
    assert engine.swap_out(*family) == 3 and engine.free("host") == 0
    crowd(engine)
    assert engine.resume(*family[::-1]) == 3
    assert len({tuple(engine.table(one)) for one in family}) == 1
    engine.release(*family[2:])
    with pytest.raises(OutOfBlocks):  # the end is shared, and has to be copied
        engine.append(parent, [1])
    engine.release(family[1])
    engine.append(parent, [1])


def test_forks_that_leave_alone_have_an_end_of_their_own_from_then_on(make: Make) -> None:
    engine = make(P=8, S=8)
    parent = engine.commit(engine.add(range(6)))
    child = engine.fork(parent)[0]
    assert engine.swap_out(child) == 2  # the full block stays cached, and has a host copy now
    engine.append(parent, [7])
    assert engine.cache.stats().copied_blocks == 0  # nobody shares the end
    assert engine.resume(child) == 1
    engine.append(child, [8])
    shared, own = zip(engine.table(parent), engine.table(child), strict=True)
    assert shared[0] == shared[1] and own[0] != own[1]


def test_part_of_a_family_comes_back_while_the_rest_waits(make: Make) -> None:
    engine = make(P=4, S=4)
    parent = engine.add(range(6))
    family = [parent, *engine.fork(parent, 2)]
    engine.swap_out(*family)
    engine.resume(*family[:2])
    assert engine.table(family[0]) == engine.table(family[1])
    engine.release(*family[:2])
    crowd(engine)
    engine.resume(family[2])


def test_a_pinned_block_stays_where_its_reader_reads_it(make: Make) -> None:
    engine = make(P=4, S=4)
    sequence = engine.commit(engine.add(range(8)))
    with engine.cache.pin_blocks(engine.table(sequence)) as lease:
        engine.swap_out(sequence)
        assert engine.free() == 2
        engine.release(engine.add(range(100, 108)), store=False)
        for i, block in enumerate(lease.blocks.tolist()):
            engine.check_content(block, (None, None), sequence.items[: 4 * i + 4], 4 * i)
    engine.resume(sequence)


def test_what_others_compute_is_forgotten_but_not_what_a_swapped_sequence_holds(make: Make) -> None:
    engine = make(P=6, S=6)
    first = engine.commit(engine.add(range(8)))
    second = engine.add([*range(8), 50])
    engine.swap_out(second)
    engine.release(first, store=False)
    assert engine.reusable([*range(8), 51]) == 8
    engine.cache.release(second.id, store=False)
    assert engine.reusable([*range(8), 51]) == 8  # the first had computed it


# -- kinds of groups ---------------------------------------------------------------------------------------------------

KINDS: dict[str, list[dict[str, Any]]] = {
    "window": [{"window": 6, "sinks": 2}],
    "full and window": [{}, {"window": 5}],
    "recurrent": [{"kind": "recurrent", "snapshot_tokens": 8}],
    "recurrent and full": [{"kind": "recurrent"}, {}],
    "cross": [{}, {"kind": "cross"}],
    "all": [{}, {"window": 4}, {"kind": "recurrent", "snapshot_tokens": 4}, {"kind": "cross"}],
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("committed", [5, 13, 17])
def test_all_kinds_of_groups_take_along_what_they_keep(open_: Open, name: str, committed: int) -> None:
    engine = open_(*({"host_blocks": 8} | group for group in KINDS[name]))
    crosses = {"encoder_tokens": 7} if any(group.get("kind") == "cross" for group in KINDS[name]) else {}
    sequence = engine.commit(engine.add(range(17), **crosses), committed)
    before = [engine.cache.stats().groups[g].device.used for g in range(len(KINDS[name]))]
    engine.swap_out(sequence)
    stats = engine.cache.stats()
    assert all(group.device.used == 0 for group in stats.groups)
    assert [group.host.used for group in stats.groups] == before
    if not crosses and len(KINDS[name]) == 1 and "kind" not in KINDS[name][0]:
        crowd(engine)
    engine.resume(sequence)
    engine.commit(engine.append(sequence, range(6)))
    child = engine.fork(sequence)[0]
    engine.swap_out(child, sequence)
    engine.resume(sequence)
    engine.append(sequence, [3])
    engine.resume(child)
    engine.append(child, [4, 5])


def test_a_group_that_is_short_is_named_and_no_group_has_changed(open_: Open) -> None:
    engine = open_({"host_blocks": 3}, {"host_blocks": 2})
    sequence = engine.add(range(9))
    before = picture(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.swap_out(sequence)
    error = raised.value
    assert (error.tier, error.needed, error.free, error.group) == ("host", 3, 2, 1) and picture(engine) == before


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_without_room_on_the_host_nothing_has_changed(make: Make) -> None:
    engine = make(P=8, S=3)
    engine.seed(range(100, 109))
    engine.cache.offload(list(range(100, 108)))
    one, two = engine.commit(engine.add([*range(100, 108), 1])), engine.add(range(9))
    before = picture(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.swap_out(one, two)
    # Of three host blocks, two have what the first takes along.
    assert (raised.value.tier, raised.value.needed, raised.value.free) == ("host", 4, 1) and picture(engine) == before
    engine.check_all()
    engine.swap_out(one)


def test_without_a_host_tier_nothing_is_swapped_out(make: Make) -> None:
    engine = make(P=4, S=0)
    sequence = engine.add(range(5))
    with pytest.raises(OutOfBlocks, match="host tier: 2 blocks needed, 0 free"):
        engine.swap_out(sequence)


def test_without_room_on_the_device_nothing_comes_back(make: Make) -> None:
    engine = make(P=4, S=8)
    sequence = engine.commit(engine.add(range(12)))
    engine.swap_out(sequence)
    other = engine.add([*range(8), 1])  # what both share is on the device
    held = engine.add([9])
    before = picture(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.resume(sequence)
    assert (raised.value.tier, raised.value.needed, raised.value.free) == ("device", 1, 0)
    assert picture(engine) == before
    engine.release(held)
    assert engine.resume(sequence) == 1
    engine.release(other)


VERBS: dict[str, Callable[[Any, int], object]] = {
    "append_tokens": lambda cache, i: cache.append_tokens(i, [1]),
    "commit": lambda cache, i: cache.commit(i),
    "rewind": lambda cache, i: cache.rewind(i, 1),
    "keep": lambda cache, i: cache.keep(i, 1, []),
    "fork": lambda cache, i: cache.fork(i),
    "reorder": lambda cache, i: cache.reorder(i, [0]),
    "block_table": lambda cache, i: cache.block_table(i),
    "block_table on a stream": lambda cache, i: cache.block_table(i, 0),
    "copy_batch_block_offsets": lambda cache, i: cache.copy_batch_block_offsets(np.zeros((1, 8), np.int32), i),
    "sequence_length": lambda cache, i: cache.sequence_length(i),
    "blocks_needed": lambda cache, i: cache.blocks_needed(sequences=i, new_tokens=1),
    "evictable_if_released": lambda cache, i: cache.evictable_if_released(i),
    "loadable": lambda cache, i: cache.loadable(i),
    "swap_out": lambda cache, i: cache.swap_out(i),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_swapped_sequence_is_accepted_by_resume_and_release_alone(make: Make, verb: str) -> None:
    engine = make(S=8)
    sequence = engine.add(range(5))
    engine.swap_out(sequence)
    before = picture(engine)
    with pytest.raises(ValueError, match=f"sequence {sequence.id} is swapped out: accepted by resume and release"):
        VERBS[verb](engine.cache, sequence.id)
    assert picture(engine) == before


@pytest.mark.parametrize("verb", ["swap_out", "resume"])
@pytest.mark.parametrize(
    ("bad", "says"),
    [(lambda i: [i, i], "named twice"), (lambda i: [i, -1], "-1 is not a live"), (lambda i: "x", "ids")],
)
def test_wrong_ids_change_nothing(make: Make, verb: str, bad: Callable[[int], Any], says: str) -> None:
    engine = make(S=8)
    sequence = engine.add(range(5))
    if verb == "resume":
        engine.swap_out(sequence)
    before = picture(engine)
    with pytest.raises((ValueError, TypeError, KeyError), match=says):
        getattr(engine.cache, verb)(bad(sequence.id))
    assert picture(engine) == before


def test_what_runs_is_not_resumed(make: Make) -> None:
    engine = make(S=8)
    one, two = engine.add(range(5)), engine.add([1])
    engine.swap_out(one)
    with pytest.raises(ValueError, match=f"sequence {two.id} is not swapped out"):
        engine.cache.resume([one.id, two.id])


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [True, False])
def test_a_swapped_sequence_is_released_beside_others(make: Make, store: bool) -> None:
    engine = make(P=4, S=4)
    one, two = engine.commit(engine.add(range(9))), engine.commit(engine.add([50, 51, 52, 53]))
    engine.swap_out(one)
    crowded = engine.add(range(7000, 7012))
    engine.cache.release([two.id, one.id], store=store)
    engine.live = {crowded.id: crowded}
    engine.cache.verify()
    assert engine.reusable(range(10)) == (8 if store else 0) and engine.free("host") == 4
    with pytest.raises(KeyError):
        engine.cache.resume(one.id)


def test_a_reset_needs_force_and_ends_swapped_sequences(make: Make) -> None:
    engine = make(S=4)
    sequence = engine.commit(engine.add(range(9)))
    engine.swap_out(sequence)
    with pytest.raises(PoolBusy, match="1 sequences are live"):
        engine.cache.reset()
    engine.cache.reset(force=True)
    engine.cache.verify()
    assert engine.free("host") == 4 and engine.free() == 8


def test_a_closed_pool_tells_who_was_swapped_out(make: Make) -> None:
    engine = make(S=4)
    sequence = engine.add(range(5))
    engine.swap_out(sequence)
    assert engine.cache.close().sequences == [sequence.id]


def test_events_rebuild_what_is_cached(make: Make) -> None:
    engine = make(P=4, S=4, event_capacity=100)
    replay = EventReplay()
    one = engine.commit(engine.add(range(9)))
    steps: list[Callable[[], object]] = [
        lambda: engine.swap_out(one), lambda: crowd(engine), lambda: engine.resume(one), lambda: engine.swap_out(one),
        lambda: engine.cache.release(one.id, store=False),
    ]  # fmt: skip
    for step in steps:
        step()
        replay.feed(engine.cache.events())
        assert replay.cached == {tier: set(engine.cached(tier)) for tier in ("device", "host")}


# -- a device that refuses ---------------------------------------------------------------------------------------------


def refusing(place: int) -> tuple[Rig, Request, Request]:
    """Two sequences, and a device that will refuse the copy at a place."""
    rig = Rig(8, 8)
    one, two = rig.commit(rig.add(range(10)), 8), rig.commit(rig.add(range(50, 60)), 8)
    rig.device.arm(lambda at: at == place)
    return rig, one, two


@pytest.mark.parametrize("place", range(6))
def test_a_sequence_whose_copy_to_the_host_was_refused_can_only_be_released(place: int) -> None:
    rig, one, two = refusing(place)
    rig.swap_out(one, two)
    rig.device.arm()
    lost, other = (one, two) if place < 3 else (two, one)
    with pytest.raises(DeviceError, match=f"sequence {lost.id} lost a block"):
        rig.cache.resume(lost.id)
    rig.resume(other)
    rig.cache.release(lost.id)
    rig.check_everything()
    assert rig.lost == 1
    rig.cache.close()


@pytest.mark.parametrize("place", range(6))
def test_a_sequence_whose_copy_back_was_refused_can_only_be_released(place: int) -> None:
    rig, one, two = refusing(-1)
    rig.swap_out(one, two)
    crowd(rig)
    rig.device.arm(lambda at: at == place)
    rig.cache.resume([one.id, two.id])
    rig.device.arm()
    lost, other = (one, two) if place < 3 else (two, one)
    with pytest.raises(DeviceError, match=f"sequence {lost.id} lost a block"):
        rig.cache.swap_out(lost.id)
    rig.live[other.id] = other
    rig.cache.release(lost.id)
    rig.check_everything()
    rig.cache.close()


def test_a_duplicate_whose_copy_back_was_refused_is_found_by_nobody() -> None:
    rig = Rig(8, 8)
    one, two = rig.add(range(13)), rig.add(range(13))
    rig.commit(one, 12)
    rig.commit(two, 12)
    rig.swap_out(two)
    rig.release(one, store=False)
    rig.device.arm(lambda at: at == 1)
    rig.cache.resume(two.id)
    rig.device.arm()
    rig.cache.release(two.id)
    rig.check_everything()
    assert rig.lost == 1 and rig.add(range(13)).cached == 4
    rig.cache.close()

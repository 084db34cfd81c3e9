"""Sequences that are swapped out: all that they had comes back, others keep what they share, and a refused call has
changed nothing."""

from __future__ import annotations

import pytest

from engine import Engine, Make
from failing import Rig
from group_engine import Open
from kvpool import OutOfBlocks
from kvpool.errors import DeviceError
from tests import debug
from tests.sequences.test_arguments import ID_CALLS


def crowd(engine: Engine) -> None:
    """A request that needs the entire device, and leaves nothing."""
    engine.release(engine.add(range(7000, 7000 + engine.T * engine.cache.device_blocks)), store=False)


def picture(engine: Engine) -> bytes:
    return debug.dump_all(engine.cache.core.states)


# -- there and back ----------------------------------------------------------------------------------------------------


def test_drafts_come_back_and_a_path_of_them_is_kept(make: Make) -> None:
    engine = make(P=4, S=4)
    sequence = engine.draft(engine.commit(engine.add(range(6))), [1, 2, 3, 4], [-1, -1, 0, 2])
    engine.swap_out(sequence)
    crowd(engine)
    engine.resume(sequence)
    engine.commit(engine.accept_drafts(sequence, 4, [0, 2, 3]))


def test_a_ttl_that_ends_while_its_block_is_held_again_changes_nothing(make: Make) -> None:
    engine = make(P=4, S=4)
    sequence = engine.commit(engine.add(range(9), retention=[(0, None, 80, 5)]))
    engine.swap_out(sequence)
    engine.resume(sequence)
    engine.clock.now = 10
    assert engine.cache.content.refresh() == 0


# -- what is shared ----------------------------------------------------------------------------------------------------


def test_forks_that_leave_together_share_on_the_host_and_when_they_are_back(make: Make) -> None:
    engine = make(P=3, S=3)
    parent = engine.commit(engine.add(range(10)), 5)
    family = [parent, *engine.fork(parent, 3)]
    assert engine.swap_out(*family) == 3 and engine.free("host") == 0
    crowd(engine)
    assert engine.resume(*family[::-1]) == 3
    assert len({tuple(engine.table(sequence)) for sequence in family}) == 1
    engine.release(*family[2:])
    with pytest.raises(OutOfBlocks):  # the end is shared, and has to be copied
        engine.append(parent, [1])
    engine.release(family[1])
    engine.append(parent, [1])


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
    engine.cache.content.offload(list(range(100, 108)))
    first, two = engine.commit(engine.add([*range(100, 108), 1])), engine.add(range(9))
    before = picture(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.swap_out(first, two)
    # Two of three host blocks have what the first takes along.
    assert (raised.value.tier, raised.value.needed, raised.value.free) == ("host", 4, 1) and picture(engine) == before
    engine.check_all()
    engine.swap_out(first)


@pytest.mark.parametrize("verb", sorted(ID_CALLS.keys() - {"release"}))
def test_a_swapped_sequence_is_accepted_by_resume_and_release_alone(make: Make, verb: str) -> None:
    engine = make(S=8)
    sequence = engine.add(range(5))
    engine.swap_out(sequence)
    before = picture(engine)
    with pytest.raises(ValueError, match=f"sequence {sequence.id} is swapped out: accepted by resume and release"):
        ID_CALLS[verb](engine.cache, sequence.id)
    assert picture(engine) == before


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [True, False])
def test_a_swapped_sequence_is_released_beside_others(make: Make, store: bool) -> None:
    engine = make(P=4, S=4)
    first, two = engine.commit(engine.add(range(9))), engine.commit(engine.add([50, 51, 52, 53]))
    engine.swap_out(first)
    crowded = engine.add(range(7000, 7012))
    engine.cache.release([two.id, first.id], store=store)
    engine.live = {crowded.id: crowded}
    engine.cache.verify()
    assert engine.reusable(range(10)) == (8 if store else 0) and engine.free("host") == 4
    with pytest.raises(KeyError):
        engine.cache.resume(first.id)


# -- a device that refuses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_a_sequence_whose_copy_was_refused_can_only_be_released(place: int, back: bool) -> None:
    rig = Rig(8, 8)
    first, two = rig.commit(rig.add(range(10)), 8), rig.commit(rig.add(range(50, 60)), 8)
    if back:
        rig.swap_out(first, two)
        crowd(rig)
    rig.device.arm(lambda at: at == place)
    if back:
        rig.cache.resume([first.id, two.id])
    else:
        rig.swap_out(first, two)
    rig.device.arm()
    lost, other = (first, two) if place < 3 else (two, first)
    with pytest.raises(DeviceError, match=f"sequence {lost.id} lost a block"):
        (rig.cache.swap_out if back else rig.cache.resume)(lost.id)
    if back:
        rig.live[other.id] = other
    else:
        rig.resume(other)
    rig.cache.release(lost.id)
    rig.check_everything()
    assert rig.lost == 1
    rig.cache.close()


def test_a_duplicate_whose_copy_back_was_refused_is_found_by_nobody() -> None:
    rig = Rig(8, 8)
    first, two = rig.add(range(13)), rig.add(range(13))
    rig.commit(first, 12)
    rig.commit(two, 12)
    rig.swap_out(two)
    rig.release(first, store=False)
    rig.device.arm(lambda at: at == 1)
    rig.cache.resume(two.id)
    rig.device.arm()
    rig.cache.release(two.id)
    rig.check_everything()
    assert rig.lost == 1 and rig.add(range(13)).cached == 4
    rig.cache.close()

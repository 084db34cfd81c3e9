"""Forks share blocks until one writes: what is copied and when, what is counted, and that nothing is lost or leaked."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, Make, Request
from failing import Rig
from kvpool import OutOfBlocks
from kvpool.errors import DeviceError
from tests import debug


def beams(engine: Engine, tokens: list[int], count: int) -> list[Request]:
    """A prompt that is computed, and sequences that go on from it."""
    first = engine.commit(engine.add(tokens))
    return [first, *engine.fork(first, count - 1)]


def copied(engine: Engine) -> int:
    return int(engine.cache.stats().copied_blocks)


def append(engine: Engine, sequences: list[Request], tokens: list[list[int]]) -> None:
    """Several in one call."""
    flat = [token for new in tokens for token in new]
    engine.cache.append_tokens([request.id for request in sequences], flat, [len(new) for new in tokens])
    for request, new in zip(sequences, tokens, strict=True):
        engine.appended(request, new)
    engine.check_all()


# -- fork ------------------------------------------------------------------------------------------------


def test_a_fork_takes_no_block_and_has_all_that_its_parent_has(make: Make) -> None:
    engine = make(P=4)
    parent = engine.commit(engine.add(range(6)), 5)
    ids = engine.cache.fork(parent.id, 3)
    assert ids.dtype == np.int64 and ids.shape == (3,) and engine.free() == 2
    for new in ids.tolist():
        figures = [
            getattr(engine.cache, name)(new) for name in ("sequence_length", "committed_tokens", "cached_tokens")
        ]
        assert figures == [6, 5, 0] and engine.table(engine.forked(parent, new)) == engine.table(parent)


def test_each_writer_copies_the_shared_end_and_the_last_holder_writes_in_place(make: Make) -> None:
    engine = make()
    a, b, c = beams(engine, [*range(6)], 3)
    shared, end = engine.table(a)
    engine.append(b, [7])
    assert engine.table(b)[0] == shared and engine.table(b)[1] != end and copied(engine) == 1
    append(engine, [c, a], [[8], [9]])
    assert engine.table(c)[1] != end and engine.table(a) == [shared, end] and copied(engine) == 2


def test_a_copy_keeps_namespace_extra_ids_and_priority(make: Make) -> None:
    engine = make()
    names = {"salt": "s", "extra_ids": [0, 0, 0, 0, 7, 0]}
    parent = engine.add(range(6), retention=[(0, None, 80, None)], **names)
    child = engine.commit(engine.append(engine.fork(parent)[0], [6, 7]))
    assert engine.priorities(child) == [80, 80]
    engine.release(child, parent)
    assert engine.reusable([*range(9)], salt="s", extra_ids=[0, 0, 0, 0, 7, 0, 0, 0, 0]) == 8
    assert engine.reusable([*range(9)], salt="s") == 4


# -- what is counted -------------------------------------------------------------------------------------


def test_without_a_block_for_every_copy_nothing_has_changed(make: Make) -> None:
    engine = make(P=4)
    group = beams(engine, [*range(6)], 4)
    before = debug.dump(engine.cache.core.tokens)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.append_tokens([request.id for request in group], [1, 2, 3, 4], [1] * 4)
    assert (raised.value.needed, raised.value.free) == (3, 2)
    assert debug.dump(engine.cache.core.tokens) == before
    append(engine, group[:2], [[1], [2]])
    engine.release(group[3])
    engine.append(group[2], [3])
    assert engine.free() == 0 and copied(engine) == 2


# -- keys ------------------------------------------------------------------------------------------------


def test_equal_ends_of_forks_are_published_once(make: Make) -> None:
    engine = make()
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[6, 7]] * 3)
    for request in group:
        engine.commit(request)
    assert len(engine.cached()) == 2
    engine.release(group[0], store=False)
    engine.commit(group[1])
    assert len(engine.cached()) == 2, "the next one takes over"


@pytest.mark.parametrize("committed", [False, True])
def test_a_rewind_into_shared_blocks_leaves_them_to_the_others(make: Make, committed: bool) -> None:
    engine = make()
    a = engine.add(range(3))
    engine.append(a, [3, 4, 5])
    if committed:
        engine.commit(a)
    b = engine.fork(a)[0]
    table, cached = engine.table(a), engine.cached()
    engine.append(engine.rewind(b, 3), [7])
    engine.append(engine.rewind(a, 1), [8])
    assert engine.table(a) == table and engine.cached() == cached and copied(engine) == 1


# -- what fails ------------------------------------------------------------------------------------------


def test_a_copy_that_fails_fails_its_writer_alone() -> None:
    rig = Rig(8, 0)
    a, b = beams(rig, [*range(6)], 2)
    rig.device.arm(lambda place: True)
    rig.cache.append_tokens(b.id, [1])
    rig.device.arm()
    del rig.live[b.id]
    rig.failed.append(b.id)
    rig.append(a, [2])
    for call in (lambda: rig.cache.fork(b.id), lambda: rig.cache.reorder([a.id, b.id], [0, 0])):
        with pytest.raises(DeviceError, match=str(b.id)):
            call()
    rig.check_failed()
    rig.release(a)
    assert rig.free() == 8
    rig.cache.close()


# -- a fork that has committed more ----------------------------------------------------------------------


def test_what_a_fork_has_published_stays_when_one_that_committed_less_of_it_is_released_last(make: Make) -> None:
    engine = make(T=4, P=8)
    parent = engine.append(engine.commit(engine.add([1, 2])), [3, 4, 5])
    (child,) = engine.fork(parent)
    engine.commit(child)
    engine.release(child)
    engine.release(parent)
    assert engine.reusable([1, 2, 3, 4, 5, 6]) == 4


def test_drafts_do_not_move_into_what_a_fork_has_published(make: Make) -> None:
    engine = make(T=4, P=8)
    parent = engine.draft(engine.commit(engine.add([1, 2, 3])), [10, 11, 12], [-1, -1, 1])
    (child,) = engine.fork(parent)
    engine.commit(engine.rewind(child, 2))
    engine.release(child)
    assert engine.reusable([1, 2, 3, 10, 9]) == 4
    engine.accept_drafts(parent, 3, [1, 2])
    assert engine.reusable([1, 2, 3, 10, 9]) == 0
    engine.finish(parent)
    assert engine.reusable([1, 2, 3, 11, 9]) == 4


def test_decoded_blocks_of_a_fork_have_the_retention_of_its_parents(make: Make) -> None:
    engine = make()
    kept = engine.commit(engine.add(range(3), decode_priority=80, decode_ttl_ms=10))
    other = engine.commit(engine.add(range(20, 23), decode_priority=5))
    (fork,) = engine.fork(kept)
    engine.append(fork, [3, 4])
    assert engine.priorities(fork) == [35, 80]
    engine.reorder([kept, other], [1, 0])
    engine.append(kept, [3, 4])
    engine.append(other, [3, 4, 5])
    assert [engine.priorities(request)[1] for request in (kept, other)] == [5, 80]
    engine.finish(engine.append(fork, [5, 6, 7, 8]))
    assert engine.cache.content.refresh(9) == 0 and engine.cache.content.refresh(10) == 1


# ----------------------------------------
# Beams change places in one call: ids stay, what nobody goes on from is given back, and every beam has its own row
# and bytes.


def test_a_reorder_takes_no_block_and_frees_what_nobody_goes_on_from(make: Make) -> None:
    engine = make()
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[1], [2], [3]])
    ids, tables = [request.id for request in group], [engine.table(request) for request in group]
    engine.reorder(group, [2, 0, 2])
    assert [request.id for request in group] == ids
    assert [engine.table(request) for request in group] == [tables[2], tables[0], tables[2]]
    assert engine.free() == 5 and engine.order()[-1] == tables[1][1]
    append(engine, group, [[4], [5], [6]])
    assert engine.free() == 4 and copied(engine) == 3


@pytest.mark.parametrize("beam", [False, True])
def test_a_fork_or_beam_publishes_what_its_parent_had_to_leave_to_another(make: Make, beam: bool) -> None:
    engine = make()
    first, second, third = engine.add(range(5)), engine.add(range(5)), engine.add(range(20, 25))
    for request in (first, second, third):
        engine.commit(request)  # the second's block is a duplicate
    if beam:
        engine.reorder([second, third], [0, 0])
    else:
        (third,) = engine.fork(second)
    engine.release(second)
    engine.release(first, store=False)
    assert engine.reusable(range(5)) == 0
    engine.commit(third)
    assert engine.reusable(range(6)) == 4


def test_a_beam_that_lost_its_end_leaves_what_it_had_committed_before() -> None:
    rig = Rig(8, 0)
    first, second = rig.add(range(6)), rig.add(range(6))
    rig.commit(first)
    rig.commit(second)  # its full block is a duplicate
    (fork,) = rig.fork(second)
    rig.device.arm(lambda place: True)
    rig.cache.append_tokens(fork.id, [1])
    rig.device.arm()
    rig.failed.append(rig.live.pop(fork.id).id)
    rig.release(second)
    rig.release(first, store=False)
    assert rig.reusable(range(6)) == 0
    rig.check_failed()
    assert rig.reusable(range(6)) == 5, "the end that the second had, too"
    rig.cache.close()


def test_what_others_go_on_from_is_not_forgotten_with_a_beam(make: Make) -> None:
    engine = make()
    a, b, c = beams(engine, [*range(6)], 3)
    engine.release(b, store=False)
    engine.reorder([a, c], [0, 0], store=False)
    assert engine.reusable(range(6)) == 4
    engine.release(c, store=False)
    engine.release(a, store=False)
    assert engine.reusable(range(6)) == 0

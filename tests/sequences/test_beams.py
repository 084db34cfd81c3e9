"""Beams change places in one call: ids stay, what nobody goes on from is given back, and every beam has its own row and
bytes."""

from __future__ import annotations

from failing import Rig
from tests.sequences.test_forks import Make, append, beams, copied


def test_a_reorder_takes_no_block_and_frees_what_nobody_goes_on_from(make: Make) -> None:
    engine = make()
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[1], [2], [3]])
    ids, tables = [one.id for one in group], [engine.table(one) for one in group]
    engine.reorder(group, [2, 0, 2])
    assert [one.id for one in group] == ids
    assert [engine.table(one) for one in group] == [tables[2], tables[0], tables[2]]
    assert engine.free() == 5 and engine.order()[-1] == tables[1][1]
    append(engine, group, [[4], [5], [6]])
    assert engine.free() == 4 and copied(engine) == 3


def test_a_fork_publishes_what_its_parent_had_to_leave_to_another(make: Make) -> None:
    engine = make()
    first, second = engine.add(range(5)), engine.add(range(5))
    engine.commit(first)
    engine.commit(second)  # its block is a duplicate
    (fork,) = engine.fork(second)
    engine.release(second)
    engine.release(first, store=False)
    assert engine.reusable(range(5)) == 0
    engine.commit(fork)
    assert engine.reusable(range(6)) == 4
    engine.release(fork)


def test_a_beam_publishes_what_its_new_parent_had_to_leave_to_another(make: Make) -> None:
    engine = make()
    first, second, third = engine.add(range(5)), engine.add(range(5)), engine.add(range(20, 25))
    for one in (first, second, third):
        engine.commit(one)
    engine.reorder([second, third], [0, 0])
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

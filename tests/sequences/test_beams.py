"""Beams change places in one call: ids stay, what nobody goes on from is given back, and every beam has its own row and
bytes."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

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


@pytest.mark.parametrize("parents", [*itertools.product(range(3), repeat=3)])
def test_every_reorder_of_three_is_right(make: Make, parents: tuple[int, ...]) -> None:
    engine = make(P=16)
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[1], [2, 2, 2], [3] * 7])
    engine.commit(group[1])
    engine.reorder(group, parents)
    append(engine, group, [[4], [5], [6]])
    engine.release(*group)
    assert engine.free() == 16


@pytest.mark.parametrize("seed", range(4))
def test_beams_that_are_searched_leak_nothing_and_mix_nothing_up(make: Make, seed: int) -> None:
    """Two groups in one call, more steps than there are blocks."""
    random = Random(seed)
    engine = make(T=2, P=60, S=4)
    groups = [beams(engine, [g] * random.randint(1, 5), 4) for g in range(2)]
    together = groups[0] + groups[1]
    for _ in range(8):
        engine.reorder(together, [random.randrange(4) for _ in range(4)] + [4 + random.randrange(4) for _ in range(4)])
        append(engine, together, [[random.randrange(9)] for _ in together])
        engine.cache.commit([one.id for one in together])
        engine.check_all()
    engine.release(*together)
    assert engine.free() == 60, f"seed {seed}"


@pytest.mark.parametrize("store", [False, True])
def test_a_dropped_beam_is_forgotten_unless_it_is_to_be_stored(make: Make, store: bool) -> None:
    engine = make()
    a, b = beams(engine, [*range(6)], 2)
    engine.commit(engine.append(b, [6, 7, 8]))
    engine.reorder([a, b], [0, 0], store=store)
    assert engine.reusable([*range(10)]) == (9 if store else 4)
    assert len(engine.cached()) == (2 if store else 1)


@pytest.mark.parametrize("store", [False, True])
def test_what_a_dropped_beam_had_twice_takes_over_only_if_it_is_to_be_stored(make: Make, store: bool) -> None:
    engine = make(event_capacity=100)
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[6, 7], [6, 7], []])
    for one in group:
        engine.commit(one)
    engine.release(group[0], store=False)
    assert engine.reusable(range(9)) == 4 and len(engine.cache.events()) > 0
    engine.reorder(group[1:], [1, 1], store=store)
    assert engine.reusable(range(9)) == (8 if store else 4)
    assert ["stored" in event.kind for event in engine.cache.events()] == ([True] if store else [])


def test_block_tables_have_a_row_for_each_beam(make: Make) -> None:
    engine = make()
    group = beams(engine, [*range(6)], 3)
    append(engine, group, [[1], [2] * 3, [3]])
    ids = [one.id for one in group]
    table = engine.cache.block_table(ids)
    target = np.full((3, 4), -7, np.int32)
    engine.cache.copy_batch_block_offsets(target, ids)
    for row, one in enumerate(group):
        own = engine.table(one)
        assert table.dense()[row, : len(own)].tolist() == own and target[row].tolist() == own + [-1] * (4 - len(own))
    assert table.csr().indptr.tolist() == [0, 2, 5, 7]


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

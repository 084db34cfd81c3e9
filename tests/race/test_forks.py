"""Copies on write on streams that run late: what a fork orders, found in every run once the rule that orders it is
taken out."""

from __future__ import annotations

from typing import Any

import pytest

from engine import Request
from kvpool.device.base import Stream
from tests.race.lab import Lab
from tests.race.test_races import Scenario, X, cached, is_right, needs


def fork(lab: Lab, parent: Request, stream: Stream | None = None) -> Request:
    """One fork, used on ``stream`` or where its parent is."""
    new = int(lab.cache.fork(parent.id, 1, stream=stream)[0])
    lab._streams[new] = stream or lab._on(parent)
    return lab.forked(parent, new)


def a_copy_of_an_end_that_the_engine_is_still_writing(lab: Lab) -> None:
    parent = lab.add(X)  # and no commit
    lab.append(fork(lab, parent), [8])
    lab.append(parent, [9])
    assert lab.cache.stats().copied_blocks == 1


def a_fork_reads_on_another_stream_what_is_still_being_written(lab: Lab) -> None:
    fork(lab, lab.add(X), lab.b)


def the_copy_of_a_writer_is_read_before_it_is_made(lab: Lab) -> None:
    parent = lab.commit(lab.add(X))
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.append(child, [8])


def a_sibling_goes_back_and_writes_what_a_copy_still_reads(lab: Lab) -> None:
    """The parent, alone again with the block, rewinds below the place where they parted."""
    parent = lab.commit(lab.add([1, 2, 3, 4, 5]))
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.append(child, [8])
    lab.append(lab.rewind(parent, 2), [6, 7, 8])
    assert lab.cache.stats().copied_blocks == 1


def a_sibling_goes_back_and_writes_what_a_fork_still_reads(lab: Lab) -> None:
    parent = lab.commit(lab.add([1, 2, 3, 4, 5]))
    child = fork(lab, parent, lab.b)
    lab.sim.synchronize()
    lab.check(child)
    lab.append(child, [8])
    lab.append(lab.rewind(parent, 2), [6, 7, 8])


def a_copy_into_a_block_whose_last_reader_is_queued(lab: Lab) -> None:
    parent = lab.commit(lab.add(X))
    child = fork(lab, parent, lab.b)
    other = lab.add([41])
    lab.sim.synchronize()
    lab.check(other)
    lab.release(other, store=False)
    lab.append(child, [8])


def a_copy_into_a_block_that_is_being_offloaded(lab: Lab) -> None:
    cached(lab, [6, 7, 8])
    parent = lab.commit(lab.add([*X]))
    child = fork(lab, parent)
    held = lab.add([41])
    lab.sim.synchronize()
    lab.append(child, [8])  # evicts what was cached
    assert lab.cache.stats().offloaded_blocks == 1
    lab.release(held)


def a_beam_takes_over_from_another_stream(lab: Lab) -> None:
    parent = lab.commit(lab.add(X))
    other = fork(lab, parent, lab.b)
    lab.append(other, [8])
    lab.cache.reorder([parent.id, other.id], [1, 1])
    lab._streams[parent.id] = lab.b
    lab.reordered([parent, other], [1, 1])
    lab.append(parent, [9])


def the_block_of_a_dropped_beam_is_copied_into_while_it_is_read(lab: Lab) -> None:
    parent = lab.commit(lab.add(X))
    other = fork(lab, parent, lab.b)
    lab.append(other, [8])
    lab.sim.synchronize()
    lab.check(other)
    lab.cache.reorder([parent.id, other.id], [0, 0])
    lab._streams[other.id] = lab.a
    lab.reordered([parent, other], [0, 0])
    lab.append(other, [9])


def beams_go_on_together_on_another_stream(lab: Lab) -> None:
    parent = lab.add(X)
    other = fork(lab, parent)
    lab.append(other, [8])
    lab.cache.reorder([parent.id, other.id], [1, 1], stream=lab.b)
    lab._streams |= {parent.id: lab.b, other.id: lab.b}
    lab.reordered([parent, other], [1, 1])


def a_block_that_a_dropped_beam_reads_on_its_own_stream_is_given_away(lab: Lab) -> None:
    parent = lab.commit(lab.add(X))
    other = fork(lab, parent, lab.b)
    lab.cache.reorder([parent.id, other.id], [0, 0])
    lab._streams[other.id] = lab.a
    held = lab.add([5])
    lab.release(parent, other, store=False)
    assert lab.table(lab.add([21, 22, 23], stream=lab.a)) == [0]
    lab.release(held)


RACES: dict[Scenario, tuple[str, dict[str, Any]]] = {
    a_copy_of_an_end_that_the_engine_is_still_writing: ("copy_reads_after_engine", {"P": 4, "S": 0, "T": 4}),
    the_copy_of_a_writer_is_read_before_it_is_made: ("engine_writes_after_copies", {"P": 4, "S": 0, "T": 4}),
    a_sibling_goes_back_and_writes_what_a_copy_still_reads: ("engine_writes_after_copies", {"P": 4, "S": 0, "T": 8}),
    a_sibling_goes_back_and_writes_what_a_fork_still_reads: ("engine_writes_after_engine", {"P": 4, "S": 0, "T": 8}),
    a_copy_into_a_block_whose_last_reader_is_queued: ("copy_writes_after_engine", {"P": 3, "S": 0}),
    a_copy_into_a_block_that_is_being_offloaded: ("copy_writes_after_copies", {"P": 4, "S": 2}),
    the_block_of_a_dropped_beam_is_copied_into_while_it_is_read: ("copy_writes_after_engine", {"P": 2, "S": 0, "T": 4}),
}
ALWAYS = [
    a_fork_reads_on_another_stream_what_is_still_being_written,
    a_beam_takes_over_from_another_stream,
    beams_go_on_together_on_another_stream,
    a_block_that_a_dropped_beam_reads_on_its_own_stream_is_given_away,
]


@pytest.mark.parametrize("scenario", [*RACES, *ALWAYS], ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    options = RACES[scenario][1] if scenario in RACES else {"P": 2, "S": 0, "T": 4}
    is_right(scenario, options)


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])

"""Swaps on streams that run late: what leaving and coming back order, found in every run once the rule that orders it
is taken out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.race.lab import Lab
from tests.race.test_races import Scenario, X, cached, is_right, needs


def a_sequence_leaves_while_the_engine_still_writes_it(lab: Lab) -> None:
    """Its unfull end is not committed."""
    sequence = lab.add(X)
    lab.swap_out(sequence)
    lab.resume(sequence)


def a_block_is_written_before_its_offload_has_read_it(lab: Lab) -> None:
    sequence = lab.commit(lab.add(X))
    lab.sim.synchronize()
    lab.swap_out(sequence)
    lab.add([11, 12, 13, 14])  # the entire device, on the stream that has written the sequence
    assert lab.free() == 0


def a_block_is_onboarded_into_before_its_offload_has_read_it(lab: Lab) -> None:
    first = lab.commit(lab.add(X))
    lab.sim.synchronize()
    lab.swap_out(first)
    second = lab.commit(lab.add([11, 12, 13]))
    lab.sim.synchronize()
    lab.swap_out(second)
    lab.resume(first)


def a_sequence_is_read_before_it_has_come_back(lab: Lab) -> None:
    """All of it is committed and full, so that the engine does not write."""
    sequence = lab.commit(lab.add([1, 2, 3, 4]))
    lab.swap_out(sequence)
    lab.release(lab.add([11, 12, 13, 14]), store=False)
    lab.sim.synchronize()
    lab.resume(sequence)


def a_sequence_comes_back_before_it_has_left(lab: Lab) -> None:
    """Its end goes into a block that nobody has used."""
    sequence = lab.commit(lab.add(X))
    lab.sim.synchronize()
    lab.swap_out(sequence)
    lab.resume(sequence)
    assert lab.cache.stats().onboarded_blocks == 1


def a_host_block_is_offloaded_into_before_its_sequence_has_read_it(lab: Lab) -> None:
    """What comes back leaves room on the host, which an eviction takes at once."""
    sequence = lab.add(X)
    lab.swap_out(sequence)
    cached(lab, [6, 7, 8])
    lab.sim.synchronize()
    lab.resume(sequence)
    lab.add([51, 52])
    assert lab.cache.stats().offloaded_blocks == 3


def a_sequence_comes_back_on_another_stream(lab: Lab) -> None:
    sequence = lab.add(X)
    lab.swap_out(sequence)
    lab._streams[sequence.id] = lab.b
    lab.resume(sequence, stream=lab.b)
    lab.commit(lab.append(sequence, [9]))


def a_shared_prefix_stays_while_a_sequence_leaves(lab: Lab) -> None:
    first = lab.commit(lab.add([1, 2]))
    second = lab.add(X, stream=lab.b)
    lab.swap_out(second)
    lab.append(first, [5])
    lab.resume(second)


RACES: dict[Scenario, tuple[str, dict[str, Any]]] = {
    a_sequence_leaves_while_the_engine_still_writes_it: ("copy_reads_after_engine", {"P": 2, "S": 2}),
    a_block_is_written_before_its_offload_has_read_it: ("engine_writes_after_copies", {"P": 2, "S": 2}),
    a_block_is_onboarded_into_before_its_offload_has_read_it: ("copy_writes_after_copies", {"P": 2, "S": 4}),
    a_sequence_is_read_before_it_has_come_back: ("engine_reads_after_copies", {"P": 2, "S": 2}),
    a_sequence_comes_back_before_it_has_left: ("copy_reads_after_copies", {"P": 4, "S": 2}),
    a_host_block_is_offloaded_into_before_its_sequence_has_read_it: ("copy_writes_after_copies", {"P": 3, "S": 2}),
}
ALWAYS = [a_sequence_comes_back_on_another_stream, a_shared_prefix_stays_while_a_sequence_leaves]


@pytest.mark.parametrize("scenario", [*RACES, *ALWAYS], ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    options = RACES[scenario][1] if scenario in RACES else {"P": 4, "S": 4}
    is_right(scenario, options)


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])

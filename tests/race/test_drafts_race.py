"""Tokens that move on the engine's stream: no race with whoever writes the blocks next, nor with the copies of blocks
that were shared."""

from __future__ import annotations

from typing import Any

import pytest

from tests.race.lab import Lab
from tests.race.test_races import Scenario, X, cached, is_right, needs
from tests.sequences.test_drafts import fork


def dropped_drafts_reused_on_another_stream(lab: Lab) -> None:
    sequence = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    lab.keep(sequence, 5, [4])
    lab.add([31, 32, 33, 34], stream=lab.b)


def shared_drafts_copied_while_the_engine_is_still_writing_them(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.add([98])  # takes the block that was in use before, so that the copy goes into one that no stream knows
    lab.keep(child, 5, [3])
    lab.check(parent)


def tokens_moved_in_a_copy_that_is_still_being_made(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.keep(child, 5, [3])
    lab.check(parent)


def tokens_moved_in_a_block_that_is_being_copied_for_another(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.cache.keep([parent.id, child.id], [5, 5], [3, 4], [1, 1])
    lab.kept(parent, 5, [3])
    lab.kept(child, 5, [4])


def shared_drafts_copied_into_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    parent = lab.draft(lab.commit(lab.add([61, 62])), [5, 6, 7, 8], [-1] * 4)
    lab.release(lab.add([99]), store=False)  # evicts X for a moment
    child = fork(lab, parent)
    lab.sim.synchronize()
    assert lab.cache.prefetch(X) == 1
    lab.keep(child, 4, [3])
    assert lab.cache.stats().copied_blocks == 1
    lab.check(parent)


def a_sequence_whose_drafts_are_kept_on_another_stream(lab: Lab) -> None:
    sequence = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    lab.cache.keep(sequence.id, 5, [4], stream=lab.b)
    lab._streams[sequence.id] = lab.b
    lab.kept(sequence, 5, [4])


RACES: dict[Scenario, tuple[str | None, dict[str, Any]]] = {
    dropped_drafts_reused_on_another_stream: ("tokens_move_before_reuse", {"P": 3, "S": 0}),
    shared_drafts_copied_while_the_engine_is_still_writing_them: ("copy_reads_after_engine", {"P": 6, "S": 0}),
    tokens_moved_in_a_copy_that_is_still_being_made: ("engine_writes_after_copies", {"P": 6, "S": 0}),
    tokens_moved_in_a_block_that_is_being_copied_for_another: ("engine_writes_after_copies", {"P": 6, "S": 0}),
    shared_drafts_copied_into_a_block_that_is_being_onboarded: ("copy_writes_after_copies", {"P": 4, "S": 2}),
    a_sequence_whose_drafts_are_kept_on_another_stream: (None, {"P": 3, "S": 0}),
}


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    is_right(scenario, RACES[scenario][1])


@pytest.mark.parametrize(
    "scenario", [one for one, (guard, _) in RACES.items() if guard], ids=lambda scenario: scenario.__name__
)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])

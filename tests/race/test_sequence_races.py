"""Drafts, swaps and windows on streams that run late: what each of them orders, found in every run once the rule that
orders it is taken out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.race.lab import Lab
from tests.race.test_races import Scenario, X, cached, is_right, needs
from tests.sequences.test_drafts import fork

# -- tokens that move on the engine's stream -------------------------------------------------------------


def dropped_drafts_reused_on_another_stream(lab: Lab) -> None:
    sequence = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    lab.accept_drafts(sequence, 5, [4])
    lab.add([31, 32, 33, 34], stream=lab.b)


def shared_drafts_copied_while_the_engine_is_still_writing_them(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.add([98])  # takes the block that was in use before, so that the copy goes into one that no stream knows
    lab.accept_drafts(child, 5, [3])
    lab.check(parent)


def tokens_moved_in_a_copy_that_is_still_being_made(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.accept_drafts(child, 5, [3])
    lab.check(parent)


def tokens_moved_in_a_block_that_is_being_copied_for_another(lab: Lab) -> None:
    parent = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    child = fork(lab, parent)
    lab.sim.synchronize()
    lab.cache.accept_drafts([parent.id, child.id], [5, 5], [3, 4], [1, 1])
    lab.kept(parent, 5, [3])
    lab.kept(child, 5, [4])


def shared_drafts_copied_into_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    parent = lab.draft(lab.commit(lab.add([61, 62])), [5, 6, 7, 8], [-1] * 4)
    lab.release(lab.add([99]), store=False)  # evicts X for a moment
    child = fork(lab, parent)
    lab.sim.synchronize()
    assert lab.cache.content.prefetch(X) == 1
    lab.accept_drafts(child, 4, [3])
    assert lab.cache.stats().copied_blocks == 1
    lab.check(parent)


def a_sequence_whose_drafts_are_kept_on_another_stream(lab: Lab) -> None:
    sequence = lab.draft(lab.commit(lab.add([1])), [5, 6, 7, 8, 9], [-1] * 5)
    lab.cache.accept_drafts(sequence.id, 5, [4], stream=lab.b)
    lab._streams[sequence.id] = lab.b
    lab.kept(sequence, 5, [4])


DRAFTS: dict[Scenario, tuple[str | None, dict[str, Any]]] = {
    dropped_drafts_reused_on_another_stream: ("tokens_move_before_reuse", {"P": 3, "S": 0}),
    shared_drafts_copied_while_the_engine_is_still_writing_them: ("copy_reads_after_engine", {"P": 6, "S": 0}),
    tokens_moved_in_a_copy_that_is_still_being_made: ("engine_writes_after_copies", {"P": 6, "S": 0}),
    tokens_moved_in_a_block_that_is_being_copied_for_another: ("engine_writes_after_copies", {"P": 6, "S": 0}),
    shared_drafts_copied_into_a_block_that_is_being_onboarded: ("copy_writes_after_copies", {"P": 4, "S": 2}),
    a_sequence_whose_drafts_are_kept_on_another_stream: (None, {"P": 3, "S": 0}),
}


# -- swaps -----------------------------------------------------------------------------------------------


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


SWAPS: dict[Scenario, tuple[str | None, dict[str, Any]]] = {
    a_sequence_leaves_while_the_engine_still_writes_it: ("copy_reads_after_engine", {"P": 2, "S": 2}),
    a_block_is_written_before_its_offload_has_read_it: ("engine_writes_after_copies", {"P": 2, "S": 2}),
    a_block_is_onboarded_into_before_its_offload_has_read_it: ("copy_writes_after_copies", {"P": 2, "S": 4}),
    a_sequence_is_read_before_it_has_come_back: ("engine_reads_after_copies", {"P": 2, "S": 2}),
    a_sequence_comes_back_before_it_has_left: ("copy_reads_after_copies", {"P": 4, "S": 2}),
    a_host_block_is_offloaded_into_before_its_sequence_has_read_it: ("copy_writes_after_copies", {"P": 3, "S": 2}),
    a_sequence_comes_back_on_another_stream: (None, {"P": 4, "S": 4}),
    a_shared_prefix_stays_while_a_sequence_leaves: (None, {"P": 4, "S": 4}),
}


# -- blocks that a window has passed, while the kernel of the step is still queued ----------------------

WINDOW = {"window": 2, "max_sequence_tokens": 20}
PROMPT = [1, 2, 3, 4, 5, 6, 7]


def step(lab: Lab) -> None:
    """A step of decoding: the kernel that reads a block written long ago is queued on stream a when the commit gives
    that block back.

    It is the next victim, and not worth a copy to the host, which would be in order behind the kernel.
    """
    sequence = lab.commit(lab.add(PROMPT, retention=[(4, 6, 10, None)]))
    lab.sim.synchronize()
    lab.append(sequence, [8])
    lab.cache.commit(sequence.id, stream=lab.a)
    assert lab.cache.stats().passed_blocks == 3


def another_sequence_writes(lab: Lab) -> None:
    step(lab)
    lab.add([11, 12], stream=lab.b)


def an_onboard_writes(lab: Lab) -> None:
    lab.seed([21, 22, 23], committed=2)
    lab.cache.content.offload([21, 22, 23])
    lab.sim.synchronize()
    step(lab)
    assert lab.cache.content.prefetch([21, 22, 23]) == 1


def the_sequence_itself_writes_on_another_stream(lab: Lab) -> None:
    step(lab)
    (sequence,) = lab.live.values()
    lab.use(sequence, lab.b)
    lab.append(sequence, [9, 10, 11, 12, 13])


def reuse_on_another_stream_of_what_is_still_being_written(lab: Lab) -> None:
    lab.cache.commit(lab.add(PROMPT).id, stream=lab.a)
    assert lab.add([*PROMPT[:6], 8], stream=lab.b).cached == 6


WINDOWS: dict[Scenario, tuple[str | None, dict[str, Any]]] = {
    another_sequence_writes: ("engine_writes_after_engine", {"P": 4, "S": 0} | WINDOW),
    an_onboard_writes: ("copy_writes_after_engine", {"P": 4, "S": 1} | WINDOW),
    reuse_on_another_stream_of_what_is_still_being_written: ("engine_reads_after_engine", {"P": 5, "S": 0} | WINDOW),
    the_sequence_itself_writes_on_another_stream: (None, {"P": 4, "S": 0} | WINDOW),
}
RACES = DRAFTS | SWAPS | WINDOWS
"""With the guard that keeps each from happening, if there is one, and the options of the pool."""


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    is_right(scenario, RACES[scenario][1])


@pytest.mark.parametrize(
    "scenario", [race for race, (guard, _) in RACES.items() if guard], ids=lambda scenario: scenario.__name__
)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])


def test_one_commit_may_both_write_and_give_back_every_block() -> None:
    for length in range(10, 80, 23):
        lab = Lab(40, 0, window=2)
        sequence = lab.add([1])
        for token in range(length):
            lab.append(sequence, [token])
        lab.commit(sequence)
        assert lab.cache.stats().passed_blocks >= length // 2 - 1
        assert not lab.findings()

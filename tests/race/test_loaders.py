"""Loaders on streams of their own: what a reservation orders, found in every run once the rule that orders it is taken
out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvpool.device.base import Stream
from kvpool.errors import ReservationExpired
from kvpool.pool import LoadTarget, Reservation
from tests.race.lab import SOME, Lab
from tests.race.test_races import Scenario, X, Y, Z, cached, is_right, needs, run


def load(lab: Lab, reservation: Reservation | LoadTarget, tokens: Sequence[int], stream: Stream) -> None:
    """Enqueue the loader's writes of all tokens that the pool lacks."""
    table, skip = reservation.blocks.tolist(), reservation.skip_prefix_n_tokens
    expected = lab.expected.of((None, None), [(token, 0) for token in tokens])

    def kernel() -> None:
        for i in range(skip, len(expected)):
            lab.block(table[i // lab.T])[:, :, i % lab.T] = expected[i]

    lab.sim.launch(stream, kernel, writes=lab.rows(table, skip, len(expected)))


def loaded(lab: Lab, prompt: Sequence[int], **commit: Any) -> None:
    """A loader on stream b brings a prompt."""
    with lab.cache.imports.reserve(lab.prompt(prompt), stream=lab.b) as reservation:
        load(lab, reservation, prompt, lab.b)
        reservation.commit(**commit)


def a_hit_on_what_a_loader_is_still_bringing(lab: Lab) -> None:
    loaded(lab, X)
    assert lab.add(X).cached == 2


def a_hit_on_the_unfull_end_of_what_a_loader_is_still_bringing(lab: Lab) -> None:
    loaded(lab, [1])
    assert lab.add([1, 2]).cached == 1


def an_offload_of_what_a_loader_is_still_bringing(lab: Lab) -> None:
    loaded(lab, X)
    lab.add(Y)
    assert lab.cache.stats().offloaded_blocks == 1


def reuse_of_a_block_that_an_aborted_loader_is_still_writing(lab: Lab) -> None:
    with lab.cache.imports.reserve(lab.prompt(Y), stream=lab.b) as reservation:
        load(lab, reservation, Y, lab.b)
    lab.add(Z)


def reuse_of_a_block_that_a_revoked_loader_is_still_writing(lab: Lab) -> None:
    load(lab, lab.cache.imports.reserve(lab.prompt(Y), owner="loader", stream=lab.b), Y, lab.b)
    assert lab.cache.revoke("loader") == 1
    lab.add(Z)


def reuse_of_a_block_that_a_loader_writes_after_its_deadline(lab: Lab) -> None:
    """The pool has as many other blocks as the next prompt needs."""
    reservation = lab.cache.imports.reserve(lab.prompt(Y), stream=lab.b, deadline_seconds=0.01)
    lab.clock.now += 10
    assert lab.cache.stats().overdue_reservations == 1
    lab.add(Z)
    load(lab, reservation, Y, lab.b)
    with pytest.raises(ReservationExpired):
        reservation.commit()
    reservation.abort()
    lab.add([31, 32, 33, 34, 35])


def reuse_of_a_block_that_a_loader_wrote_before_a_reset(lab: Lab) -> None:
    load(lab, lab.cache.imports.reserve(lab.prompt(Y), stream=lab.b), Y, lab.b)
    lab.cache.clear(force=True)
    lab.add(Z)


def reuse_of_a_block_that_a_loader_wrote_and_did_not_publish(lab: Lab) -> None:
    loaded(lab, Y, tokens=2)
    lab.add(Z)


def an_onboard_into_a_block_that_an_aborted_loader_is_still_writing(lab: Lab) -> None:
    cached(lab, X)
    reservation = lab.cache.imports.reserve(lab.prompt(Y), stream=lab.b)  # evicts X to the host
    lab.sim.synchronize()
    load(lab, reservation, Y, lab.b)
    reservation.abort()
    assert lab.cache.content.prefetch(X) == 1


def a_loader_in_a_block_that_is_being_offloaded(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()
    loaded(lab, Y)
    assert lab.cache.stats().offloaded_blocks == 1


def a_loader_in_a_block_that_the_engine_is_still_using(lab: Lab) -> None:
    lab.release(lab.add(Y), store=False)
    loaded(lab, Z)


def a_loader_behind_tokens_that_are_being_copied(lab: Lab) -> None:
    """The reader of the whole block waits for the loader alone."""
    cached(lab, X)
    lab.sim.synchronize()
    loaded(lab, [1, 9])
    assert lab.add([1, 9, 5]).cached == 2


def a_loader_without_a_stream_in_a_block_that_is_being_offloaded(lab: Lab) -> None:
    """Another process, whose stream the pool cannot know: what it enqueues is ordered by nothing but this thread."""
    cached(lab, X)
    elsewhere = lab.sim.create_stream("elsewhere")
    with lab.cache.imports.reserve(lab.prompt(Y)) as reservation:
        load(lab, reservation, Y, elsewhere)
        lab.sim.synchronize(lab.sim.record(elsewhere))
        reservation.commit()
    lab.add([*Y, 6])


def prefill_behind_a_store(lab: Lab) -> None:
    """A store brings the first tokens of a sequence, the engine computes the others behind it, in the same block
    too."""
    tokens = lab.prompt([*Y, 16])
    sequence = lab.cache.add_sequence(tokens, stream=lab.a)
    (part,) = lab.cache.imports.load_targets(sequence, stream=lab.b)
    expected = lab.expected.of((None, None), [(token, 0) for token in [*Y, 16]])
    table = part.blocks.tolist()

    def write(first: int, last: int, stream: Stream) -> None:
        def kernel() -> None:
            for i in range(first, last):
                lab.block(table[i // lab.T])[:, :, i % lab.T] = expected[i]

        lab.sim.launch(
            stream, kernel, reads=lab.rows(table, 0, first) if first else (), writes=lab.rows(table, first, last)
        )

    write(0, 3, lab.b)
    lab.cache.commit(sequence, [3], stream=lab.b)
    lab.cache.block_table(sequence, lab.a)
    write(3, 6, lab.a)
    lab.cache.commit(sequence, stream=lab.a)
    lab.cache.release(sequence)
    assert lab.add([*Y, 16, 7], stream=lab.sim.create_stream("c")).cached == 6


def a_store_in_a_block_that_is_being_offloaded(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()
    sequence = lab.cache.add_sequence(lab.prompt(Y), stream=lab.a)
    elsewhere = lab.sim.create_stream("elsewhere")
    (part,) = lab.cache.imports.load_targets([sequence])
    load(lab, part, Y, elsewhere)
    lab.sim.synchronize(lab.sim.record(elsewhere))
    lab.cache.commit(sequence)
    lab.cache.release(sequence)


RACES: dict[Scenario, tuple[str, dict[str, Any]]] = {
    a_hit_on_what_a_loader_is_still_bringing: ("engine_reads_after_engine", {"P": 4, "S": 2}),
    a_hit_on_the_unfull_end_of_what_a_loader_is_still_bringing: ("copy_reads_after_engine", {"P": 3, "S": 0}),
    an_offload_of_what_a_loader_is_still_bringing: ("copy_reads_after_engine", {"P": 3, "S": 2}),
    reuse_of_a_block_that_an_aborted_loader_is_still_writing: ("engine_writes_after_engine", {"P": 3, "S": 2}),
    reuse_of_a_block_that_a_revoked_loader_is_still_writing: ("engine_writes_after_engine", {"P": 3, "S": 2}),
    reuse_of_a_block_that_a_loader_writes_after_its_deadline: ("engine_writes_after_engine", {"P": 6, "S": 0}),
    reuse_of_a_block_that_a_loader_wrote_before_a_reset: ("engine_writes_after_engine", {"P": 3, "S": 2}),
    reuse_of_a_block_that_a_loader_wrote_and_did_not_publish: ("engine_writes_after_engine", {"P": 3, "S": 0}),
    an_onboard_into_a_block_that_an_aborted_loader_is_still_writing: ("copy_writes_after_engine", {"P": 3, "S": 2}),
    a_loader_in_a_block_that_is_being_offloaded: ("engine_writes_after_copies", {"P": 3, "S": 2}),
    a_loader_in_a_block_that_the_engine_is_still_using: ("engine_writes_after_engine", {"P": 3, "S": 0}),
    a_loader_behind_tokens_that_are_being_copied: ("engine_writes_after_copies", {"P": 4, "S": 0}),
    a_loader_without_a_stream_in_a_block_that_is_being_offloaded: ("reader_waits", {"P": 4, "S": 2}),
    prefill_behind_a_store: ("engine_reads_after_engine", {"P": 5, "S": 0}),
    a_store_in_a_block_that_is_being_offloaded: ("reader_waits", {"P": 3, "S": 2}),
}


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_a_loader_races_with_nobody(scenario: Scenario) -> None:
    is_right(scenario, RACES[scenario][1])


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])


def a_loader_that_forgets_its_stream(lab: Lab) -> None:
    elsewhere = lab.sim.create_stream("elsewhere")
    with lab.cache.imports.reserve(lab.prompt(X)) as reservation:
        load(lab, reservation, X, elsewhere)
        reservation.commit()
    lab.add([*X, 6])


def test_a_loader_that_says_too_early_that_the_bytes_are_there_is_found() -> None:
    """Without a stream, nothing in the pool makes anybody wait: the device sees it."""
    for seed, progress in SOME:
        assert run(a_loader_that_forgets_its_stream, {"P": 4, "S": 0}, seed, progress)


@pytest.mark.parametrize("reserved", [False, True], ids=["reserved without a stream", "reserved with one"])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_loader_may_end_on_another_stream_than_it_began(reserved: bool, end: str) -> None:
    def scenario(lab: Lab) -> None:
        other = lab.sim.create_stream("other")
        reservation = lab.cache.imports.reserve(lab.prompt(X), stream=lab.b if reserved else None)
        load(lab, reservation, X, lab.b if reserved else other)
        getattr(reservation, end)(stream=other)
        lab.add([*X, 6] if end == "commit" else [*Y, 6])

    for seed, progress in SOME:
        assert not run(scenario, {"P": 3, "S": 0}, seed, progress)

"""Every race that a rule forbids: found nowhere while the rule holds, found in every run, lucky ones too, once it is
taken out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from kvpool.device.base import Device, DeviceEvent, WrappedDevice
from kvpool.errors import DeviceError
from kvpool.state import records
from tests.device.faults import FaultyDevice
from tests.race.lab import SOME, Lab, Runs

Scenario = Callable[[Lab], None]
X, Y, Z = [1, 2, 3], [11, 12, 13, 14, 15], [21, 22, 23, 24, 25]


def cached(lab: Lab, tokens: list[int], **options: Any) -> None:
    """Content that nobody holds, all of it full blocks but the last token."""
    lab.seed(tokens, committed=len(tokens) - 1, **options)


def offload_of_a_block_that_the_engine_is_still_writing(lab: Lab) -> None:
    cached(lab, X)
    lab.add(Y)  # evicts what stream a writes
    assert lab.cache.stats().offloaded_blocks == 1


def reuse_of_an_evicted_block_before_its_offload_has_read_it(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()
    lab.add(Y, stream=lab.b)


def onboard_into_a_block_whose_last_reader_is_queued(lab: Lab) -> None:
    cached(lab, X)
    other = lab.add(Y)  # evicts X to the host
    lab.sim.synchronize()
    lab.check(other)
    lab.release(other, store=False)
    assert lab.cache.content.prefetch(X) == 1


def hit_on_a_block_whose_write_is_queued_on_another_stream(lab: Lab) -> None:
    cached(lab, X)
    assert lab.add(X, stream=lab.b).cached == 2


def a_sequence_goes_on_on_another_stream(lab: Lab) -> None:
    lab.use(lab.add(X), lab.b)


def reuse_of_a_released_block_on_another_stream(lab: Lab) -> None:
    lab.release(lab.add(Y), store=False)
    lab.add(Z, stream=lab.b)


def onboard_from_a_host_block_whose_offload_is_pending(lab: Lab) -> None:
    cached(lab, X)
    held = lab.add([41, 42, 43, 44, 45])
    lab.sim.synchronize()
    lab.add([11], stream=lab.b)  # evicts X
    lab.release(held, store=False)
    assert lab.cache.content.prefetch(X) == 1


def read_of_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    assert lab.add(X).cached == 2
    assert lab.cache.stats().onboarded_blocks == 1


def two_evictions_into_one_host_block_in_one_step(lab: Lab) -> None:
    cached(lab, X)
    cached(lab, [6, 7, 8])
    lab.sim.synchronize()
    lab.add(Y)
    assert lab.cache.stats().offloaded_blocks == 2


def eviction_into_a_host_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    cached(lab, [6, 7, 8])
    lab.sim.synchronize()
    assert lab.cache.content.prefetch(X) == 1  # its host copy is the next victim
    lab.add([31, 32, 33], stream=lab.b)
    assert lab.cache.stats().redundant_dropped == 1


def full_tiers(lab: Lab) -> list[int]:
    """A prompt of two full blocks, which are on the host alone, and other content in all blocks of the device."""
    first = [51, 52, 53, 54, 55]
    cached(lab, first)
    for token in range(60, 100, 10):
        lab.seed([token, token + 1], committed=2)
    lab.sim.synchronize()
    return first


def evictions_into_host_blocks_that_the_same_admission_onboards(lab: Lab) -> None:
    assert lab.add(full_tiers(lab)).cached == 4
    assert lab.cache.stats().redundant_dropped == 2


def evictions_into_host_blocks_that_the_same_prefetch_onboards(lab: Lab) -> None:
    assert lab.cache.content.prefetch(full_tiers(lab)) == 2
    assert lab.cache.stats().redundant_dropped == 1
    lab.add([51, 52, 53, 54, 55], stream=lab.b)


def partial_copy_from_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add([*Y, 16, 17, 18, 19]), store=False)
    cached(lab, [6, 7, 8])
    held = lab.add([41])
    lab.sim.synchronize()
    assert lab.cache.content.prefetch(X) == 1
    lab.add(Z, stream=lab.b)  # evicts another block into the host copy of X
    assert lab.cache.stats().redundant_dropped == 1
    lab.release(held, store=False)
    assert lab.add([1, 9]).cached == 1


def a_host_block_reused_while_a_copy_of_its_reader_is_pending(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    with lab.cache.pin(lab.keys(X), tier="host", stream=lab.b) as lease:
        lab.read(lease, X[:2], lab.b)
    cached(lab, [6, 7, 8])
    lab.add(Z)
    assert lab.cache.stats().forgotten_host_blocks == 1


def reuse_of_a_block_that_a_revoked_reader_is_still_copying(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()
    lab.read(lab.cache.pin(lab.keys(X), owner="reader", stream=lab.b), X[:2], lab.b)
    assert lab.cache.revoke("reader") == 1
    lab.add(Y)


def a_pin_between_the_start_of_an_onboard_and_its_end(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    lab.cache.content.prefetch(X)
    with lab.cache.pin(lab.keys(X), tier="device") as lease:
        lab.read(lease, X[:2])


def partial_copy_from_tokens_that_the_engine_is_still_writing(lab: Lab) -> None:
    lab.seed([1], committed=1)  # an unfull block
    assert lab.add([1, 9], stream=lab.b).cached == 1


def rewound_blocks_reused_on_another_stream(lab: Lab) -> None:
    lab.rewind(lab.add(Y), 3)
    lab.add([31, 32, 33], stream=lab.b)


def rewind_into_a_block_that_is_being_offloaded(lab: Lab) -> None:
    sequence = lab.commit(lab.add([1, 2, 3, 4]))
    lab.sim.synchronize()
    assert lab.cache.content.offload([1, 2, 3, 4]) == 2
    lab.append(lab.rewind(sequence, 1), [9])


def growth_into_a_block_that_is_being_offloaded(lab: Lab) -> None:
    cached(lab, X)
    sequence = lab.add([11, 12, 13, 14])
    lab.sim.synchronize()
    lab.append(sequence, [15])


def a_reader_on_a_stream_of_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    lab.cache.content.prefetch(X)
    with lab.cache.pin(lab.keys(X), tier="device", stream=lab.b) as lease:
        lab.read(lease, X[:2], lab.b)


def an_import_into_a_block_that_is_being_onboarded(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    lab.cache.content.prefetch(X)
    assert lab.cache.imports.import_blocks(lab.prompt([31, 32]), [bytes(lab.cache.layout.block_bytes)]) == 1


def on_the_host(lab: Lab) -> None:
    """The content of X is on the host alone."""
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()


def a_layer_read_while_it_is_loaded(lab: Lab) -> None:
    on_the_host(lab)
    loads = lab.cache.imports.layer_loads(lab.a, parts=2)
    ids = lab.cache.add_sequence_batch([lab.prompt(X)], loads=loads).ids
    for layer in range(2):
        loads.wait(layer)
        lab.read_layers(int(ids[0]), X[:2], [layer])
    lab.cache.release(ids)


def between_decision_and_enqueue(lab: Lab, act: Callable[[], None]) -> None:
    """Another thread comes in where the next decision is made and not yet handed over."""
    drain = lab.cache.core.transfer.drain

    def interrupted() -> None:
        lab.cache.core.transfer.drain = drain  # type: ignore[method-assign]
        act()
        drain()

    lab.cache.core.transfer.drain = interrupted  # type: ignore[method-assign]


def lagging(lab: Lab) -> list[Callable[[], None]]:
    """What may lag is enqueued when the calls that this returns are made."""
    transfer, later = lab.cache.core.transfer, list[Callable[[], None]]()
    transfer.at_once, transfer.start = 1, later.append
    return later


def a_kernel_launched_before_the_wait_for_a_load(lab: Lab) -> None:
    on_the_host(lab)
    later = lagging(lab)
    lab.add(X)
    for enqueue in later:
        enqueue()


def a_kernel_launched_before_the_save_of_its_block(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()
    later = lagging(lab)
    lab.add(Y, stream=lab.b)
    for enqueue in later:
        enqueue()


def a_hit_on_what_a_lagging_prefetch_brings(lab: Lab) -> None:
    on_the_host(lab)
    later = lagging(lab)
    assert lab.cache.content.prefetch(X) == 1
    assert later
    lab.add(X, stream=lab.b)
    for enqueue in later:
        enqueue()


def a_pin_between_decision_and_enqueue(lab: Lab) -> None:
    cached(lab, X)
    lab.sim.synchronize()

    def pin() -> None:
        with lab.cache.pin(lab.keys(X), tier="host") as lease:
            lab.read(lease, X[:2])

    between_decision_and_enqueue(lab, pin)
    lab.add(Y)


def a_second_admission_between_decision_and_enqueue(lab: Lab) -> None:
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    lab.sim.synchronize()
    between_decision_and_enqueue(lab, lambda: lab.add(X, stream=lab.b) and None)  # type: ignore[func-returns-value]
    assert lab.cache.content.prefetch(X) == 1


RACES: dict[Scenario, tuple[str, dict[str, Any]]] = {
    offload_of_a_block_that_the_engine_is_still_writing: ("copy_reads_after_engine", {"P": 3, "S": 2}),
    reuse_of_an_evicted_block_before_its_offload_has_read_it: ("engine_writes_after_copies", {"P": 3, "S": 2}),
    onboard_into_a_block_whose_last_reader_is_queued: ("copy_writes_after_engine", {"P": 3, "S": 2}),
    hit_on_a_block_whose_write_is_queued_on_another_stream: ("engine_reads_after_engine", {"P": 4, "S": 2}),
    reuse_of_a_released_block_on_another_stream: ("engine_writes_after_engine", {"P": 3, "S": 2}),
    onboard_from_a_host_block_whose_offload_is_pending: ("copy_reads_after_copies", {"P": 4, "S": 2}),
    read_of_a_block_that_is_being_onboarded: ("engine_reads_after_copies", {"P": 3, "S": 2}),
    two_evictions_into_one_host_block_in_one_step: ("levels", {"P": 3, "S": 1}),
    eviction_into_a_host_block_that_is_being_onboarded: ("copy_writes_after_copies", {"P": 3, "S": 1}),
    evictions_into_host_blocks_that_the_same_admission_onboards: ("copy_writes_after_copies", {"P": 4, "S": 2}),
    evictions_into_host_blocks_that_the_same_prefetch_onboards: ("levels", {"P": 4, "S": 2}),
    partial_copy_from_a_block_that_is_being_onboarded: ("copy_reads_after_copies", {"P": 5, "S": 1}),
    a_host_block_reused_while_a_copy_of_its_reader_is_pending: ("copy_writes_after_engine", {"P": 3, "S": 1}),
    reuse_of_a_block_that_a_revoked_reader_is_still_copying: ("engine_writes_after_engine", {"P": 3, "S": 0}),
    a_pin_between_the_start_of_an_onboard_and_its_end: ("reader_waits", {"P": 3, "S": 2}),
    partial_copy_from_tokens_that_the_engine_is_still_writing: ("copy_reads_after_engine", {"P": 3, "S": 0}),
    rewound_blocks_reused_on_another_stream: ("engine_writes_after_engine", {"P": 3, "S": 0}),
    rewind_into_a_block_that_is_being_offloaded: ("engine_writes_after_copies", {"P": 3, "S": 2}),
    growth_into_a_block_that_is_being_offloaded: ("engine_writes_after_copies", {"P": 3, "S": 2}),
    a_reader_on_a_stream_of_a_block_that_is_being_onboarded: ("engine_reads_after_copies", {"P": 3, "S": 2}),
    an_import_into_a_block_that_is_being_onboarded: ("reader_waits", {"P": 3, "S": 1}),
    a_kernel_launched_before_the_wait_for_a_load: ("handed_out_is_enqueued", {"P": 3, "S": 2}),
    a_kernel_launched_before_the_save_of_its_block: ("handed_out_is_enqueued", {"P": 3, "S": 2}),
    a_hit_on_what_a_lagging_prefetch_brings: ("engine_reads_after_copies", {"P": 3, "S": 2}),
    a_layer_read_while_it_is_loaded: ("engine_reads_layer_after_copy", {"P": 3, "S": 2}),
    a_pin_between_decision_and_enqueue: ("others_batches_too", {"P": 3, "S": 2}),
    a_second_admission_between_decision_and_enqueue: ("ticket_order", {"P": 3, "S": 2}),
}


class Unasked(WrappedDevice):
    """Never says that an event is complete: without the guard, the pool cannot have known it by luck."""

    def query(self, event: DeviceEvent) -> bool:
        return False


def run(scenario: Scenario, options: dict[str, Any], seed: int, progress: float, guard: str | None = None) -> list[str]:
    """What a scenario found."""
    lab = Lab(**options, seed=seed, progress=progress, guard=guard, wrap=Unasked if guard else None)
    try:
        scenario(lab)
    except (AssertionError, DeviceError):
        if guard is None:
            raise
    return lab.findings()


def is_right(scenario: Scenario, options: dict[str, Any], runs: Runs = SOME) -> None:
    for seed, progress in runs:
        failures = run(scenario, options, seed, progress)
        assert not failures, f"seed {seed}, progress {progress}: {failures}"


def needs(guard: str | None, scenario: Scenario, options: dict[str, Any], runs: Runs = SOME) -> None:
    """Every run shows what the guard is for, once it is taken out."""
    for seed, progress in runs:
        failures = run(scenario, options, seed, progress, guard)
        assert failures, f"seed {seed}, progress {progress}: nothing was found without {guard}"


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_nothing_races(scenario: Scenario) -> None:
    is_right(scenario, RACES[scenario][1])


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_the_race_is_found_without_its_guard(scenario: Scenario) -> None:
    needs(RACES[scenario][0], scenario, RACES[scenario][1])


def test_every_guard_has_a_race() -> None:
    elsewhere = {"lost_content_is_forgotten", "staged_buffers_retire_by_event", "tokens_move_before_reuse"}
    elsewhere |= {"parent_in_key", "namespace_in_key", "namespace_at_hit", "tokens_at_hit", "ticket_at_loss"}
    elsewhere |= {"unpin_after_release"}
    assert {guard for guard, _ in RACES.values()} | elsewhere == set(records.GUARDS)


def test_a_sequence_may_change_its_stream() -> None:
    for seed, progress in SOME:
        assert not run(a_sequence_goes_on_on_another_stream, {"P": 4, "S": 0}, seed, progress)


# -- failures on a device that works behind its callers --------------------------------------------------


class Failing(FaultyDevice):
    """Fails at one move, counted from when it was armed."""

    place: int | None = None

    def __init__(self, inner: Device) -> None:
        super().__init__(inner, self._refuse)

    def _refuse(self, call: int, index: int, move: Any) -> bool:
        if self.place is None:
            return False
        self.place -= 1
        return self.place == -1


def failing_lab(P: int, S: int, **options: Any) -> tuple[Lab, Failing]:
    lab = Lab(P, S, wrap=Failing, **options)
    assert isinstance(lab.cache.core.device, Failing)
    return lab, lab.cache.core.device


def a_failure_at_a_move(place: int, seed: int, progress: float, guard: str | None) -> list[str]:
    """Onboards, offloads and a partial copy in one batch, one of which fails; then everything that is still found is
    read."""
    lab, device = failing_lab(4, 4, seed=seed, progress=progress, guard=guard)
    prompts = [[1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [31, 32, 33, 34, 35]]
    for prompt in prompts:
        cached(lab, prompt)
    device.place = place
    with suppress(DeviceError):
        sequence = lab.cache.add_sequence(lab.prompt([1, 2, 3, 9, 9]), stream=lab.a)
        device.place = None
        lab.cache.release(sequence)
    for prompt in prompts:
        lab.release(lab.add(prompt, stream=lab.b))  # compares what it reuses
    assert lab.cache.stats().lost_blocks or guard
    return lab.findings()


@pytest.mark.parametrize("place", range(4))
def test_a_failure_at_each_move_of_a_batch_hands_out_nothing_that_never_came(place: int) -> None:
    for seed, progress in SOME:
        failures = a_failure_at_a_move(place, seed, progress, None)
        assert not failures, f"seed {seed}, progress {progress}: {failures}"


def test_content_that_never_came_is_handed_out_without_the_guard() -> None:
    for seed, progress in SOME:
        failures = [a_failure_at_a_move(place, seed, progress, "lost_content_is_forgotten") for place in range(4)]
        assert any(failures), f"seed {seed}, progress {progress}"


def a_failure_that_is_reported_after_a_reset(guard: str | None) -> bool:
    """Whether a sequence that was admitted after the reset survives a report that names its block."""
    lab, device = failing_lab(3, 2, guard=guard)
    cached(lab, X)
    lab.release(lab.add(Y), store=False)
    transfer, after = lab.cache.core.transfer, []
    end, drain = transfer._end, transfer.drain

    def meanwhile(batch: Any) -> None:
        """What another thread decides while this one is inside the device is handed over afterwards."""
        transfer._end = end  # type: ignore[method-assign]
        (lost,) = transfer._lost
        transfer.drain = lambda: None  # type: ignore[method-assign]
        lab.cache.clear()
        after.append(lab.cache.add_sequence(lab.prompt(Z), stream=lab.b))
        transfer.drain = drain  # type: ignore[method-assign]
        assert lost in lab.cache.block_table(after[0]).dense()[0]
        end(batch)

    device.place, transfer._end = 0, meanwhile  # type: ignore[method-assign]
    lab.cache.content.prefetch(X)
    device.place = None
    try:
        lab.cache.append_tokens(after[0], [1], stream=lab.b)
        return True
    except DeviceError:
        return False
    finally:
        lab.cache.release(after[0])
        assert not lab.findings()


def test_a_failure_that_is_reported_after_a_reset_harms_nobody() -> None:
    assert a_failure_that_is_reported_after_a_reset(None)


def test_a_failure_that_is_reported_after_a_reset_harms_without_its_guard() -> None:
    assert not a_failure_that_is_reported_after_a_reset("ticket_at_loss")

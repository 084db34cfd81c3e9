"""What the sim device runs, and when: streams, events, pieces of copies, early progress, gates, waits without end,
every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.sim import Deadlock, ListedChoices, RaceError, ScheduleFailed, SeededChoices, SimDevice, explore
from tests.device import reference
from tests.device.pools import as_moves, host_writes, make_pools, sims

# Four segments of 64 bytes: with chunks of 64, a move has four pieces.
LAYOUT = BlockLayout(2, 1, 16, 4, dtype="uint8")
Open = Callable[..., tuple[SimDevice, MemoryPools]]


@pytest.fixture
def sim() -> Iterator[Open]:
    yield from sims(LAYOUT, progress=0.0, chunk_bytes=64)


def block(pools: MemoryPools, number: int) -> np.ndarray:
    return reference.block_view(LAYOUT, pools.device_pool, pools.host_pool, number)


def orders(device: SimDevice, streams: list[object], ordered: bool) -> list[int]:
    """In which order functions ran that were launched on these streams, one after the other, with or without events
    between."""
    ran: list[int] = []
    for i, stream in enumerate(streams):
        device.launch(stream, lambda i=i: ran.append(i))
        if ordered and i + 1 < len(streams):
            device.wait(device.as_stream(streams[i + 1]), device.record(device.as_stream(stream)))
    device.synchronize()
    return ran


def test_work_of_one_stream_runs_in_order_of_several_streams_in_any() -> None:
    observed = {tuple(orders(SimDevice(seed), [7, 7, 7], ordered=False)) for seed in range(60)}
    several = {tuple(orders(SimDevice(seed, progress=0), [7, 8, None], ordered=False)) for seed in range(60)}
    assert observed == {(0, 1, 2)}
    assert len(several) == 6


def test_events_order_streams() -> None:
    assert {tuple(orders(SimDevice(seed), [7, 8, None, 7, 9], ordered=True)) for seed in range(60)} == {(0, 1, 2, 3, 4)}


def test_a_wait_takes_the_point_that_was_recorded_and_nothing_after_it(sim: Open) -> None:
    device, _ = sim()
    ran: list[str] = []
    first, second = device.create_stream("first"), device.create_stream("second")
    device.launch(first, lambda: ran.append("before"))
    device.wait(second, device.record(first))
    gate = device.stall(first)
    device.launch(first, lambda: ran.append("after"))
    device.launch(second, lambda: ran.append("waited"))
    device.run()
    assert ran == ["before", "waited"]
    gate.open()


def test_nothing_runs_before_it_is_forced_without_progress_and_everything_at_once_with_all(sim: Open) -> None:
    ran: list[int] = []
    lazy, pools = sim(progress=0)
    lazy.launch(None, lambda: ran.append(0))
    lazy.copy_blocks(as_moves((0, 8, 4)))
    assert not ran and not np.array_equal(block(pools, 8), block(pools, 0))
    assert not lazy.query(lazy.record(NULL_STREAM))
    eager, pools = sim(progress=1)
    eager.launch(None, lambda: ran.append(1))
    eager.copy_blocks(as_moves((0, 8, 4)))
    np.testing.assert_array_equal(block(pools, 8), block(pools, 0))
    assert eager.query(eager.record(NULL_STREAM))
    assert ran == [1]


def test_an_event_on_an_idle_stream_is_not_complete_at_once(sim: Open) -> None:
    device, _ = sim()
    event = device.record(device.create_stream("idle"))
    assert not device.query(event)
    device.run(1)
    assert device.query(event)


def test_run_takes_that_many_steps(sim: Open) -> None:
    device, _ = sim()
    ran: list[int] = []
    for i in range(5):
        device.launch(i, lambda i=i: ran.append(i))
    device.run(0)
    assert len(ran) == 0
    device.run(3)
    assert len(ran) == 3
    device.run()
    assert sorted(ran) == [0, 1, 2, 3, 4]


def test_other_streams_see_copies_half_done_in_every_order_of_their_pieces() -> None:
    def torn(seed: int) -> tuple[bool, ...]:
        device = SimDevice(seed, progress=0, chunk_bytes=64)
        pools = make_pools(device, LAYOUT)
        old, new = block(pools, 8).copy(), block(pools, 0).copy()
        device.copy_blocks(as_moves((0, 8, 4)))
        device.run(2)
        content = block(pools, 8)
        pieces = [(layer, plane) for layer in range(2) for plane in range(2)]
        assert all(np.array_equal(content[p], new[p]) or np.array_equal(content[p], old[p]) for p in pieces)
        copied = tuple(np.array_equal(content[p], new[p]) for p in pieces)
        device.synchronize()
        np.testing.assert_array_equal(block(pools, 8), new)
        device.close()
        return copied

    seen = {torn(seed) for seed in range(60)}
    assert len(seen) == 6 and {sum(copied) for copied in seen} == {2}


def test_moves_of_one_call_are_made_in_any_order(sim: Open) -> None:
    def first_made(seed: int) -> int:
        device, pools = sim(seed=seed, chunk_bytes=1 << 20)
        device.copy_blocks(as_moves((0, 6, 4), (1, 7, 4), (2, 8, 4)))
        device.run(1)
        made = [np.array_equal(block(pools, target), block(pools, target - 6)) for target in (6, 7, 8)]
        assert sum(made) == 1
        return made.index(True)

    assert {first_made(seed) for seed in range(30)} == {0, 1, 2}


def test_the_moves_of_a_long_call_are_mixed() -> None:
    def made_first(seed: int) -> set[int]:
        device = SimDevice(seed, progress=0, chunk_bytes=1 << 20)
        pools = MemoryPools(device, LAYOUT, 20, 20)
        with device.host_access(writes=[(number, 0, 4) for number in range(20)]):
            pools.flat("device")[:] = 1
        device.copy_blocks(as_moves(*((number, 20 + number, 4) for number in range(20))))
        device.run(1)
        made = set(np.flatnonzero(pools.host_pool.reshape(20, -1).any(axis=1)).tolist())
        device.synchronize()
        assert pools.flat("host").all()
        device.close()
        return made

    several = [made for made in map(made_first, range(30)) if len(made) > 1]
    assert any(2 in made and 3 not in made for made in several)


def test_equal_seeds_give_equal_schedules_and_others_do_not(sim: Open) -> None:
    def trace(seed: int) -> tuple[object, ...]:
        device, pools = sim(seed=seed, progress=0.5)
        ran: list[object] = []
        for i in range(6):
            device.launch(i % 3, lambda i=i: ran.append((i, pools.flat("host").tobytes())))
            device.copy_blocks(as_moves((i % 3, 6 + i % 3, 4)), device.as_stream(i % 3))
            ran.append(device.query(device.record(device.as_stream(i % 3))))
        device.synchronize()
        return tuple(ran)

    traces = [trace(seed) for seed in range(10)]
    assert [trace(seed) for seed in range(10)] == traces
    assert len(set(traces)) > 5


def test_a_loop_over_query_ends_without_progress(sim: Open) -> None:
    device, _ = sim()
    first, second = device.create_stream("first"), device.create_stream("second")
    ran: list[int] = []
    device.copy_blocks(as_moves((0, 6, 4), (1, 7, 3)), first)
    device.launch(None, lambda: ran.append(0))
    device.wait(second, device.record(first))
    event = device.record(second)
    for _ in range(500):
        if device.query(event):
            break
    assert device.query(event)
    assert not ran, "a query forces only what its event needs"


def test_a_query_may_take_steps_early(sim: Open) -> None:
    def after_a_query(seed: int) -> tuple[bool, bool]:
        device, _ = sim(seed=seed, progress=0.5)
        ran: list[int] = []
        device.launch(1, lambda: ran.append(0))
        event = device.record(device.as_stream(2))
        before = bool(ran)
        device.query(event)
        return before, bool(ran)

    assert {after_a_query(seed) for seed in range(40)} == {(False, False), (False, True), (True, True)}


def test_a_closed_gate_holds_back_its_stream_alone(sim: Open) -> None:
    device, _ = sim()
    ran: list[str] = []
    device.launch(1, lambda: ran.append("before"))
    gate = device.stall(1)
    device.launch(1, lambda: ran.append("after"))
    device.launch(2, lambda: ran.append("elsewhere"))
    device.run()
    assert sorted(ran) == ["before", "elsewhere"]
    gate.open()
    gate.open()
    device.synchronize()
    assert ran[-1] == "after"


def test_waits_that_can_never_end_are_reported_with_the_calls_that_are_stuck(
    sim: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, _ = sim()
    slow, waiting = device.create_stream("slow"), device.create_stream("waiting")
    gate = device.stall(slow)
    device.copy_blocks(as_moves((0, 8, 4)), slow)
    event = device.record(slow)
    device.wait(waiting, event)
    device.launch(waiting, lambda: None)
    for wait in (lambda: device.synchronize(event), device.synchronize):
        with pytest.raises(Deadlock, match="can never end") as caught:
            wait()
        for part in ("stream 'slow' is at a closed gate", "stream 'waiting' is at wait", "test_sim_schedule.py:"):
            assert part in str(caught.value)
    monkeypatch.setattr("kvpool.device.sim.sim_device._VAIN_QUERIES", 50)
    with pytest.raises(Deadlock, match=r"loop over query.*"):
        for _ in range(100):
            assert not device.query(event)
    gate.open()
    device.synchronize(event)


# Every schedule


def test_a_list_of_other_calls_is_refused() -> None:
    with pytest.raises(ValueError, match=r"listed\[0\]: .*5"):
        ListedChoices([5]).choose(2)


def test_permutations_are_all_permutations() -> None:
    seen, listed = set(), []
    while listed is not None:
        choices = ListedChoices(listed)
        seen.add(tuple(choices.permutation(3)))
        listed = choices.following()
    assert len(seen) == 6
    assert sorted(SeededChoices(1, 0.5).permutation(5)) == list(range(5))


def launches(*streams: int) -> Callable[[SimDevice], None]:
    def body(device: SimDevice) -> None:
        for stream in streams:
            device.launch(stream, lambda: None)

    return body


@pytest.mark.parametrize(
    ("body", "schedules"),
    [
        (launches(), 1),
        (launches(1), 2),  # at the call, or at the end
        (launches(1, 1), 5),  # steps early after the calls: 00 01 02 10 11
        # 1 early: 2 early or not; else none, in two orders, or 1 then 2 or not, or 2 then 1 or not
        (launches(1, 2), 8),
    ],
)
def test_every_schedule_is_tried_once(body: Callable[[SimDevice], None], schedules: int) -> None:
    assert explore(body) == schedules


def test_every_order_of_streams_is_tried_and_none_that_events_forbid() -> None:
    def orders_seen(ordered: bool) -> set[tuple[int, ...]]:
        seen = set()
        explore(lambda device: seen.add(tuple(orders(device, [1, 2, 3], ordered))))
        return seen

    assert len(orders_seen(ordered=False)) == 6
    assert orders_seen(ordered=True) == {(0, 1, 2)}


def test_the_single_bad_interleaving_is_found_and_can_be_run_again() -> None:
    """A function that must not run between two others of another stream, which only one of all schedules with pieces
    shows."""

    def body(device: SimDevice) -> None:
        ran: list[str] = []
        for name in ("a", "b", "c"):
            device.launch(1, lambda name=name: ran.append(name))
        device.launch(2, lambda: ran.append("between"))
        device.synchronize()
        assert ran != ["a", "between", "b", "c"], "torn"

    with pytest.raises(ScheduleFailed, match="AssertionError: torn") as caught:
        explore(body)
    assert f"ListedChoices({caught.value.choices})" in str(caught.value)
    with pytest.raises(AssertionError, match="torn"):
        body(SimDevice(choices=ListedChoices(caught.value.choices)))
    body(SimDevice(choices=ListedChoices()))


def test_failures_of_the_device_fail_their_schedule() -> None:
    def body(device: SimDevice) -> None:
        pools = MemoryPools(device, LAYOUT, 2, 1)
        device.copy_blocks(as_moves((0, 2, 4)), device.as_stream(1))
        device.copy_blocks(as_moves((2, 1, 4)), device.as_stream(2))
        device.synchronize()
        pools.close()

    with pytest.raises(ScheduleFailed, match="schedule 1 failed with RaceError") as caught:
        explore(body)
    assert isinstance(caught.value.__cause__, RaceError)


def test_torn_copies_are_among_the_schedules() -> None:
    seen = set()

    def body(device: SimDevice) -> None:
        pools = MemoryPools(device, LAYOUT, 2, 1)
        with host_writes(pools):
            block(pools, 0)[:] = 1
        device.copy_blocks(as_moves((0, 2, 4)))
        device.launch(1, lambda: seen.add(int(block(pools, 2).sum())))
        device.synchronize()
        pools.close()

    explore(body, chunk_bytes=128)
    assert seen == {0, 128, 256}


def test_devices_are_closed_after_their_schedule() -> None:
    devices: list[SimDevice] = []
    explore(devices.append)
    explore(lambda device: (devices.append(device), device.close()))
    assert [device.closed for device in devices] == [True, True]


def test_more_schedules_than_the_limit_are_an_error() -> None:
    assert explore(launches(1, 2), limit=8) == 8
    with pytest.raises(ValueError, match="limit: .*7"):
        explore(launches(1, 2), limit=7)

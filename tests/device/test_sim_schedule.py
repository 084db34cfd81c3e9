"""What the sim device runs, and when: streams, events, pieces of copies, early progress, gates, waits without end,
every schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import NULL_STREAM
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.sim import Deadlock, ListedChoices, ScheduleFailed, SeededChoices, SimDevice, explore
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


def orders(device: SimDevice, streams: list[object], ordered: bool) -> tuple[int, ...]:
    """In which order functions ran that were launched on these streams, one after the other, with or without events
    between."""
    ran: list[int] = []
    for i, stream in enumerate(streams):
        device.launch(stream, lambda i=i: ran.append(i))
        if ordered and i + 1 < len(streams):
            device.wait(device.as_stream(streams[i + 1]), device.record(device.as_stream(stream)))
    device.synchronize()
    return tuple(ran)


@pytest.mark.parametrize(
    ("streams", "ordered", "count"), [([7, 7, 7], False, 1), ([7, 8, None], False, 6), ([7, 8, None, 7, 9], True, 1)]
)
def test_work_of_one_stream_or_behind_events_runs_in_order_and_of_several_streams_in_any(
    streams: list[object], ordered: bool, count: int
) -> None:
    drawn = {orders(SimDevice(seed, progress=0.5 * ordered), streams, ordered) for seed in range(60)}
    assert len(drawn) == count and tuple(range(len(streams))) in drawn
    if len(streams) == 3:
        explored = set()
        explore(lambda device: explored.add(orders(device, streams, ordered)))
        assert explored == drawn


def test_a_wait_takes_the_point_that_was_recorded_and_a_gate_holds_back_its_stream_alone(sim: Open) -> None:
    device, _ = sim()
    ran: list[str] = []
    first, second = device.create_stream("first"), device.create_stream("second")
    device.launch(first, lambda: ran.append("before"))
    device.wait(second, device.record(first))
    gate = device.stall(first)
    device.launch(first, lambda: ran.append("after"))
    device.launch(second, lambda: ran.append("waited"))
    device.run(0)
    assert not ran
    device.run(1)
    assert ran == ["before"]
    device.run()
    assert ran == ["before", "waited"]
    gate.open()
    gate.open()
    device.synchronize()
    assert ran == ["before", "waited", "after"]


@pytest.mark.parametrize("progress", [0, 1])
def test_nothing_runs_before_it_is_forced_without_progress_and_everything_at_once_with_all(
    sim: Open, progress: int
) -> None:
    ran: list[int] = []
    device, pools = sim(progress=progress)
    device.launch(None, lambda: ran.append(0))
    device.copy_blocks(as_moves((0, 8, 4)))
    assert len(ran) == np.array_equal(block(pools, 8), block(pools, 0)) == progress
    assert (
        device.query(device.record(NULL_STREAM)) == device.query(device.record(device.as_stream(9))) == bool(progress)
    )


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


@pytest.mark.parametrize("blocks", [3, 20])
def test_moves_of_one_call_are_made_in_any_order_and_those_of_a_long_call_are_mixed(blocks: int) -> None:
    def made_first(seed: int) -> set[int]:
        device = SimDevice(seed, progress=0, chunk_bytes=1 << 20)
        pools = MemoryPools(device, LAYOUT, blocks, blocks)
        with device.host_access(writes=[(number, 0, 4) for number in range(blocks)]):
            pools.flat("device")[:] = 1
        device.copy_blocks(as_moves(*((number, blocks + number, 4) for number in range(blocks))))
        device.run(1)
        made = set(np.flatnonzero(pools.host_pool.reshape(blocks, -1).any(axis=1)).tolist())
        device.synchronize()
        assert pools.flat("host").all()
        device.close()
        return made

    first = [made_first(seed) for seed in range(30)]
    if blocks == 3:
        assert {*map(frozenset, first)} == {frozenset([number]) for number in range(3)}
    else:
        assert any(len(made) > 1 and 2 in made and 3 not in made for made in first)


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
    assert any(device.query(event) for _ in range(500))
    assert not ran, "a query forces only what its event needs"


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


def test_permutations_are_all_permutations() -> None:
    permutations, listed = set(), []
    while listed is not None:
        choices = ListedChoices(listed)
        permutations.add(tuple(choices.permutation(3)))
        listed = choices.following()
    assert len(permutations) == 6
    assert sorted(SeededChoices(1, 0.5).permutation(5)) == list(range(5))
    with pytest.raises(ValueError, match=r"listed\[0\]: .*5"):
        ListedChoices([5]).choose(2)


def launches(*streams: int) -> Callable[[SimDevice], None]:
    def body(device: SimDevice) -> None:
        for stream in streams:
            device.launch(stream, lambda: None)

    return body


@pytest.mark.parametrize(
    ("body", "schedules"),
    [
        (launches(1), 2),  # at the call, or at the end
        (launches(1, 1), 5),  # steps early after the calls: 00 01 02 10 11
        # 1 early: 2 early or not; else none, in two orders, or 1 then 2 or not, or 2 then 1 or not
        (launches(1, 2), 8),
    ],
)
def test_every_schedule_is_tried_once(body: Callable[[SimDevice], None], schedules: int) -> None:
    assert explore(body, limit=schedules) == schedules
    with pytest.raises(ValueError, match=f"limit: .*{schedules - 1}"):
        explore(body, limit=schedules - 1)


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

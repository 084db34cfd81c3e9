"""Which accesses the sim device reports as unordered: all that no event orders, however lucky the run, and no
others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.base import Device, WrappedDevice
from kvpool.device.sim import RaceError, SimDevice
from kvpool.device.sim.order import Access, AccessOrder, new_clock
from tests.device.pools import as_moves, make_pools
from tests.waiting import at_once

LAYOUT = BlockLayout(2, 1, 16, 4, dtype="uint8")
T = LAYOUT.tokens_per_block
# However lucky the run: everything done at once, in the order of the calls, or as late as can be.
PROGRESS = [0.0, 0.5, 1.0]


@pytest.fixture(params=PROGRESS, ids=lambda progress: f"progress {progress}")
def sim(request: pytest.FixtureRequest) -> Iterator[SimDevice]:
    """A device with a pool of 6 + 5 blocks; races that a test has not taken fail it at the end."""
    device = SimDevice(1, progress=request.param)
    make_pools(device, LAYOUT)
    yield device
    device.synchronize()
    device.close()


def copy(device: Device, source: int, target: int, stream: Any = None, tokens: int = T) -> None:
    device.copy_blocks(as_moves((source, target, tokens)), device.as_stream(stream))


def nothing() -> None:
    pass


def touch(device: SimDevice, **rows: Any) -> None:
    """The host reads or writes, and is done."""
    with device.host_access(**rows):
        pass


def races(device: SimDevice) -> list[tuple[str, str, tuple[tuple[int, int, int], ...]]]:
    """What was found since the last call, all of it reported in one error."""
    before = list(device.races)
    try:
        device.check()
    except RaceError as error:
        assert error.races == before[-len(error.races) :]
        device.check()
        return [(race.first.kind, race.second.kind, race.rows) for race in error.races]
    return []


ACCESSES: dict[str, tuple[Callable[[SimDevice, int], None], str]] = {
    "read": (lambda device, stream: device.launch(stream, nothing, reads=[(8, 0, T)]), "r"),
    "write": (lambda device, stream: device.launch(stream, nothing, writes=[(8, 0, T)]), "w"),
    "copy from": (lambda device, stream: copy(device, 8, 1, stream), "r"),
    "copy to": (lambda device, stream: copy(device, 0, 8, stream), "w"),
}


@pytest.mark.parametrize("second", ACCESSES)
@pytest.mark.parametrize("first", ACCESSES)
def test_two_streams_race_where_one_writes_unless_an_event_orders_them(sim: SimDevice, first: str, second: str) -> None:
    (begin, access), (go_on, other) = ACCESSES[first], ACCESSES[second]
    both_copy_to_1 = first == second == "copy from"
    begin(sim, 1)
    go_on(sim, 2)
    assert len(races(sim)) == ("w" in access + other or both_copy_to_1)
    sim.synchronize()
    begin(sim, 1)
    sim.wait(sim.as_stream(2), sim.record(sim.as_stream(1)))
    go_on(sim, 2)
    go_on(sim, 2)
    assert not races(sim)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_partial_copies_touch_their_first_tokens_only(sim: SimDevice, tokens: int) -> None:
    copy(sim, 0, 8, stream=1, tokens=tokens)
    sim.launch(2, nothing, writes=[(8, tokens, T), (0, tokens, T)])
    assert not races(sim)
    sim.launch(3, nothing, reads=[(8, 0, T)])
    assert races(sim) == [
        ("copy_blocks", "launch", ((8, 0, tokens),)),
        ("launch", "launch", ((8, tokens, T),)),
    ]


def test_a_race_is_found_although_other_accesses_came_between(sim: SimDevice) -> None:
    sim.launch(1, nothing, reads=[(8, 0, T)])
    sim.launch(2, nothing, reads=[(8, 0, T)])
    event = sim.record(sim.as_stream(2))
    sim.launch(3, nothing, reads=[(8, 0, T)])
    sim.wait(sim.as_stream(3), event)
    sim.launch(3, nothing, writes=[(8, 0, T)])
    assert races(sim) == [("launch", "launch", ((8, 0, T),))]
    assert sim.races[0].first.where == "stream 0x1" and sim.races[0].does == ("a read", "a write")


def test_order_passes_on_from_event_to_event_and_not_to_what_was_enqueued_after(sim: SimDevice) -> None:
    early = sim.record(sim.as_stream(1))
    copy(sim, 0, 8, stream=1)
    sim.wait(sim.as_stream(2), sim.record(sim.as_stream(1)))
    sim.wait(sim.as_stream(3), sim.record(sim.as_stream(2)))
    copy(sim, 8, 1, stream=3)
    assert not races(sim)
    sim.wait(sim.as_stream(4), early)
    sim.launch(4, nothing, reads=[(8, 0, T)])
    assert races(sim) == [("copy_blocks", "launch", ((8, 0, T),))]


def test_what_the_host_waited_for_comes_before_all_that_is_enqueued_after(sim: SimDevice) -> None:
    copy(sim, 0, 8, stream=1)
    sim.synchronize(sim.record(sim.as_stream(1)))
    copy(sim, 8, 1, stream=2)
    event = sim.record(sim.as_stream(2))
    while not sim.query(event):
        pass
    copy(sim, 2, 1, stream=3)
    assert not races(sim)


def test_a_gate_orders_nothing(sim: SimDevice) -> None:
    gate = sim.stall(1)
    sim.launch(1, nothing, writes=[(8, 0, T)])
    sim.launch(2, nothing, writes=[(8, 0, T)])
    gate.open()
    assert len(races(sim)) == 1


@pytest.mark.parametrize(
    ("rows", "blocks"),
    [
        (((0, 7, T), (7, 1, T)), [7]),
        (((0, 7, 2), (1, 7, 1)), [7]),
        (((0, 1, T), (1, 0, T)), [0, 1]),
        (((0, 7, T), (0, 8, T)), []),
    ],
)
def test_rows_of_one_call_that_depend_on_each_other_are_a_race(sim: SimDevice, rows: Any, blocks: list[int]) -> None:
    sim.copy_blocks(as_moves(*rows))
    assert [[block for block, _, _ in rows] for _, _, rows in races(sim)] == ([blocks] if blocks else [])


def test_both_calls_are_named_with_their_lines_and_the_library_lines_between(sim: SimDevice) -> None:
    wrapped = WrappedDevice(sim)
    copy(wrapped, 0, 8, sim.create_stream("offload"))
    sim.launch(None, nothing, reads=[(8, 1, 3)])
    with pytest.raises(RaceError) as caught:
        sim.check()
    text = str(caught.value)
    here = Path(__file__).read_text().splitlines()
    launched = next(i for i, line in enumerate(here, 1) if "reads=[(8, 1, 3)]" in line)
    copied = next(i for i, line in enumerate(here, 1) if "device.copy_blocks(as_moves((source" in line)
    assert f"{__file__}:{launched} test_both_calls" in text and f"{__file__}:{copied} copy" in text
    assert "base.py:" in text and "kvpool/device/sim" not in text
    assert "block 8 tokens 1..2" in text and "stream 'offload'" in text and "the null stream" in text
    assert "SimDevice(seed=1, progress=" in text


def test_many_races_are_all_kept_and_some_are_shown(sim: SimDevice) -> None:
    for stream in range(1, 10):
        sim.launch(stream, nothing, writes=[(8, 0, T)])
    assert len(sim.races) == 8
    with pytest.raises(RaceError, match="3 more races") as caught:
        sim.check()
    assert len(caught.value.races) == 8


@pytest.mark.parametrize("verb", ["synchronize", "close"])
def test_races_are_reported_by_synchronize_and_close_once_each(verb: str) -> None:
    device = SimDevice()
    make_pools(device, LAYOUT)
    for stream in (1, 2):
        copy(device, 0, 8, stream)
    for stream in (1, 2):
        device.synchronize(device.record(device.as_stream(stream)))
    with pytest.raises(RaceError):
        getattr(device, verb)()
    device.close()


# The host


@pytest.mark.parametrize("thread", ["this thread", "another thread"])
@pytest.mark.parametrize("wait", ["nothing", "synchronize", "event", "query", "other event"])
def test_the_host_may_touch_what_it_has_waited_for(sim: SimDevice, wait: str, thread: str) -> None:
    """The wait of another thread for one event does not count, since this one may not know of it."""
    earlier = sim.record(sim.as_stream(1))
    copy(sim, 0, 8, stream=1)
    event = sim.record(sim.as_stream(1))
    waits: dict[str, Callable[[], object]] = {
        "nothing": nothing,
        "synchronize": sim.synchronize,
        "event": lambda: sim.synchronize(event),
        "query": lambda: [None for _ in iter(lambda: sim.query(event), True)],
        "other event": lambda: sim.synchronize(earlier),
    }
    if thread == "this thread":
        waits[wait]()
    else:
        at_once(lambda call: call(), [waits[wait]])
    touch(sim, reads=[(0, 0, T), (1, 0, T)], writes=[(9, 0, T)])
    assert not races(sim)
    touch(sim, reads=[(8, 3, T)])
    waited = ("synchronize", "query", *(["event"] if thread == "this thread" else []))
    assert races(sim) == ([] if wait in waited else [("copy_blocks", "host_access", ((8, 3, T),))])
    copy(sim, 8, 1, stream=2)
    assert len(races(sim)) == (wait in ("nothing", "other event"))
    touch(sim, writes=[(8, 0, 1)])
    assert ("copy_blocks", "host_access", ((8, 0, 1),)) in races(sim), "which is still read"


def test_what_is_enqueued_during_an_access_races_with_it_and_after_it_does_not(sim: SimDevice) -> None:
    with sim.host_access(reads=[(8, 0, T)]):
        copy(sim, 8, 1)
        assert not races(sim)
        copy(sim, 2, 8)
        assert races(sim) == [("host_access", "copy_blocks", ((8, 0, T),))]
    copy(sim, 3, 8)
    with sim.host_access(writes=[(9, 0, 2)]):
        sim.launch(None, nothing, reads=[(9, 1, 3)])
    assert races(sim) == [("host_access", "launch", ((9, 1, 2),))]


def test_open_accesses_of_two_threads_race_and_those_of_one_do_not(sim: SimDevice) -> None:
    def touch_elsewhere(**rows: Any) -> None:
        at_once(lambda rows: touch(sim, **rows), [rows])

    with sim.host_access(writes=[(8, 0, T)]), sim.host_access(reads=[(8, 0, T)]):
        assert not races(sim)
        touch_elsewhere(reads=[(8, 1, 2)])
        assert races(sim) == [("host_access", "host_access", ((8, 1, 2),))]
    touch_elsewhere(writes=[(8, 0, T)])
    with sim.host_access(reads=[(8, 0, T)]):
        touch_elsewhere(reads=[(8, 0, T)])
    assert not races(sim)


# Giving memory back


@pytest.mark.parametrize("progress", PROGRESS)
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("end", ["free", "close"])
def test_memory_is_given_back_only_after_waiting(progress: float, wait: bool, end: str) -> None:
    device = SimDevice(progress=progress)
    pools = make_pools(device, LAYOUT)
    copy(device, 0, 8, stream=1)
    if wait:
        device.synchronize()
    if end == "free":
        pools.close()
    assert len(device.races) == (end == "free" and not wait)
    if wait:
        device.close()
    else:
        with pytest.raises(RaceError, match=end):
            device.close()


# The order itself


def test_an_order_forgets_accesses_that_no_token_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpool.device.sim.order._KEPT", 10)
    order = AccessOrder(np.full(4, T), np.ones(4, np.int64))
    none, rows = np.empty((0, 3), np.int64), np.array([[2, 0, T]])
    clock = new_clock(2)
    for number in range(1, 1000):
        key = (number << 16) | 1
        assert not order.enqueue(Access(f"call {number}", "a stream", ()), key, clock, none, rows)
        clock[1] = key
    assert len(order._accesses) < 50
    (race,) = order.enqueue(Access("late", "another stream", ()), (1000 << 16) | 2, new_clock(), rows, none)
    assert race.first.kind == "call 999"

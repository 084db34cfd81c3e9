"""The order of accesses: many streams, every schedule of a small case, and devices that cannot be ordered."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from engine import small_layout
from kvpool import KVCacheManager, LayerGroup, PoolClosed
from kvpool.device.base import Device, DeviceEvent, Stream, WrappedDevice
from kvpool.device.sim import SimDevice, explore
from kvpool.errors import DeviceError, LeaseExpired
from kvpool.pool.transfer.waits import STREAMS_KEPT, Order
from tests.race.lab import RUNS, Lab, Runs


class Refusing(WrappedDevice):
    """Once armed, fails at one kind of call from its ``after``-th on."""

    def __init__(self, inner: Device) -> None:
        super().__init__(inner)
        self.refuses, self.after = "", 0

    def _may(self, call: str) -> None:
        if self.refuses == call:
            self.after -= 1
            if self.after < 0:
                raise DeviceError(f"{call} refused")

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        self._may("create_stream")
        return super().create_stream(name)

    def record(self, stream: Stream) -> DeviceEvent:
        self._may("record")
        return super().record(stream)

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        self._may("wait")
        super().wait(stream, event)

    def query(self, event: DeviceEvent) -> bool:
        self._may("query")
        return super().query(event)

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        if event is not None:
            self._may("synchronize")
        super().synchronize(event)


def refusing_lab(P: int, S: int, **options: Any) -> tuple[Lab, Refusing]:
    lab = Lab(P, S, wrap=Refusing, **options)
    assert isinstance(lab.cache.core.device, Refusing)
    return lab, lab.cache.core.device


@pytest.mark.parametrize("after", range(3))
def test_a_pool_whose_streams_cannot_be_created_leaves_no_memory_taken(after: int) -> None:
    sim = SimDevice()
    device = Refusing(sim)
    layouts = [small_layout(4), small_layout(4, kv_heads=3)]
    options: dict[str, Any] = {
        "groups": [LayerGroup(layouts)],
        "device_blocks": [3],
        "host_blocks": [2],
        "device": device,
    }
    device.refuses, device.after = "create_stream", after
    with pytest.raises(DeviceError, match="create_stream refused"):
        KVCacheManager(**options)
    assert not sim._allocated
    device.refuses = ""
    KVCacheManager(**options).close()
    sim.close()


@pytest.mark.parametrize("after", range(3))
@pytest.mark.parametrize("call", ["record", "wait", "query"])
def test_a_device_that_cannot_order_closes_the_pool_for_all_but_stats_and_close(call: str, after: int) -> None:
    lab, device = refusing_lab(3, 2)
    lab.seed([1, 2, 3], committed=2)
    device.refuses, device.after = call, after
    for number in range(10, 20):
        with suppress(PoolClosed, DeviceError):
            sequence = lab.cache.add_sequence([number, number, number, number, number], stream=lab.b)
            lab.cache.commit(sequence)
            lab.cache.release(sequence)
    with pytest.raises(PoolClosed, match=f"{call} refused"):
        lab.cache.add_sequence([1, 2, 3])
    lab.cache.stats()
    device.refuses = ""
    lab.cache.close()
    assert lab.cache.core.transfer._queue.__len__() == 0, "nothing is left behind"


def test_a_reader_that_cannot_wait_gets_no_lease() -> None:
    lab, device = refusing_lab(3, 2)
    lab.seed([1, 2, 3], committed=2)
    lab.cache.content.offload([1, 2, 3])
    device.refuses = "synchronize"
    with pytest.raises(DeviceError, match="synchronize refused"):
        lab.cache.pin(lab.keys([1, 2, 3]), owner="reader")
    assert lab.cache.leases == [] and lab.cache.stats().host.pinned == 0
    with pytest.raises(PoolClosed):
        lab.cache.add_sequence([1])
    device.refuses = ""
    lab.cache.close()


def test_an_import_that_cannot_wait_stores_nothing() -> None:
    lab, device = refusing_lab(3, 1)
    lab.seed([1, 2, 3], committed=2)
    lab.cache.content.offload([1, 2, 3])
    lab.cache.release(lab.cache.add_sequence([5, 5, 5, 5, 5]), store=False)  # the host copy is the only one
    device.refuses = "synchronize"
    keys = lab.prompt([8, 8])
    with pytest.raises(DeviceError, match="synchronize refused"):
        lab.cache.imports.import_blocks(keys, [bytes(lab.cache.layout.block_bytes)])
    assert lab.cache.stats().host.pinned == 0
    device.refuses = ""
    lab.cache.close()


def test_any_number_of_streams_is_kept_apart() -> None:
    lab = Lab(4, 4)
    streams = [lab.sim.create_stream(str(i)) for i in range(12)]
    for turn in range(36):
        lab.release(lab.add([turn % 5, 7, turn, 7, 7], stream=streams[turn % 12]))
    assert not lab.findings()


def pass_through(lab: Lab, count: int, first: int = 1000) -> None:
    """Requests on as many streams as are needed for their numbers to be given away, each done before the next."""
    for i in range(count):
        lab.release(lab.add([first + i], stream=lab.sim.create_stream(f"passing {i}")), store=False)
        lab.sim.synchronize()


def test_a_stream_that_a_sequence_is_on_keeps_its_number() -> None:
    """All that it was told to do is done, so that nothing but the sequence names it."""
    lab = Lab(6, 0)
    stream = lab.sim.create_stream("own")
    sequence = lab.commit(lab.add([1, 2, 3], stream=stream))
    lab.sim.synchronize()
    pass_through(lab, 40)
    lab.commit(lab.append(sequence, [4]))  # on the stream that it used last
    assert lab.add([1, 2, 3, 4, 5], stream=lab.b).cached == 4
    assert not lab.findings()


def test_a_stream_that_the_end_of_a_lease_names_keeps_its_number() -> None:
    """The end is enqueued with the next decision."""
    lab = Lab(4, 0)
    lab.seed([1, 2, 3], committed=2, stream=lab.b)
    leases = [lab.cache.pin(lab.keys([1, 2, 3]), stream=lab.b) for _ in range(2)]
    pass_through(lab, STREAMS_KEPT)
    lab.read(leases[0], [1, 2], lab.b)
    leases[0].close()
    leases[1].close(lab.sim.create_stream("new"))  # while the end is not queued
    lab.add([11, 12, 13, 14, 15, 16, 17], stream=lab.a)  # while it is; needs the block that was leased
    assert not lab.findings()


def test_a_stream_that_still_works_keeps_its_number() -> None:
    """Nobody names it any more, but what it was told to do is not done: whoever comes after its kernels waits for
    them."""
    lab = Lab(24, 0)
    for stream in [lab.sim.create_stream(f"slow {i}") for i in range(20)]:
        lab.release(lab.add([1, 2], stream=stream), store=False)  # all in the block that was released last
    assert len(lab.cache.core.transfer.order._streams) == 23  # type: ignore[union-attr]
    assert not lab.findings()


def test_a_point_that_was_recorded_twice_is_complete_with_its_last_event() -> None:
    """An exception of a signal handler came between its event and its number."""
    device = SimDevice(0, progress=0.0)
    order = Order(device, 1)
    for point in (1, 1, 2):
        device.launch(order.stream(0), lambda: None)
        order._stream_points[0] = point - 1
        assert order._record(0) == point
    first, again, second = (event for _, event in order._events[0])
    assert (order._event(0, 1), order._event(0, 2)) == (again, second) != (first, again)
    device.close()


def test_streams_are_known_by_their_handles() -> None:
    class Foreign:
        def __init__(self, stream: Stream) -> None:
            self.cuda_stream = stream.handle

    lab = Lab(4, 4, guard="engine_reads_after_engine")
    lab.seed([1, 2, 3], committed=2, stream=lab.b)
    lab.add([1, 2, 3], stream=Foreign(lab.b))  # the same stream: nothing to wait for
    assert not lab.findings()


def test_the_default_is_the_stream_that_a_sequence_used_last() -> None:
    lab = Lab(4, 4)
    sequence = lab.add([1, 2, 3], stream=lab.b)
    lab.append(sequence, [4, 5])
    lab.finish(sequence)
    assert lab.add([1, 2, 3, 4, 5], stream=lab.a).cached
    assert not lab.findings()


def test_a_closed_lease_says_so_on_every_stream() -> None:
    lab = Lab(4, 4)
    lab.seed([1, 2, 3], committed=2)
    lease = lab.cache.pin(lab.keys([1, 2, 3]), stream=lab.b)
    lease.close(lab.a)
    with pytest.raises(LeaseExpired):
        lease.close(lab.a)
    assert not lab.findings()


# -- every schedule of a small case ------------------------------------------------------------------


def small_case(guard: str | None) -> Callable[[SimDevice], None]:
    """The only block is evicted while its writer may still run, and written anew while its offload may still run."""

    def body(device: SimDevice) -> None:
        cache = KVCacheManager(small_layout(1), device_blocks=1, host_blocks=1, device=device, secret=bytes(32))
        try:
            if guard is not None:
                cache.core.disable_guard(guard)
            engine = device.create_stream("engine")

            def write(value: int) -> None:
                cache.memory.device_pool[...] = value

            def compute(tokens: list[int], value: int) -> None:
                sequence = cache.add_sequence(tokens, stream=engine)
                device.launch(engine, lambda: write(value), writes=[(0, 0, 1)])
                cache.commit(sequence)
                cache.release(sequence)

            compute([1], 7)
            cache.add_sequence([2], stream=engine)
            device.launch(engine, lambda: write(9), writes=[(0, 0, 1)])
            with cache.pin(cache.block_keys([1]), tier="host"):
                assert (cache.memory.host_pool == 7).all()
        finally:
            cache.close()

    return body


@RUNS
def test_a_small_case_is_right_in_some_schedules(runs: Runs) -> None:
    for seed, progress in runs:
        device = SimDevice(seed, progress=progress)
        small_case(None)(device)
        device.close()


@pytest.mark.exhaustive
def test_a_small_case_is_right_in_every_schedule() -> None:
    count = explore(small_case(None), limit=20_000)
    print(f"{count} schedules")
    assert count > 100


@pytest.mark.parametrize("guard", ["copy_reads_after_engine", "engine_writes_after_copies", "reader_waits"])
def test_a_small_case_is_wrong_in_some_schedule_without_a_guard(guard: str) -> None:
    with pytest.raises(AssertionError):
        explore(small_case(guard), limit=20_000)


def test_offloads_and_onboards_may_pass_each_other() -> None:
    """Copies of different blocks in different directions are not ordered by the pool."""
    lab = Lab(6, 6)
    lab.seed([1, 2, 3], committed=2)
    lab.seed([11, 12, 13], committed=2)
    lab.cache.content.offload([1, 2, 3])
    waits: list[Any] = []
    wait = lab.sim.wait

    def noted(stream: Stream, event: DeviceEvent) -> None:
        waits.append(stream)
        wait(stream, event)

    lab.sim.wait = noted  # type: ignore[method-assign]
    lab.cache.content.offload([11, 12, 13])
    assert len(waits) == 1, "for the engine's write, and for no copy"
    assert not lab.findings()

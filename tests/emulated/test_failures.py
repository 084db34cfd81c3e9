"""A call of the driver fails, at each place where a device or a pool makes one: what is said, what goes on, what comes
back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cuda import CudaDevice
from kvpool.errors import DeviceError
from tests.device.pools import DEVICE_BLOCKS, as_moves, assert_same_as_reference, make_pools
from tests.emulated import lab
from tests.emulated.lab import Driver
from tests.emulated.test_races import EmulatedLab

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4)
OFFLOADS = as_moves(*((block, DEVICE_BLOCKS + block, 4) for block in (0, 2, 4)))

# A call of the driver's, by its name in the emulation's sources, and the way of copying that makes it.
CALLS = {
    "copy_on": "plain",
    "batch": "batched",
    "launch": "kernel",
    "record": "plain",
    "cuStreamWaitEvent": "plain",
    "cuEventQuery": "plain",
    "cuEventSynchronize": "plain",
}


@pytest.mark.parametrize(("status", "sticky"), [(1, False), (400, False), (700, True), (719, True), (999, True)])
@pytest.mark.parametrize("call", CALLS)
def test_errors_say_what_failed_and_whether_it_will_go_away(
    driver: Driver, call: str, status: int, sticky: bool
) -> None:
    device = CudaDevice(calibration=CALLS[call])
    pools, stream = make_pools(device, LAYOUT), device.create_stream("copies")
    driver.stall(stream.handle)()  # so that the event is not complete
    event = device.record(stream)
    attempts = {
        "record": lambda: device.record(stream),
        "cuStreamWaitEvent": lambda: device.wait(stream, event),
        "cuEventQuery": lambda: device.query(event),
        "cuEventSynchronize": lambda: device.synchronize(event),
    }
    with driver.failing(call, status), pytest.raises(DeviceError, match=r"\w+: (CUDA_ERROR|cudaError)") as caught:
        attempts.get(call, lambda: device.copy_blocks(OFFLOADS, stream))()
    assert (caught.value.sticky, caught.value.completed) == (sticky, 0)
    assert_same_as_reference(pools, OFFLOADS)
    device.close()


def serve(made: EmulatedLab, table: np.ndarray) -> None:
    """Admissions that offload and onboard, uploads, a prefetch, and a prompt on another stream."""
    for prompt in ([1, 2, 3], [11, 12, 13, 14, 15], [1, 2, 3]):
        sequence = made.add(prompt)
        made.cache.tables.copy_batch_block_offsets(table, sequence.id)
        made.commit(sequence)
        made.release(sequence)
    made.cache.content.prefetch([11, 12, 13, 14, 15])
    made.release(made.add([11, 12, 13, 9], stream=made.b))


def failing_at(driver: Driver, path: str, call: str, place: int, status: int) -> bool:
    """Whether the pool was served until its end, or closed. Whatever is still found has the bytes that it should."""
    made = EmulatedLab(4, 6, path=path)
    table = made.sim.allocate(4 * 8, "device").view(np.int32).reshape(1, 8)
    try:
        with driver.failing(call, status, place, 1):
            serve(made, table)
    except (DeviceError, PoolClosed):
        pass
    alive = made.cache.core.transfer.broken is None
    if alive:
        made.cache.release(made.cache.core.live())
        made.live.clear()
        serve(made, table)
        made.sim.synchronize()
        made.cache.verify()
        assert not made.wrong, made.wrong
    else:
        with pytest.raises(PoolClosed, match="the device has failed"):
            made.add([5])
    made.cache.close()
    made.sim.close()
    return alive


@pytest.fixture
def collected_here() -> Iterator[None]:
    """No garbage is collected inside a host function, where CUDA takes nothing back."""
    gc.disable()
    yield
    gc.enable()


PLACES = ("copy_on", "batch", "launch", "record", "cuStreamWaitEvent", "cuEventCreate", "cuMemHostAlloc")
QUESTIONS = ("cuEventQuery", "cuStreamIsCapturing")


@pytest.mark.usefixtures("collected_here")
@pytest.mark.parametrize(
    ("call", "status"),
    [
        *product(PLACES, (lab.INVALID, lab.OUT_OF_MEMORY, lab.ILLEGAL_ADDRESS)),
        *product(QUESTIONS, (lab.INVALID, lab.ILLEGAL_ADDRESS)),
    ],
)
def test_a_pool_lives_through_a_call_that_fails_at_any_place_or_closes(driver: Driver, call: str, status: int) -> None:
    path, outcomes = CALLS.get(call, "kernel"), list[bool]()
    driver.quiet(1, 0.3)
    with driver.counting(call) as grown:
        failing_at(driver, path, call, 1 << 30, status)
    # Those of the first of two servings; the second one allocates no more memory.
    before, places = driver.in_use(collected=False), max(1, grown[call] // 2)
    assert grown[call]
    for place in range(places):
        outcomes.append(failing_at(driver, path, call, place, status))
    assert driver.in_use(collected=False) == before, "a closed pool gives everything back at once"
    if call in ("copy_on", "batch") and status == lab.INVALID:
        assert all(outcomes), "a refused copy costs its blocks, and no more"


def test_events_in_a_cycle_that_the_collector_finds_are_used_again(driver: Driver) -> None:
    """As the frames of an error hold them; a destroyed one would break the pool at its next use."""
    device = CudaDevice()
    stream = device.create_stream("any")
    for _ in range(3):
        cycle: list[object] = [device.record(stream)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        device.synchronize(device.record(stream))
    device.close()

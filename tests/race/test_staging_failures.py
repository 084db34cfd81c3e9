"""What is found when staging goes wrong: by the sim device, by verify, and by callers of devices that fail."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from engine import small_layout
from kvpool import DeviceError, IntegrityError, KVCacheManager, PoolClosed
from kvpool.device.base import NULL_STREAM, Event, Stream, WrappedDevice
from kvpool.device.sim import RaceError, SimDevice, UndeclaredWrite
from kvpool.device.work import StagedRows, Work
from kvpool.tables.staging import Buffer
from tests.race.lab import Lab


def target(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


# -- what the sim device watches --------------------------------------------------------------------------------


def test_a_write_that_nobody_declared_is_found_in_tables_and_buffers() -> None:
    for which in ("table", "buffer"):
        lab = Lab(8, 0)
        sequence, out = lab.add([1]), target(2, 4)
        lab.cache.copy_batch_block_offsets(out, sequence.id)
        array = out if which == "table" else lab.cache._staging._buffers[0].array
        array[0] += 1
        with pytest.raises(UndeclaredWrite, match="array"):
            lab.sim.check()
        lab.sim.synchronize()
        with lab.sim.host_access(stores=[array]):
            array[0] += 1
        assert not lab.findings()


def test_memory_that_is_freed_before_it_was_read_is_a_race() -> None:
    device = SimDevice(progress=0.0)
    cache = KVCacheManager(small_layout(2), device_blocks=4, host_blocks=0, device=device)
    sequence = cache.add_sequence([1])
    cache.copy_batch_block_offsets(target(1, 2), sequence)
    buffer = cache._staging._buffers[0]
    device.free(buffer.array)
    cache._staging._buffers.clear()
    with pytest.raises(RaceError, match=r"(?s)array.*stage_rows.*free"):
        device.check()
    with pytest.raises(ValueError, match="staged: rows"):
        device.synchronize()  # it read poison
    with pytest.raises(ValueError, match="staged: a buffer"):
        device.enqueue(StagedRows(device.views.table(target(1, 2)), buffer.array, buffer.address, 1, 1, 1, 2))
    cache.release(sequence)
    cache.close()
    device.close()


def test_memory_outside_the_pools_is_named_by_arrays() -> None:
    lab = Lab(4, 0)
    for call in (
        lambda bad: lab.sim.launch(lab.a, lambda: None, loads=bad),
        lambda bad: lab.sim.host_access(stores=bad),
    ):
        with pytest.raises(TypeError, match="loads|stores"):
            call([[1, 2]])
    lab.sim.launch(lab.a, lambda: None, stores=[np.zeros((0, 3))])
    assert not lab.findings()


# -- invariants ---------------------------------------------------------------------------------------------------


def without_event(cache: KVCacheManager) -> None:
    cache._staging._retained.add(0, None, Buffer(np.zeros(1, np.uint8)))


def free_too_early(cache: KVCacheManager) -> None:
    cache._staging._free.append(next(buffer for _, buffer in cache._staging._retained))
    cache._staging._retained.clear()


def listed_twice(cache: KVCacheManager) -> None:
    event, buffer = next(iter(cache._staging._retained))
    cache._staging._retained.add(0, event, buffer)


def stranger(cache: KVCacheManager) -> None:
    cache._staging._buffers.pop()


@pytest.mark.parametrize(
    ("corrupt", "check"),
    [
        (without_event, "staging retained"), (free_too_early, "staging free"), (listed_twice, "staging buffers"),
        (stranger, "staging buffers"),
    ],
)  # fmt: skip
def test_verify_finds_broken_staging(corrupt: Callable[[KVCacheManager], None], check: str) -> None:
    device = SimDevice(progress=0.0)
    cache = KVCacheManager(small_layout(2), device_blocks=4, host_blocks=0, device=device)
    sequence = cache.add_sequence([1])
    for _ in range(2):
        cache.copy_batch_block_offsets(target(1, 2), sequence)
    cache.verify()
    corrupt(cache)
    with pytest.raises(IntegrityError, match=check):
        cache.verify()
    cache.release(sequence)
    cache.close()


# -- devices that fail ----------------------------------------------------------------------------------------------


class Failing(WrappedDevice):
    """Fails at the next call of one kind."""

    refuses = ""

    def _may(self, call: str) -> None:
        if self.refuses == call:
            self.refuses = ""
            raise DeviceError(f"{call} refused")

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self._may("enqueue")
        super().enqueue(work, stream)

    def record(self, stream: Stream) -> Event:
        self._may("record")
        return super().record(stream)

    def query(self, event: Event) -> bool:
        self._may("query")
        return super().query(event)

    def synchronize(self, event: Event | None = None) -> None:
        self._may("synchronize")
        super().synchronize(event)


@pytest.mark.parametrize("call", ["enqueue", "record", "query", "synchronize"])
def test_a_device_that_fails_while_staging_is_reported(call: str) -> None:
    lab = Lab(8, 0, wrap=Failing, staging_depth=1)
    sequence, out = lab.add([1]), target(1, 4)
    lab.cache.copy_batch_block_offsets(out, sequence.id)
    assert isinstance(lab.cache.core.device, Failing)
    lab.cache.core.device.refuses = call
    with pytest.raises(DeviceError, match=f"{call} refused"):
        lab.cache.copy_batch_block_offsets(out, sequence.id)
    lab.cache.core.device.refuses = ""
    if call == "enqueue":
        lab.cache.copy_batch_block_offsets(out, sequence.id)
        assert not lab.findings()
    else:
        with pytest.raises(PoolClosed, match="refused"):
            lab.cache.copy_batch_block_offsets(out, sequence.id)
        lab.cache.close()

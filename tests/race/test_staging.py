"""Uploads of block tables on streams that run late: what was staged is what arrives, and no buffer is taken before
it was read."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager, MemoryOptions, PoolClosed
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.device.sim import RaceError, SimDevice, UndeclaredWrite
from kvpool.device.work import StagedRows, Work
from kvpool.errors import DeviceError, IntegrityError
from kvpool.pool import StepTables
from kvpool.pool.tables.staging import Buffer
from steps import NAMES, arrays, check, expected
from tests.race.lab import RUNS, Lab, Runs
from tests.waiting import at_once

GUARD = "staged_buffers_retire_by_event"
GARBAGE = 1234567


def target(*shape: int) -> np.ndarray:
    return np.full(shape, GARBAGE, np.int32)


def rows_of(cache: KVCacheManager, ids: Any, columns: int) -> np.ndarray:
    return cache.block_table(ids).dense(columns)


def test_the_rule_that_is_broken_is_found_by_verify() -> None:
    lab = Lab(8, 0, guard=GUARD)
    gate = lab.sim.stall(lab.a)
    lab.cache.tables.copy_batch_block_offsets(target(1, 4), lab.add([1]).id)
    with pytest.raises(IntegrityError, match="staging free"):
        lab.cache.verify()
    gate.open()
    assert not lab.findings()


# -- how many, and for how long --------------------------------------------------------------------------------


@RUNS
@pytest.mark.parametrize("depth", [1, 3, 8])
def test_what_is_retained_is_bounded_and_gone_after_a_drain(depth: int, runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress, memory=MemoryOptions(staging_depth=depth))
        sequence, out, events, most = lab.add([1, 2, 3]), target(3, 4), list[DeviceEvent](), 0
        staging = lab.cache._staging
        for turn in range(25):
            lab.cache.tables.copy_batch_block_offsets(out, sequence.id, rows=turn % 3)
            events += [
                buffer.event for buffer in staging._buffers if buffer.event is not None and buffer.event not in events
            ]
            pending = sum(not lab.sim.query(event) for event in events)
            stats = lab.cache.stats()
            assert len(staging._buffers) <= depth and stats.uploads <= min(depth, pending, stats.most_uploads)
            most = max(most, stats.uploads)
            lab.cache.verify()
        lab.sim.synchronize()
        stats = lab.cache.stats()
        assert stats.uploads == staging.retained == 0 and most <= stats.most_uploads <= depth
        assert (out == rows_of(lab.cache, sequence.id, 4)).all()
        assert not lab.findings(), f"seed {seed}, progress {progress}"
        assert not staging._buffers


@RUNS
def test_a_stalled_stream_keeps_no_other_waiting(runs: Runs) -> None:
    """An upload behind a stalled stream, then more than may be under way on another, each read before the next: on
    the sim device a wait for the stalled one is an error."""
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress, memory=MemoryOptions(staging_depth=8))
        a, out, other = lab.add([1, 2, 3]), target(1, 4), target(1, 4)
        with lab.on(lab.b):
            b = lab.add([7, 8])
        lab.sim.synchronize()
        gate = lab.sim.stall(lab.a)
        lab.cache.tables.copy_batch_block_offsets(out, a.id)
        for _ in range(20):
            lab.cache.tables.copy_batch_block_offsets(other, b.id)
            lab.sim.synchronize(lab.sim.record(lab.b))
            assert lab.cache.stats().uploads == 1 and other[0].tolist() == rows_of(lab.cache, b.id, 4)[0].tolist()
        assert lab.cache.stats().most_uploads <= 2 and len(lab.cache._staging._buffers) <= 3
        gate.open()
        lab.sim.synchronize()
        assert lab.cache.stats().uploads == 0 and out[0].tolist() == rows_of(lab.cache, a.id, 4)[0].tolist()
        assert not lab.findings(), f"seed {seed}, progress {progress}"


class Interrupted:
    """An upload whose call has ended right after its buffer was retained, and before that was noted."""

    def __init__(self, stream: Stream) -> None:
        self.begun, self.stream = True, stream


def test_an_upload_that_ends_when_it_is_retained_leaves_its_buffer_there_once() -> None:
    lab, (first, other) = Lab(8, 0), (target(1, 4), target(1, 4))
    sequence, staging = lab.add([1, 2, 3]), lab.cache._staging
    gate, upload = lab.sim.stall(lab.a), Interrupted(lab.a)
    buffer = staging.take(64, lab.a, upload)
    staging.retain(buffer, lab.a, lab.sim.record(lab.a), ())
    buffer.user = upload
    another = threading.Thread(target=lab.cache.tables.copy_batch_block_offsets, args=(first, sequence.id))
    another.start()
    another.join()
    staging.cancel(upload)
    assert buffer.user is None and staging.retained == 2
    gate.open()
    lab.cache.tables.copy_batch_block_offsets(other, sequence.id)
    lab.sim.synchronize()
    assert staging.retained == 0 and (first == other).all()
    assert not lab.findings()


class Slow(WrappedDevice):
    """Stages at once, and says so when a test lets it; ``waiting`` is set while somebody waits for an event."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.synchronous = False
        self.done, self.waiting = threading.Event(), threading.Event()

    def record(self, stream: Stream) -> DeviceEvent:
        return DeviceEvent()

    def query(self, event: DeviceEvent) -> bool:
        return self.done.is_set()

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        if event is not None:
            self.waiting.set()
            assert self.done.wait(600)


def test_one_too_many_waits_with_no_lock_held() -> None:
    device = Slow()
    cache = KVCacheManager(
        small_layout(2), device_blocks=8, host_blocks=0, device=device, memory=MemoryOptions(staging_depth=2)
    )
    ids, out, errors = [cache.add_sequence([k]) for k in range(3)], target(3, 4), list[BaseException]()

    def stage() -> None:
        try:
            for k in range(3):
                cache.tables.copy_batch_block_offsets(out, ids[k], rows=k)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=stage)
    thread.start()
    assert device.waiting.wait(600)
    assert (out[2] == GARBAGE).all() and cache._staging.retained == 2
    cache.release(cache.add_sequence([7, 8, 9]))
    cache.commit(ids[0])
    cache.verify()
    device.done.set()
    thread.join(600)
    assert not thread.is_alive() and not errors
    assert (out == rows_of(cache, ids, 4)).all()
    cache.release(ids)
    cache.close()


def test_a_table_lives_until_it_was_written() -> None:
    device = Slow()
    cache = KVCacheManager(small_layout(2), device_blocks=8, host_blocks=0, device=device)
    sequence, out = cache.add_sequence([1]), target(1, 4)
    cache.tables.copy_batch_block_offsets(out, sequence)
    table = weakref.ref(out)
    del out
    gc.collect()
    assert table() is not None and cache._staging.retained == 1
    device.done.set()
    assert cache._staging.retained == 0
    gc.collect()
    assert table() is None
    cache.release(sequence)
    cache.close()


@RUNS
def test_a_pool_that_is_closed_first_lets_everything_arrive(runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress)
        out, a = target(1, 4), lab.add([1, 2, 3])
        expected = rows_of(lab.cache, a.id, 4)
        lab.cache.tables.copy_batch_block_offsets(out, a.id)
        lab.release(a)
        lab.cache.close()
        assert (out == expected).all()
        lab.sim.close()


# -- order -------------------------------------------------------------------------------------------------------


def test_the_default_is_the_stream_of_all_the_sequences() -> None:
    lab = Lab(8, 0)
    on_b, on_a, out = lab.add([1, 2, 3], stream=lab.b), lab.add([4]), target(2, 4)
    lab.cache.tables.copy_batch_block_offsets(out, on_b.id)
    lab.sim.launch(lab.b, lambda: None, loads=[out])
    with pytest.raises(ValueError, match=rf"stream: .*sequence {on_a.id} .* {on_b.id}"):
        lab.cache.tables.copy_batch_block_offsets(out, [on_b.id, on_a.id])
    lab.cache.tables.copy_batch_block_offsets(out, [on_b.id, on_a.id], stream=lab.b)
    lab.cache.tables.copy_batch_block_offsets(out, [on_b.id, on_a.id])
    assert not lab.findings()


@pytest.mark.parametrize("other", ["kernel", "host", "stage"])
@pytest.mark.parametrize("ordered", [True, False])
def test_a_table_that_others_use_without_an_order_is_a_race(other: str, ordered: bool) -> None:
    lab = Lab(8, 0)
    sequence, twin, out = lab.add([1]), lab.add([2], stream=lab.b), target(2, 4)
    lab.cache.tables.copy_batch_block_offsets(out, sequence.id, stream=lab.a)
    if ordered and other == "host":
        lab.sim.synchronize(lab.sim.record(lab.a))
    elif ordered:
        lab.sim.wait(lab.b, lab.sim.record(lab.a))
    if other == "kernel":
        lab.sim.launch(lab.b, lambda: None, loads=[out[:1]])
    elif other == "host":
        with lab.sim.host_access(loads=[out]):
            pass
    else:
        lab.cache.tables.copy_batch_block_offsets(out, twin.id, rows=1, stream=lab.b)
    races = lab.findings()
    assert not races if ordered else any("RaceError" in race and "array" in race for race in races), races


def test_halves_of_a_table_that_are_targets_by_themselves_are_apart() -> None:
    lab = Lab(8, 0)
    a, b, out = lab.add([1]), lab.add([2], stream=lab.b), target(4, 4)
    lab.cache.tables.copy_batch_block_offsets(out[:2], a.id)
    lab.cache.tables.copy_batch_block_offsets(out[2:], b.id)
    assert not lab.findings()
    assert (out[[1, 3]] == GARBAGE).all() and (out[[0, 2]] != GARBAGE).all()


# -- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "progress"), [(0, 0.0), (1, 0.4), (2, 1.0)])
def test_threads_hand_over_at_once(seed: int, progress: float) -> None:
    print(f"seed {seed}, progress {progress}")
    device = SimDevice(seed, progress=progress)
    cache = KVCacheManager(
        small_layout(2), device_blocks=24, host_blocks=4, device=device, memory=MemoryOptions(staging_depth=3)
    )

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        stream, kept, wrong = device.create_stream(f"engine {number}"), list[np.ndarray](), list[str]()
        for turn in range(25):
            out = target(1, 6)
            sequence = cache.add_sequence(rng.integers(0, 1000, rng.integers(1, 10)), stream=stream)
            expected = rows_of(cache, sequence, 6)

            def read(out: np.ndarray = out, expected: np.ndarray = expected, turn: int = turn) -> None:
                if not np.array_equal(out, expected):
                    wrong.append(f"turn {turn}: {out} and not {expected}")

            cache.tables.copy_batch_block_offsets(out, sequence)
            device.launch(stream, read, loads=[out])
            cache.release(sequence, store=False)
            kept.append(out)
        device.synchronize(device.record(stream))
        assert not wrong

    at_once(work, range(3))
    device.synchronize()
    assert cache._staging.retained == 0
    cache.verify()
    cache.close()
    device.close()


# ----------------------------------------
# Uploads of step tables on streams that run late: what was staged is what arrives, and no buffer is taken before
# it was read.


def out() -> StepTables:
    return arrays(1, 6, 5, 5)


def all_of(tables: StepTables) -> list[np.ndarray]:
    return [getattr(tables, name) for name in NAMES]


@RUNS
@pytest.mark.parametrize("staged", [True, False])
def test_the_stream_that_is_named_follows_the_one_that_the_sequences_were_used_on(staged: bool, runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress)
        a, tables = lab.add([1, 2, 3]), out()
        both = [a.id, lab.add([4], stream=lab.b).id]
        with pytest.raises(ValueError, match="stream: .*None"):
            lab.cache.tables.copy_step_tables(arrays(2, 9, 9, 9), both)
        with pytest.raises(ValueError, match="which has 3"):
            step(lab, tables, staged, a.id, first=4)  # and nothing has changed
        lab.write(a, 0)
        step(lab, tables, staged, a.id)
        lab._streams[a.id] = lab.b
        lab.check(a)  # reads on b what was written on a
        lab.sim.launch(lab.b, lambda tables=tables: None, loads=all_of(tables) if staged else [])
        assert not lab.findings(), f"seed {seed}, progress {progress}"


def step(lab: Lab, tables: StepTables, staged: bool, *args: Any, **more: Any) -> None:
    if staged:
        lab.cache.tables.copy_step_tables(tables, *args, stream=lab.b, **more)
    else:
        lab.cache.tables.step_tables(*args, stream=lab.b, **more)


@RUNS
def test_step_tables_on_the_host_read_what_no_stream_writes(runs: Runs) -> None:
    """They are there at once, whatever is still to be done on the streams."""
    for seed, progress in runs:
        lab = Lab(8, 4, seed=seed, progress=progress)
        gate = lab.sim.stall(lab.a)
        a, tables = lab.add([1, 2, 3]), out()
        lab.cache.tables.step_tables(a.id, out=tables)
        check(tables, expected(lab.cache, a.id, [0], [3]))
        gate.open()
        assert not lab.findings(), f"seed {seed}, progress {progress}"


# ----------------------------------------
# What is found when staging goes wrong: by the sim device, by verify, and by callers of devices that fail.


def declared_target(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


# -- what the sim device watches --------------------------------------------------------------------------------


def test_a_write_that_nobody_declared_is_found_in_tables_and_buffers() -> None:
    for which in ("table", "buffer"):
        lab = Lab(8, 0)
        sequence, out = lab.add([1]), declared_target(2, 4)
        lab.cache.tables.copy_batch_block_offsets(out, sequence.id)
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
    cache.tables.copy_batch_block_offsets(declared_target(1, 2), sequence)
    buffer = cache._staging._buffers[0]
    device.free(buffer.array)
    cache._staging._buffers.clear()
    with pytest.raises(RaceError, match=r"(?s)array.*stage_rows.*free"):
        device.check()
    with pytest.raises(ValueError, match="staged: rows"):
        device.synchronize()  # it read poison
    with pytest.raises(ValueError, match="staged: a buffer"):
        device.enqueue(StagedRows(device.views.table(declared_target(1, 2)), buffer.array, buffer.address, 1, 1, 1, 2))
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
        (without_event, "staging retained"),
        (free_too_early, "staging free"),
        (listed_twice, "staging buffers"),
        (stranger, "staging buffers"),
    ],
)
def test_verify_finds_broken_staging(corrupt: Callable[[KVCacheManager], None], check: str) -> None:
    device = SimDevice(progress=0.0)
    cache = KVCacheManager(small_layout(2), device_blocks=4, host_blocks=0, device=device)
    sequence = cache.add_sequence([1])
    for _ in range(2):
        cache.tables.copy_batch_block_offsets(declared_target(1, 2), sequence)
    cache.verify()
    corrupt(cache)
    with pytest.raises(IntegrityError, match=check):
        cache.verify()
    cache.release(sequence)
    cache.close()


# -- devices that fail ----------------------------------------------------------------------------------------------


class Failing(WrappedDevice):
    """Fails at the next calls of some kinds."""

    refuses: tuple[str, ...] = ()

    def _may(self, call: str) -> None:
        if call in self.refuses:
            self.refuses = self.refuses[1:]
            raise DeviceError(f"{call} refused")

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self._may("enqueue")
        super().enqueue(work, stream)

    def record(self, stream: Stream) -> DeviceEvent:
        self._may("record")
        return super().record(stream)

    def query(self, event: DeviceEvent) -> bool:
        self._may("query")
        return super().query(event)

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        self._may("synchronize")
        super().synchronize(event)


@pytest.mark.parametrize(
    ("call", "times"), [("enqueue", 1), ("record", 1), ("record", 2), ("query", 1), ("synchronize", 1)]
)
def test_a_device_that_fails_while_staging_is_reported(call: str, times: int) -> None:
    """An upload can be repeated if there is an event behind what is enqueued of it."""
    lab = Lab(8, 0, wrap=Failing, memory=MemoryOptions(staging_depth=1))
    sequence, out = lab.add([1]), declared_target(1, 4)
    lab.cache.tables.copy_batch_block_offsets(out, sequence.id)
    assert isinstance(lab.cache.core.device, Failing)
    lab.cache.core.device.refuses = (call,) * times
    with pytest.raises(DeviceError, match=f"{call} refused"):
        lab.cache.tables.copy_batch_block_offsets(out, sequence.id)
    lab.cache.core.device.refuses = ()
    if call in ("enqueue", "record") and times == 1:
        lab.cache.tables.copy_batch_block_offsets(out, sequence.id)
        assert not lab.findings()
    else:
        with pytest.raises(PoolClosed, match="refused"):
            lab.cache.tables.copy_batch_block_offsets(out, sequence.id)
        lab.cache.close()

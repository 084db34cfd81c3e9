"""What is handed over on streams that run late, as rows of a table, as CSR and as the tables of a step: what was staged
is what arrives, and no buffer is taken before it was read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import small_layout
from kvpool import KVCacheManager, PoolClosed
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.sim import RaceError, ScheduleFailed, SimDevice, explore
from kvpool.pool import GraphTables
from steps import GARBAGE, NAMES, arrays, check, expected
from tests.race.lab import RUNS, Lab, Runs

GUARD = "staged_buffers_retire_by_event"


class Rows:
    """Memory into which one sequence is handed over, and what it should be then."""

    launch = "stage_rows"

    def __init__(self) -> None:
        self.arrays = [np.full((1, 6), GARBAGE, np.int32)]

    def send(self, cache: KVCacheManager, sequence: Any, **stream: Any) -> None:
        cache.tables.copy_batch_block_offsets(self.arrays[0], sequence, **stream)

    def capture(self, cache: KVCacheManager, stream: Stream) -> GraphTables:
        return cache.tables.capture_block_offsets(self.arrays[0], 1, stream=stream)

    def wanted(self, cache: KVCacheManager, sequence: int) -> Any:
        return cache.block_table(sequence).dense(6).tolist()

    def is_right(self, wanted: Any) -> bool:
        return bool(self.arrays[0].tolist() == wanted)


class Csr(Rows):
    launch = "stage_vectors"

    def __init__(self) -> None:
        self.arrays = [np.full(size, GARBAGE, np.int32) for size in (2, 5, 1)]

    def send(self, cache: KVCacheManager, sequence: Any, **stream: Any) -> None:
        cache.tables.copy_batch_block_csr(*self.arrays, sequence, **stream)

    def wanted(self, cache: KVCacheManager, sequence: int) -> Any:
        return [part.tolist() for part in cache.block_table(sequence).csr()]

    def is_right(self, wanted: Any) -> bool:
        return [array[array != GARBAGE].tolist() for array in self.arrays] == wanted


class Steps(Rows):
    launch = "stage_step"

    def __init__(self) -> None:
        self.tables = arrays(1, 6, 5, 5)
        self.arrays = [getattr(self.tables, name) for name in NAMES]

    def send(self, cache: KVCacheManager, sequence: Any, **stream: Any) -> None:
        cache.tables.copy_step_tables(self.tables, sequence, **stream)

    def capture(self, cache: KVCacheManager, stream: Stream) -> GraphTables:
        return cache.tables.capture_step_tables(self.tables, 1, stream=stream)

    def wanted(self, cache: KVCacheManager, sequence: int) -> Any:
        return expected(cache, sequence, [0], [int(cache.sequence_length(sequence))])

    def is_right(self, wanted: Any) -> bool:
        try:
            check(self.tables, wanted)
        except AssertionError:
            return False
        return True


KINDS = pytest.mark.parametrize("kind", [Rows, Csr, Steps])


def stalled(kind: type[Rows], seed: int, progress: float, guard: str | None) -> tuple[list[int], list[str]]:
    """Stage A, release it, give its row and blocks to B, stage B, all behind a closed gate: which of the two is wrong,
    and what else is."""
    lab = Lab(3, 0, seed=seed, progress=progress, guard=guard)
    cache, both = lab.cache, (kind(), kind())
    a = lab.add([1, 2, 3, 4, 5])
    row, wanted = a.id & 0xFFFFFFFF, [both[0].wanted(cache, a.id)]
    gate = lab.sim.stall(lab.a)
    both[0].send(cache, a.id)
    cache.release(lab.live.pop(a.id).id, store=False)
    b = cache.add_sequence([11, 12, 13, 14, 15, 16], stream=lab.a)
    assert b & 0xFFFFFFFF == row, "B has the row of A"
    wanted.append(both[1].wanted(cache, b))
    both[1].send(cache, b)
    assert all((upload == GARBAGE).all() for array in both for upload in array.arrays)
    gate.open()
    lab.sim.run()
    return [i for i, upload in enumerate(both) if not upload.is_right(wanted[i])], lab.findings()


@RUNS
@KINDS
def test_what_was_staged_arrives_whatever_happens_to_the_sequences_meanwhile(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        assert stalled(kind, seed, progress, None) == ([], []), f"seed {seed}, progress {progress}"


@RUNS
@KINDS
def test_a_buffer_that_is_taken_at_once_gives_a_sequence_what_is_anothers(kind: type[Rows], runs: Runs) -> None:
    """The proof bites: without the rule both the tables and the order of accesses are wrong, in every run."""
    for seed, progress in runs:
        wrong, races = stalled(kind, seed, progress, GUARD)
        assert wrong, f"seed {seed}, progress {progress}"
        assert any("RaceError" in race and kind.launch in race for race in races), f"seed {seed}: {races}"


def small_case(kind: type[Rows], guard: str | None) -> Callable[[SimDevice], None]:
    """Two uploads with a release between; a kernel behind them reads what they write."""

    def body(device: SimDevice) -> None:
        cache = KVCacheManager(
            small_layout(1), device_blocks=2, host_blocks=0, device=device, max_sequences=1, secret=bytes(32)
        )
        engine, first, second, seen = device.create_stream("engine"), kind(), kind(), list[bool]()
        try:
            if guard is not None:
                cache.core.disable_guard(guard)
            a = cache.add_sequence([1, 2], stream=engine)
            first.send(cache, a)
            wanted = [first.wanted(cache, a)]
            cache.release(a, store=False)
            b = cache.add_sequence([3], stream=engine)
            second.send(cache, b)
            wanted.append(second.wanted(cache, b))
            device.launch(
                engine,
                lambda: seen.extend([first.is_right(wanted[0]), second.is_right(wanted[1])]),
                loads=first.arrays + second.arrays,
            )
            device.synchronize()
            assert seen == [True, True]
            cache.verify()
        finally:
            cache.close()

    return body


@RUNS
@KINDS
def test_a_small_case_is_right_in_some_schedules(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        device = SimDevice(seed, progress=progress)
        small_case(kind, None)(device)
        device.close()


@pytest.mark.exhaustive
@KINDS
def test_a_small_case_is_right_in_every_schedule(kind: type[Rows]) -> None:
    count = explore(small_case(kind, None), limit=20_000)
    print(f"{count} schedules")
    assert count > 50


@KINDS
def test_a_small_case_is_wrong_in_some_schedule_without_the_guard(kind: type[Rows]) -> None:
    with pytest.raises(ScheduleFailed):
        explore(small_case(kind, GUARD), limit=20_000)


@KINDS
@pytest.mark.parametrize("ordered", [True, False])
def test_an_array_that_others_use_without_an_order_is_a_race(kind: type[Rows], ordered: bool) -> None:
    for number in range(len(kind().arrays)):
        lab, upload = Lab(8, 0), kind()
        upload.send(lab.cache, lab.add([1]).id)
        if ordered:
            lab.sim.wait(lab.b, lab.sim.record(lab.a))
        lab.sim.launch(lab.b, lambda: None, loads=[upload.arrays[number]])
        races = lab.findings()
        assert not races if ordered else any("RaceError" in race and "array" in race for race in races), races


@RUNS
@KINDS
def test_the_stream_that_is_named_follows_the_one_that_the_sequence_was_used_on(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress)
        a, upload = lab.add([1, 2, 3]), kind()
        upload.send(lab.cache, a.id, stream=lab.b)
        lab._streams[a.id] = lab.b
        lab.check(a)  # reads on b what was written on a
        lab.sim.launch(lab.b, lambda: None, loads=upload.arrays)
        assert not lab.findings(), f"seed {seed}, progress {progress}"


@RUNS
@KINDS
def test_another_stream_writes_what_the_stream_before_has_read(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(8, 0, seed=seed, progress=progress)
        a, upload = lab.add([1, 2, 3]), kind()
        upload.send(lab.cache, a.id)
        lab.sim.launch(lab.a, lambda: None, loads=upload.arrays)
        upload.send(lab.cache, a.id, stream=lab.b)
        assert not lab.findings(), f"seed {seed}, progress {progress}"


CAPTURED = pytest.mark.parametrize("kind", [Rows, Steps])


def replay_twice(kind: type[Rows], device: SimDevice, cache: KVCacheManager) -> None:
    """A graph hands over and reads, twice, each time another sequence."""
    engine, upload, wanted, seen = device.create_stream("engine"), kind(), list[Any](), list[bool]()

    def read() -> None:
        seen.append(upload.is_right(wanted[len(seen)]))
        for array in upload.arrays:
            array.fill(GARBAGE)

    with device.capture(engine) as graph:
        captured = upload.capture(cache, engine)
        device.launch(engine, read, loads=upload.arrays, stores=upload.arrays)
    for prompt in ([1, 2, 3], [4]):
        sequence = cache.add_sequence(prompt, stream=engine)
        wanted.append(upload.wanted(cache, sequence))
        captured.stage(sequence, stream=engine)
        device.replay(graph, engine)
    captured.close()
    device.synchronize()
    assert seen == [True, True]
    cache.verify()


@RUNS
@CAPTURED
def test_each_replay_hands_over_what_was_staged_for_it(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(3, 0, seed=seed, progress=progress)
        replay_twice(kind, lab.sim, lab.cache)
        assert not lab.findings(), f"seed {seed}, progress {progress}"


@RUNS
@CAPTURED
def test_what_is_staged_first_waits_for_the_replays_of_nothing(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(3, 0, seed=seed, progress=progress)
        with lab.sim.capture(lab.b) as graph:
            captured = kind().capture(lab.cache, lab.b)
        lab.sim.replay(graph, lab.b)
        captured.stage(lab.add([1, 2, 3]).id, stream=lab.b)
        assert not lab.findings(), f"seed {seed}, progress {progress}"


@RUNS
@CAPTURED
def test_a_buffer_that_was_never_staged_is_no_others_while_a_replay_may_read_it(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab = Lab(3, 0, seed=seed, progress=progress)
        with lab.sim.capture(lab.b) as graph:
            captured = kind().capture(lab.cache, lab.b)
        lab.sim.replay(graph, lab.b)
        captured.close()
        kind().send(lab.cache, lab.add([1, 2, 3]).id, stream=lab.a)
        assert not lab.findings(), f"seed {seed}, progress {progress}"


@RUNS
@CAPTURED
def test_what_is_staged_before_the_replay_before_has_read_is_a_race(kind: type[Rows], runs: Runs) -> None:
    """The proof bites: in every run, whether or not the bytes were right by luck."""
    for seed, progress in runs:
        lab = Lab(3, 0, seed=seed, progress=progress, guard=GUARD)
        with contextlib.suppress(AssertionError, RaceError):
            replay_twice(kind, lab.sim, lab.cache)
        assert any(kind.launch in str(race) for race in lab.sim.races), f"seed {seed}, progress {progress}"


@CAPTURED
def test_what_no_graph_can_have_is_refused_before_anything_happens(kind: type[Rows]) -> None:
    lab, upload = Lab(4, 0), kind()
    cache, sim, a = lab.cache, lab.sim, lab.add([1, 2, 3]).id
    with pytest.raises(ValueError, match="expected one that is being captured"):
        upload.capture(cache, lab.b)
    with sim.capture(lab.b) as graph:
        for call in (lambda: Csr().send(cache, a, stream=lab.b), lambda: cache.commit(a, stream=lab.b)):
            with pytest.raises(ValueError, match="expected one that is not being captured"):
                call()
        assert not graph
        captured = upload.capture(cache, lab.b)
        with pytest.raises(ValueError, match="expected one that is not being captured"):
            captured.stage(a, stream=lab.b)
    captured.stage(a, stream=lab.b)
    wanted = upload.wanted(cache, a)
    with pytest.raises(ValueError, match="expected up to 1 sequences.*, got 2"):
        captured.stage([a, a], stream=lab.b)
    with pytest.raises(ValueError, match="first, counts"):
        captured.stage(a, [2], [2], stream=lab.b)
    sim.replay(graph, lab.b)
    with sim.capture(lab.b), pytest.raises(ValueError, match="expected one that is not being captured"):
        captured.close()  # nobody can ask now when its replays are done
    sim.synchronize()
    assert upload.is_right(wanted), "what was refused has left what was staged before"
    captured.close()
    captured.close()
    with pytest.raises(ValueError, match="closed"):
        captured.stage(a, stream=lab.b)
    assert not lab.findings()
    with KVCacheManager(small_layout(1), device_blocks=2, device="cpu") as plain:
        with pytest.raises(ValueError, match="the cpu device has no graphs"):
            upload.capture(plain, NULL_STREAM)
        plain.verify()


@RUNS
@CAPTURED
def test_a_pool_that_closes_waits_for_the_replays_and_keeps_no_buffer(kind: type[Rows], runs: Runs) -> None:
    for seed, progress in runs:
        lab, upload = Lab(3, 0, seed=seed, progress=progress), kind()
        with lab.sim.capture(lab.b) as graph:
            captured = upload.capture(lab.cache, lab.b)
        a = lab.add([1, 2, 3]).id
        captured.stage(a, stream=lab.b)
        wanted = upload.wanted(lab.cache, a)
        lab.sim.replay(graph, lab.b)
        lab.cache.close()
        assert upload.is_right(wanted)
        captured.close()
        with pytest.raises(PoolClosed):
            upload.capture(lab.cache, lab.b)
        assert not lab.sim.races

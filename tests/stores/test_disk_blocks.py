"""Which blocks a DiskStore keeps, what it evicts, and how calls share commits."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from kvpool.storage import CANCELLED, FAILED, OK, REFUSED, StoreWorker
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.backends.disk.slot_index import Index, SlotTable
from tests.stores.contract import LastingContract
from tests.stores.disk_lab import Faulty, crash
from tests.stores.lab import (
    BLOCK_BYTES,
    OTHER,
    Gate,
    begin_load,
    begin_save,
    codes_of,
    content,
    done,
    fail,
    fill,
    keys_of,
    open_queue,
    returned,
    saved,
)

Disk = Callable[..., StoreWorker]


def here(queue: StoreWorker, count: int, first: int = 0) -> list[int]:
    """The numbers of the blocks that are found."""
    job = done(queue.find(keys_of(queue, count, first)))
    return [first + place for place in np.flatnonzero(job.codes == OK).tolist()]


def load(queue: StoreWorker, *numbers: int) -> None:
    keys = queue.secret.derive_keys([b"block %d" % number for number in numbers])
    assert returned(queue.load(keys, np.arange(40, 40 + len(numbers)))).ok == len(numbers)
    for place, number in enumerate(numbers):
        assert np.array_equal(queue.memory[40 + place], content(number))


def save(queue: StoreWorker, name: bytes, limit: int, numbers: range) -> list[int]:
    """Save blocks in a namespace."""
    fill(queue.memory, len(numbers), numbers.start)
    keys, tag = keys_of(queue, len(numbers), numbers.start), queue.secret.tag(name)
    return codes_of(queue.save(keys, np.arange(len(numbers)), tag=tag, limit=limit))


# -- eviction ----------------------------------------------------------------------------------------


class Lru:
    """Which blocks a store has: the least recently used goes, of one call the last, and of a namespace at its limit one
    of its own. The order of ``tags`` is that of uses, the oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.tags = capacity, OrderedDict[int, bytes]()

    def use(self, numbers: Iterable[int]) -> None:
        for number in reversed([*numbers]):
            if number in self.tags:
                self.tags.move_to_end(number)

    def save(self, tag: bytes, limit: int, numbers: range) -> list[int]:
        self.use(numbers)
        new, answers = [number for number in numbers if number not in self.tags], []
        for number in numbers:
            while number not in self.tags and limit:
                own = [other for other, of in self.tags.items() if of == tag]
                if len(own) < limit and len(self.tags) < self.capacity:
                    self.tags[number] = tag
                    break
                going = [other for other in (own if len(own) >= limit else self.tags) if other not in numbers]
                if not going:
                    break
                del self.tags[going[0]]
            answers.append(OK if number in self.tags else REFUSED)
        self.use(new)
        return answers


@pytest.mark.parametrize("seed", range(3))
def test_a_store_evicts_as_an_lru_with_limits_through_restarts(disk: Disk, seed: int) -> None:
    print("seed", seed)
    chance, model, lasts = random.Random(seed), Lru(16), 1 << 40
    limits = {b"a": [3, 5, lasts], b"b": [0, 4], b"c": [lasts]}
    for _ in range(4):
        with disk(16) as queue:
            for _ in range(25):
                (name, choice), first = chance.choice([*limits.items()]), chance.randrange(12)
                limit = chance.choice(choice)
                numbers = (
                    range(first, first + chance.choice([1, 2, 4, 20])) if name == b"c" else range(first, first + 4)
                )
                shift = 100 * [*limits].index(name)
                numbers = range(numbers.start + shift, numbers.stop + shift)
                kind = chance.random()
                there = [number for number in numbers if number in model.tags]
                if kind < 0.6:
                    assert save(queue, name, limit, numbers) == model.save(name, limit, numbers)
                elif kind < 0.9 and there:
                    chance.shuffle(there)
                    load(queue, *there)
                    model.use(there)
                elif there:
                    done(queue.forget(queue.secret.derive_keys([b"block %d" % there[0]])))
                    del model.tags[there[0]]
                assert [n for at in (0, 100, 200) for n in here(queue, 32, at)] == sorted(model.tags)


def test_a_crash_keeps_the_order_of_saves_and_of_uses_before_the_last_commit(disk: Disk, tmp_path: Path) -> None:
    with disk(9) as queue:
        saved(queue, 4)
        saved(queue, 4, first=4)
        load(queue, 0, 1, 2, 3)
        saved(queue, 1, first=8)
        crash(tmp_path / "store", tmp_path / "later")
    with disk(9, "later") as queue:
        saved(queue, 4, first=20)
        assert here(queue, 9) == [0, 1, 2, 3, 8]


def test_blocks_of_another_model_are_counted_and_go_before_older_ones_of_this(disk: Disk) -> None:
    with disk(8) as queue:
        saved(queue, 4)
    with disk(8, identity=OTHER) as queue:
        saved(queue, 4)
    with disk(8) as queue:
        stats = queue.stats().store
        assert (stats["other_model_blocks"], stats["opened_blocks"]) == (4, 8)
        saved(queue, 3, first=4)
        assert here(queue, 7) == [0, 1, 2, 3, 4, 5, 6]
    with disk(8, identity=OTHER) as queue:
        assert here(queue, 4) == [0], "they are found again by their own model"


def test_a_block_that_is_read_is_not_overwritten(disk: Disk, faulty: Faulty) -> None:
    with disk(4) as queue:
        keys, gate = saved(queue, 4), Gate()
        faulty.before["preadv"] = gate
        reading = begin_load(queue, keys[:2], 50)
        gate.wait()
        done(queue.forget(keys[:1]))
        assert codes_of(begin_save(queue, 4, 10)) == [OK, OK, REFUSED, REFUSED]
        gate.open()
        assert codes_of(reading) == [CANCELLED, OK], "it is forgotten"
        assert np.array_equal(queue.memory[50], content(0)) and np.array_equal(queue.memory[51], content(1))
        saved(queue, 4, first=20)
        assert here(queue, 4, first=20) == [20, 21, 22, 23], "no slot is lost"


# -- limits of namespaces ------------------------------------------------------------------------------


def test_namespaces_that_have_left_cost_no_memory_and_the_others_keep_their_limits() -> None:
    """A namespace with a limit needs its keys in order. One that has no block any more needs nothing."""
    index = Index(SlotTable(64), bytes(16), in_doubt=False)

    def save(number: int, tag: bytes) -> bytes:
        key = number.to_bytes(32, "big")
        assert index.reserve([key], tag, limit=2)[0] >= 0
        index.publish([key], [bytes(16)])
        index.complete([key])
        return key

    keys = [save(number, b"a tenant, staying"[:16]) for number in range(2)]
    for number in range(10, 3_000):
        assert index.forget([save(number, number.to_bytes(16, "big"))]) == 1
    assert len(index._tags) <= 1024
    keys.append(save(2, b"a tenant, staying"[:16]))
    assert [index.has(key) for key in keys] == [False, True, True]


def test_forgotten_and_failed_blocks_do_not_count(disk: Disk, faulty: Faulty) -> None:
    with disk(32) as queue:
        assert save(queue, b"a", 4, range(0, 4)) == [OK] * 4
        done(queue.forget(keys_of(queue, 2)))
        faulty.before["pwritev"] = fail
        assert save(queue, b"a", 4, range(10, 12)) == [FAILED] * 2
        del faulty.before["pwritev"]
        assert save(queue, b"a", 4, range(20, 22)) == [OK] * 2
        assert here(queue, 30) == [2, 3, 20, 21] and queue.stats().store["evicted"] == 0


# -- calls that share a commit ---------------------------------------------------------------------------


def test_saves_that_wait_share_one_commit(disk: Disk, faulty: Faulty) -> None:
    with disk(64, piece_bytes=BLOCK_BYTES) as queue:
        gate = faulty.before["fdatasync"] = Gate()
        fill(queue.memory, 8)
        keys = keys_of(queue, 8)
        first = queue.save(keys[:1], np.arange(1))
        gate.wait()
        written = threading.Semaphore(0)
        faulty.before["pwritev"] = written.release
        others = [queue.save(keys[i : i + 1], np.arange(i, i + 1)) for i in range(1, 8)]
        for _ in others:
            assert written.acquire(timeout=600)
        assert not any(job.done for job in [first, *others]), "nothing is durable yet"
        assert here(queue, 8) == []
        gate.open()
        assert all(job.wait(600) and job.ok == 1 for job in [first, *others])
        # A thread that has written but not begun to wait when the second commit begins takes part in a third.
        assert 2 <= queue.stats().store["commits"] <= 3 and faulty.count["fdatasync"] == faulty.count["COMMIT"] - 1


def test_a_sync_that_fails_is_not_made_up_for_by_the_next_one(disk: Disk, faulty: Faulty) -> None:
    """The kernel reports a failure once. What was written before it may be lost, and the next sync succeeds."""
    with disk(64) as queue:
        gate = Gate()

        def fail_once() -> None:
            gate()
            if faulty.count["fdatasync"] == 1:
                raise OSError(5, "I/O error")

        faulty.before["fdatasync"] = fail_once
        fill(queue.memory, 2)
        keys = keys_of(queue, 2)
        jobs = [queue.save(keys[:1], np.arange(1))]
        gate.wait()
        written = threading.Event()
        faulty.before["pwritev"] = written.set
        jobs.append(queue.save(keys[1:], np.arange(1, 2)))
        assert written.wait(600)
        gate.open()
        assert all(job.wait(600, returned=True) and not job.ok for job in jobs), (
            "the second was synced without an error"
        )
        assert here(queue, 2) == []
        saved(queue, 2)


def test_two_saves_of_one_key_write_once_and_both_wait_until_it_is_durable(disk: Disk, faulty: Faulty) -> None:
    with disk(8) as queue:
        gate = faulty.before["fdatasync"] = Gate()
        fill(queue.memory, 1)
        keys = keys_of(queue, 1)
        jobs = [queue.save(keys, np.arange(1)) for _ in range(3)]
        gate.wait()
        assert not any(job.done for job in jobs) and begin_load(queue, keys, 9).wait(600)
        gate.open()
        assert all(job.wait(600) and job.ok == 1 for job in jobs)
        assert faulty.count["pwritev"] == 1


def test_a_key_twice_in_one_call_is_saved_once(disk: Disk) -> None:
    with disk(8) as queue:
        fill(queue.memory, 1)
        keys = keys_of(queue, 1).repeat(2, axis=0)
        assert returned(queue.save(keys, np.array([0, 0]))).ok == 2 and queue.stats().store["blocks"] == 1
        assert returned(begin_load(queue, keys, 3)).ok == 2


def test_another_call_takes_over_when_a_save_of_the_same_key_fails(disk: Disk, faulty: Faulty) -> None:
    with disk(8) as queue:
        gate = Gate()

        def fail_once() -> None:
            gate()
            if faulty.count["pwritev"] == 1:
                raise OSError(5, "I/O error")

        faulty.before["pwritev"] = fail_once
        fill(queue.memory, 1)
        keys = keys_of(queue, 1)
        jobs = [queue.save(keys, np.arange(1)) for _ in range(2)]
        gate.wait()
        gate.open()
        assert all(job.wait(600, returned=True) for job in jobs)
        assert sorted(job.ok for job in jobs) == [0, 1] and here(queue, 1) == [0]


def test_a_call_that_nobody_waits_for_stops_between_blocks(disk: Disk, faulty: Faulty) -> None:
    with disk(64) as queue:
        saved(queue, 8)
        gate, keys = Gate(), queue.secret.derive_keys([b"block %d" % number for number in (0, 2, 4, 6)])
        faulty.before["preadv"] = gate
        job = begin_load(queue, keys, 20)
        gate.wait()
        job.cancel()
        gate.open()
        assert codes_of(job) == [CANCELLED] * 4
        assert faulty.count["preadv"] == 1


# -- capacity --------------------------------------------------------------------------------------------


def test_another_capacity_keeps_what_fits(disk: Disk, tmp_path: Path) -> None:
    with disk(64) as queue:
        saved(queue, 60)
    with disk(50) as queue:
        stats = queue.stats().store
        assert stats["capacity"] == stats["opened_blocks"] == 50 and stats["dropped_rows"] == 10
        assert len(here(queue, 60)) == 50
        assert (tmp_path / "store" / "slab").stat().st_size == 50 * BLOCK_BYTES
    with disk(200) as queue:
        assert len(here(queue, 60)) == 50
        saved(queue, 60, first=1000)
        assert queue.stats().store["blocks"] == 110
    with open_queue(DiskStore(tmp_path / "store")) as queue:
        assert queue.stats().store["capacity"] == 200, "without a capacity it stays as it is"


@pytest.mark.parametrize("seed", range(3))
def test_many_threads_on_few_slots_lose_no_slot_and_mix_no_bytes(disk: Disk, faulty: Faulty, seed: int) -> None:
    """Saves, loads and forgets of the same 40 keys on 12 slots, while one write and one commit of ten fail."""
    print("seed", seed)
    chance = random.Random(seed)

    def sometimes() -> None:
        if chance.random() < 0.1:
            raise OSError(5, "I/O error")

    with disk(12, piece_bytes=3 * BLOCK_BYTES) as queue:
        faulty.before.update(pwritev=sometimes, fdatasync=sometimes)
        fill(queue.memory, 40)
        jobs, tags = [], [queue.secret.tag(name) for name in (b"a", b"b")]
        for _ in range(400):
            numbers = chance.sample(range(40), chance.choice([1, 4, 8]))
            keys = queue.secret.derive_keys([b"block %d" % number for number in numbers])
            kind = chance.choice(["save", "save", "load", "forget"])
            if kind == "save":
                limit = chance.choice([3, 1 << 40])
                jobs.append(queue.save(keys, np.array(numbers), tag=chance.choice(tags), limit=limit))
            elif kind == "load":
                # Loads share rows: their MACs are compared, and what another has overwritten is damaged.
                jobs.append(queue.load(keys[:1], np.array([40 + chance.randrange(24)])))
            else:
                jobs.append(queue.forget(keys[:1]))
            # With more at a time, drops cancel most of them before they have begun.
            assert jobs[max(0, len(jobs) - 8)].wait(600, returned=True)
        assert all(job.wait(600, returned=True) for job in jobs)
        faulty.before.clear()
        assert queue.stats().store["blocks"] == len(here(queue, 40)) <= 12
        load(queue, *here(queue, 40))
        assert queue.stats().store["io_errors"]
    with disk(12) as queue:
        load(queue, *here(queue, 40))
        saved(queue, 12, first=100)
        assert here(queue, 12, 100) == list(range(100, 112)), "no slot is lost"
        assert queue.stats().store["blocks"] == 12


# ----------------------------------------
# DiskStore keeps the contract.


class TestDiskStore(LastingContract):
    @pytest.fixture(params=["lru", "agent"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], DiskStore]:
        return lambda blocks: DiskStore(tmp_path / "store", blocks * BLOCK_BYTES, policy=request.param)

    @pytest.fixture
    def again(self, tmp_path: Path) -> Callable[[], DiskStore]:
        return lambda: DiskStore(tmp_path / "store")

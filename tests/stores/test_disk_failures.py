"""A disk that is full, read-only or broken: blocks fail, all is counted, and nothing is lost that was saved."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, FAILED, OK, StoreWorker
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.backends.disk.slab import System
from kvpool.storage.store import KEY_BYTES, MAC_BYTES, Space
from tests.stores.disk_lab import Faulty
from tests.stores.lab import (
    BLOCK_BYTES,
    IDENTITY,
    Gate,
    begin_load,
    begin_save,
    codes_of,
    content,
    done,
    fail,
    keys_of,
    memory,
    names,
    open_queue,
    raising,
    returned,
    saved,
)

CAPACITY = 32 * BLOCK_BYTES
ERRORS = [errno.ENOSPC, errno.EROFS, errno.EIO]
FULL, BROKEN = sqlite3.OperationalError("database or disk is full"), sqlite3.OperationalError("disk I/O error")


@pytest.fixture
def store(tmp_path: Path, faulty: Faulty) -> DiskStore:
    return DiskStore(tmp_path / "store", CAPACITY, system=faulty.system)


FAILURES = [(name, OSError(number, os.strerror(number))) for name in ("pwritev", "fdatasync") for number in ERRORS]
FAILURES += [(name, error) for name in ("BEGIN", "COMMIT") for error in (FULL, BROKEN)]


@pytest.mark.parametrize(("name", "error"), FAILURES, ids=lambda value: str(value))
def test_a_save_that_fails_loses_nothing_and_later_ones_go_on(
    store: DiskStore, faulty: Faulty, tmp_path: Path, name: str, error: Exception
) -> None:
    with open_queue(store) as queue:
        keys = saved(queue, 4)
        faulty.before[name] = raising(error)
        job = returned(begin_save(queue, 4, 4))
        assert job.codes.tolist() == [FAILED] * 4
        text = "database" if error is FULL else "disk I/O" if error is BROKEN else os.strerror(error.errno)  # type: ignore
        assert text in job.error
        assert queue.stats().store["io_errors"] == 1 and queue.stats().store["blocks"] == 4
        del faulty.before[name]
        assert done(queue.find(keys_of(queue, 8))).ok == 4
        assert returned(begin_load(queue, keys, 10)).ok == 4
        saved(queue, 20, first=8)
    with open_queue(DiskStore(tmp_path / "store")) as queue:
        assert returned(queue.load(queue.secret.derive_keys([*names(4), *names(20, 8)]), np.arange(24))).ok == 24
        assert np.array_equal(queue.memory[0], content(0)) and np.array_equal(queue.memory[4], content(8))


@pytest.mark.parametrize("clears", [False, True])
def test_a_drop_that_is_not_durable_is_not_confirmed_and_tried_again(
    store: DiskStore, faulty: Faulty, tmp_path: Path, clears: bool
) -> None:
    tried = threading.Semaphore(0)

    def refuse() -> None:
        tried.release()
        raise BROKEN

    with open_queue(store) as queue:
        tag = queue.secret.tag(b"tenant")
        keys = np.concatenate([saved(queue, 2, tag=tag), saved(queue, 2, first=2)])
        faulty.before["COMMIT"] = refuse
        job = queue.clear(tag) if clears else queue.forget(keys[:2])
        assert tried.acquire(timeout=600) and tried.acquire(timeout=600) and not job.done
        assert done(queue.find(keys)).ok == 2, "they are forgotten all the same"
        del faulty.before["COMMIT"]
        assert job.wait(600) and job.ok == len(job.codes)
    with open_queue(DiskStore(tmp_path / "store")) as queue:
        assert done(queue.find(keys)).ok == 2


def test_what_was_evicted_for_a_save_that_failed_and_is_forgotten_stays_gone_after_a_crash(
    store: DiskStore, faulty: Faulty, tmp_path: Path
) -> None:
    """Nothing is there to forget, but the row is not cleared durably yet."""
    with open_queue(store) as queue:
        keys = saved(queue, 32)
        faulty.before["pwritev"] = fail
        assert not returned(begin_save(queue, 4, 100)).ok
        listed = done(queue.find(keys))
        assert listed.codes.tolist().count(ABSENT) == 4
        dropped = done(queue.forget(keys[listed.codes == ABSENT]))
        assert dropped.ok == 4 and dropped.dropped == 0
        shutil.copytree(tmp_path / "store", tmp_path / "crashed")
    with open_queue(DiskStore(tmp_path / "crashed")) as queue:
        assert done(queue.find(keys)).codes.tolist() == listed.codes.tolist()


def test_a_block_that_cannot_be_read_fails_alone(store: DiskStore, faulty: Faulty) -> None:
    with open_queue(store) as queue:
        keys = saved(queue, 8)[[0, 2, 4, 6]]
        faulty.before["preadv"] = lambda: fail() if faulty.count["preadv"] == 2 else None
        assert codes_of(begin_load(queue, keys, 20)) == [OK, FAILED, OK, OK]
        assert queue.stats().store["io_errors"] == 1
        del faulty.before["preadv"]
        assert returned(begin_load(queue, keys, 20)).ok == 4


def test_a_call_that_does_a_part_is_made_again(tmp_path: Path) -> None:
    """The kernel may read or write fewer bytes than it was asked for."""

    def part(call: Callable[..., int]) -> Callable[..., int]:
        return lambda fd, views, place: call(fd, [views[0][:512]], place)

    small = System(preadv=part(os.preadv), pwritev=part(os.pwritev))
    with open_queue(DiskStore(tmp_path / "store", CAPACITY, system=small)) as queue:
        keys = saved(queue, 5)
        assert returned(begin_load(queue, keys, 20)).ok == 5
        assert np.array_equal(queue.memory[24], content(4))


def test_a_slab_that_was_cut_while_it_is_used_fails_and_does_not_hang(store: DiskStore, tmp_path: Path) -> None:
    with open_queue(store) as queue:
        keys = saved(queue, 8)
        os.truncate(tmp_path / "store" / "slab", 4 * BLOCK_BYTES)
        job = returned(begin_load(queue, keys[4:]))
        assert job.codes.tolist() == [FAILED] * 4 and "ends early" in job.error


@pytest.mark.parametrize("name", ["PRAGMA", "SELECT", "BEGIN", "INSERT"])
def test_a_database_that_cannot_be_opened_is_not_thrown_away(
    store: DiskStore, faulty: Faulty, tmp_path: Path, name: str
) -> None:
    with open_queue(store) as queue:
        keys = saved(queue, 4)
    faulty.before[name] = raising(BROKEN)
    if name != "INSERT":
        with pytest.raises(OSError, match=r"\] SQLite: disk I/O error: '"):
            open_queue(store)
    faulty.before.clear()
    with open_queue(store) as queue:
        assert done(queue.find(keys)).ok == 4 and (not queue.stats().store["damaged_files"])


def test_who_waits_for_a_commit_learns_that_the_one_before_has_failed(tmp_path: Path, faulty: Faulty) -> None:
    """A commit begins while the one before ends, which has the page of the key that both forget."""
    store = DiskStore(tmp_path / "store", 64 * BLOCK_BYTES, system=faulty.system)
    with open_queue(store) as queue:
        keys = queue.secret.keys(saved(queue, 60))
        gate, begun, answers = Gate(), threading.Event(), list[object]()

        def forget(keys: np.ndarray) -> None:
            try:
                answers.append(store.forget(keys))
            except OSError as error:
                answers.append(error)

        def fail() -> None:
            gate()
            raise FULL

        faulty.before["COMMIT"] = fail
        threads = [threading.Thread(target=forget, args=(keys[[0, *more]],)) for more in ([], [59], [58])]
        threads[0].start()
        gate.wait()
        faulty.before["fdatasync"] = begun.set
        threads[1].start()
        assert begun.wait(600), "it begins before the other has ended"
        threads[2].start()
        del faulty.before["COMMIT"]
        gate.open()
        for thread in threads:
            thread.join(600)
        failed = [answer for answer in answers if isinstance(answer, OSError)]
        assert (len(failed), len(answers)) == (2, 3), "the commit after both is one of its own"


def test_a_close_that_fails_is_counted_and_lets_go(store: DiskStore, faulty: Faulty, tmp_path: Path) -> None:
    queue = open_queue(store)
    keys = saved(queue, 4)
    returned(begin_load(queue, keys))
    faulty.before["COMMIT"] = raising(FULL)
    assert queue.close(600)
    assert store.stats()["io_errors"] == 1
    with open_queue(DiskStore(tmp_path / "store")) as queue:
        assert done(queue.find(keys)).ok == 4


def test_rows_of_any_address_and_size_are_kept(tmp_path: Path) -> None:
    """They go through memory that direct I/O takes."""
    rows = np.zeros((8, 5001), np.uint8)
    with StoreWorker(DiskStore(tmp_path / "store", 16 * 8192), rows, IDENTITY) as queue:
        keys = saved(queue, 4)
        rows[:] = 0
        assert returned(begin_load(queue, keys, 4)).ok == 4
        assert np.array_equal(rows[7], content(3, 5001))
        assert queue.stats().store["capacity"] == 16


def test_a_save_that_fails_late_takes_nothing_from_the_save_that_tries_again(tmp_path: Path) -> None:
    """One save cannot write a block, and its commit fails later. Meanwhile another save writes that block. The slot
    that it writes to must not go to a third."""
    rows = memory(8, 4097)  # of this size each block is written by a call of its own
    for row in range(8):
        rows[row] = row + 1
    names = [np.full((1, KEY_BYTES), number, np.uint8) for number in range(8)]
    macs, who = np.zeros((2, MAC_BYTES), np.uint8), threading.local()
    commit, write = Gate(), Gate()

    def pwritev(fd: int, views: Any, at: int) -> int:
        name = getattr(who, "name", "")
        if name == "first" and bytes(views[0][:1]) == b"\x01":
            raise OSError(errno.EIO, "one write fails")
        if name == "second":
            write()
        return os.pwritev(fd, views, at)

    def fdatasync(fd: int) -> None:
        if getattr(who, "name", "") == "first":
            commit()
            raise OSError(errno.EIO, "the sync fails")
        os.fdatasync(fd)

    store = DiskStore(tmp_path / "store", 3 * 8192, system=System(pwritev=pwritev, fdatasync=fdatasync))
    store.open(Space(bytes(16), rows))
    codes: dict[str, Any] = {}

    def save(name: str, *numbers: int) -> None:
        who.name = name
        keys = np.concatenate([names[number] for number in numbers])
        with suppress(OSError):  # a sync that fails may fail the second too
            codes[name] = store.save(keys, np.array(numbers) - 1, macs[: len(numbers)], bytes(16), 1 << 40, bool)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(save, "first", 1, 2)
        commit.wait()
        second = pool.submit(save, "second", 1)
        write.wait()
        commit.open()
        first.result(600)
        for number in (3, 4):
            save("third", number)
            assert codes["third"].tolist() == [OK]
        write.open()
        second.result(600)
    for number in (3, 4):
        rows[7] = 0
        loaded, _ = store.load(names[number], np.array([7]), bool)
        assert loaded.tolist() == [ABSENT] or (rows[7] == number).all()
    store.close()

"""Whatever has happened to its files, a DiskStore opens, serves no wrong byte, and counts what is lost."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.storage import ABSENT, DAMAGED, OK, REFUSED, StoreRequest
from kvpool.storage.backends.disk import DiskStore, disk_store
from kvpool.storage.backends.disk.folder import Folder
from kvpool.storage.backends.disk.slot_index import PAGE_BYTES
from kvpool.storage.store import Space
from tests.children import in_child
from tests.seeds import some_of
from tests.stores.disk_lab import Faulty, crash
from tests.stores.lab import (
    BLOCK_BYTES,
    Gate,
    begin_load,
    begin_save,
    codes_of,
    content,
    done,
    fill,
    keys_of,
    memory,
    open_queue,
    raising,
    returned,
    right,
    saved,
)

BLOCKS = 60
CAPACITY = 64 * BLOCK_BYTES
FILES = ["slab", "rows.sqlite", "rows.sqlite-wal", "secret", "lock"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store as a killed process leaves it: half of the rows are in the database, half in its log."""
    with open_queue(DiskStore(tmp_path / "first", CAPACITY)) as queue:
        saved(queue, BLOCKS // 2)
    with open_queue(DiskStore(tmp_path / "first", CAPACITY)) as queue:
        saved(queue, BLOCKS // 2, first=BLOCKS // 2)
        return crash(tmp_path / "first", tmp_path / "store")


def check(folder: Path) -> tuple[int, dict[str, int]]:
    """Open the store. Every block is right, damaged or absent, and the store takes new ones. Returns how many are
    right."""
    with open_queue(DiskStore(folder, CAPACITY)) as queue:
        stats = queue.stats().store
        job = right(queue, begin_load(queue, keys_of(queue, BLOCKS)))
        assert set(job.codes.tolist()) <= {OK, ABSENT, DAMAGED}, (job.codes, job.error)
        keys = saved(queue, 4, first=1000)
        assert returned(begin_load(queue, keys)).ok == 4
    with open_queue(DiskStore(folder)) as queue:
        assert done(queue.find(keys)).ok == 4
    return job.ok, stats


def test_a_killed_store_has_all_that_was_saved(folder: Path) -> None:
    ok, stats = check(folder)
    assert ok == BLOCKS and stats["opened_blocks"] == BLOCKS and not stats["dropped_rows"] + stats["damaged_files"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 1, 100, 5000, 0.5])
def test_truncated_files(folder: Path, name: str, size: float) -> None:
    path = folder / name
    os.truncate(path, int(size if size >= 1 or not size else size * path.stat().st_size))
    check(folder)


@pytest.mark.parametrize("name", FILES)
def test_missing_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    ok, stats = check(folder)
    if name in ("slab", "secret"):
        assert ok == 0 and stats["dropped_rows"] >= BLOCKS
    if name == "rows.sqlite":
        assert ok == 0 and stats["damaged_files"] == 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", some_of(3, range(8)))
def test_random_bytes_in_files(folder: Path, name: str, seed: int) -> None:
    print("seed", seed)
    chance = random.Random(f"{name} {seed}")
    with open(folder / name, "r+b") as file:
        size = os.fstat(file.fileno()).st_size or 4096
        for _ in range(chance.choice([1, 3, 30])):
            file.seek(chance.choice([0, 16, chance.randrange(size)]))
            file.write(chance.randbytes(min(chance.choice([1, 16, 512, 4096]), size)))
    check(folder)


def change(folder: Path, command: str, *arguments: object) -> None:
    connection = sqlite3.connect(folder / "rows.sqlite")
    connection.execute(command, arguments)
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "command",
    [
        "DELETE FROM store",
        "INSERT INTO store SELECT * FROM store",
        "UPDATE store SET block_bytes = 'many'",
        "UPDATE store SET slots = 9223372036854775807",
        "UPDATE store SET secret = NULL",
        "DROP TABLE pages",
        "ALTER TABLE pages RENAME COLUMN content TO other",
        "UPDATE pages SET content = 'text'",
        "UPDATE pages SET number = number - 5",
        "UPDATE pages SET number = number + 1000000",
        f"UPDATE pages SET content = randomblob({PAGE_BYTES})",
        f"UPDATE pages SET content = zeroblob({PAGE_BYTES})",
        "INSERT INTO pages SELECT number + 1, content FROM pages WHERE number = 1",
    ],
)
def test_rows_that_nobody_has_written(folder: Path, command: str) -> None:
    change(folder, command)
    check(folder)


_ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) SELECT n"
_NO_TABLES_OF_OURS = {
    "a view that never ends for pages": [
        "DROP TABLE pages",
        f"CREATE VIEW pages AS SELECT n AS number, zeroblob(8) AS content FROM ({_ENDLESS} FROM c)",
    ],
    "a view that never ends for the header": [
        "DROP TABLE store",
        f"CREATE VIEW store AS SELECT n AS version, n AS block_bytes, n AS slots, n AS secret, n AS closed "
        f"FROM ({_ENDLESS} FROM c)",
    ],
    "a trigger that never ends": [
        "CREATE TRIGGER t AFTER INSERT ON store BEGIN INSERT INTO pages "
        f"SELECT n, NULL FROM ({_ENDLESS} FROM c) WHERE n < 0; END",
    ],
    "a trigger that refuses": ["CREATE TRIGGER t AFTER INSERT ON store BEGIN SELECT raise(abort, 'no'); END"],
    "a column that is computed": [
        "DROP TABLE pages",
        "CREATE TABLE pages (number INTEGER PRIMARY KEY, content BLOB GENERATED ALWAYS AS (zeroblob(4232)) VIRTUAL)",
    ],
    "an index": ["CREATE INDEX i ON pages (content)"],
    "a number of another type": [
        "ALTER TABLE pages RENAME TO old",
        "CREATE TABLE pages (number, content)",
        "INSERT INTO pages SELECT 9e999, content FROM old",
        "DROP TABLE old",
    ],
}


@pytest.mark.parametrize("commands", _NO_TABLES_OF_OURS.values(), ids=_NO_TABLES_OF_OURS)
def test_tables_that_no_store_has_made_are_put_aside(folder: Path, commands: list[str]) -> None:
    for command in commands:
        change(folder, command)
    ok, stats = check(folder)
    assert ok == 0 and stats["damaged_files"] == 1


@pytest.mark.parametrize(
    "command",
    [
        "UPDATE pages SET content = zeroblob(40000000) WHERE number = 0",
        "UPDATE store SET secret = zeroblob(40000000)",
        "INSERT INTO pages WITH RECURSIVE c(n) AS (SELECT 1000 UNION ALL SELECT n + 1 FROM c LIMIT 200000) "
        "SELECT n, x'' FROM c",
    ],
)
def test_what_a_database_has_too_much_costs_no_memory(folder: Path, command: str) -> None:
    change(folder, command)

    def opens() -> None:
        store, space = DiskStore(folder, 1 << 20), Space(bytes(16), memory(4))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + (24 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        store.open(space)

    in_child(opens)


@pytest.mark.parametrize("content", [b"", b"x" * 25, None], ids=["empty", "damaged", "missing"])
def test_without_its_epochs_a_store_finds_nothing_that_was_saved_before(folder: Path, content: bytes | None) -> None:
    with open_queue(DiskStore(folder)) as queue:
        done(queue.reset())
        saved(queue, BLOCKS)
    (folder / "epochs").unlink() if content is None else (folder / "epochs").write_bytes(content)
    ok, stats = check(folder)
    assert ok == 0 and stats["damaged_files"] == (content == b"x" * 25)


def test_epochs_of_more_models_than_a_store_remembers_take_no_room(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(disk_store, "EPOCHS_MAX", 3)
    store = DiskStore(tmp_path / "store", CAPACITY)
    with open_queue(store):
        models = [bytes([number]) * 8 for number in range(5)]
        drawn = [store.epoch(model, True) for model in (*models, models[3])]
        assert len(set(drawn)) == 6 and (tmp_path / "store" / "epochs").stat().st_size == 3 * 24
        assert [store.epoch(model, False) for model in models] == [b"", b"", drawn[2], drawn[5], drawn[4]]


def test_a_database_that_is_damaged_is_kept_under_another_name(folder: Path) -> None:
    damaged = b"no database at all" * 500
    (folder / "rows.sqlite").write_bytes(damaged)
    (folder / "rows.sqlite-wal").unlink()
    ok, stats = check(folder)
    assert ok == 0 and stats["damaged_files"] == 1
    assert (folder / "rows.sqlite.damaged").read_bytes() == damaged


def test_the_files_of_two_stores_do_not_mix(tmp_path: Path, folder: Path) -> None:
    """An operator restores the wrong file from a backup."""
    with open_queue(DiskStore(tmp_path / "other", CAPACITY)) as queue:
        saved(queue, 20, first=500)
    for name in ("slab", "secret"):
        mixed = tmp_path / f"mixed {name}"
        shutil.copytree(folder, mixed)
        shutil.copy(tmp_path / "other" / name, mixed / name)
        assert check(mixed)[0] == 0


# -- slots that are used again -------------------------------------------------------------------------


def crash_at(faulty: Faulty, at: str, folder: Path, call: Callable[[], StoreRequest], ok: int = 1) -> Path:
    """The files as a crash leaves them when a save makes this call of the system. The save ends afterwards."""
    gate = faulty.before[at] = Gate()
    job = call()
    gate.wait()
    left = crash(folder, folder.with_name("before"))
    gate.open()
    assert returned(job).ok == ok
    return left


@pytest.mark.parametrize("at", ["pwritev", "fdatasync", "COMMIT"])
def test_a_crash_while_a_slot_gets_other_bytes(tmp_path: Path, at: str, faulty: Faulty) -> None:
    """The old row may still name the slot. Its MAC shows that the bytes are not its own."""
    place = tmp_path / "store"
    with open_queue(DiskStore(place, BLOCK_BYTES, system=faulty.system)) as queue:
        old, new = saved(queue, 1), keys_of(queue, 1, 7)
        queue.memory[0] = content(7)
        before = crash_at(faulty, at, place, lambda: queue.save(new, np.arange(1)))
        after = crash(place, tmp_path / "after")
    for folder, expected in ((before, [OK if at == "pwritev" else DAMAGED, ABSENT]), (after, [ABSENT, OK])):
        with open_queue(DiskStore(folder)) as queue:
            came = [codes_of(queue.load(key, np.array([row])))[0] for row, key in enumerate((old, new))]
            assert came == expected, "what was not reported as saved is absent"
    assert np.array_equal(queue.memory[1], content(7))


@pytest.mark.parametrize("closings", [0, 2])
@pytest.mark.parametrize("taken", [True, False], ids=["bytes taken", "bytes there"])
def test_a_block_that_was_there_at_a_crash_is_made_durable_once(
    tmp_path: Path, taken: bool, closings: int, faulty: Faulty
) -> None:
    """The row is there in both cases, so that a save could take it for saved."""
    place, at = tmp_path / "store", "fdatasync" if taken else "pwritev"
    with open_queue(DiskStore(place, 2 * BLOCK_BYTES, system=faulty.system)) as queue:
        old = saved(queue, 1, limit=1)
        queue.memory[1] = content(7)
        left = crash_at(faulty, at, place, lambda: queue.save(keys_of(queue, 1, 7), np.arange(1, 2), limit=1))
    for _ in range(closings):
        open_queue(DiskStore(left)).close()
    with open_queue(DiskStore(left)) as queue:
        for _ in range(2):
            assert np.array_equal(saved(queue, 1), old)
            assert queue.stats().store["commits"] == 1
        assert returned(begin_load(queue, old, 1)).ok == 1 and np.array_equal(queue.memory[1], content(0))


@pytest.fixture
def doubtful(tmp_path: Path) -> Path:
    """A store with room for twelve blocks, which has four, as a killed process leaves it."""
    with open_queue(DiskStore(tmp_path / "store", 12 * BLOCK_BYTES)) as queue:
        saved(queue, 4)
        return crash(tmp_path / "store", tmp_path / "left")


def loaded(folder: Path, count: int = 4) -> list[int]:
    """Which content the first blocks have after a crash. All of them are there."""
    with open_queue(DiskStore(folder)) as queue:
        assert returned(queue.load(keys_of(queue, count), np.arange(count))).ok == count
        return [n for row in range(count) for n in range(8) if np.array_equal(queue.memory[row], content(n))]


@pytest.mark.parametrize("at", ["pwritev", "fdatasync", "COMMIT"])
def test_a_crash_while_a_block_gets_other_bytes_leaves_the_old_or_the_new(
    tmp_path: Path, doubtful: Path, at: str, faulty: Faulty
) -> None:
    with open_queue(DiskStore(doubtful, system=faulty.system)) as queue:
        fill(queue.memory, 4, 4)
        left = crash_at(faulty, at, doubtful, lambda: queue.save(keys_of(queue, 4), np.arange(4)), ok=4)
        later = crash(doubtful, tmp_path / "later")
    assert (loaded(left), loaded(later)) == ([0, 1, 2, 3], [4, 5, 6, 7])


@pytest.mark.parametrize("durable", [False, True], ids=["not durable", "durable"])
def test_a_commit_that_fails_takes_neither_the_old_bytes_nor_the_new(
    tmp_path: Path, doubtful: Path, durable: bool, faulty: Faulty
) -> None:
    """An error of a commit does not say whether it is durable. Until the next one, no slot is written that it may have
    named."""
    with open_queue(DiskStore(doubtful, system=faulty.system)) as queue:
        fill(queue.memory, 4, 4)
        (faulty.after if durable else faulty.before)["COMMIT"] = raising(sqlite3.OperationalError("disk I/O error"))
        assert not returned(queue.save(keys_of(queue, 4), np.arange(4))).ok
        faulty.after, faulty.before = {}, {}
        left = crash_at(faulty, "fdatasync", doubtful, lambda: begin_save(queue, 4, 100), ok=4)
        saved(queue, 4, first=200)
        later = crash(doubtful, tmp_path / "later")
    assert loaded(left) == ([4, 5, 6, 7] if durable else [0, 1, 2, 3])
    assert loaded(later) == [0, 1, 2, 3]


def writes(doubtful: Path, faulty: Faulty) -> list[tuple[int, int]]:
    """The offsets and sizes that a save of all blocks after a crash writes."""
    written = list[tuple[int, int]]()

    def write(fd: int, views: list[memoryview], offset: int) -> int:
        written.append((offset, sum(len(view) for view in views)))
        return os.pwritev(fd, views, offset)

    with open_queue(DiskStore(doubtful, system=replace(faulty.system, pwritev=write))) as queue:
        saved(queue, 4)
    return written


def test_a_save_after_a_crash_writes_only_the_blocks_that_are_damaged(doubtful: Path, faulty: Faulty) -> None:
    place = (doubtful / "slab").read_bytes().index(content(2).tobytes())
    with (doubtful / "slab").open("r+b") as file:
        file.seek(place)
        file.write(b"noise")
    assert writes(doubtful, faulty) == [(4 * BLOCK_BYTES, BLOCK_BYTES)] and faulty.count["fdatasync"] == 1
    assert loaded(doubtful) == [0, 1, 2, 3]


def test_without_direct_access_to_the_device_a_save_after_a_crash_writes_every_block(
    doubtful: Path, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read may be in the page cache alone, and a sync does not write what it has failed to write before."""
    opening = Folder.open

    def buffered(folder: Folder, name: str, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return opening(folder, name, flags)

    monkeypatch.setattr(Folder, "open", buffered)
    assert sum(size for _, size in writes(doubtful, faulty)) == 4 * BLOCK_BYTES


def test_a_block_that_cannot_be_read_after_a_crash_is_written_again(doubtful: Path, faulty: Faulty) -> None:
    faulty.before["preadv"] = raising(OSError(errno.EIO, "I/O error"))
    with open_queue(DiskStore(doubtful, system=faulty.system)) as queue:
        saved(queue, 1)
        assert faulty.count["pwritev"] == 1


@pytest.mark.parametrize("failing", [False, True], ids=["cancelled", "failing"])
def test_a_save_that_does_not_write_a_block_again_drops_nothing(doubtful: Path, failing: bool, faulty: Faulty) -> None:
    gate = Gate()
    with open_queue(DiskStore(doubtful, system=faulty.system)) as queue:
        keys = keys_of(queue, 4)
        fill(queue.memory, 4, 4)  # Not what is there, so that it is written.
        faulty.before["pwritev"] = raising(OSError(errno.EIO, "I/O error")) if failing else gate
        job = queue.save(keys, np.arange(4))
        if not failing:
            gate.wait()
            job.cancel()
            gate.open()
        assert job.wait(600, returned=True) and not job.ok
        del faulty.before["pwritev"]
        assert returned(begin_load(queue, keys, 4)).ok == 4
        commits = queue.stats().store["commits"]
        saved(queue, 4)
        assert (queue.stats().store["commits"] > commits) == failing, "what was not written is still in doubt"


def test_a_block_that_gets_other_bytes_while_it_is_read_keeps_its_slot(doubtful: Path) -> None:
    gate, reads = Gate(), itertools.count()
    system = replace(Faulty().system, preadv=lambda *read: (next(reads) or gate(), os.preadv(*read))[1])
    with open_queue(DiskStore(doubtful, system=system)) as queue:
        keys = keys_of(queue, 1)
        load = begin_load(queue, keys, 20)
        gate.wait()
        fill(queue.memory, 1, 4)
        assert returned(queue.save(keys, np.arange(1))).ok
        saved(queue, 8, first=100)  # all that there is room for
        gate.open()
        assert returned(load).ok == 1
        assert np.array_equal(queue.memory[20], content(0))
        evicted = queue.stats().store["evicted"]
        saved(queue, 1, first=200)
        assert queue.stats().store["evicted"] == evicted, "now it is free"


def test_where_no_other_slot_is_free_other_bytes_are_refused(doubtful: Path) -> None:
    with open_queue(DiskStore(doubtful, 4 * BLOCK_BYTES)) as queue:
        fill(queue.memory, 4, 4)
        assert set(codes_of(queue.save(keys_of(queue, 4), np.arange(4)))) == {REFUSED}
    assert loaded(doubtful) == [0, 1, 2, 3]


def test_the_last_of_two_rows_with_one_key_counts(tmp_path: Path) -> None:
    """Only damage makes them: a page that was copied."""
    store = DiskStore(tmp_path / "store", 200 * BLOCK_BYTES)
    with open_queue(store) as queue:
        saved(queue, 40)
    change(tmp_path / "store", "INSERT INTO pages SELECT 2, content FROM pages WHERE number = 0")
    with open_queue(store) as queue:
        stats = queue.stats().store
        assert stats["opened_blocks"] == 40 and stats["dropped_rows"] == 40
        job = queue.load(keys_of(queue, 40), np.arange(40))
        assert job.wait(600, returned=True) and set(job.codes.tolist()) <= {OK, DAMAGED}

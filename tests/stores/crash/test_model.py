"""The recorder misses nothing, and the model lets a crash take what no sync has covered, and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest

from tests.stores.crash import log, proof
from tests.stores.crash.log import Kind, Missing, Record
from tests.stores.crash.model import ALL, NOTHING, SECTOR, Disk, Fate, Unsupported
from tests.stores.crash.promises import Promises

ROOT = Path("/disk")
FILE, OTHER, FOLDER = 11, 12, 0
"""inode numbers; 0 is the folder itself"""


class Calls:
    """A disk, and calls that are put into its log."""

    def __init__(self) -> None:
        self.disk, self._numbers = Disk(ROOT), itertools.count(1)

    def begin(
        self,
        kind: Kind,
        file: int = 0,
        data: bytes = b"",
        offset: int = 0,
        *,
        length: int = 0,
        path: str = "",
        flags: int = 0,
    ) -> int:
        number = next(self._numbers)
        self.disk.apply([Record(kind, flags, number, file, offset, length or len(data), path, data)])
        return number

    def end(self, call: int, result: int = 0) -> None:
        self.disk.apply([Record(Kind.END, 0, call, 0, 0, result, "", b"")])

    def name(self, kind: Kind, path: str, file: int = 0) -> None:
        self.begin(kind, file, path="\n".join(f"{ROOT}/{part}" for part in path.split("\n")))

    def write(self, data: bytes, offset: int = 0, flags: int = 0, file: int = FILE) -> None:
        self.end(self.begin(Kind.WRITE, file, data, offset, flags=flags), len(data))

    def sync(self, file: int = FILE, result: int = 0) -> None:
        self.end(self.begin(Kind.SYNC, file), result)

    def left(self, fate: Fate = NOTHING, seed: int = 0) -> dict[str, bytes | None]:
        """What a crash leaves now."""
        return self.disk.state(fate, random.Random(seed))

    def leave(self, least: bytes, most: bytes | None = None) -> bool:
        """Whether a crash leaves this of the file where nothing survives that is not durable, and where all does."""
        return self.left() == {"file": least} and (most is None or self.left(ALL) == {"file": most})


@pytest.fixture
def calls() -> Calls:
    """With an empty file that is durable."""
    made = Calls()
    made.name(Kind.CREATE, "file", FILE)
    made.sync(FOLDER)
    return made


# -- what a crash may leave ----------------------------------------------------------------------------


def test_a_sync_of_everything_covers_all_files_and_names_and_that_of_another_file_nothing(calls: Calls) -> None:
    calls.name(Kind.CREATE, "other", OTHER)
    calls.write(b"new")
    calls.write(b"too", file=OTHER)
    calls.sync(OTHER)
    sync = calls.begin(Kind.SYNC_ALL)
    assert calls.leave(b"")
    calls.end(sync)
    assert calls.left() == {"file": b"new", "other": b"too"}


def test_what_is_not_durable_survives_in_any_subset(calls: Calls) -> None:
    for place in range(3):
        calls.write(b"%d" % place, place)
    contents = {calls.left(Fate(0.5), seed)["file"] for seed in range(200)}
    assert contents == {b"", b"0", b"\0" + b"1", b"\0\0" + b"2", b"01", b"0\0" + b"2", b"\0" + b"12", b"012"}


def test_a_torn_write_changes_its_own_sectors_only(calls: Calls) -> None:
    calls.write(b"a" * 4 * SECTOR)
    calls.sync()
    calls.write(b"b" * 2 * SECTOR, SECTOR)
    contents = {calls.left(Fate(0.0, 1.0), seed)["file"] for seed in range(200)}
    middles = {left * SECTOR + other * SECTOR for left in (b"a", b"b") for other in (b"a", b"b")}
    assert contents == {b"a" * SECTOR + middle + b"a" * SECTOR for middle in middles}
    noisy = [calls.left(Fate(0.0, 1.0, 0.5), seed)["file"] or b"" for seed in range(50)]
    assert all(data[:SECTOR] == data[-SECTOR:] == b"a" * SECTOR for data in noisy)
    assert set(noisy) - contents


def test_names_are_durable_when_their_folder_was_synced(calls: Calls) -> None:
    calls.name(Kind.MKDIR, "folder", 20)
    calls.name(Kind.CREATE, "folder/in", 21)
    calls.write(b"x", file=21)
    calls.sync(21)
    assert calls.leave(b"")
    calls.sync(20)
    assert calls.leave(b"")
    calls.sync(FOLDER)
    assert calls.left() == {"file": b"", "folder": None, "folder/in": b"x"}


def test_names_survive_in_their_order(calls: Calls) -> None:
    calls.name(Kind.CREATE, "new", OTHER)
    calls.name(Kind.RENAME, "new\nfile")
    calls.name(Kind.UNLINK, "file")
    states = [calls.left(Fate(0.6), seed) for seed in range(100)]
    assert {tuple(sorted(state)) for state in states} == {("file",), ("file", "new"), ()}


# -- what is promised ----------------------------------------------------------------------------------


def promised(*marks: object) -> list[set[int]]:
    """The promises before the first mark and after each."""
    promises = Promises([Record(Kind.MARK, 0, 0, 0, 0, 0, "", json.dumps(mark).encode()) for mark in marks])
    assert not promises.lost
    return [promises.at(point) for point in range(len(marks) + 1)]


def test_a_block_is_promised_from_its_acknowledgement_until_it_is_forgotten() -> None:
    promises = promised({"saving": [1, 2]}, {"saved": [1]}, {"forgetting": [1]}, {"forgot": [1]})
    assert promises == [set(), set(), {1}, set(), set()]


def test_a_block_that_was_evicted_is_promised_until_the_last_look() -> None:
    promises = promised(
        {"saved": [1, 2]},
        {"looking": 0},
        {"seen": [1, 2], "evicted": False},
        {"saved": [3]},
        {"looking": 0},
        {"seen": [2, 3], "evicted": True},
    )
    assert promises == [set(), {1, 2}, {2}, {2}, {2, 3}, {2, 3}, {2, 3}]


def test_a_block_that_was_saved_again_may_have_been_evicted_before() -> None:
    promises = promised(
        {"saved": [1]},
        {"looking": 0},
        {"seen": [1], "evicted": False},
        {"saving": [1]},
        {"saved": [1]},
        {"looking": 0},
        {"seen": [1], "evicted": True},
    )
    assert promises == [set(), {1}, set(), set(), set(), {1}, {1}, {1}]


# -- the recorder --------------------------------------------------------------------------------------

PROGRAM = """
import ctypes, mmap, os, sqlite3, sys, threading
root = sys.argv[1]
os.mkdir(f"{root}/made", 0o700)
fd = os.open(f"{root}/made/file", os.O_RDWR | os.O_CREAT)
os.posix_fallocate(fd, 0, 8192)
os.ftruncate(fd, 5000)
os.pwritev(fd, [b"one", b"two"], 100)
os.pwrite(fd, b"three", 200)
os.write(fd, b"four")
os.writev(fd, [b"five", b"six"])
again = os.dup(fd)
os.pwrite(again, b"seven", 300)
folder = os.open(f"{root}/made", os.O_RDONLY)
relative = os.open("relative", os.O_RDWR | os.O_CREAT | os.O_APPEND, dir_fd=folder)
os.write(relative, b"a"); os.write(relative, b"b")
os.rename("relative", "renamed", src_dir_fd=folder, dst_dir_fd=folder)
os.link(f"{root}/made/renamed", f"{root}/made/linked")
os.chdir(root)
with open("plain", "wb") as file:
    file.write(b"buffered")
with open("plain", "wb") as file:
    file.write(b"anew")
with open("gone", "wb") as file:
    file.write(b"x")
os.unlink("gone")
database = sqlite3.connect("rows.sqlite")
database.execute("PRAGMA journal_mode=WAL")
database.execute("CREATE TABLE t (a)")
threads = [threading.Thread(target=os.pwrite, args=(fd, b"%d" % i, 1000 + i)) for i in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.fsync(fd); os.fsync(folder)
ctypes.CDLL(None).syncfs(fd); os.sync()
"""


def recorded(program: str, folder: Path) -> proof.Recording:
    root = folder / "root"
    root.mkdir()
    try:
        log.recorder()
    except Missing as missing:
        pytest.skip(str(missing))
    return proof.Recording(root, log.record([("-c", program + "\nos._exit(0)\n", str(root))], root, folder / "log"))


def test_the_log_leads_to_what_is_in_the_folder(tmp_path: Path) -> None:
    explained = proof.explained(recorded(PROGRAM, tmp_path))
    disk = explained.disk()
    disk.apply(explained.records)
    assert disk.state(ALL, random.Random(0))["made/linked"] == b"ab"
    assert {"rows.sqlite-shm"} == disk.mapped()
    kept = disk.state(NOTHING, random.Random(0))
    assert kept["made/linked"] == b"ab" and "gone" not in kept


def test_calls_that_pass_the_recorder_by_are_noticed(tmp_path: Path) -> None:
    past = "ctypes.CDLL(None).syscall(18, fd, b'unseen', 6, ctypes.c_long(400))"
    if os.uname().machine != "x86_64":
        pytest.skip("the number of the system call pwrite64 is that of x86-64")
    with pytest.raises(Unsupported, match="made/file"):
        proof.explained(recorded(PROGRAM + past, tmp_path))

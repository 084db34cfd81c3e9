"""The folder of a DiskStore is private, has one user at a time, and keeps its secret."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvpool import PoolClosed
from kvpool.storage import FAILED
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.backends.disk import folder as folder_module
from kvpool.storage.backends.disk.database import VERSION
from kvpool.storage.backends.disk.slab import System
from kvpool.storage.store import Space
from tests.children import in_child
from tests.stores.lab import BLOCK_BYTES, begin_save, codes_of, keys_of, memory, open_queue, raising, returned, saved

SPACE = Space(bytes(16), memory(4))
CAPACITY = 8 * BLOCK_BYTES

FULL = System(posix_fallocate=raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))


def opened(path: Path) -> DiskStore:
    store = DiskStore(path, CAPACITY)
    store.open(SPACE)
    return store


FILES = ["lock", "secret", "slab", "rows.sqlite", "rows.sqlite-wal"]


@pytest.mark.parametrize("umask", [0, 0o777], ids=oct)
def test_files_are_of_the_user_alone_under_any_umask(tmp_path: Path, umask: int) -> None:
    folder, old = tmp_path / "store", os.umask(umask)
    try:
        with open_queue(DiskStore(folder, CAPACITY)) as queue:
            saved(queue, 2)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    finally:
        os.umask(old)
    assert modes.keys() >= {*FILES} and set(modes.values()) == {0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770, 0o707])
def test_a_folder_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"its mode is {mode:04o}"):
        opened(folder)
    assert not list(folder.iterdir())


def linked(path: Path) -> None:
    """Have the path lead to an empty file, or to the folder that was there, which is elsewhere."""
    elsewhere = path.with_name("elsewhere")
    if path.is_dir():
        path.rename(elsewhere)
    else:
        path.unlink(missing_ok=True)
        elsewhere.touch(0o600)
    path.symlink_to(elsewhere)


def shared(path: Path) -> None:
    path.touch()
    path.chmod(0o640)


UNSAFE: list[tuple[Callable[[Path], None], str, str]] = [
    *((shared, name, "its mode is 0640") for name in FILES),
    *((linked, name, "link|plain files") for name in ("", *FILES)),
    *((lambda path: os.chown(path, 12345, -1), name, "belongs to user 12345") for name in ("", "secret", "slab")),
]


@pytest.mark.parametrize(("change", "name", "message"), UNSAFE)
def test_what_others_can_reach_or_own_and_links_are_refused(
    tmp_path: Path, change: Callable[[Path], None], name: str, message: str
) -> None:
    if "user" in message and os.geteuid() != 0:
        pytest.skip("only root can give files away")
    folder = tmp_path / "store"
    opened(folder).close()
    change(folder / name if name else folder)
    with pytest.raises(PermissionError, match=message):
        opened(folder)
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.is_file() or not elsewhere.read_bytes()


def test_the_secret_stays_and_is_shown_nowhere(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "store", CAPACITY)
    secret = store.secret
    assert len(secret) == 32 and secret == (tmp_path / "store" / "secret").read_bytes()
    assert DiskStore(tmp_path / "store").secret == store.open(SPACE) == store.secret == secret
    assert secret.hex() not in repr(store) + repr(vars(store)) and repr(secret) not in repr(vars(store))
    with pytest.raises(BlockingIOError):
        _ = DiskStore(tmp_path / "store").secret
    store.close()
    assert store.secret == store.open(SPACE) == secret
    store.close()
    assert DiskStore(tmp_path / "other", CAPACITY).secret != secret


def test_a_path_that_is_not_a_folder_or_has_no_parent_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError, match="expected a folder"):
        opened(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="missing"):
        opened(tmp_path / "missing" / "store")


def test_a_second_store_of_this_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with open_queue(DiskStore(tmp_path / "store", CAPACITY)) as queue:
        for _ in range(2):
            with pytest.raises(BlockingIOError, match=str(os.getpid())):
                opened(tmp_path / "store")
        # The failed attempts have not ended the first store's lock.
        message = f"a store of process {os.getpid()} has this folder"
        in_child(lambda: pytest.raises(BlockingIOError, opened, tmp_path / "store").match(message))
        saved(queue, 2)
    opened(tmp_path / "store").close()


@pytest.mark.parametrize("removed", ["", "lock", "slab"])
@pytest.mark.parametrize("forks", [False, True], ids=["alone", "with a child that lives on"])
def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path: Path, forks: bool, removed: str) -> None:
    folder, (reading, writing) = tmp_path / "store", os.pipe()
    pid = os.fork()
    if not pid:
        try:
            held, child = opened(folder), os.fork() if forks else os.getpid()
            if child:
                os.write(writing, b"%d" % child)
            time.sleep(600 if held else 0)
        finally:
            os._exit(1)
    child = int(os.read(reading, 20))
    try:
        if removed:
            (folder / removed).unlink()
        left = set(os.listdir(folder))
        with pytest.raises(BlockingIOError, match=f"process {pid} has this folder"):
            opened(folder)
        assert set(os.listdir(folder)) <= left, "what was made for the attempt is gone"
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        opened(folder).close()
    finally:
        for process in {pid, child}:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def test_what_could_not_be_opened_leaves_no_folder_and_no_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir(0o700)
    for path in (tmp_path / "new", empty):
        store = DiskStore(path, CAPACITY, system=FULL)
        assert len(store.secret) == 32 and path.is_dir()
        with pytest.raises(OSError, match="the slab takes"):
            store.open(SPACE)
        with pytest.raises(ValueError, match="capacity"):
            DiskStore(path, 1).open(SPACE)
    assert os.listdir(tmp_path) == ["empty"] and not os.listdir(empty)
    used = tmp_path / "used"
    opened(used).close()
    before = sorted(os.listdir(used)), (used / "secret").read_bytes()
    with pytest.raises(ValueError, match="capacity"):
        DiskStore(used, 1).open(SPACE)
    assert before == (sorted(os.listdir(used)), (used / "secret").read_bytes())


def full_disk(call: str, number: int) -> SimpleNamespace:
    """``os`` for one module, in which the call with this number of one function fails."""
    calls = itertools.count()

    def limited(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return getattr(os, call)(*arguments, **options)

    return SimpleNamespace(**{**vars(os), call: limited})


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "fchmod", "chmod"])
def test_a_disk_that_is_full_at_any_step_keeps_nothing_of_the_attempt(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th call fails, for every n until an attempt makes no n-th call. The secret is asked for first, as for a
    pool."""
    failures = 0
    for number in range(100):
        monkeypatch.setattr(folder_module, "os", full_disk(call, number))
        store = DiskStore(tmp_path / "new", CAPACITY)
        try:
            assert len(store.secret) == 32
            store.open(SPACE)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            failures += 1
            assert not os.listdir(tmp_path), number
        else:
            store.close()
            break
    assert failures


def test_what_another_store_has_used_since_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "new", 900 << 40)
    secret = store.secret
    opened(tmp_path / "new").close()
    before = sorted(os.listdir(tmp_path / "new"))
    with pytest.raises(OSError, match="the slab takes"):
        store.open(SPACE)
    assert sorted(os.listdir(tmp_path / "new")) == before
    assert (tmp_path / "new" / "secret").read_bytes() == secret


GONE: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "removed, and made again": lambda folder: (shutil.rmtree(folder), opened(folder).close()),
    "moved": lambda folder: folder.rename(folder.with_name("elsewhere")),
    "its slab removed": lambda folder: (folder / "slab").unlink(),
    "its rows removed": lambda folder: (folder / "rows.sqlite").unlink(),
}


@pytest.mark.parametrize("kind", GONE)
def test_a_folder_that_has_gone_is_said_once_counted_and_not_saved_into(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    store = DiskStore(folder, CAPACITY)
    with open_queue(store) as queue:
        saved(queue, 2)
        assert not queue.stats().store["folder_gone"]
        GONE[kind](folder)
        for count in (1, 2):
            assert codes_of(begin_save(queue, 2, 10)) == [FAILED, FAILED]
            assert queue.stats().store["folder_gone"] == count
        warnings = [
            record
            for record in caplog.records
            if "removed or replaced" in record.message and record.name.endswith("disk_store")
        ]
        assert len(warnings) == 1 and warnings[0].levelname == "WARNING"
        job = queue.load(keys_of(queue, 2), np.array([4, 5]))
        assert returned(job).ok == 2, "what was saved before is still read"


def test_a_folder_that_goes_while_a_save_is_under_way_has_not_saved_it(tmp_path: Path) -> None:
    folder = tmp_path / "store"

    def gone(fd: int) -> None:
        os.fdatasync(fd)
        (folder / "slab").unlink()

    with open_queue(DiskStore(folder, CAPACITY, system=System(fdatasync=gone))) as queue:
        assert codes_of(begin_save(queue, 2)) == [FAILED, FAILED]


PARENT = """
import os, sys
import numpy as np
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.backends.disk.slab import System
from tests.stores.lab import open_queue, saved, raising
queue = open_queue(DiskStore(sys.argv[1], 64 * 4096))
saved(queue, 3)
child = os.fork()
if child:
    assert os.waitpid(child, 0)[1] == 0
    for first in range(3, 60, 3):
        saved(queue, 3, first)
    os._exit(0)
"""


@pytest.mark.exhaustive
def test_a_child_that_ends_does_no_harm(tmp_path: Path) -> None:
    """Its interpreter closes its copy of the connection to SQLite, while the parent's is in use."""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", PARENT, str(tmp_path / "store")], cwd=root, check=True)
    with open_queue(DiskStore(tmp_path / "store")) as queue:
        job = queue.load(keys_of(queue, 60), np.arange(60))
        assert job.wait(600) and job.ok == 60 and not queue.stats().store["damaged_files"]


def test_closing_twice_is_fine_and_later_calls_are_refused(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    with pytest.raises(BlockingIOError, match="open already"):
        store.open(SPACE)
    store.close()
    store.close()
    with pytest.raises(PoolClosed):
        store.find(np.zeros((1, 32), np.uint8))
    assert store.stats()["capacity"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "path: expected"),
        (("/tmp/x", 1 << 60), "capacity: expected"),
        (("/tmp/x", "1GiB"), "capacity: expected"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        DiskStore(*arguments)  # type: ignore[arg-type]


def test_blocks_of_another_size_are_refused_with_both_sizes(tmp_path: Path) -> None:
    opened(tmp_path / "store").close()
    with pytest.raises(ValueError, match="expected one with blocks of 8192 bytes, got blocks of 4096"):
        DiskStore(tmp_path / "store", CAPACITY).open(Space(bytes(16), memory(4, 8192)))
    opened(tmp_path / "store").close()


@pytest.mark.parametrize(("free", "blocks"), [(100, 50), (1 << 20, 64 << 10)], ids=["small", "large"])
def test_without_a_capacity_a_store_takes_half_of_what_is_free_and_at_most_64_gib(
    tmp_path: Path, free: int, blocks: int
) -> None:
    """Once it is made it stays as it is."""
    free_space = SimpleNamespace(f_bavail=free << 8, f_frsize=4096)
    system = System(posix_fallocate=lambda fd, start, nbytes: None, statvfs=lambda path: free_space)
    store, space = DiskStore(tmp_path / "store", system=system), Space(bytes(16), memory(1, 1 << 20))
    for _ in range(2):
        store.open(space)
        assert store.stats()["capacity"] == blocks
        store.close()
        free_space.f_bavail = 1 << 10


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
def test_a_folder_of_another_version_is_refused_and_stays_as_it_is(tmp_path: Path, version: int) -> None:
    folder = tmp_path / "store"

    def write(version: int) -> None:
        with closing(sqlite3.connect(folder / "rows.sqlite", isolation_level=None)) as rows:
            rows.execute("UPDATE store SET version = ?", (version,))

    with open_queue(DiskStore(folder, CAPACITY)) as queue:
        saved(queue, 8)
    write(version)
    with pytest.raises(ValueError, match=f"expected a store of version {VERSION}, got {version}"):
        open_queue(DiskStore(folder))
    write(VERSION)
    with open_queue(DiskStore(folder)) as queue:
        assert queue.stats().store["blocks"] == 8


def test_a_store_that_is_not_opened_leaves_a_folder_that_another_has_made_in_its_place(tmp_path: Path) -> None:
    place = tmp_path / "new"
    first, second = DiskStore(place), DiskStore(place)
    assert len(first.secret) == 32
    place.rename(tmp_path / "moved")
    secret = second.secret
    first.discard()
    assert second.secret == secret
    second.discard()
    assert not place.exists()

"""DiskStore: keeps blocks in a folder, so that they outlive the process.

SQLite keeps which slot has which key. The bytes, their eviction and the sharing of syncs are by hand: no library bounds
the room of blocks in bytes and reads them past the page cache into the memory of the caller.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays.layout import choice_argument, integer_argument
from kvpool.common.process import stays_here
from kvpool.errors import PoolClosed
from kvpool.state.arrays import LRU, POLICIES, PolicyName
from kvpool.storage.backends.disk import slot_index
from kvpool.storage.backends.disk.database import BYTES_MAX, VERSION, Database, GroupCommit, Header
from kvpool.storage.backends.disk.folder import DATABASE, EPOCHS, Folder, Made
from kvpool.storage.backends.disk.slab import Slab, System, stride_of
from kvpool.storage.backends.disk.slot_index import PER_PAGE, Index, Page, SlotTable
from kvpool.storage.store import (
    ABSENT,
    CANCELLED,
    EPOCH_BYTES,
    EPOCHS_MAX,
    FAILED,
    MAC_BYTES,
    MODEL_BYTES,
    OK,
    REFUSED,
    TAG_BYTES,
    Bytes,
    Rows,
    Space,
    Stop,
    Store,
)

DEFAULT_CAPACITY = 64 << 30
_FORGOTTEN_AT_ONCE = 4096
_COUNTS = "io_errors opened_blocks other_model_blocks dropped_rows damaged_files folder_gone commits"
_log = logging.getLogger(__name__)


class Commit(NamedTuple):
    """Changed pages, slots that are free when it is durable, and how many commits had failed when it began."""

    pages: list[Page]
    unclear: list[int]
    failed: int


class DiskStore(Store):
    """A ``Store`` in a folder of a local file system.

    Parameters
    ----------
    path : str or PathLike
        The folder. It is made if it is not there; its parent must be there. It gets the mode 0700, its files 0600.
    capacity : int, optional
        Bytes of blocks. The file for them is allocated when the store is opened. By default the size that the folder
        has already, and for a new one half of the free space of the file system, up to 64 GiB.
    threads : int, default 16
        Number of calls that run at a time, 1 to 256.
    policy : {"lru", "reuse", "agent", "adaptive"}, default "lru"
        Which block of the model is evicted next, as in a pool: keys that are loaded or saved by one call are a turn.
        What others than "lru" learn ends with the process.
    system : System, optional
        The calls of the operating system, for tests.

    Raises
    ------
    TypeError, ValueError
        For a bad argument. ``open`` raises ValueError for a folder with blocks of another size.
    OSError
        From ``open``, and from a call that fails. A folder that others can reach is a PermissionError. A folder that a
        process has open is a BlockingIOError, which names the process.

    Notes
    -----
    A block is *saved* when first its bytes and then the entry that names it are durable. Saves that wait share one
    fdatasync and one transaction. After a crash each saved block is there, unless it was evicted. A block that was
    being written, or evicted for one that was being written, may be named by an entry while its slot has other bytes:
    its MAC detects that. So after a crash the first save of a block that was there at the opening compares its bytes.
    Other bytes are written to another slot, and one transaction puts it in the place of the old one. Whenever power
    fails, the old bytes or the new ones are there.

    Any thread may call it. The constructor touches no file. A call that raises leaves no new folder and no new file. A
    damaged file is replaced and counted. If the folder or a file in it is removed later, that is logged once, and saves
    raise OSError. All calls raise ForkedProcess in a child of ``os.fork()``, and PoolClosed after ``close``.
    """

    name = "disk"
    clears_prefix = TAG_BYTES
    indexed = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity: int | None = None,
        *,
        threads: int = 16,
        policy: PolicyName = LRU,
        system: System | None = None,
    ) -> None:
        self._path = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if not isinstance(self._path, str) or not self._path:
            raise TypeError(f"path: expected the path of a folder, got {path!r:.80}")
        self._capacity = None if capacity is None else integer_argument("capacity", capacity, 1, BYTES_MAX)
        self.threads = integer_argument("threads", threads, 1, 256)
        self._policy = choice_argument("policy", policy, POLICIES)
        if system is not None and not isinstance(system, System):
            raise TypeError(f"system: expected a System, got {system!r:.80}")
        self._system = system or System()
        stays_here(self)
        # Taken by itself: ``stats`` is for any thread, see ``kvpool.common.threads.Bell``.
        self._lock, self._opened = threading.Lock(), False
        self._changed = threading.Condition(self._lock)
        self._counts = dict.fromkeys(_COUNTS.split(), 0)
        self._slots = self._failed_commits = self._failed_by = 0
        # What ``secret`` created. ``open`` removes it if it fails.
        self._made: Made | None = None
        self._epochs, self._renewing = dict[bytes, bytes](), threading.Lock()

    def __repr__(self) -> str:
        return f"DiskStore({self._path!r}, capacity={self._capacity}, threads={self.threads})"

    # -- begin -----------------------------------------------------------------------------------------

    @property
    def secret(self) -> bytes:
        """The secret of the folder, 32 bytes. It is made, with the folder, if it is not there.

        If ``open`` then fails before a store has used the folder, or ``discard`` is called, both are removed, and a
        later call makes another secret.

        Raises
        ------
        OSError
            What ``open`` raises for a folder that cannot be used.
        """
        if self._opened:
            return self._folder.secret()
        folder = Folder(self._path, self._made)
        try:
            secret = folder.secret()
        except BaseException:
            folder.discard()
            raise
        self._made = folder.made
        folder.close()
        return secret

    def discard(self) -> None:
        made, self._made = self._unused(), None
        if made is not None:
            with suppress(OSError):
                Folder(self._path, made).discard()

    def open(self, space: Space) -> bytes:
        if self._opened:
            raise BlockingIOError(errno.EAGAIN, "this store is open already", self._path)
        undo: list[Callable[[], None]] = []
        try:
            folder = Folder(self._path, self._unused())
            undo.append(folder.discard)
            secret, self._epochs = folder.secret(), self._read_epochs(folder)
            database = Database(folder, self._system)
            undo.append(database.close)
            self._counts["damaged_files"] += database.damaged
            self._slots = self._size(folder, database.header, space.block_bytes)
            slab = Slab(folder, self._slots, space.memory, self._system)
            undo.append(slab.close)
            check = hashlib.blake2b(b"kvpool disk store", key=secret, digest_size=16).digest()
            # Bytes without rows are lost: nobody knows whose they are.
            if database.header is None and not database.damaged and slab.had > 0:
                self._counts["damaged_files"] += 1
            header = Header(VERSION, space.block_bytes, self._slots, check, closed=0)
            self._read(database, header, slab.had, space.fingerprint)
            folder.sync()
        except BaseException:
            for close in reversed(undo):
                close()
            self._made = None
            raise
        self._made = None
        self._folder, self._database, self._slab = folder, database, slab
        self._commits, self._opened = GroupCommit(self._begin_commit, self._check_commit, self._end_commit), True
        return secret

    def _unused(self) -> Made | None:
        """What ``secret`` created, or None if a store has used the folder since, which leaves a database."""
        return None if os.path.lexists(os.path.join(self._path, DATABASE)) else self._made

    def _size(self, folder: Folder, header: Header | None, block_bytes: int) -> int:
        """How many slots there are. Raises ValueError."""
        if header is not None and header.version != VERSION:
            raise ValueError(f"path: expected a store of version {VERSION}, got {header.version} in {self._path}")
        if header is not None and header.block_bytes != block_bytes:
            sizes = f"expected one with blocks of {block_bytes} bytes, got blocks of {header.block_bytes}"
            raise ValueError(f"path: {sizes} in {self._path}: give each size a folder of its own, or delete this one")
        stride = stride_of(block_bytes)
        if self._capacity is None and header is not None:
            return header.slots
        free = self._system.statvfs(folder.path)
        wanted = self._capacity or min(DEFAULT_CAPACITY, free.f_bavail * free.f_frsize // 2)
        if wanted < stride:
            raise ValueError(f"capacity: expected at least one block, which takes {stride} bytes here, got {wanted}")
        return wanted // stride

    def _read(self, database: Database, header: Header, had: int, model: bytes) -> None:
        """Read what the database has. What cannot be there is dropped and counted."""
        same_secret = database.header is not None and database.header.secret == header.secret
        count = -(-self._slots // PER_PAGE) if same_secret else 0
        pages, others = database.pages(count)
        table, dropped = SlotTable(self._slots), PER_PAGE * others
        table.fill(pages)
        dropped += table.check(min(had, self._slots))
        in_doubt = database.header is not None and not database.header.closed
        database.begin(header, count)
        self._table, self._index = table, Index(table, model, in_doubt, self._policy)
        self._counts["dropped_rows"] += dropped + self._index.duplicates
        self._counts["opened_blocks"], self._counts["other_model_blocks"] = len(self._index), self._index.others

    def _read_epochs(self, folder: Folder) -> dict[bytes, bytes]:
        """The epoch of each model that has one."""
        size = MODEL_BYTES + EPOCH_BYTES
        data = folder.read(EPOCHS, size * EPOCHS_MAX + 1)
        if len(data) % size:
            folder.put_aside(EPOCHS)
            self._counts["damaged_files"] += 1
            return {}
        entries = (data[start : start + size] for start in range(0, len(data), size))
        return {entry[:MODEL_BYTES]: entry[MODEL_BYTES:] for entry in entries}

    # -- calls -----------------------------------------------------------------------------------------

    def epoch(self, model: bytes, new: bool) -> bytes:
        self._check()
        if new:
            self._check_folder()
            with self._renewing:
                others = [(name, epoch) for name, epoch in self._epochs.items() if name != model]
                epochs = dict([*others[1 - EPOCHS_MAX :], (model, os.urandom(EPOCH_BYTES))])
                self._folder.write(EPOCHS, b"".join(name + epoch for name, epoch in epochs.items()))
                self._epochs = epochs
        return self._epochs.get(model, b"")

    def find(self, keys: Bytes) -> Bytes:
        self._check()
        with self._lock:
            return np.array([OK if self._index.has(key.tobytes()) else ABSENT for key in keys], np.uint8)

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        self._check()
        codes, macs = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), MAC_BYTES), np.uint8)
        with self._lock:
            slots = self._index.pin([key.tobytes() for key in keys])
            places = [place for place, slot in enumerate(slots) if slot >= 0]
            macs[places] = self._table.entries["seal"][[slots[place] for place in places]]
        try:
            codes[[place for place, slot in enumerate(slots) if slot < 0]] = ABSENT
            pinned = [(place, slots[place]) for place in places]
            self._transfer(self._slab.read, pinned, rows, codes, stop)
        finally:
            with self._lock:
                self._index.unpin(slots)
        return codes, macs

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        self._check()
        self._check_folder()
        codes = np.full(len(keys), CANCELLED, np.uint8)
        names = [key.tobytes() for key in keys]
        left = list(range(len(keys)))
        while left and not stop():
            left = self._save(left, names, rows, macs, tag, limit, stop, codes)
        return codes

    def _save(
        self,
        places: list[int],
        names: list[bytes],
        rows: Rows,
        macs: Bytes,
        tag: bytes,
        limit: int,
        stop: Stop,
        codes: Bytes,
    ) -> list[int]:
        """Save what no other call is writing. Wait for what another writes, and return its places."""
        same = self._same(places, names, rows)
        with self._lock:
            answers = self._index.reserve([names[place] for place in places], tag, limit, same)
            failed = self._failed_commits
            for place, answer in zip(places, answers, strict=True):
                is_saved = answer == slot_index.HERE or answer >= 0 and self._index.is_written(names[place])
                codes[place] = OK if is_saved else REFUSED if answer == slot_index.REFUSED else CANCELLED
        reserved = [(place, slot) for place, slot in zip(places, answers, strict=True) if slot >= 0]
        new = [(place, slot) for place, slot in reserved if codes[place] != OK]
        try:
            self._transfer(self._slab.write, new, rows, codes, stop)
            self._finish(reserved, names, macs, codes, failed)
        except BaseException:
            with self._lock:
                self._index.abort([names[place] for place, _ in reserved if self._index.is_pending(names[place])])
                self._changed.notify_all()
            raise
        pending = [place for place, answer in zip(places, answers, strict=True) if answer == slot_index.PENDING]
        with self._lock:
            self._changed.wait_for(lambda: not any(self._index.is_pending(names[place]) for place in pending))
        return pending

    def _same(self, places: list[int], names: list[bytes], rows: Rows) -> set[bytes]:
        """Those of the keys whose entries are doubtful and whose slots have the bytes of their rows."""
        with self._lock:
            doubtful = [place for place in places if self._index.is_doubtful(names[place])]
            slots = self._index.pin([names[place] for place in doubtful])
        try:
            checked = zip(doubtful, slots, strict=True)
            return {names[place] for place, slot in checked if self._slab.has(slot, int(rows[place]))}
        finally:
            with self._lock:
                self._index.unpin(slots)

    def _finish(
        self, reserved: list[tuple[int, int]], names: list[bytes], macs: Bytes, codes: Bytes, failed: int
    ) -> None:
        """Make durable what was written, and give up what was not. The keys are still pending."""
        written = [place for place, _ in reserved if codes[place] == OK]
        with self._lock:
            self._index.abort([names[place] for place, _ in reserved if codes[place] != OK])
            # Another may have the rest now.
            reserved[:] = [(place, slot) for place, slot in reserved if codes[place] == OK]
            self._index.publish([names[place] for place in written], [macs[place].tobytes() for place in written])
            self._changed.notify_all()
        if not written:
            return
        self._commits.wait()
        self._check_folder()
        with self._lock:
            # A sync that fails is not made up for by the next one: what was written before it may be lost for good.
            if self._failed_commits != failed:
                raise OSError(self._failed_by, "a commit has failed since the blocks were written", self._path)
            self._index.complete([names[place] for place in written])
            self._changed.notify_all()

    def forget(self, keys: Bytes) -> int:
        self._check()
        return self._forget([key.tobytes() for key in keys])

    def clear(self, tag: bytes) -> int:
        self._check()
        with self._lock:
            names = self._index.tagged(tag)
        return self._forget(names)

    def _forget(self, names: list[bytes]) -> int:
        """Drop keys durably, a part at a time, so that others need not wait long for the lock."""
        count = 0
        for start in range(0, len(names), _FORGOTTEN_AT_ONCE):
            with self._lock:
                count += self._index.forget(names[start : start + _FORGOTTEN_AT_ONCE])
        # Also if none was there: the row of one that was evicted, or not saved, may not be cleared durably yet.
        self._commits.wait()
        return count

    def stats(self) -> dict[str, int]:
        with self._lock:
            index = self._index if self._opened else ()
            evicted = self._index.evicted if self._opened else 0
            return {"capacity": self._slots, "blocks": len(index), "evicted": evicted, **self._counts}

    def close(self) -> None:
        """End. The order of last use is written too, if that is possible. Closing twice is fine."""
        with self._lock:
            opened, self._opened = self._opened, False
        if not opened:
            return
        for end in (self._write_all, self._database.close):
            try:
                end()
            except OSError:  # What was promised is durable already.
                self._count_error()
        self._slab.close()
        self._folder.close()

    # -- inside ----------------------------------------------------------------------------------------

    def _check(self) -> None:
        if not self._opened:
            raise PoolClosed("the store is closed")

    def _check_folder(self) -> None:
        """Raise OSError if nobody would find what is saved."""
        if self._folder.is_there():
            return
        with self._lock:
            self._counts["folder_gone"] += 1
            first = self._counts["folder_gone"] == 1
        if first:
            _log.warning("%s, or a file in it, was removed or replaced: nothing is saved there any more", self._path)
        raise OSError(errno.ESTALE, "the folder or a file in it was removed or replaced", self._path)

    def _transfer(
        self,
        call: Callable[[list[int], list[int]], None],
        pairs: list[tuple[int, int]],
        rows: Rows,
        codes: Bytes,
        stop: Stop,
    ) -> None:
        """Read or write the slots of places, and set their codes. Raises the last error if there was nothing else."""
        failed: OSError | None = None
        # In the order of the file: neighbours are one call, whichever of them was reserved first.
        pairs = sorted(pairs, key=itemgetter(1))
        places, slots = [place for place, _ in pairs], [slot for _, slot in pairs]
        for run in self._slab.runs(slots):
            if stop():
                break
            where = places[run]
            try:
                call(slots[run], rows[where].tolist())
                codes[where] = OK
            except OSError as error:
                failed = error
                codes[where] = FAILED
                self._count_error()
        if failed is not None and not (codes[places] == OK).any():
            raise failed

    def _begin_commit(self, everything: bool = False) -> Commit:
        """Make all content durable. Returns what the database is to get then. One thread at a time."""
        with self._lock:
            pages = self._table.take(everything)
            begun = Commit(pages, self._index.take_unclear() if pages else [], self._failed_commits)
        with self._ending(begun):
            if pages:
                self._slab.sync()
        return begun

    def _check_commit(self, begun: Commit) -> None:
        """Who waits for this commit may need pages that the one before had. Raises OSError if that has failed."""
        with self._ending(begun):
            if self._failed_commits != begun.failed:
                raise OSError(self._failed_by, "the commit before this one has failed", self._path)

    def _end_commit(self, begun: Commit) -> None:
        """Make the entries durable. One thread at a time, in the order in which the commits began."""
        with self._ending(begun):
            if begun.pages:
                self._database.write(begun.pages)
        with self._lock:
            if begun.pages:
                self._counts["commits"] += 1
            self._index.committed(begun.unclear, durable=True)

    @contextmanager
    def _ending(self, begun: Commit) -> Iterator[None]:
        """Take back what does not become durable."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                self._counts["io_errors"] += self._opened  # ``close`` counts what fails in it
                self._failed_commits += 1
                self._failed_by = getattr(error, "errno", None) or errno.EIO
                self._table.give_back(begun.pages)
                self._index.committed(begun.unclear, durable=False)
            raise

    def _write_all(self) -> None:
        """Write what is not durable yet, and say that all rows name the bytes that are there, if that is known."""
        self._end_commit(self._begin_commit(everything=True))
        header = self._database.header
        if header is not None and not self._index.in_doubt:
            self._database.begin(header._replace(closed=1))

    def _count_error(self) -> None:
        with self._lock:
            self._counts["io_errors"] += 1

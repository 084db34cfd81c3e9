"""The folder of a DiskStore: private to one user, used by one store at a time, and the place of its secret."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from kvpool.storage.mac import SECRET_BYTES

LOCK = "lock"
SECRET = "secret"
SLAB = "slab"
DATABASE = "rows.sqlite"
EPOCHS = "epochs"
_FLOCK = "hhqqi"
"""``struct flock``: type, whence, start, length, process"""

_open: set[tuple[int, int, int]] = set()
"""(process, device, inode) of the folders that are open here. A record lock does not keep out its own process."""
_open_lock = threading.Lock()


class Made(NamedTuple):
    """What an attempt to open a folder has created: names of files, and whether the folder itself. ``place`` is the
    file system and the inode of the folder: another one may be at its path later."""

    names: tuple[str, ...]
    folder: bool
    place: tuple[int, int]


class Folder:
    """A folder that is made if it is not there, checked, and locked until ``close``.

    The file ``lock`` and the slab are locked: who removes one of them lets nobody in. The locks are record locks: the
    kernel ends them with the process that took them, also while forked children live on. So nobody may open and close
    these files meanwhile. Raises PermissionError for a folder or file that others can reach, BlockingIOError while
    another store has it, and other OSErrors, which name the file with its folder.
    """

    def __init__(self, path: str, made: Made | None = None) -> None:
        self.path, self._fd, self._locked, self._entry = path, -1, list[int](), (0, 0, 0)
        self._made, self._is_new = (list(made.names), made.folder) if made else (list[str](), False)
        self._held: list[str] = []
        self._place = (0, 0)
        self._files: dict[str, tuple[int, int]] = {}
        try:
            with suppress(FileExistsError), self._named():
                try:
                    os.mkdir(path, 0o700)
                except FileNotFoundError as error:
                    parent = os.path.dirname(os.path.abspath(path))
                    raise OSError(errno.ENOENT, f"expected that the folder {parent} exists", path) from error
                self._made, self._is_new, made = [], True, None
                os.chmod(path, 0o700)  # A umask may have taken away what the owner needs.
            self._fd = _open_folder(path)
            status = os.fstat(self._fd)
            self._place = status.st_dev, status.st_ino
            if made is not None and made.place != self._place:
                self._made, self._is_new = [], False
            check_private(path, status)
            _sync_path(os.path.dirname(os.path.abspath(path)))
            self._lock()
        except BlockingIOError:
            # Another store has the folder. It uses every file that this one could not lock.
            self._made, self._is_new = [name for name in self._made if name in self._held], False
            self.discard()
            raise
        except BaseException:
            self.discard()
            raise

    def _lock(self) -> None:
        status = os.fstat(self._fd)
        entry = os.getpid(), status.st_dev, status.st_ino
        with _open_lock:
            # Before a file is opened: closing it again would end the lock of the store that has it.
            if entry in _open:
                raise BlockingIOError(errno.EAGAIN, f"a store of this process ({entry[0]}) has this folder", self.path)
            for name in (LOCK, SLAB):
                self._locked.append(self.open(name))
                self._lock_file(self._locked[-1])
                self._held.append(name)
            _open.add(entry)
            self._entry = entry

    def _lock_file(self, fd: int) -> None:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            holder = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, wanted))[4] or "unknown"
            raise BlockingIOError(errno.EAGAIN, f"a store of process {holder} has this folder", self.path) from None

    def join(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def open(self, name: str, flags: int = 0) -> int:
        """Open a file for reading and writing, and make it if it is not there. It gets the mode 0600."""
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        with self._named(name):
            try:
                fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
                self._made.append(name)
            except FileExistsError:
                fd = os.open(name, flags, dir_fd=self._fd)
        try:
            if name in self._made:
                os.fchmod(fd, 0o600)
            status = os.fstat(fd)
            check_private(self.join(name), status)
        except BaseException:
            os.close(fd)
            raise
        self._files[name] = status.st_dev, status.st_ino
        return fd

    def is_there(self) -> bool:
        """Whether who opens this folder next finds the files that are used here."""
        try:
            folders = os.stat(self.path), os.fstat(self._fd)
            seen = {name: os.stat(name, dir_fd=self._fd, follow_symlinks=False) for name in (SLAB, DATABASE)}
        except OSError:
            return False
        same = all((status.st_dev, status.st_ino) == self._files[name] for name, status in seen.items())
        return same and os.path.samestat(*folders)

    def remove(self, name: str) -> bool:
        """Remove a file. Returns whether it was there."""
        try:
            with self._named(name):
                os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def put_aside(self, name: str) -> None:
        """Rename a damaged file, so that a person can look at it. An older one is replaced."""
        self._rename(name, f"{name}.damaged")

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self._fd)

    def secret(self) -> bytes:
        """The secret, which is made if it is not there. One of another length is put aside."""
        stored = self.read(SECRET, SECRET_BYTES + 1)
        if len(stored) == SECRET_BYTES:
            return stored
        if stored:
            self.put_aside(SECRET)
        made = os.urandom(SECRET_BYTES)
        self.write(SECRET, made)
        return made

    def read(self, name: str, most: int) -> bytes:
        """The first bytes of a small file. It is made, empty, if it is not there."""
        fd = self.open(name)
        try:
            return os.pread(fd, most, 0)
        finally:
            os.close(fd)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file durably. Whatever happens, it has what it had, or this."""
        self.remove(f"{name}.new")
        fd = self.open(f"{name}.new")
        try:
            if os.write(fd, content) != len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.join(name))
            os.fsync(fd)
        finally:
            os.close(fd)
        self._rename(f"{name}.new", name)

    def _rename(self, name: str, other: str) -> None:
        with self._named(name):
            os.rename(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()

    @contextmanager
    def _named(self, name: str = "") -> Iterator[None]:
        """Say which file of which folder an error is about, and what a read-only file system means here."""
        try:
            yield
        except OSError as error:
            reasons = {
                errno.EROFS: "a DiskStore needs a file system that it can write to",
                errno.ELOOP: "expected a folder or file, got a symbolic link",
            }
            number = errno.EPERM if error.errno == errno.ELOOP else error.errno
            raise OSError(number, reasons.get(error.errno or 0, error.strerror), self.join(name)) from None

    @property
    def made(self) -> Made:
        """What this object has created. A later ``Folder`` that gets it discards it too."""
        return Made(tuple(self._made), self._is_new, self._place)

    def discard(self) -> None:
        """Remove the files and the folder that were made here, and close. No other store can use a file meanwhile whose
        lock is held."""
        logs = [f"{DATABASE}-{log}" for log in ("wal", "shm", "journal")] if DATABASE in self._made else []
        for name in (*self._made, *logs):
            with suppress(OSError):
                self.remove(name)
        with suppress(OSError):
            if self._is_new:
                os.rmdir(self.path)
        self.close()

    def close(self) -> None:
        """Unlock. In a forked child this must not be called: the locks are the parent's."""
        for fd in (*self._locked, self._fd):
            if fd >= 0:
                os.close(fd)
        self._locked, self._fd = [], -1
        with _open_lock:
            _open.discard(self._entry)


def check_private(path: str, found: os.stat_result) -> None:
    """Raise PermissionError unless this is a plain file or folder of this user alone."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise PermissionError(errno.EPERM, "expected plain files in a plain folder, got another kind", path)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {found.st_uid}, not to {os.geteuid()}", path)
    if found.st_mode & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(errno.EPERM, f"its mode is {mode:04o}: others must have no access (chmod go=)", path)


def _open_folder(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(errno.EPERM, "expected a folder, got a symbolic link or a file", path) from None
        raise


def _sync_path(path: str) -> None:
    """Make the names in a folder durable, also in one that this user may not list."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        os.sync()
        return
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""The folder of a DiskStore: private to one user, used by one store at a time, and the place of its secret."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from contextlib import suppress

from kvpool.stores.seals import SECRET_BYTES

LOCK, SECRET = "lock", "secret"

_open: set[tuple[int, int, int]] = set()
"""(process, device, inode) of the folders that are open here. A record lock does not keep out its own process."""
_open_lock = threading.Lock()


class Folder:
    """A folder that is made if it is not there, checked, and locked until ``close``.

    The lock is a record lock: the kernel ends it with the process that took it, also while forked children live on.
    Raises PermissionError for a folder or file that others can reach, BlockingIOError while another store has it, and
    other OSErrors.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            os.chmod(path, 0o700)  # A umask may have taken away what the owner needs.
        self._fd = _open_folder(path)
        self._lock_fd, self._entry = -1, (0, 0, 0)
        try:
            check_private(path, os.fstat(self._fd))
            _sync_path(os.path.dirname(os.path.abspath(path)))
            self._lock()
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        found = os.fstat(self._fd)
        entry = os.getpid(), found.st_dev, found.st_ino
        with _open_lock:
            # Before the file is opened: closing it again would end the lock of the store that has it.
            if entry in _open:
                raise BlockingIOError(errno.EAGAIN, f"a store of this process ({entry[0]}) has this folder", self.path)
            self._lock_fd = self.open(LOCK)
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                holder = os.pread(self._lock_fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
                raise BlockingIOError(errno.EAGAIN, f"a store of process {holder} has this folder", self.path) from None
            _open.add(entry)
            self._entry = entry
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, b"%d\n" % os.getpid(), 0)

    def join(self, name: str) -> str:
        return os.path.join(self.path, name)

    def open(self, name: str, flags: int = 0) -> int:
        """Open a file for reading and writing, and make it if it is not there. It gets the mode 0600."""
        flags |= os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
            os.fchmod(fd, 0o600)
            return fd
        except FileExistsError:
            pass
        try:
            fd = os.open(name, flags, dir_fd=self._fd)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PermissionError(errno.EPERM, "accepted is no symbolic link", self.join(name)) from None
            raise
        try:
            check_private(self.join(name), os.fstat(fd))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def remove(self, name: str) -> bool:
        """Remove a file. Returns whether it was there."""
        try:
            os.unlink(name, dir_fd=self._fd)
        except FileNotFoundError:
            return False
        return True

    def put_aside(self, name: str) -> None:
        """Rename a damaged file, so that a person can look at it. An older one is replaced."""
        os.rename(name, f"{name}.damaged", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()

    def sync(self) -> None:
        """Make the names in the folder durable."""
        os.fsync(self._fd)

    def secret(self) -> bytes:
        """The secret, which is made if it is not there. One of another length is put aside."""
        fd = self.open(SECRET)
        try:
            found = os.pread(fd, SECRET_BYTES + 1, 0)
        finally:
            os.close(fd)
        if len(found) == SECRET_BYTES:
            return found
        if found:
            self.put_aside(SECRET)
        made = os.urandom(SECRET_BYTES)
        self.remove("secret.new")
        fd = self.open("secret.new")
        try:
            if os.write(fd, made) != SECRET_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.join(SECRET))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename("secret.new", SECRET, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        self.sync()
        return made

    def close(self) -> None:
        """Unlock. In a forked child this must not be called: the lock is the parent's."""
        for fd in (self._lock_fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._fd = -1
        with _open_lock:
            _open.discard(self._entry)


def check_private(path: str, found: os.stat_result) -> None:
    """Raise PermissionError unless this is a plain file or folder of this user alone."""
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise PermissionError(errno.EPERM, "accepted are plain files in a plain folder", path)
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
            raise PermissionError(errno.EPERM, "accepted is a folder, and no symbolic link", path) from None
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

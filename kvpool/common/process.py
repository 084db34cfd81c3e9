"""Objects with threads and sockets belong to the process that made them. After a fork, the child's copies have no
threads, although they look alive. A lock that another thread held at the fork stays locked there.

``Closing``: what is closed when its ``with`` block ends.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, TypeVar

from kvpool.common.errors import ForkedProcess
from kvpool.common.jit import LOCK

Own = TypeVar("Own", bound="Closing")


class Closing:
    """A context manager. Leaving it calls ``close``, also after an error."""

    __slots__ = ()

    def close(self) -> object:
        raise NotImplementedError

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Process:
    """The process that has made an object, and the locks of the object and of its parts.

    What has threads or sockets calls ``check`` at its door. What has none can serve a child, unless another thread held
    one of its locks at the fork: then it is in the middle of a change, and whoever takes one of them in the child gets
    ForkedProcess at once. ``what`` names the object there, ``remedy`` says what to do. ``lost``: why no child can use
    it, if that is so. The compiler of jitted functions is guarded too.
    """

    def __init__(self, what: str = "", remedy: str = "make one of its own after os.fork()") -> None:
        self._id, self._what, self._remedy, self.lost = os.getpid(), what, remedy, ""
        self._locks: list[tuple[weakref.ref[Any], str]] = []

    def check(self, what: object) -> None:
        """Raise ForkedProcess in any other process, where a wait would never end."""
        process_id = os.getpid()
        if process_id != self._id:
            whose = f"this {type(what).__name__} belongs to process {self._id}, and this is process {process_id}"
            raise ForkedProcess(f"{whose}: make one of its own after os.fork()")

    def guard(self, part: object, *names: str) -> None:
        """Guard the locks that are attributes of a part. The part is not kept alive."""
        self._locks += [(weakref.ref(part), name) for name in names]
        _guarded.add(self)

    def after_fork(self) -> None:
        """In a child: replace the locks if one of them is lost."""
        locks = [
            (part, name, getattr(part, name))
            for part, name in ((ref(), name) for ref, name in self._locks)
            if part is not None
        ]
        why = self.lost
        if not why and not all(map(_is_free, (lock for _, _, lock in locks))):
            why = f"another thread was in a call of this {self._what} when process {os.getppid()} forked this one"
        if why:
            lost = LostLock(f"{why}: {self._remedy}")
            for part, name, _ in locks:
                setattr(part, name, lost)


_guarded: weakref.WeakSet[Process] = weakref.WeakSet()
_compiler = Process("compiler", "compile first (kvpool.warm_up()), or fork before")
if LOCK is not None:
    _compiler.guard(*LOCK)


class LostLock:
    """Stands in a child for a lock that nobody can release there. Whoever takes it gets ForkedProcess."""

    def __init__(self, why: str) -> None:
        self._why = why

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise ForkedProcess(self._why)

    __enter__ = acquire

    def __exit__(self, *error: object) -> None:
        """Nothing to do: nobody is inside."""

    def _is_owned(self) -> bool:
        return False


def _is_free(lock: Any) -> bool:
    """Whether this thread can take a lock."""
    take = getattr(lock, "acquire", None)
    if take is None or isinstance(lock, LostLock):
        return True
    if not take(False):
        return False
    lock.release()
    return True


def _after_fork() -> None:
    for process in list(_guarded):
        process.after_fork()


os.register_at_fork(after_in_child=_after_fork)

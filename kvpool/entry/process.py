"""Objects with threads and sockets belong to the process that made them. After a fork, the child's copies have no
threads, although they look alive. A lock that another thread held at the fork stays locked there."""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from kvpool.errors import ForkedProcess


class Process:
    """The process that has made an object."""

    def __init__(self) -> None:
        self._id = os.getpid()

    def check(self, what: object) -> None:
        """Raise ForkedProcess in any other process, where a wait would never end."""
        here = os.getpid()
        if here != self._id:
            whose = f"this {type(what).__name__} belongs to process {self._id}, and this is process {here}"
            raise ForkedProcess(f"{whose}: make one of its own after os.fork()")


class LostLock:
    """Stands in a child for a lock that nobody can release there. Whoever takes it gets ForkedProcess."""

    def __init__(self, why: str) -> None:
        self._why = why

    def acquire(self, blocking: bool = True, timeout: float = -1) -> NoReturn:
        raise ForkedProcess(self._why)

    def __enter__(self) -> NoReturn:
        raise ForkedProcess(self._why)

    def __exit__(self, *error: object) -> None:
        """Nothing to do: nobody is inside."""


class ForkGuard:
    """The locks of an object and of its parts. If another thread holds one of them at a fork, the object is in the
    middle of a change. Then none of them can be taken in the child: each raises ForkedProcess at once.

    ``what`` names the object in the error. ``lost``: why no child can use the object, if that is so.
    """

    def __init__(self, what: str, lost: str = "") -> None:
        self._what, self.lost = what, lost
        self._locks: list[tuple[weakref.ref[Any], str]] = []
        _guards.add(self)

    def add(self, part: object, *names: str) -> None:
        """Guard the locks that are attributes of a part. The part is not kept alive."""
        self._locks += [(weakref.ref(part), name) for name in names]

    def after_fork(self) -> None:
        """In a child: replace the locks if one of them is lost."""
        found = [(part, name, getattr(part, name)) for part, name in ((ref(), name) for ref, name in self._locks)
                 if part is not None]  # fmt: skip
        why = self.lost
        if not why and not all(map(_is_free, (lock for _, _, lock in found))):
            why = f"another thread was in a call of this {self._what} when process {os.getppid()} forked this one"
        if why:
            lost = LostLock(f"{why}: make one of its own after os.fork()")
            for part, name, _ in found:
                setattr(part, name, lost)


_guards: weakref.WeakSet[ForkGuard] = weakref.WeakSet()


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
    for guard in list(_guards):
        guard.after_fork()


os.register_at_fork(after_in_child=_after_fork)

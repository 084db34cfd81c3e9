"""Objects with threads and sockets belong to the process that made them. After a fork, the child's copies have no
threads, although they look alive. A lock that another thread held at the fork stays locked there. One hook
sees to both.

``Closing``: what is closed when its ``with`` block ends.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from types import FunctionType
from typing import Any, NoReturn, TypeVar

from kvpool.common.jit import LOCK
from kvpool.errors import ForkedProcess

Own = TypeVar("Own", bound="Closing")


class Closing(ABC):
    """A context manager. Leaving it calls ``close``, also after an error."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """End it."""

    def __enter__(self: Own) -> Own:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def stays_here(part: object) -> None:
    """Mark an object with threads, sockets or memory that no child of ``os.fork()`` has. There, all its public methods
    and properties raise ForkedProcess, except methods that were bound before the fork."""
    _staying.add(part)


class Process:
    """The locks of an object that a child can use, and of its parts.

    If another thread held one of them at the fork, the object is in the middle of a change, and whoever takes one of
    them in the child gets ForkedProcess at once. ``what`` names the object there, ``remedy`` says what to do.
    ``lost``: why no child can use it, if that is so. The compiler of jitted functions is guarded too.
    """

    def __init__(self, what: str, remedy: str = "make one of its own after os.fork()") -> None:
        self._what, self._remedy, self.lost = what, remedy, ""
        self._locks: list[tuple[weakref.ref[Any], str]] = []

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
_staying: weakref.WeakSet[Any] = weakref.WeakSet()
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


def _left_behind(kind: type, message: str) -> type:
    """The class that objects of a class have in a child, which cannot use them."""

    def refuse(*arguments: object, **options: object) -> NoReturn:
        raise ForkedProcess(message)

    def get(part: object, name: str) -> Any:
        member = None if name[0] == "_" else getattr(kind, name, None)
        if isinstance(member, FunctionType):
            return refuse
        return refuse() if isinstance(member, property) else object.__getattribute__(part, name)

    return type(kind.__name__, (kind,), {"__getattribute__": get})


def _after_fork() -> None:
    for process in list(_guarded):
        process.after_fork()
    whose = f"belongs to process {os.getppid()}, and this is process {os.getpid()}: make one of its own after os.fork()"
    for part in list(_staying):
        part.__class__ = _left_behind(type(part), f"this {type(part).__name__} {whose}")
    _staying.clear()


os.register_at_fork(after_in_child=_after_fork)

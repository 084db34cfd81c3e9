"""What the tests of DiskStore share: a system whose calls fail or wait, and a folder as a crash leaves it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvpool.storage.backends.disk.slab import System


class Faulty:
    """``before[name]`` is called before each call of that name: "preadv", "pwritev", "fdatasync", "posix_fallocate",
    "connect", or "COMMIT" and other commands of SQLite, and ``after[name]`` after each such command that has worked.
    ``count[name]`` says how many there were."""

    def __init__(self) -> None:
        self.before: dict[str, Callable[[], Any]] = {}
        self.after: dict[str, Callable[[], Any]] = {}
        self.count: dict[str, int] = {}
        self.system = System(
            preadv=self._wrap("preadv", os.preadv),
            pwritev=self._wrap("pwritev", os.pwritev),
            fdatasync=self._wrap("fdatasync", os.fdatasync),
            posix_fallocate=self._wrap("posix_fallocate", os.posix_fallocate),
            connect=self._wrap("connect", lambda *a, **o: Connection(sqlite3.connect(*a, **o), self)),
        )

    def reached(self, name: str) -> None:
        self.count[name] = self.count.get(name, 0) + 1
        self.before.get(name, lambda: None)()

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.reached(name)
            return call(*arguments, **options)

        return wrapped


class Connection:
    """A connection to SQLite, of which each command can fail."""

    def __init__(self, inner: sqlite3.Connection, faulty: Faulty) -> None:
        self._inner, self._faulty = inner, faulty

    def execute(self, command: str, *arguments: Any) -> Any:
        name = command.split()[0]
        self._faulty.reached(name)
        done = self._inner.execute(command, *arguments)
        self._faulty.after.get(name, lambda: None)()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def crash(folder: Path, to: Path) -> Path:
    """The files as a process leaves them that is killed now. Locks and shared memory end with it."""
    shutil.copytree(folder, to)
    (to / "rows.sqlite-shm").unlink(missing_ok=True)
    return to

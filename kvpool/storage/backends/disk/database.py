"""Database: keeps the pages of a table, in SQLite. It is put aside if it is damaged. Calls of several threads share one
commit."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, Generic, NamedTuple, TypeVar

from kvpool.storage.backends.disk.folder import DATABASE, Folder, check_private
from kvpool.storage.backends.disk.slab import System
from kvpool.storage.backends.disk.slot_index import PAGE_BYTES, Page

Begun = TypeVar("Begun")
VERSION, BYTES_MAX = 3, 1 << 50
_LOGS = (f"{DATABASE}-wal", f"{DATABASE}-shm", f"{DATABASE}-journal")
_TABLES = (
    "CREATE TABLE pages (number INTEGER PRIMARY KEY, content BLOB)",
    "CREATE TABLE store (version INTEGER, block_bytes INTEGER, slots INTEGER, secret BLOB, closed INTEGER)",
)
_HEADER = (
    "SELECT * FROM store WHERE typeof(version) || typeof(block_bytes) || typeof(slots) || typeof(closed) = "
    "'integerintegerintegerinteger' AND typeof(secret) = 'blob' AND length(secret) <= 64"
)
_FITS = "number BETWEEN 0 AND ? AND typeof(content) = 'blob' AND length(content) = ?"
"""of a page. SQLite reads no content to find its length."""
_NOT_DAMAGE = ("disk i/o error", "disk is full", "unable to open", "readonly", "locked", "out of memory")


class Header(NamedTuple):
    """What a store was made with. ``secret``: a digest, by which a new secret is noticed. ``closed``: 1 if no
    row was doubtful when it was left."""

    version: int
    block_bytes: int
    slots: int
    secret: bytes
    closed: int


class Database:
    """The SQLite database of a store. One thread at a time.

    ``header``: what it has, or None if it is new. ``damaged``: whether an old one was put aside. Raises OSError.
    """

    def __init__(self, folder: Folder, system: System) -> None:
        self._folder, self._system, self.damaged = folder, system, False
        self._path = folder.join(DATABASE)
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            if _is_no_damage(error):
                raise self._error(error) from error
            self._put_aside()

    def _open(self) -> None:
        # SQLite gives its log and shared memory the mode of the database.
        os.close(self._folder.open(DATABASE))
        for name in _LOGS:
            _check_file(self._folder.join(name))
        self._connection = self._system.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            for setting in ("journal_mode = WAL", "synchronous = FULL", "trusted_schema = OFF", "cell_size_check = ON"):
                self._connection.execute(f"PRAGMA {setting}")
            self._check_tables()
            if self._connection.execute("PRAGMA quick_check(1)").fetchall() != [("ok",)]:
                raise sqlite3.DatabaseError("quick_check has found damage")
            self.header = self._header()
            self._folder.sync()
        except BaseException:
            self._connection.close()
            raise

    def _check_tables(self) -> None:
        """Make the tables of a new database. Raises DatabaseError for others than ours: views and triggers would run
        what somebody else has written."""
        statements = self._connection.execute("SELECT sql FROM sqlite_master ORDER BY sql LIMIT 3").fetchall()
        if not statements:
            for command in ("BEGIN IMMEDIATE", *_TABLES, "END"):
                self._connection.execute(command)
        elif statements != [(command,) for command in _TABLES]:
            raise sqlite3.DatabaseError("its tables are not those of a store")

    def _header(self) -> Header | None:
        """Raises DatabaseError for a header that nobody can have written."""
        count = self._connection.execute("SELECT count(*) FROM (SELECT 1 FROM store LIMIT 2)").fetchone()[0]
        if not count and not self._connection.execute("SELECT 1 FROM pages LIMIT 1").fetchall():
            return None
        rows = self._connection.execute(_HEADER).fetchmany(2)
        if count != 1 or len(rows) != 1 or min(rows[0][:3]) < 1 or rows[0][1] * rows[0][2] > BYTES_MAX:
            raise sqlite3.DatabaseError("the header is damaged")
        return Header(*rows[0])

    def _put_aside(self) -> None:
        """Begin anew. The damaged file stays under another name."""
        self._folder.put_aside(DATABASE)
        for name in _LOGS:
            self._folder.remove(name)
        self.damaged = True
        try:
            self._open()
        except sqlite3.Error as error:
            raise self._error(error) from error

    def pages(self, count: int) -> tuple[list[Page], int]:
        """The pages with the numbers [0, ``count``), in any order, and how many others there are. Their content is of
        the right length, and can be anything. Raises OSError."""
        try:
            fitting = self._connection.execute(
                f"SELECT number, content FROM pages WHERE {_FITS}", (count - 1, PAGE_BYTES)
            )
            rows = fitting.fetchall()
            return rows, self._connection.execute("SELECT count(*) FROM pages").fetchone()[0] - len(rows)
        except sqlite3.Error as error:
            raise self._error(error) from error

    def begin(self, header: Header, count: int | None = None) -> None:
        """Write the header, and drop all pages but [0, ``count``), durably. None: drop none. Raises OSError."""
        commands: list[tuple[str, Any]] = [("DELETE FROM store", [()])]
        commands.append(("INSERT INTO store VALUES (?, ?, ?, ?, ?)", [tuple(header)]))
        if count is not None:
            commands.append((f"DELETE FROM pages WHERE NOT ({_FITS})", [(count - 1, PAGE_BYTES)]))
        self._transaction(commands)
        self.header = header

    def write(self, pages: Iterable[Page]) -> None:
        """Keep these pages durably: all of them, or none if it raises OSError."""
        self._transaction([("INSERT OR REPLACE INTO pages VALUES (?, ?)", list(pages))])

    def _transaction(self, commands: list[tuple[str, Any]]) -> None:
        connection = self._connection
        try:
            if connection.in_transaction:  # A rollback has failed before.
                connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            for command, rows in commands:
                connection.executemany(command, rows)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            try:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            except sqlite3.Error:
                pass  # The next transaction tries again.
            raise self._error(error) from error

    def close(self) -> None:
        """End. Raises OSError."""
        try:
            self._connection.close()
        except sqlite3.Error as error:
            raise self._error(error) from error

    def _error(self, error: sqlite3.Error) -> OSError:
        number = errno.ENOSPC if "disk is full" in str(error) else errno.EIO
        return OSError(number, f"SQLite: {error}", self._path)


def _is_no_damage(error: sqlite3.Error) -> bool:
    return any(text in str(error).lower() for text in _NOT_DAMAGE)


def _check_file(path: str) -> None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    check_private(path, status)


class GroupCommit(Generic[Begun]):
    """Runs commits for all who wait for them: ``begin()``, then ``check`` and ``end`` with what that returns.
    Thread-safe.

    While one commit begins, others wait together for the next, which begins while this one ends. They end in turn. So
    the number of commits follows the speed of the disk, and not the number of calls. ``check`` raises if a commit may
    not end. It is called when the one before has ended, and before the next begins.
    """

    def __init__(
        self, begin: Callable[[], Begun], check: Callable[[Begun], None], end: Callable[[Begun], None]
    ) -> None:
        self._begin, self._check, self._end, self._lock = begin, check, end, threading.Lock()
        self._begins, self._ends = threading.Lock(), threading.Lock()
        self._next, self._led = Future[None](), False

    def wait(self) -> None:
        """Return after a commit that has begun after this call. Raises OSError if that has failed."""
        with self._lock:
            batch, leads, self._led = self._next, not self._led, True
        if leads:
            try:
                self._run()
                batch.set_result(None)
            except BaseException as error:  # Whatever it is, all who wait are told.
                batch.set_exception(error)
        failed = batch.exception()
        if failed is not None:
            raise OSError(getattr(failed, "errno", None) or 0, f"the commit has failed: {failed}")

    def _run(self) -> None:
        with ExitStack() as ending:
            with self._begins:
                with self._lock:
                    self._next, self._led = Future(), False
                begun = self._begin()
                ending.enter_context(self._ends)
                self._check(begun)
            self._end(begun)

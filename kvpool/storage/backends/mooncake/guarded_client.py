"""A client of a Mooncake cluster that does not crash the process: no call of the library before its setup, after its
end, or in a forked child."""

from __future__ import annotations

import atexit
import errno
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from typing import Any

from kvpool.common.arrays import Uint8s
from kvpool.common.process import stays_here
from kvpool.errors import ForkedProcess, PoolClosed

TESTED = "0.3.13.post1"
PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
SYSTEM_PACKAGES = {"libibverbs.so": "libibverbs1", "libcurl.so": "libcurl4", "libnuma.so": "libnuma1"}
"""Shared libraries that the wheel needs and does not bring, and the packages of Debian and Ubuntu that have them."""

ENVIRONMENT = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}
"""Settings that the library reads from the environment. Numbers that are there already stay."""

NO_SPACE = -200
BAD_ARGUMENT = -600
UNFINISHED = -703
NOT_THERE = -704
LEASE_ENDED = -707
CHECKSUM = -801
REASONS = {
    NO_SPACE: "no_space",
    BAD_ARGUMENT: "bad_argument",
    UNFINISHED: "unfinished",
    NOT_THERE: "not_there",
    LEASE_ENDED: "lease_ended",
    -800: "transfer_failed",
    CHECKSUM: "checksum",
    -900: "master_unreachable",
    -901: "master_late",
}
"""What the codes of the library mean, as far as a caller can meet them. The others are "other_error"."""

_TRANSFER_BOUNDS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")
_GIVES_UP_SECONDS = 50.0
_CONNECT_SECONDS, _LAST_WAIT_SECONDS, _EXIT_WAIT_SECONDS = 2.0, 120.0, 10.0
_METHODS = (
    "setup",
    "close",
    "register_buffer",
    "unregister_buffer",
    "batch_put_from_multi_buffers",
    "batch_get_into_multi_buffers",
    "batch_is_exist",
    "batch_remove",
    "remove_by_regex",
)


def library() -> Any:
    """The class MooncakeDistributedStore. Raises ImportError, which says what to install. Warns of versions with which
    kvpool was not tested."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ModuleNotFoundError as error:
        raise ImportError('MooncakeStore needs Mooncake: pip install ".[mooncake]"') from error
    except ImportError as error:
        missing = next((package for name, package in SYSTEM_PACKAGES.items() if name in str(error)), None)
        remedy = f": apt-get install {missing}" if missing else ""
        raise ImportError(f"Mooncake is installed, but cannot be loaded ({error}){remedy}") from error
    lacking = [name for name in _METHODS if not hasattr(MooncakeDistributedStore, name)]
    if lacking:
        raise ImportError(f"this version of Mooncake has no {lacking[0]}: pip install '{PACKAGES[0]}=={TESTED}'")
    installed = version()
    if installed != TESTED:
        warnings.warn(f"Mooncake {installed} was not tested with kvpool, {TESTED} was", RuntimeWarning, stacklevel=3)
    return MooncakeDistributedStore


def version() -> str | None:
    """The version that is installed."""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def reach(master: str, timeout: float = _CONNECT_SECONDS) -> str:
    """Connect to a master, and part again. Returns the address of this machine as the master sees it. Raises
    OSError."""
    host, _, port = master.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            return str(connection.getsockname()[0])
    except OSError as error:
        raise OSError(error.errno or errno.ETIMEDOUT, f"no Mooncake master at {master} ({error})") from error


_OPEN: weakref.WeakSet[Client] = weakref.WeakSet()
_USED_BY: dict[str, int] = {}
_KEPT: list[Any] = []
"""What must not be destroyed before the process ends."""


def _after_fork() -> None:
    """A child never destroys what its parent's clients are made of: that would crash it."""
    _KEPT.extend(client.inner for client in _OPEN)


os.register_at_fork(after_in_child=_after_fork)


def end_all() -> None:
    """Close what is open when the interpreter ends. A thread that it ends inside a call would crash the process."""
    for client in list(_OPEN):
        with suppress(ForkedProcess):
            client.close(_EXIT_WAIT_SECONDS)


atexit.register(end_all)


class Client:
    """One client of a cluster. Thread-safe. No lock is held during a call.

    Answers are lists with a code for each key: see ``REASONS``. Raises OSError if the master cannot be reached, and
    PoolClosed after ``close``. All calls raise ForkedProcess in a child of ``os.fork()``. So does the
    constructor if the parent has had a client.
    """

    def __init__(self, master: str, segment: int, hostname: str, metadata: str, protocol: str, devices: str) -> None:
        make = library()
        if _USED_BY.setdefault("process", os.getpid()) != os.getpid():
            problem = f"process {_USED_BY['process']} used Mooncake before it started this one by os.fork()"
            raise ForkedProcess(f"{problem}, in which it would hang: start processes by spawn")
        seen = reach(master)
        for name, value in ENVIRONMENT.items():
            setting = os.environ.get(name, "")
            if not setting.isdecimal() or not int(setting):
                os.environ[name] = value
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        self._lock = threading.Condition()
        stays_here(self)
        self._master, self._segment = master, segment
        self._closed, self._calls, self._memory = False, 0, list[Any]()
        self.inner: Any = make()
        _OPEN.add(self)
        code = self.inner.setup(hostname or seen, metadata, segment, 0, protocol, devices, master)
        if code:
            raise OSError(errno.ECONNREFUSED, f"Mooncake has not begun: code {code} of setup with the master {master}")

    @property
    def calls(self) -> int:
        """How many calls are under way."""
        return self._calls

    def register(self, memory: Uint8s) -> None:
        """Tell the library of memory that calls read and write. It is kept until ``close`` has returned."""
        code = self._call("register_buffer", memory.ctypes.data, memory.nbytes)
        if code:
            raise OSError(errno.EINVAL, f"Mooncake cannot register {memory.nbytes} bytes of memory: code {code}")
        self._memory.append(memory)

    def put(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Keep an object under each key. Its parts are at these addresses. 0 does not say that they are there."""
        return self._batch("batch_put_from_multi_buffers", keys, addresses, sizes)

    def get(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """Write the object of each key to these addresses. The answers are bytes, or codes below zero.

        Nothing is written after it has returned. The library waits a minute for transfers, and then gives up some that
        still run. Those of one machine run one after the other, and each ends soon after it stands still. So this waits
        until the last must have ended.
        """
        began = time.monotonic()
        answer = self._batch("batch_get_into_multi_buffers", keys, addresses, sizes)
        if time.monotonic() - began > _GIVES_UP_SECONDS and min(answer, default=0) < 0:
            time.sleep(len(keys) * sum(int(os.environ[name]) for name in _TRANSFER_BOUNDS) + 5.0)
        return answer

    def exist(self, keys: list[str]) -> list[int]:
        """1 or 0, or codes below zero. What is there has a lease from now on: it is not evicted while it lasts."""
        return self._batch("batch_is_exist", keys)

    def remove(self, keys: list[str]) -> list[int]:
        """Drop objects, also those with a lease. 0 for each that was there, or codes below zero."""
        return self._batch("batch_remove", keys, True)

    def remove_matching(self, pattern: str) -> int:
        """Drop all objects whose keys match, also those with a lease. Returns how many, or a code below zero."""
        return int(self._call("remove_by_regex", pattern, True))

    def close(self, timeout: float = _LAST_WAIT_SECONDS) -> None:
        """Wait for calls under way, and end. Holds the interpreter's lock for about a second, as the library does.

        The client is left to the end of the process, with the memory that it uses, if calls still hang after
        ``timeout`` seconds. So it is if memory is lent and the master is gone: the library would take 13 seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            over = self._lock.wait_for(lambda: not self._calls, timeout)
        inner, memory, self.inner, self._memory = self.inner, self._memory, None, []
        if not over or not self._can_leave():
            _KEPT.append((inner, memory))
            return
        for registered in memory:
            inner.unregister_buffer(registered.ctypes.data)
        inner.close()

    def _can_leave(self) -> bool:
        try:
            return not self._segment or bool(reach(self._master))
        except OSError:
            return False

    def _batch(self, name: str, keys: list[str], *arguments: Any) -> list[int]:
        answer = self._call(name, keys, *arguments)
        if not isinstance(answer, list) or len(answer) != len(keys):
            raise OSError(errno.EPROTO, f"Mooncake has answered {answer!r:.80} to {name} of {len(keys)} keys")
        return answer

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            if self._closed:
                raise PoolClosed("this client of Mooncake is closed")
            self._calls += 1
        try:
            return getattr(self.inner, name)(*arguments)
        finally:
            with self._lock:
                self._calls -= 1
                self._lock.notify_all()


def reason(code: int) -> str:
    """The name of a code below zero."""
    return REASONS.get(code, "other_error")


def every_reason() -> Iterable[str]:
    """The names that ``reason`` gives."""
    return (*REASONS.values(), "other_error")

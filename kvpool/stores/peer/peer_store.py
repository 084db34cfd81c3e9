"""PeerStore: keeps blocks in another process, which serves a store of its own with a StoreServer."""

from __future__ import annotations

import functools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ModuleNotFoundError as error:
    raise ImportError("PeerStore needs pyzmq: pip install 'kvpool[remote]'") from error

from kvpool.arrays.layout import integer_argument
from kvpool.entry.process import Process
from kvpool.remote.ending import end, new_context
from kvpool.remote.endpoints import ClientKeys, ClientPassword, check_endpoint
from kvpool.remote.frames import Failed, Malformed, Message, decode, encode
from kvpool.remote.remote_errors import printable
from kvpool.stores.peer.wire import (
    KEYS_MAX,
    StoreCall,
    StoreClear,
    StoreDone,
    StoreFind,
    StoreForget,
    StoreHello,
    StoreLoad,
    StoreSave,
    StoreWelcome,
    any_count,
    codes_seals_blocks,
    frame_bytes_max,
    frames_argument,
    only_codes,
    only_count,
    password,
)
from kvpool.stores.secrets import SharedSecret
from kvpool.stores.store import ABSENT, CANCELLED, OK, SEAL_BYTES, TAG_BYTES, Bytes, Rows, Space, Stop

CALL_BYTES_MAX = 4 << 20
"""The most bytes of blocks that this client sends or takes in one call, if a block is not larger."""
STOP_POLL_S = 0.05
"""How often a call that waits asks whether it should stop."""
_ENDED: dict[int, str] = {
    zmq.EVENT_CLOSED: "nobody listens there",
    zmq.EVENT_CONNECT_RETRIED: "nobody listens there",
    zmq.EVENT_DISCONNECTED: "the connection has ended",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not accept this client's secret or keys",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak this protocol, or not with a secret or keys",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "the connection has ended",
}
_log = logging.getLogger(__name__)


class Refusal(ValueError):
    """The server has blocks of another size."""


class _Stopped(Exception):
    """Nobody waits for the call any more."""


def _never() -> bool:
    return False


class PeerStore:
    """A ``Store`` in another process: see ``StoreServer``.

    Parameters
    ----------
    endpoint
        The server's ``endpoint``. Other machines only with ``keys``.
    secret, secret_file
        What all clients of this content share: 32 bytes, or the path of a file with 64 hex digits that only its owner
        may read. Keys and seals are made from it.
    keys
        CURVE keys of this client and of the server. The server need not know the secret then.
    timeout_ms
        How long one call may take.
    connections
        How many calls are made at a time, each on a connection of its own.

    Notes
    -----
    A connection that fails is given up, with all that may still come over it. The next call makes a new one. ``open``
    needs no server: without one it logs a warning, and calls fail until there is one. It raises ValueError if the
    server has blocks of another size, and PermissionError if it does not let this client in.

    Thread-safe. Each connection is used by one thread at a time. Calls raise OSError, and ForkedProcess in a child of
    ``os.fork()``. The constructor raises TypeError, ValueError, OSError for a file that cannot be read, and ImportError
    without pyzmq.
    """

    name = "peer"
    clears = TAG_BYTES
    lasting = True

    def __init__(
        self, endpoint: str, *, secret: bytes | None = None, secret_file: str | os.PathLike[str] | None = None,
        keys: ClientKeys | None = None, timeout_ms: int = 5_000, connections: int = 2,
    ) -> None:  # fmt: skip
        self._endpoint = check_endpoint(endpoint, keys)
        self._secret = SharedSecret(secret, secret_file)
        self._door = keys or ClientPassword(password(self._secret))
        self._timeout_ms = integer_argument("timeout_ms", timeout_ms, 1, 600_000)
        self.threads = integer_argument("connections", connections, 1, 64)
        self._process, self._lock = Process(), threading.Lock()
        self._context: zmq.Context[Any] | None = None
        self._idle: list[Connection] = []
        self._made = self._busy = self._failed = self._era = 0
        self._session = os.urandom(16).hex()

    @property
    def secret(self) -> bytes:
        """What keys and seals are made from, 32 bytes: the same for all clients with this secret."""
        return self._secret.derived(b"kvpool.storeseal")

    def __repr__(self) -> str:
        return f"PeerStore({self._endpoint!r})"

    # -- the store ---------------------------------------------------------------------------------

    def open(self, space: Space) -> bytes:
        self._process.check(self)
        self._memory, self._block_bytes = space.memory, space.block_bytes
        self._context = new_context()
        try:
            with self._connection(_never):
                pass
        except (Refusal, PermissionError):
            self.close()
            raise
        except OSError as error:
            _log.warning("the store is not there, and is asked again by each call: %s", error)
        return self.secret

    def find(self, keys: Bytes) -> Bytes:
        codes = np.full(len(keys), ABSENT, np.uint8)
        for part in _parts(len(keys), KEYS_MAX):
            codes[part] = self._call(StoreFind, [keys[part]], only_codes)
        return codes

    def save(self, keys: Bytes, rows: Rows, seals: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        codes = np.full(len(keys), CANCELLED, np.uint8)
        with suppress(_Stopped):
            for part in _parts(len(keys), self._blocks_per_call(stop)):
                # A copy: what is under way may outlive the call, and the rows may change then.
                frames = [keys[part], seals[part], self._memory[rows[part]]]
                era = {"session": self._session, "era": self._era}
                codes[part] = self._call(StoreSave, frames, only_codes, stop, tag=tag.hex(), limit=limit, **era)
        return codes

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        codes, seals = np.full(len(keys), CANCELLED, np.uint8), np.zeros((len(keys), SEAL_BYTES), np.uint8)
        with suppress(_Stopped):
            for part in _parts(len(keys), self._blocks_per_call(stop)):
                read = partial(codes_seals_blocks, block_bytes=self._block_bytes)
                codes[part], seals[part], blocks = self._call(StoreLoad, [keys[part]], read, stop)
                self._memory[rows[part][codes[part] == OK]] = blocks
        return codes, seals

    def forget(self, keys: Bytes) -> int:
        era = self._next_era()
        return sum(
            int(self._call(StoreForget, [keys[part]], only_count, **era)) for part in _parts(len(keys), KEYS_MAX)
        )

    def clear(self, tag: bytes) -> int:
        return int(self._call(StoreClear, [], any_count, tag=tag.hex(), **self._next_era()))

    def stats(self) -> dict[str, int]:
        self._process.check(self)
        with self._lock:
            open_now = len(self._idle) + self._busy
            return {"connections": open_now, "connected": self._made, "failed_calls": self._failed}

    def close(self) -> None:
        """Disconnect. Content stays with the server."""
        self._process.check(self)
        with self._lock:
            connections, self._idle = self._idle, []
            context, self._context = self._context, None
        for connection in connections:
            connection.close()
        if context is not None:
            end(context)

    # -- connections -------------------------------------------------------------------------------

    def _call(
        self, kind: type[StoreCall], frames: list[Any], read: Callable[..., Any], stop: Stop = _never, **fields: Any
    ) -> Any:
        """Make one call. Returns what ``read`` makes of the answer."""
        with self._connection(stop) as connection:
            message = kind(connection.number(), self._timeout_ms, **fields)
            done, answer = connection.ask(message, frames, StoreDone, stop)
            return read(done.count, answer, len(frames[0]) if frames else 0)

    def _next_era(self) -> dict[str, Any]:
        """What was saved until now, and reaches the server later, is not kept there."""
        with self._lock:
            self._era += 1
            return {"session": self._session, "era": self._era}

    def _blocks_per_call(self, stop: Stop) -> int:
        with self._connection(stop) as connection:
            return connection.blocks

    @contextmanager
    def _connection(self, stop: Stop) -> Iterator[Connection]:
        """A connection that nobody else uses meanwhile. An error ends it."""
        self._process.check(self)
        connection = self._taken()
        try:
            if not connection.blocks:
                connection.greet(stop)
                with self._lock:
                    self._made += 1
            yield connection
        except BaseException as error:
            with self._lock:
                self._busy -= 1
                self._failed += not isinstance(error, _Stopped)
            connection.close()
            if isinstance(error, Malformed):
                raise ConnectionError(f"{self._endpoint} sent {error}") from None
            raise
        with self._lock:
            self._busy -= 1
            self._idle.append(connection)

    def _taken(self) -> Connection:
        """An idle connection that has not ended, or else a new one."""
        with self._lock:
            if self._context is None:
                raise ValueError("the store is closed, or was not opened")
            connection = None
            while self._idle and connection is None:
                connection = self._idle.pop()
                if connection.ended():
                    connection.close()
                    connection = None
            if connection is None:
                connection = Connection(self._context, self._endpoint, self._door, self._block_bytes, self._timeout_ms)
            self._busy += 1
            return connection


class Connection:
    """A socket of a PeerStore, and one call at a time on it. Only for one thread at a time."""

    def __init__(
        self, context: zmq.Context[Any], endpoint: str, door: ClientKeys | ClientPassword, block_bytes: int,
        timeout_ms: int,
    ) -> None:  # fmt: skip
        self._endpoint, self._block_bytes, self._timeout_ms = endpoint, block_bytes, timeout_ms
        self._number, self.blocks = 0, 0
        self._socket = socket = context.socket(zmq.DEALER)
        socket.linger, socket.ipv6 = 0, "[" in endpoint
        # Another connection could not know what was under way on this one.
        socket.reconnect_ivl = -1
        # One answer is awaited at a time.
        socket.rcvhwm = 4
        self._most = max(1, CALL_BYTES_MAX // block_bytes)
        socket.maxmsgsize = frame_bytes_max(self._most, block_bytes)
        door.apply(socket)
        self._monitor = socket.get_monitor_socket(functools.reduce(operator.or_, _ENDED))
        socket.connect(endpoint)

    def number(self) -> int:
        """A number for the next message."""
        self._number += 1
        return self._number

    def greet(self, stop: Stop) -> None:
        """Learn how many ``blocks`` a call may have. Raises Refusal, and what ``ask`` raises."""
        welcome, frames = self.ask(StoreHello(self.number(), self._block_bytes), [], StoreWelcome, stop)
        frames_argument(frames, 0)
        if not 1 <= welcome.blocks_per_call <= KEYS_MAX:
            raise Malformed(f"calls of {welcome.blocks_per_call} blocks")
        self.blocks = min(welcome.blocks_per_call, self._most)

    def ask(self, message: Message, frames: list[Any], kind: type[Any], stop: Stop) -> tuple[Any, list[memoryview]]:
        """Send a message and wait for its answer. Raises OSError, Malformed, Refusal, and _Stopped."""
        with suppress(zmq.Again):  # without a connection; the monitor tells why
            self._socket.send_multipart([encode(message), *frames], zmq.NOBLOCK, copy=False)
        self._wait(stop)
        header, *rest = [frame.buffer for frame in self._socket.recv_multipart(copy=False)]
        answer = decode(header, (kind, Failed))
        if answer.id != message.id:
            raise Malformed(f"an answer to message {answer.id}, which does not wait for one")
        if isinstance(answer, Failed):
            error = Refusal if answer.code == "size" else OSError
            raise error(f"{self._endpoint}: {printable(answer.reason)}")
        return answer, rest

    def ended(self) -> bool:
        """Whether the connection has ended while nobody used it."""
        return bool(self._monitor.poll(0))

    def _wait(self, stop: Stop) -> None:
        """Wait until there is a message."""
        end = time.monotonic() + self._timeout_ms / 1e3
        while True:
            left = end - time.monotonic()
            ready = zmq.select([self._socket, self._monitor], [], [], max(0.0, min(left, STOP_POLL_S)))[0]
            if self._socket in ready:
                return
            if self._monitor in ready:
                event = int(recv_monitor_message(self._monitor)["event"])
                error = PermissionError if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else ConnectionError
                raise error(f"{self._endpoint}: {_ENDED[event]}")
            if stop():
                raise _Stopped
            if left <= 0:
                raise TimeoutError(f"{self._endpoint} did not answer for {self._timeout_ms} ms")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)


def _parts(count: int, most: int) -> list[slice]:
    """0 to ``count``, in parts of up to ``most``."""
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]

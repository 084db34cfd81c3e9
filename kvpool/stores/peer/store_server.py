"""StoreServer: serves a store of this process to the PeerStores of others."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

try:
    import zmq
except ModuleNotFoundError as error:
    raise ImportError("StoreServer needs pyzmq: pip install 'kvpool[remote]'") from error

from kvpool.arrays.layout import integer_argument
from kvpool.entry.interrupt import Bell, DeferSignals
from kvpool.entry.process import Process
from kvpool.remote.connections import Connections
from kvpool.remote.ending import end, new_context
from kvpool.remote.endpoints import ServerKeys, ServerPassword, check_endpoint
from kvpool.remote.frames import Failed, Malformed, Message, encode
from kvpool.stores.peer.served_calls import Eras, Request, ServedStats, StoreCalls
from kvpool.stores.peer.wire import DROPS, KEYS_MAX, StoreHello, StoreSave, StoreWelcome, frame_bytes_max, password
from kvpool.stores.secrets import SharedSecret
from kvpool.stores.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

_ANSWERS = "inproc://answers"
_log = logging.getLogger(__name__)


class StoreServer:
    """Serves one store to each ``PeerStore`` of other processes, over ZeroMQ. A context manager.

    Parameters
    ----------
    store
        Any store. It is opened here, and closed by ``close``. Nobody else may use it meanwhile.
    endpoint
        ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    block_bytes
        The size of a block. Clients with blocks of another size are refused.
    secret, secret_file
        The secret of the clients, 32 bytes, or the path of a file with 64 hex digits. Only a password that is derived
        from it is kept.
    keys
        CURVE keys of the server and of its clients, in the place of a secret. The server does not know the clients'
        secret then, and can make no block that counts.
    call_bytes
        The most bytes of blocks that one call may have; at least one block is accepted.
    calls_waiting
        How many calls may wait for the store. While as many wait, no further message is read.
    connections
        The most clients; others are refused.
    stall_ms
        A TCP client that reads nothing for so long is disconnected. 0: never.

    Notes
    -----
    The server keeps keys, seals and bytes as they come. It checks the form of messages, and believes nothing else, for
    it need not: clients check what they load. Blocks of several models and of several groups of layers may be on one
    server, if they have one size.

    Memory, beside the store's own: at most (2 ``store.threads`` + ``calls_waiting`` + 4 ``connections``) x
    ``call_bytes``. Clients that were let in trust each other: ZeroMQ bounds each frame of a message, but not how many a
    message has.

    ``endpoint`` is where it listens. Thread-safe. Raises TypeError and ValueError for bad arguments, what
    ``store.open`` raises, ImportError without pyzmq, and zmq.ZMQError for an endpoint that is not available. All calls
    raise ForkedProcess in a child of ``os.fork()``.
    """

    def __init__(
        self, store: Store, endpoint: str = "tcp://127.0.0.1:*", *, block_bytes: int, secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None, keys: ServerKeys | None = None, call_bytes: int = 4 << 20,
        calls_waiting: int = 16, connections: int = 64, stall_ms: int = 5_000,
    ) -> None:  # fmt: skip
        check_endpoint(endpoint, keys)
        size = integer_argument("block_bytes", block_bytes, 1, 1 << 31)
        blocks = min(max(integer_argument("call_bytes", call_bytes, 1, 1 << 31) // size, 1), KEYS_MAX)
        waiting = integer_argument("calls_waiting", calls_waiting, 1, 1 << 16)
        most = integer_argument("connections", connections, 1, 1 << 16)
        stall = integer_argument("stall_ms", stall_ms, 0, (1 << 31) - 1)
        if keys is not None and (secret is not None or secret_file is not None):
            raise ValueError("secret, secret_file, keys: accepted is one of them")
        door = keys or ServerPassword(password(SharedSecret(secret, secret_file)))
        self._process, self._store, self._calls_most = Process(), store, waiting + store.threads
        # Taken by itself, and not by way of a condition: see ``Bell``.
        self._lock, self._waiting, self._saves, self._eras = threading.Lock(), deque[Request](), 0, Eras()
        self._changed, self._bell = threading.Condition(self._lock), Bell()
        self._under_way, self._closing = 0, False
        self._stopping, self._ended = threading.Event(), False
        self._calls = StoreCalls(store, size, blocks)
        self._context: zmq.Context[Any] = new_context()
        self._authenticator = None
        try:
            self._authenticator = door.authenticator(self._context)
            self._answers = self._context.socket(zmq.PULL)
            self._answers.rcvhwm = 0
            self._answers.bind(_ANSWERS)
            self._wake = self._sender()
            self._socket = self._listen(endpoint, door, most, stall)
            self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self._give_up()
            raise
        self._threads = store.threads + 1
        threads = [threading.Thread(target=self._run, name="kvpool-store-server", daemon=True)]
        for number in range(store.threads):
            name = f"kvpool-store-server-{number}"
            threads.append(threading.Thread(target=self._work, args=(number,), name=name, daemon=True))
        for thread in threads:
            thread.start()

    def _listen(self, endpoint: str, door: Any, connections: int, stall_ms: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.ROUTER)
        socket.linger, socket.ipv6 = 0, "[" in endpoint
        # An answer to a client that has gone, or reads nothing, is an error here instead of being dropped in silence.
        socket.router_mandatory = True
        # A client has one call under way on each connection. ZeroMQ holds one message more each way.
        socket.sndhwm, socket.rcvhwm = 1, 2
        socket.maxmsgsize = frame_bytes_max(self._calls.blocks_per_call, self._calls.block_bytes)
        if stall_ms and endpoint.startswith("tcp:"):
            socket.tcp_maxrt = stall_ms
        door.apply(socket)
        self._connections = Connections(socket, connections, guarded=True)
        socket.bind(endpoint)
        return socket

    # -- for other threads -----------------------------------------------------------------------

    def stats(self) -> ServedStats:
        """Figures of now. Never waits for the store."""
        self._process.check(self)
        return replace(self._calls.stats(), under_way=self._under_way, connections_refused=self._connections.refused)

    @property
    def connections(self) -> int:
        """How many connections clients have now."""
        return len(self._connections)

    def close(self, timeout: float = 10.0) -> bool:
        """Disconnect all clients, ask calls under way to stop, wait for them, and close the store.

        Returns False if a call still hangs after ``timeout`` seconds. The store is closed when that call returns. May
        be called again.
        """
        self._process.check(self)
        with DeferSignals():
            with self._lock:
                begins, self._closing = not self._closing, True
                self._stopping.set()
                self._changed.notify_all()
            if begins:
                with suppress(zmq.ZMQError):  # the socket's thread has ended by itself
                    self._wake.send(b"", zmq.NOBLOCK)
        return self._bell.wait_for(lambda: self._ended, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread of the socket ------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._answers, zmq.POLLIN)
        poller.register(self._connections.events, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                poller.register(self._socket, zmq.POLLIN if self._under_way < self._calls_most else 0)
                ready = dict(poller.poll())
                self._connections.poll()
                if self._answers in ready:
                    client, *frames = self._answers.recv_multipart(copy=False)
                    if frames:
                        self._under_way -= 1
                        self._send(client, frames)
                if self._socket in ready:
                    self._under_way += self._take()
        finally:
            self._stopping.set()
            self._connections.close()
            self._socket.close(linger=0)
            with self._lock:
                self._changed.notify_all()
            self._thread_ends()

    def _take(self) -> int:
        """Read one message. Returns how many calls it has begun."""
        try:
            client, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return 0
        self._connections.heard(client)
        try:
            request = self._calls.parse(client.bytes, [frame.buffer for frame in frames])
            if isinstance(request, StoreHello):
                self._answer_hello(client, request)
                return 0
        except Malformed as error:
            self._calls.count(malformed=1)
            self._send(client, [encode(Failed(error.id, "malformed", str(error)))])
            return 0
        with self._lock:
            self._waiting.append(request)
            self._changed.notify()
        return 1

    def _answer_hello(self, client: Any, hello: StoreHello) -> None:
        calls = self._calls
        answer: Message = StoreWelcome(hello.id, calls.blocks_per_call)
        if hello.block_bytes != calls.block_bytes:
            calls.count(refused=1)
            reason = f"blocks of {hello.block_bytes} bytes: this server has blocks of {calls.block_bytes}"
            answer = Failed(hello.id, "size", reason)
        self._send(client, [encode(answer)])

    def _send(self, client: Any, frames: list[Any]) -> None:
        try:
            self._socket.send_multipart([client, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._calls.count(dropped=1)

    # -- the threads that call the store -----------------------------------------------------------

    def _work(self, number: int) -> None:
        with self._sender() as sender:
            while (request := self._next()) is not None:
                try:
                    answer, frames = self._calls.answer(request, number, self._stopping.is_set)
                except Exception as error:  # A store that fails in any way must not end the thread.
                    self._calls.count(failed=1)
                    reason = f"{type(error).__name__}: {error}"[:1000]
                    answer, frames = Failed(request.message.id, "store", reason), []
                if isinstance(request.message, StoreSave):
                    with self._lock:
                        self._saves -= 1
                        self._changed.notify()
                with suppress(zmq.Again):  # the socket's thread has ended
                    sender.send_multipart([request.client, encode(answer), *frames], zmq.NOBLOCK, copy=False)
        self._thread_ends()

    def _next(self) -> Request | None:
        """Wait for a call to make. Returns None when there will be none."""
        with self._lock:
            while not self._stopping.is_set():
                place = self._first()
                if place is not None:
                    request = self._waiting[place]
                    del self._waiting[place]
                    message = request.message
                    if isinstance(message, StoreSave):
                        self._saves += 1
                        return request._replace(stale=self._eras.is_over(message))
                    if isinstance(message, DROPS):
                        self._eras.drop(message)
                        self._changed.notify_all()
                    return request
                self._changed.wait(0.5 if self._waiting else None)
        return None

    def _first(self) -> int | None:
        """The place of the next call that may begin. The lock is held.

        Saves leave one thread to all other calls, so that a save that hangs keeps no load waiting. A drop waits for the
        saves that came before it, and those that come after it wait for it to begin.
        """
        may_save = self._saves < max(1, self._store.threads - 1)
        saves = self._saves > 0
        for place, request in enumerate(self._waiting):
            saving, drops = isinstance(request.message, StoreSave), isinstance(request.message, DROPS)
            over = time.monotonic() >= request.deadline  # its answer takes no time, and makes room
            if over or not (saving and not may_save or drops and saves):
                return place
            saves, may_save = saves or saving, may_save and not drops
        return None

    def _sender(self) -> zmq.Socket[bytes]:
        """A socket of this thread, to wake the socket's thread."""
        sender = self._context.socket(zmq.PUSH)
        sender.sndhwm, sender.linger = 0, 0
        sender.connect(_ANSWERS)
        return sender

    def _thread_ends(self) -> None:
        """The last thread to end closes the store."""
        with self._lock:
            self._threads -= 1
            if self._threads:
                return
        self._give_up()

    def _give_up(self) -> None:
        try:
            self._calls.close()
        finally:
            if self._authenticator is not None:
                self._authenticator.stop()
            end(self._context)
            self._ended = True
            self._bell.ring()

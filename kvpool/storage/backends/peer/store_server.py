"""StoreServer: serves a store of this process to the PeerStores of others."""

from __future__ import annotations

import logging
import math
import mmap
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

try:
    from kvpool.remote.server import ClientSession, Refused, Server
except ModuleNotFoundError as error:
    raise ImportError('StoreServer needs pyzmq: pip install ".[remote]"') from error

from kvpool.common.arguments import number_argument
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.remote.listener import ServerKeys, ServerSecret, check_endpoint
from kvpool.remote.session import NO_MAC, Failed, Malformed, Message, Received, frames_argument
from kvpool.storage.backends.peer.peer_store import (
    CALLS,
    DROPS,
    EPOCHS,
    KEYS_MAX,
    StoreCall,
    StoreDone,
    StoreHello,
    StoreWelcome,
    codes_of,
    frame_bytes_max,
    rows_of,
    wire_key,
)
from kvpool.storage.backends.shared_secret import SharedSecret
from kvpool.storage.store import (
    CANCELLED,
    FAILED,
    KEY_BYTES,
    MAC_BYTES,
    MODEL_BYTES,
    OK,
    TAG_BYTES,
    Bytes,
    Space,
    Store,
    store_argument,
)

WAIT_MS_MAX = 600_000
_SESSIONS_MAX = 4096
_FINGERPRINT = bytes(16)
"""The server's store has keys of any model. They differ because the clients derive them from the model."""
_log = logging.getLogger(__name__)


@dataclass
class ServedStats:
    """Totals of a ``StoreServer``, and its state now.

    Attributes
    ----------
    calls : int
        Calls that the store has answered.
    failed : int
        Calls that raised an error, or whose client had stopped waiting.
    found_blocks : int
        Blocks that the store has found.
    saved_blocks : int
        Blocks that it has saved.
    loaded_blocks : int
        Blocks that it has loaded.
    failed_blocks : int
        Blocks that it could not look up, keep or load.
    malformed : int
        Messages that no client sends.
    refused : int
        Clients with blocks of another size.
    dropped : int
        Answers that could not be sent, because the client has gone or reads nothing.
    in_flight : int
        Calls that wait for the store, or are made now.
    hanging : int
        Those of them that the store has not ended, though nobody waits for them any longer.
    connections : int
        Connections of clients.
    connections_refused : int
        Connections that were refused.
    store : mapping of str to int
        The store's own figures when it last answered a call.
    """

    calls: int = 0
    failed: int = 0
    found_blocks: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    failed_blocks: int = 0
    malformed: int = 0
    refused: int = 0
    dropped: int = 0
    in_flight: int = 0
    hanging: int = 0
    connections: int = 0
    connections_refused: int = 0
    store: Mapping[str, int] = field(default_factory=dict)


class StoreServer(Closing):
    """Serves one store to each ``PeerStore`` of other processes, over ZeroMQ. A context manager.

    Parameters
    ----------
    store : Store
        Any store. It is opened here, and closed by ``close``. Nobody else may use it meanwhile.
    endpoint : str, default ``"tcp://127.0.0.1:*"``
        ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    block_bytes : int
        Bytes of a block. Clients with blocks of another size are refused.
    secret : bytes, optional
        The secret of the clients, 32 bytes. Only a password that is derived from it is kept.
    secret_file : str or PathLike, optional
        A file with 64 hex digits, instead of ``secret``.
    keys : ServerKeys, optional
        CURVE keys of the server and of its clients, in the place of a secret. The server then cannot make blocks that
        clients accept.
    call_bytes : int, default 4 MiB
        The most bytes of blocks that one call may have; at least one block is accepted.
    calls_waiting : int, default 16
        Number of calls that may wait for the store. While as many wait, no further message is read.
    connections : int, default 64
        The most clients; others are refused.
    stall_seconds : float, default 5.0
        A TCP client that reads nothing for this long is disconnected. 0 never disconnects it.

    Attributes
    ----------
    endpoint : str
        Where it listens.

    Raises
    ------
    TypeError, ValueError
        For a bad argument.
    OSError
        From ``Store.open``; ``zmq.ZMQError`` for an endpoint that is not available.
    ImportError
        Without pyzmq.

    Notes
    -----
    The server keeps keys, MACs and bytes as they arrive. It checks the form of messages, and trusts nothing else:
    clients verify what they load. Blocks of several models and of several groups of layers may be on one server, if
    they have one size.

    Memory, beside the store's own: at most (2 ``store.threads`` + ``calls_waiting`` + 4 ``connections``) x
    ``call_bytes``. Clients that have connected trust each other: ZeroMQ bounds each frame of a message, but not how
    many a message has.

    Any thread may call it. All calls raise ForkedProcess in a child of ``os.fork()``.
    """

    def __init__(
        self,
        store: Store,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        block_bytes: int,
        secret: bytes | None = None,
        secret_file: str | os.PathLike[str] | None = None,
        keys: ServerKeys | None = None,
        call_bytes: int = 4 << 20,
        calls_waiting: int = 16,
        connections: int = 64,
        stall_seconds: float = 5.0,
    ) -> None:
        check_endpoint(endpoint, keys)
        size = integer_argument("block_bytes", block_bytes, 1, 1 << 31)
        blocks = min(max(integer_argument("call_bytes", call_bytes, 1, 1 << 31) // size, 1), KEYS_MAX)
        waiting = integer_argument("calls_waiting", calls_waiting, 1, 1 << 16)
        most = integer_argument("connections", connections, 1, 1 << 16)
        stall_ms = round(1e3 * number_argument("stall_seconds", stall_seconds, 0.0, 1e6))
        if keys is not None and (secret is not None or secret_file is not None):
            raise ValueError("secret, secret_file, keys: expected one of them, got several")
        credentials = keys or ServerSecret(wire_key(SharedSecret(secret, secret_file)))
        self._calls = _Calls(store_argument("store", store), size, blocks, waiting + store.threads)
        try:
            # A client has one call under way on each connection. ZeroMQ holds one message more each way.
            self._server = self._calls.server = Server(
                self._calls,
                endpoint,
                credentials,
                connections=most,
                stall_ms=stall_ms,
                frame_bytes=frame_bytes_max(blocks, size),
                messages=2,
                answers=1,
            )
        except BaseException:
            store.close()
            raise
        self.endpoint = self._server.endpoint
        stays_here(self)
        self._server.start()
        self._calls.start()

    def stats(self) -> ServedStats:
        """Return the figures. Never waits for the store.

        Returns
        -------
        ServedStats
            Totals, and the state now.
        """
        counts, calls = self._server.counts, self._calls
        return replace(
            calls.stats,
            malformed=counts.malformed,
            refused=counts.failed - counts.malformed,
            dropped=counts.dropped,
            in_flight=calls.in_flight,
            hanging=calls.hanging(),
            connections=len(self._server.connections),
            connections_refused=self._server.connections.refused,
            store=calls.figures,
        )

    def trouble(self) -> str:
        """Return why the service is not healthy. Never waits for the store.

        Returns
        -------
        str
            "" for a healthy service. Otherwise that it is closed, that calls hang in the store, or that the last save
            failed.
        """
        hanging = self.stats().hanging
        if self.closed:
            return "closed"
        if hanging:
            return f"{hanging} calls hang in the store"
        return "the last save failed" if self._calls.unsaved else ""

    @property
    def closed(self) -> bool:
        """Whether the server was closed, or has ended."""
        return self._server.stopping

    def close(self, timeout: float = 10.0) -> bool:
        """Disconnect all clients, ask calls in flight to stop, wait for them, and close the store.

        Parameters
        ----------
        timeout : float, default 10.0
            Seconds to wait.

        Returns
        -------
        bool
            False if a call still hangs. The store is closed when that call returns.

        Notes
        -----
        May be called again.
        """
        end = time.monotonic() + timeout
        self._server.close()
        return self._calls.join(end)


class _Request(NamedTuple):
    """A checked call of one client. ``blocks`` must fit ``seal``. ``deadline``: in seconds of ``time.monotonic``.
    ``tag``: of a save or a clear. ``stale``: a save that was sent before a drop and begins after it."""

    client: ClientSession
    message: StoreCall
    keys: Bytes
    macs: Bytes
    blocks: Bytes
    mac: bytes
    tag: bytes
    deadline: float
    stale: bool = False


class _Answer(NamedTuple):
    message: Message
    frames: Sequence[Any] = ()
    blocks: Sequence[Any] = ()
    mac: bytes = NO_MAC


class _Calls:
    """What a ``Server`` serves of a store: checks calls, and makes them on the store's threads, in memory of its own.

    ``server`` must be set before ``start``. Raises what ``store.open`` raises.
    """

    accepted = (StoreHello, StoreCall)
    server: Server

    def __init__(self, store: Store, block_bytes: int, blocks_per_call: int, most: int) -> None:
        self._store, self._block_bytes, self._blocks_per_call, self._most = store, block_bytes, blocks_per_call, most
        # Whole pages, as direct I/O wants them.
        slots = store.threads * blocks_per_call
        raw = mmap.mmap(-1, -(-slots * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._memory = np.frombuffer(raw, np.uint8, slots * block_bytes).reshape(slots, block_bytes)
        self._lock, self._waiting, self._saves = threading.Lock(), deque[_Request](), 0
        self._changed, self._eras = threading.Condition(self._lock), OrderedDict[str, int]()
        self.stats, self.in_flight, self.unsaved = ServedStats(), 0, False
        # Until when somebody waits for the call that each thread makes.
        self._deadlines = [math.inf] * store.threads
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"kvpool-store-server-{number}", daemon=True)
            for number in range(store.threads)
        ]
        self._running = len(self._threads)
        store.open(Space(_FINGERPRINT, self._memory))
        self.figures: Mapping[str, int] = store.stats()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self, end: float) -> bool:
        """Wait for the threads until a time of ``time.monotonic``. Returns whether all have ended."""
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def hanging(self) -> int:
        """How many calls the store should have ended."""
        now_s = time.monotonic()
        return sum(deadline < now_s for deadline in self._deadlines)

    # -- on the server's thread --------------------------------------------------------------------

    def has_room(self) -> bool:
        return self.in_flight < self._most

    def turn(self) -> int | None:
        return None

    def disconnect(self) -> None:
        pass

    def disconnected(self) -> None:
        with self._lock:
            self._changed.notify_all()

    def take(self, client: ClientSession, received: Received) -> None:
        message = received.message
        if isinstance(message, StoreHello):
            frames_argument([*received.frames, *received.blocks], 0)
            if message.block_bytes != self._block_bytes:
                reason = f"blocks of {message.block_bytes} bytes: this server has blocks of {self._block_bytes}"
                raise Refused("size", reason)
            client.hello = message
            self.server.send(client, StoreWelcome(message.id, self._blocks_per_call))
            return
        request = self._request(client, received)
        self.in_flight += 1
        with self._lock:
            self._waiting.append(request)
            self._changed.notify()

    def _request(self, client: ClientSession, received: Received) -> _Request:
        """The call that a message makes. Raises Malformed."""
        message, frames = received.message, received.frames
        saves, clears = message.call == "save", message.call in ("clear", *EPOCHS)
        if message.call not in CALLS:
            raise Malformed(f"call: expected {', '.join(CALLS)}, got {message.call!r:.40}")
        if not 1 <= message.wait_ms <= WAIT_MS_MAX:
            raise Malformed(f"wait_ms: expected 1 to {WAIT_MS_MAX}, got {message.wait_ms}")
        tag = b""
        if saves or clears:
            sizes = {"save": [TAG_BYTES], "clear": [MODEL_BYTES, TAG_BYTES]}.get(message.call, [MODEL_BYTES])
            tag = _tag(message.tag, *sizes)
        frames_argument(frames, 0 if clears else 2 if saves else 1)
        count = 0 if clears else frames[0].nbytes // KEY_BYTES
        most = self._blocks_per_call if message.call in ("save", "load") else KEYS_MAX
        if not clears and not 1 <= count <= most:
            raise Malformed(f"keys: expected 1 to {most}, got {count}")
        keys = rows_of(frames[:1] or [b""], count, KEY_BYTES)
        macs = rows_of(frames[1:] or [b""], count if saves else 0, MAC_BYTES)
        blocks = rows_of(received.blocks or [b""], count if saves else 0, self._block_bytes)
        deadline = time.monotonic() + message.wait_ms / 1e3
        return _Request(client, message, keys, macs, blocks, received.mac, tag, deadline)

    def _answered(self, client: ClientSession, answer: _Answer) -> None:
        self.in_flight -= 1
        self.server.send(client, *answer)

    # -- on the threads that call the store --------------------------------------------------------

    def _work(self, number: int) -> None:
        while (request := self._next()) is not None:
            self._deadlines[number] = request.deadline
            try:
                answer = self._answer(request, number)
            except Exception as error:  # A store that fails in any way must not end the thread.
                self._count(failed=1)
                answer = _Answer(Failed(request.message.id, "store", f"{type(error).__name__}: {error}"[:1000]))
            self._deadlines[number] = math.inf
            if request.message.call == "save":
                with self._lock:
                    self._saves -= 1
                    self._changed.notify()
            self.server.post(partial(self._answered, request.client, answer))
        with self._lock:
            self._running -= 1
            last = not self._running
        if last:
            self._store.close()

    def _next(self) -> _Request | None:
        """Wait for a call to make. Returns None when there will be none."""
        with self._lock:
            while not self.server.stopping:
                place = self._first()
                if place is not None:
                    request = self._waiting[place]
                    del self._waiting[place]
                    return self._begin(request)
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
            saving, drops = request.message.call == "save", request.message.call in DROPS
            over = time.monotonic() >= request.deadline  # its answer takes no time, and makes room
            if over or not (saving and not may_save or drops and saves):
                return place
            saves, may_save = saves or saving, may_save and not drops
        return None

    def _begin(self, request: _Request) -> _Request:
        """A call begins. The lock is held."""
        message = request.message
        if message.call == "save":
            self._saves += 1
            return request._replace(stale=message.era < self._eras.get(message.session, 0))
        if message.call in DROPS:
            self._eras[message.session] = max(message.era, self._eras.pop(message.session, 0))
            if len(self._eras) > _SESSIONS_MAX:
                self._eras.popitem(last=False)
            self._changed.notify_all()
        return request

    def _answer(self, request: _Request, thread: int) -> _Answer:
        """Make a call, in the part of the memory that belongs to this thread. Raises what the store raises."""
        message, keys, session = request.message, request.keys, request.client.session
        rows = np.arange(len(keys)) + thread * self._blocks_per_call

        def stop() -> bool:
            return self.server.stopping or time.monotonic() >= request.deadline

        if stop():
            raise TimeoutError("the caller waits no longer")
        if message.call == "find":
            return self._codes(message, "found", self._store.find(keys))
        if message.call == "forget":
            return self._done(message, self._store.forget(keys))
        if message.call in EPOCHS:
            return self._epoch(message, request.tag)
        if message.call == "clear":
            # Its space is of no model, so that blocks are told apart by their tags alone.
            if self._store.clears_prefix < TAG_BYTES:
                raise NotImplementedError(f"the store {self._store.name!r} of this server does not know tags")
            return self._done(message, self._store.clear(request.tag))
        if message.call == "save":
            if request.stale:
                return self._codes(message, "saved", np.full(len(keys), CANCELLED, np.uint8))
            self._memory[rows] = request.blocks
            if not session.verify_mac([self._memory[rows[0] : rows[-1] + 1]], request.mac):
                raise ConnectionError("the blocks do not fit their seal")
            saved = False
            try:
                said = self._store.save(keys, rows, request.macs, request.tag, message.limit, stop)
                codes = codes_of(said, len(keys))
                saved = FAILED not in codes
            finally:
                self.unsaved = not saved
            return self._codes(message, "saved", codes)
        # The store gets a copy, which it may write to: other rows are those of other threads.
        answered, sealed = self._store.load(keys, rows.copy(), stop)
        codes = codes_of(answered, len(keys))
        # A copy: the next call of this thread uses the memory while these bytes are sent.
        blocks = self._memory[rows[codes == OK]]
        answer = self._codes(message, "loaded", codes)
        macs = np.array(sealed, np.uint8).reshape(len(keys), MAC_BYTES)
        return answer._replace(frames=[codes, macs], blocks=[blocks], mac=session.mac([blocks]))

    def _epoch(self, message: StoreCall, model: bytes) -> _Answer:
        epoch = self._store.epoch(model, message.call == "renew")
        return self._done(message, int(epoch is not None), [epoch or b""])

    def _codes(self, message: StoreCall, kind: str, codes: Any) -> _Answer:
        checked = codes_of(codes, len(codes))
        counts = {
            f"{kind}_blocks": int(np.count_nonzero(checked == OK)),
            "failed_blocks": int((checked == FAILED).sum()),
        }
        self._count(**counts)
        return self._done(message, 0, [checked])

    def _done(self, message: StoreCall, count: int, frames: Sequence[Any] = ()) -> _Answer:
        self._count(calls=1)
        self.figures = self._store.stats()
        holds, capacity = (int(self.figures.get(name, 0)) for name in ("blocks", "capacity"))
        return _Answer(StoreDone(message.id, int(count), holds, capacity), frames)

    def _count(self, **more: int) -> None:
        with self._lock:
            self.stats = replace(self.stats, **{name: getattr(self.stats, name) + n for name, n in more.items()})


def _tag(text: str, *sizes: int) -> bytes:
    """A tag, or the beginning of one, of one of these sizes."""
    try:
        tag = bytes.fromhex(text)
    except ValueError:
        tag = b""
    if len(tag) not in sizes or len(text) != 2 * len(tag):
        raise Malformed(f"tag: expected {' or '.join(str(2 * size) for size in sizes)} hex digits, got {text!r:.40}")
    return tag

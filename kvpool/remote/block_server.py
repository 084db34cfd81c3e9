"""BlockServer: a thread that finds, pins and sends host blocks, and unpins them when the transport has let go of
them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zmq

from kvpool.arrays.layout import integer_argument
from kvpool.entry.interrupt import DeferSignals
from kvpool.entry.process import Process
from kvpool.errors import BlockNotFound, KVPoolError, LeaseExpired, PoolClosed
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.connections import Connections
from kvpool.remote.ending import end, new_context
from kvpool.remote.endpoints import ServerKeys, ServerPassword, check_endpoint
from kvpool.remote.frames import (
    BLOCKS_MAX,
    HEADER_BYTES_MAX,
    KEY_BYTES,
    Blocks,
    Failed,
    Find,
    Found,
    Get,
    Hello,
    Malformed,
    Message,
    Released,
    Welcome,
    decode,
    encode,
)
from kvpool.remote.limits import Limits, ServerStats, fitting
from kvpool.remote.served import host_bytes, served
from kvpool.remote.transport import InlineServer, ServerTransport
from kvpool.remote.underway import Refused, Transfer, UnderWay, Waiting
from kvpool.state import guards
from kvpool.state.hashing import remote_password

if TYPE_CHECKING:
    from typing_extensions import Self

POLL_MS, POLL_MS_STALLED, STALLED_TURNS = 1, 32, 100
"""How often the thread checks blocks that it has sent. The second is used after so many checks that found nothing.
While no blocks are sent, the thread sleeps."""
REQUESTS_PER_TURN = 16
KEYS_PER_LOOK = 256
_NAME_MAX = 64
_log = logging.getLogger(__name__)


class BlockServer:
    """Serves the host tier of a pool to clients that share its hash secret and its block layouts. A context manager.

    The server's own thread finds, pins and sends blocks. It unpins them when the transport no longer reads them. No
    other thread ever waits for a client. The owner of a lease is ``remote NAME ID``. A client that stopped reading is
    listed in ``cache.leases``, and ``cache.revoke`` takes its blocks back. If the client reads again later, it learns
    that these blocks are void.

    Parameters
    ----------
    cache : the pool. It must have a host tier. Close it after the server. Its groups of layers may be of all kinds, but
        groups for cross attention are not served.
    endpoint : ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    transport : how the blocks travel; default ``InlineServer()``, inside the replies.
    limits : how much clients may request.
    keys : CURVE keys of the server and of its clients.
    stall_ms : a TCP client that reads no bytes for so long is disconnected, which releases its blocks. 0: never.

    Thread-safe. Raises ValueError, TypeError, and zmq.ZMQError for an endpoint that is not available. Changes only pins
    in the pool.
    """

    def __init__(
        self, cache: KVCacheManager, endpoint: str = "tcp://127.0.0.1:*", *, transport: ServerTransport | None = None,
        limits: Limits | None = None, keys: ServerKeys | None = None, stall_ms: int = 5_000,
    ) -> None:  # fmt: skip
        check_endpoint(endpoint, keys)
        stall, what = integer_argument("stall_ms", stall_ms, 0, (1 << 31) - 1), served(cache)
        if cache.host_blocks == 0:
            raise ValueError("cache: its host tier is what is served, and it has none (host_blocks=0)")
        self._cache, self._transport = cache, InlineServer() if transport is None else transport
        self._layout, self._origin = what.fingerprint, cache.block_keys([0]).origin[0]
        sizes = [(size, group.host_blocks) for size, group in zip(what.block_bytes, cache.groups, strict=True) if size]
        self._limits = limits = fitting(limits or Limits(), sizes)
        each = limits.bytes_per_client or 0
        self._welcome = Welcome(0, what.block_bytes, limits.blocks_per_request, limits.requests_per_client, each)
        self._process, self._stats = Process(), ServerStats()
        self._under_way = UnderWay(limits)
        self._stopping, self._linger_ms = threading.Event(), 0
        self._closing, self._given_up = threading.Lock(), False
        if self._transport.serving:
            raise ValueError("transport: it is that of another server; each needs one of its own")
        self._transport.serving = True
        self._transport.start(host_bytes(cache))
        self._context: zmq.Context[Any] = new_context()
        self._authenticator = None
        try:
            door = keys or ServerPassword(remote_password(cache.core.states.secret))
            self._authenticator = door.authenticator(self._context)
            self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
            self._woken.bind("inproc://wake")
            self._wake.connect("inproc://wake")
            self._socket = self._listen(endpoint, door, stall)
            self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        except BaseException:
            self._give_up()
            raise
        self._thread = threading.Thread(target=self._run, name="kvpool-server", daemon=True)
        self._thread.start()

    def _listen(self, endpoint: str, door: ServerKeys | ServerPassword, stall_ms: int) -> zmq.Socket[bytes]:
        limits, socket = self._limits, self._context.socket(zmq.ROUTER)
        socket.linger, socket.ipv6 = 0, "[" in endpoint
        # A reply to a client that has gone, or that reads nothing, is an error here instead of being dropped in
        # silence.
        socket.router_mandatory = True
        # Every request has up to two replies. A client that leaves more of them unread exceeds its limit.
        socket.sndhwm = 4 * limits.requests_per_client
        socket.rcvhwm = 4 * limits.requests_per_client
        socket.maxmsgsize = max(HEADER_BYTES_MAX, KEY_BYTES * BLOCKS_MAX)
        if stall_ms and endpoint.startswith("tcp:"):
            socket.tcp_maxrt = stall_ms
        door.apply(socket)
        self._connections = Connections(socket, limits.connections, guarded=True)
        socket.bind(endpoint)
        return socket

    # -- for other threads -----------------------------------------------------------------------

    def stats(self) -> ServerStats:
        """A copy of the figures. Each is right, but they may be some microseconds apart."""
        return replace(self._stats, connections_refused=self._connections.refused)

    @property
    def closed(self) -> bool:
        return self._stopping.is_set()

    def close(self, linger_ms: int = 1000) -> None:
        """Stop serving. Transfers have ``linger_ms`` to be released. Then all clients are disconnected and all blocks
        unpinned. A second call does nothing.

        Waits for the thread, which takes hardly longer than that. Raises ForkedProcess in a child of ``os.fork()``; so
        does leaving the context there.
        """
        linger = integer_argument("linger_ms", linger_ms, 0, 1 << 31)
        self._process.check(self)
        with DeferSignals(), self._closing:
            if not self._stopping.is_set():
                self._linger_ms = linger
                self._stopping.set()
                self._wake.send(b"")
        self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        """Free what does not belong to the thread."""
        with self._closing:
            given_up, self._given_up = self._given_up, True
        if not given_up:
            self._transport.close()
            self._transport.serving = False
            if self._authenticator is not None:
                self._authenticator.stop()
            end(self._context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._connections.events, zmq.POLLIN)
        idle_turns = 0
        try:
            while not self._stopping.is_set():
                wait = POLL_MS if idle_turns < STALLED_TURNS else POLL_MS_STALLED
                asked = dict(poller.poll(wait if self._under_way.transfers else None)).get(self._socket)
                self._connections.poll()
                if asked:
                    self._answer_some()
                settled = self._settle()
                if settled:
                    self._serve()
                idle_turns = 0 if settled or asked else idle_turns + 1
            self._linger(self._linger_ms)
        finally:
            self._stopping.set()
            # The socket drops its messages, and the transport drops its readers. With them goes every use of the pool's
            # memory.
            self._connections.close()
            self._socket.close(linger=0)
            self._transport.close()
            self._linger(max(self._linger_ms, 1000))
            for transfer in self._under_way.transfers:
                _log.warning(
                    "client %s has not let go of %d bytes: they stay pinned", transfer.client.hex(), transfer.nbytes
                )

    def _linger(self, for_ms: int) -> None:
        end = time.monotonic() + for_ms / 1e3
        self._settle()
        while self._under_way.transfers and time.monotonic() < end:
            time.sleep(POLL_MS / 1e3)
            self._settle()

    def _answer_some(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                received = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._connections.heard(received[0])
            client, *frames = [frame.bytes for frame in received]
            self._answer(client, frames)
            self._serve()

    def _answer(self, client: bytes, frames: list[bytes]) -> None:
        with self._errors_go_to(client):
            request = decode(frames[0] if frames else b"", (Hello, Get, Find))
            with self._errors_go_to(client, request.id):
                self._check(request)
                if isinstance(request, Get):
                    self._accept(client, request, frames[1:])
                elif isinstance(request, Find):
                    self._find(client, request, frames[1:])
                elif len(frames) > 1:
                    raise Malformed(f"{len(frames) - 1} frames behind hello: accepted are none")
                else:
                    self._send(client, replace(self._welcome, id=request.id), self._transport.welcome())

    @contextmanager
    def _errors_go_to(self, client: bytes, id: int = 0) -> Iterator[None]:
        """Answer a client's request with the error that it causes, so that it does not end the service for all
        others."""
        try:
            yield
        except Malformed as error:
            self._stats.malformed += 1
            self._refuse(client, Refused(error.id or id, "malformed", str(error)))
        except Refused as error:
            self._refuse(client, error)
        except PoolClosed as error:
            self._refuse(client, Refused(id, "closed", str(error)))
        except Exception as error:
            _log.exception("request %d of client %s failed", id, client.hex())
            self._refuse(client, Refused(id, "internal", type(error).__name__))

    def _refuse(self, client: bytes, error: Refused) -> None:
        self._stats.refused += 1
        self._send(client, Failed(error.id, error.code, str(error)))

    def _check(self, request: Hello) -> None:
        """Raise unless the client may read blocks here at all."""
        if request.id == 0:
            raise Malformed("id=0: accepted are 1 and more")
        if len(request.client) > _NAME_MAX or not request.client.isprintable():
            raise Malformed(f"client: accepted is a name of up to {_NAME_MAX} printable characters")
        if request.layout != self._layout:
            reason = (
                f"layout {request.layout:.40} cannot read blocks of layout {self._layout}: both pools need one "
                "BlockLayout, or the same groups of layers"
            )
            raise Refused(request.id, "layout", reason)
        if request.origin != self._origin:
            raise Refused(
                request.id,
                "secret",
                "the pools have different hash secrets, so that no key of one is known to the other: pass "
                "the same secret= to both KVCacheManagers",
            )
        if request.transport != self._transport.name:
            reason = f"transport {request.transport!r:.40}: this server sends {self._transport.name!r}"
            raise Refused(request.id, "transport", reason)

    def _accept(self, client: bytes, request: Get, frames: list[bytes]) -> None:
        count, sizes = _key_count(request, frames), self._welcome.block_bytes
        if request.group >= len(sizes) or not sizes[request.group]:
            groups = [group for group, size in enumerate(sizes) if size]
            raise Malformed(f"group={request.group}: accepted are {groups!r:.80}")
        owner, nbytes = f"remote {request.client} {client.hex()}", count * sizes[request.group]
        self._under_way.accept(Waiting(client, request.id, request.group, frames[0], owner, nbytes), count)

    def _find(self, client: bytes, request: Find, frames: list[bytes]) -> None:
        """Answer which blocks are there. The pool is asked in pieces, so that nobody waits long for its lock.

        The socket accepts no message of more than BLOCKS_MAX keys.
        """
        count = _key_count(request, frames)
        keys = np.frombuffer(frames[0], np.uint64).reshape(-1, 2)
        pieces = [keys[first : first + KEYS_PER_LOOK] for first in range(0, count, KEYS_PER_LOOK)]
        found = np.concatenate([self._cache.cached_blocks(piece, tier="host") for piece in pieces], axis=1)
        if self._send(client, Found(request.id), [np.packbits(found).tobytes()]):
            self._stats.questions += 1

    def _serve(self) -> None:
        """Pin and send requests for which there is room."""
        while (request := self._under_way.take()) is not None:
            with self._errors_go_to(request.client, request.id):
                keys = np.frombuffer(request.keys, np.uint64).reshape(-1, 2)
                leases, found = self._pin(keys, request.group, request.owner)
                try:
                    self._send_blocks(request, leases, found)
                except BaseException:
                    _unpin(leases)
                    raise

    def _pin(self, keys: npt.NDArray[np.uint64], group: int, owner: str) -> tuple[list[Lease], npt.NDArray[np.bool_]]:
        """Leases of the blocks that are there, in the order of their keys, and which keys those are."""
        try:
            return [self._cache.pin(keys, owner=owner, tier="host", group=group)], np.ones(len(keys), np.bool_)
        except BlockNotFound:
            leases: list[Lease] = []
            found = np.zeros(len(keys), np.bool_)
            try:
                for i, key in enumerate(keys):
                    lease = self._cache.find_and_pin_host(key, owner=owner, group=group)
                    if lease is not None:
                        leases.append(lease)
                        found[i] = True
            except BaseException:
                _unpin(leases)
                raise
            return leases, found

    def _send_blocks(self, request: Waiting, leases: list[Lease], found: npt.NDArray[np.bool_]) -> None:
        client, id, group = request.client, request.id, request.group
        stats, count = self._stats, int(found.sum())
        frames: list[Any]
        reply = Blocks(id, "".join("1" if one else "0" for one in found), done=count == 0)
        nbytes, frames, released = count * self._welcome.block_bytes[group], [], _nothing
        if count:
            rows = np.concatenate([lease.blocks for lease in leases]) - self._cache.groups[group].first_host_block
            frames, copied, released = self._transport.offer(group, rows)
            if copied or not self._cache.core.transfer.guards & guards.UNPIN_AFTER_RELEASE:
                if not _unpin(leases):
                    raise self._revoked(id)
                reply, leases = replace(reply, done=True), []
        if not self._send(client, reply, frames):
            _unpin(leases)
            return
        stats.requests, stats.blocks, stats.bytes = stats.requests + 1, stats.blocks + count, stats.bytes + nbytes
        stats.missing_blocks += len(found) - count
        if count:
            self._under_way.transfers.append(Transfer(client, id, nbytes, leases, released))
            self._count_transfers()

    def _count_transfers(self) -> None:
        self._stats.transfers, self._stats.transfer_bytes = len(self._under_way.transfers), self._under_way.nbytes

    def _send(self, client: bytes, message: Message, frames: list[Any] | None = None) -> bool:
        """Queue a message for a client. If the client has gone or has too many unread, returns False and counts that.
        Does not wait."""
        try:
            self._socket.send_multipart([client, encode(message), *(frames or [])], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._stats.dropped += 1
            return False
        return True

    def _revoked(self, id: int) -> Refused:
        self._stats.revoked += 1
        return Refused(
            id, "revoked", "the lease was revoked while the blocks were on their way: they may hold anything"
        )

    def _settle(self) -> bool:
        """Unpin what has been released. Tell the clients that their blocks are whole, or that somebody revoked the
        lease.

        Returns whether there was any.
        """
        transfers = self._under_way.transfers
        if not transfers:
            return False
        self._transport.poll()
        going = []
        for transfer in transfers:
            if not transfer.released() and not any(lease.closed for lease in transfer.leases):
                going.append(transfer)
            elif transfer.leases:
                self._finish(transfer)
        self._under_way.transfers = going
        self._count_transfers()
        return len(going) < len(transfers)

    def _finish(self, transfer: Transfer) -> None:
        whole = _unpin(transfer.leases)
        if self._socket.closed:
            return
        if whole:
            self._send(transfer.client, Released(transfer.id))
        else:
            self._refuse(transfer.client, self._revoked(transfer.id))


def _key_count(request: Hello, frames: list[bytes]) -> int:
    """How many keys a request names. Raises Malformed."""
    if len(frames) != 1 or not frames[0] or len(frames[0]) % KEY_BYTES:
        sizes, kind = [len(frame) for frame in frames], type(request).__name__.lower()
        raise Malformed(
            f"frames of {sizes!r:.80} bytes behind {kind}: accepted is one, of {KEY_BYTES} bytes for each key"
        )
    return len(frames[0]) // KEY_BYTES


def _nothing() -> bool:
    return True


def _unpin(leases: list[Lease]) -> bool:
    """Close leases. Returns False if somebody else had closed one before."""
    whole = True
    for lease in leases:
        try:
            lease.close()
        except LeaseExpired:
            whole = False
        except KVPoolError:
            # The pool is closed, and its leases with it.
            whole = False
    return whole

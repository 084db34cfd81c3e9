"""BlockServer: finds, pins and sends host blocks on a thread of its own, and unpins them when the transport has let go of them."""

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

from kvpool.errors import BlockNotFound, KVPoolError, LeaseExpired, PoolClosed
from kvpool.layout import integer_argument
from kvpool.leases import Lease
from kvpool.manager import KVCacheManager
from kvpool.remote.endpoints import ServerKeys, ServerPassword, check_endpoint
from kvpool.remote.limits import Limits, ServerStats, fitting
from kvpool.remote.messages import (
    HEADER_BYTES_MAX,
    KEY_BYTES,
    Blocks,
    Failed,
    Get,
    Hello,
    Malformed,
    Message,
    Released,
    Welcome,
    decode,
    encode,
)
from kvpool.remote.served import served_layout
from kvpool.remote.transport import InlineServer, ServerTransport
from kvpool.remote.underway import Refused, Transfer, UnderWay, Waiting

if TYPE_CHECKING:
    from typing_extensions import Self

POLL_MS, POLL_MS_STALLED, STALLED_TURNS = 1, 32, 100
"""How often the thread looks after blocks that are on their way: less often when so many looks found nothing. With none it sleeps."""
REQUESTS_PER_TURN = 16
GUARDS = frozenset({"unpin_after_release"})
"""Rules that only a test switches off, to show that its proof bites."""
_NAME_MAX = 64
_log = logging.getLogger(__name__)


class BlockServer:
    """Serves the host tier of a pool to the clients that share its hash secret and its block layout. A context manager.

    A thread of its own finds, pins and sends blocks, and unpins them when the transport says that it reads them no more: no other thread
    ever waits for a client. Leases are open as ``remote NAME ID``; a client that stopped reading shows in ``cache.leases`` and
    can be revoked there, and is then told, should it ever read on, that what it got is void.

    Parameters
    ----------
    cache : the pool; it must have a host tier and one group of layers of one layout, and be closed after the server.
    endpoint : ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    transport : how the blocks travel; default ``InlineServer()``, inside the replies.
    limits : what clients may ask for.
    keys : CURVE keys of the server and of its clients.
    stall_ms : a TCP client that takes no bytes for so long is disconnected, which releases what it was sent; 0: never.

    Thread-safe. Raises ValueError, TypeError, and zmq.ZMQError for an endpoint that cannot be had. Changes nothing in the pool but pins.
    """

    def __init__(
        self, cache: KVCacheManager, endpoint: str = "tcp://127.0.0.1:*", *, transport: ServerTransport | None = None,
        limits: Limits | None = None, keys: ServerKeys | None = None, stall_ms: int = 5_000,
    ) -> None:  # fmt: skip
        check_endpoint(endpoint, keys)
        stall, layout = integer_argument("stall_ms", stall_ms, 0, (1 << 31) - 1), served_layout(cache)
        if cache.host_blocks == 0:
            raise ValueError("cache: its host tier is what is served, and it has none (host_blocks=0)")
        self._cache, self._transport = cache, InlineServer() if transport is None else transport
        self._layout, self._origin = layout.fingerprint, cache.block_keys([0]).origin[0]
        self._limits = limits = fitting(limits or Limits(), layout.block_bytes, cache.host_blocks)
        each = limits.bytes_per_client or 0
        self._welcome = Welcome(0, layout.block_bytes, limits.blocks_per_request, limits.requests_per_client, each)
        self._guards = GUARDS
        self._stats = ServerStats()
        self._under_way = UnderWay(limits)
        self._stopping, self._linger_ms = threading.Event(), 0
        self._closing, self._given_up = threading.Lock(), False
        if self._transport.serving:
            raise ValueError("transport: it is that of another server; each needs one of its own")
        self._transport.serving = True
        self._transport.start(cache.host_pool.reshape(cache.host_blocks, -1).view(np.uint8))
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = None
        try:
            door = keys or ServerPassword(cache.remote_password)
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
        # A reply to a client that has gone, or that reads nothing, is an error here, not silence.
        socket.router_mandatory = True
        # Every request has up to two replies; a client that leaves more than that unread does not keep to its limit.
        socket.sndhwm = 4 * limits.requests_per_client
        socket.rcvhwm = 4 * limits.requests_per_client
        socket.maxmsgsize = max(HEADER_BYTES_MAX, KEY_BYTES * limits.blocks_per_request)
        if stall_ms and endpoint.startswith("tcp:"):
            socket.tcp_maxrt = stall_ms
        door.apply(socket)
        socket.bind(endpoint)
        return socket

    # -- for other threads -----------------------------------------------------------------------

    def stats(self) -> ServerStats:
        """A copy; each figure is right, and they may be some microseconds apart."""
        return replace(self._stats)

    @property
    def closed(self) -> bool:
        return self._stopping.is_set()

    def close(self, linger_ms: int = 1000) -> None:
        """Stop serving: give what is under way ``linger_ms`` to be released, then disconnect everybody and unpin. Closing twice is fine.

        Waits for the thread, which never takes much longer than that.
        """
        linger = integer_argument("linger_ms", linger_ms, 0, 1 << 31)
        with self._closing:
            if not self._stopping.is_set():
                self._linger_ms = linger
                self._stopping.set()
                self._wake.send(b"")
        self._thread.join()
        self._give_up()

    def _give_up(self) -> None:
        """Free what is not the thread's."""
        with self._closing:
            given_up, self._given_up = self._given_up, True
        if not given_up:
            self._transport.close()
            self._transport.serving = False
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        idle_turns = 0
        try:
            while not self._stopping.is_set():
                wait = POLL_MS if idle_turns < STALLED_TURNS else POLL_MS_STALLED
                asked = dict(poller.poll(wait if self._under_way.transfers else None)).get(self._socket)
                if asked:
                    self._answer_some()
                settled = self._settle()
                if settled:
                    self._serve()
                idle_turns = 0 if settled or asked else idle_turns + 1
            self._linger(self._linger_ms)
        finally:
            self._stopping.set()
            # The socket drops its messages, the transport its readers, and with them their hold on the pool's memory.
            self._socket.close(linger=0)
            self._transport.close()
            self._linger(max(self._linger_ms, 1000))
            for transfer in self._under_way.transfers:
                _log.warning("client %s has not let go of %d bytes: they stay pinned", transfer.client.hex(), transfer.nbytes)

    def _linger(self, for_ms: int) -> None:
        end = time.monotonic() + for_ms / 1e3
        self._settle()
        while self._under_way.transfers and time.monotonic() < end:
            time.sleep(POLL_MS / 1e3)
            self._settle()

    def _answer_some(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(client, frames)
            self._serve()

    def _answer(self, client: bytes, frames: list[bytes]) -> None:
        with self._errors_go_to(client):
            request = decode(frames[0] if frames else b"", (Hello, Get))
            with self._errors_go_to(client, request.id):
                self._check(request)
                if isinstance(request, Get):
                    self._accept(client, request, frames[1:])
                elif len(frames) > 1:
                    raise Malformed(f"{len(frames) - 1} frames behind hello: accepted are none")
                else:
                    self._send(client, replace(self._welcome, id=request.id), self._transport.welcome())

    @contextmanager
    def _errors_go_to(self, client: bytes, id: int = 0) -> Iterator[None]:
        """Answer a client's request with what goes wrong with it: it must not end the service of all others."""
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
            reason = f"layout {request.layout:.40} cannot read blocks of layout {self._layout}: both pools need one BlockLayout"
            raise Refused(request.id, "layout", reason)
        if request.origin != self._origin:
            raise Refused(request.id, "secret", "the pools have different hash secrets, so that no key of one is known to the other: pass "
                           "the same secret= to both KVCacheManagers")  # fmt: skip
        if request.transport != self._transport.name:
            reason = f"transport {request.transport!r:.40}: this server sends {self._transport.name!r}"
            raise Refused(request.id, "transport", reason)

    def _accept(self, client: bytes, request: Get, frames: list[bytes]) -> None:
        if len(frames) != 1 or not frames[0] or len(frames[0]) % KEY_BYTES:
            sizes = [len(frame) for frame in frames]
            raise Malformed(f"frames of {sizes!r:.80} bytes behind get: accepted is one, of {KEY_BYTES} bytes for each key")
        count = len(frames[0]) // KEY_BYTES
        owner = f"remote {request.client} {client.hex()}"
        self._under_way.accept(Waiting(client, request.id, frames[0], owner, count * self._welcome.block_bytes), count)

    def _serve(self) -> None:
        """Pin and send what there is room for."""
        while (request := self._under_way.take()) is not None:
            with self._errors_go_to(request.client, request.id):
                leases, found = self._pin(np.frombuffer(request.keys, np.uint64).reshape(-1, 2), request.owner)
                try:
                    self._send_blocks(request.client, request.id, leases, found)
                except BaseException:
                    _unpin(leases)
                    raise

    def _pin(self, keys: npt.NDArray[np.uint64], owner: str) -> tuple[list[Lease], npt.NDArray[np.bool_]]:
        """Leases of the blocks that are there, in the order of their keys, and which those are."""
        try:
            return [self._cache.pin(keys, owner=owner, tier="host")], np.ones(len(keys), np.bool_)
        except BlockNotFound:
            leases: list[Lease] = []
            found = np.zeros(len(keys), np.bool_)
            try:
                for i, key in enumerate(keys):
                    lease = self._cache.find_and_pin_host(key, owner=owner)
                    if lease is not None:
                        leases.append(lease)
                        found[i] = True
            except BaseException:
                _unpin(leases)
                raise
            return leases, found

    def _send_blocks(self, client: bytes, id: int, leases: list[Lease], found: npt.NDArray[np.bool_]) -> None:
        stats, count = self._stats, int(found.sum())
        frames: list[Any]
        reply = Blocks(id, "".join("1" if one else "0" for one in found), done=count == 0)
        nbytes, frames, released = count * self._welcome.block_bytes, [], _nothing
        if count:
            rows = np.concatenate([lease.blocks for lease in leases]) - self._cache.device_blocks
            frames, copied, released = self._transport.offer(rows)
            if copied or "unpin_after_release" not in self._guards:
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
        """Queue a message for a client; False, and counted, if it has gone or has too many unread. Does not wait."""
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
        return Refused(id, "revoked", "the lease was revoked while the blocks were on their way: they may hold anything")

    def _settle(self) -> bool:
        """Unpin what has been released, and tell the clients that their blocks are whole, or that somebody took the lease away.

        Returns whether anything has been.
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


def _nothing() -> bool:
    return True


def _unpin(leases: list[Lease]) -> bool:
    """Close leases; False if one was closed before, by somebody else."""
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

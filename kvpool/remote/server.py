"""BlockServer: finds, pins and sends host blocks on a thread of its own, and unpins them when the transport has let go of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from kvpool.errors import BlockNotFound, KVPoolError, LeaseExpired, PoolClosed
from kvpool.layout import integer_argument
from kvpool.leases import Lease
from kvpool.manager import KVCacheManager
from kvpool.remote.endpoints import ServerKeys, check_endpoint
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
from kvpool.remote.transport import InlineServer, ServerTransport

if TYPE_CHECKING:
    from typing_extensions import Self

POLL_MS, POLL_MS_MAX = 1, 32
"""How often the thread looks after blocks that are on their way: less and less often while nothing happens. With none it sleeps."""
REQUESTS_PER_TURN = 16
GUARDS = frozenset({"unpin_after_release"})
"""Rules that only a test switches off, to show that its proof bites."""
_NAME_MAX = 64
_log = logging.getLogger(__name__)


class _Transfer(NamedTuple):
    """Blocks of one request that the transport has not let go of. ``leases`` is empty where nothing is pinned for it any more."""

    client: bytes
    id: int
    nbytes: int
    leases: list[Lease]
    released: Callable[[], bool]


class _Refused(Exception):
    """A request gets ``Failed`` for an answer."""

    def __init__(self, id: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.id, self.code = id, code


class BlockServer:
    """Serves the host tier of a pool to the clients that share its hash secret and its block layout. A context manager.

    A thread of its own finds, pins and sends blocks, and unpins them when the transport says that it reads them no more: no other thread
    ever waits for a client. Leases are open as ``remote NAME ID``; a client that stopped reading shows in ``cache.leases`` and
    can be revoked there, and is then told, should it ever read on, that what it got is void.

    Parameters
    ----------
    cache : the pool; it must have a host tier, and be closed after the server.
    endpoint : ``tcp://127.0.0.1:*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    transport : how the blocks travel; default ``InlineServer()``, inside the replies.
    limits : what clients may ask for.
    keys : CURVE keys of the server and of its clients.
    stall_ms : a TCP client that takes no bytes for so long is disconnected, which releases what it was sent; 0: never.

    Thread-safe. Raises ValueError, TypeError, and zmq.ZMQError for an endpoint that cannot be had. Does not change the pool, apart from pins.
    """

    def __init__(
        self, cache: KVCacheManager, endpoint: str = "tcp://127.0.0.1:*", *, transport: ServerTransport | None = None,
        limits: Limits | None = None, keys: ServerKeys | None = None, stall_ms: int = 60_000,
    ) -> None:  # fmt: skip
        check_endpoint(endpoint, keys)
        stall = integer_argument("stall_ms", stall_ms, 0, (1 << 31) - 1)
        if cache.host_blocks == 0:
            raise ValueError("cache: its host tier is what is served, and it has none (host_blocks=0)")
        self._cache, self._transport = cache, InlineServer() if transport is None else transport
        self._layout, self._origin = cache.layout.fingerprint, cache.block_keys([0]).origin[0]
        self._limits = limits = fitting(limits or Limits(), cache.layout.block_bytes, cache.host_blocks)
        self._welcome = Welcome(0, cache.layout.block_bytes, limits.blocks_per_request, limits.requests_per_client, limits.bytes_per_client)
        self._guards = GUARDS
        self._stats = ServerStats()
        self._transfers: list[_Transfer] = []
        self._stopping, self._linger_ms = threading.Event(), 0
        self._closing, self._given_up = threading.Lock(), False
        self._transport.start(cache.host_pool.reshape(cache.host_blocks, -1).view(np.uint8))
        self._context: zmq.Context[Any] = zmq.Context()
        self._authenticator = None
        try:
            self._authenticator = None if keys is None else keys.authenticator(self._context)
            self._wake, self._woken = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
            self._woken.bind("inproc://wake")
            self._wake.connect("inproc://wake")
            self._socket = self._listen(endpoint, keys, stall)
            self.endpoint = self._socket.last_endpoint.decode()
        except BaseException:
            self._give_up()
            raise
        self._thread = threading.Thread(target=self._run, name="kvpool-server", daemon=True)
        self._thread.start()

    def _listen(self, endpoint: str, keys: ServerKeys | None, stall_ms: int) -> zmq.Socket[bytes]:
        limits, socket = self._limits, self._context.socket(zmq.ROUTER)
        socket.linger = 0
        # A reply to a client that has gone, or that reads nothing, is an error here, not silence.
        socket.router_mandatory = True
        # Every request has up to two replies; a client that leaves more than that unread does not keep to its limit.
        socket.sndhwm = 4 * limits.requests_per_client
        socket.rcvhwm = 4 * limits.requests_per_client
        socket.maxmsgsize = max(HEADER_BYTES_MAX, KEY_BYTES * limits.blocks_per_request)
        if stall_ms and endpoint.startswith("tcp:"):
            socket.tcp_maxrt = stall_ms
        if keys is not None:
            keys.apply(socket)
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
        wait = POLL_MS
        try:
            while not self._stopping.is_set():
                asked = dict(poller.poll(wait if self._transfers else None)).get(self._socket)
                if asked:
                    self._answer_some()
                wait = POLL_MS if self._settle() or asked else min(2 * wait, POLL_MS_MAX)
            self._linger(self._linger_ms)
        finally:
            self._stopping.set()
            # The socket drops its messages, the transport its readers, and with them their hold on the pool's memory.
            self._socket.close(linger=0)
            self._transport.close()
            self._linger(max(self._linger_ms, 1000))
            for transfer in self._transfers:
                _log.warning("client %s has not let go of %d bytes: they stay pinned", transfer.client.hex(), transfer.nbytes)

    def _linger(self, for_ms: int) -> None:
        end = time.monotonic() + for_ms / 1e3
        self._settle()
        while self._transfers and time.monotonic() < end:
            time.sleep(POLL_MS / 1e3)
            self._settle()

    def _answer_some(self) -> None:
        for _ in range(REQUESTS_PER_TURN):
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(client, frames)

    def _answer(self, client: bytes, frames: list[bytes]) -> None:
        id = 0
        try:
            request = decode(frames[0] if frames else b"", (Hello, Get))
            id = request.id
            self._check(request)
            if isinstance(request, Get):
                self._get(client, request, frames[1:])
            elif len(frames) > 1:
                raise Malformed(f"{len(frames) - 1} frames behind hello: accepted are none", id)
            else:
                self._send(client, replace(self._welcome, id=id), self._transport.welcome())
        except Malformed as error:
            self._stats.malformed += 1
            self._refuse(client, error.id or id, "malformed", str(error))
        except _Refused as error:
            self._refuse(client, error.id, error.code, str(error))
        except PoolClosed as error:
            self._refuse(client, id, "closed", str(error))
        except Exception as error:
            # One request must not end the service of all others.
            _log.exception("request %d of client %s failed", id, client.hex())
            self._refuse(client, id, "internal", type(error).__name__)

    def _refuse(self, client: bytes, id: int, code: str, reason: str) -> None:
        self._stats.refused += 1
        self._send(client, Failed(id, code, reason))

    def _check(self, request: Hello) -> None:
        """Raise unless the client may read blocks here at all."""
        if request.id == 0:
            raise Malformed("id=0: accepted are 1 and more")
        if len(request.client) > _NAME_MAX or not request.client.isprintable():
            raise Malformed(f"client: accepted is a name of up to {_NAME_MAX} printable characters", request.id)
        if request.layout != self._layout:
            reason = f"layout {request.layout:.40} cannot read blocks of layout {self._layout}: both pools need one BlockLayout"
            raise _Refused(request.id, "layout", reason)
        if request.origin != self._origin:
            raise _Refused(request.id, "secret", "the pools have different hash secrets, so that no key of one is known to the other: pass "
                           "the same secret= to both KVCacheManagers")  # fmt: skip
        if request.transport != self._transport.name:
            reason = f"transport {request.transport!r:.40}: this server sends {self._transport.name!r}"
            raise _Refused(request.id, "transport", reason)

    def _admit(self, client: bytes, id: int, count: int) -> None:
        """Raise _Refused unless the limits leave room for ``count`` more blocks."""
        limits, nbytes = self._limits, count * self._welcome.block_bytes
        if count > limits.blocks_per_request:
            raise _Refused(id, "limit", f"{count} blocks in one request: accepted are up to {limits.blocks_per_request}")
        mine = [transfer.nbytes for transfer in self._transfers if transfer.client == client]
        if len(mine) >= limits.requests_per_client:
            raise _Refused(id, "limit", f"{len(mine)} requests are under way: accepted are up to {limits.requests_per_client}")
        if sum(mine) + nbytes > limits.bytes_per_client:
            raise _Refused(id, "limit", f"{sum(mine)} + {nbytes} bytes under way: accepted are up to {limits.bytes_per_client}")
        total = limits.bytes_in_total
        if total is not None and self._stats.transfer_bytes + nbytes > total:
            raise _Refused(id, "busy", f"all clients together have {self._stats.transfer_bytes} of {total} bytes under way")

    def _get(self, client: bytes, request: Get, frames: list[bytes]) -> None:
        if len(frames) != 1 or not frames[0] or len(frames[0]) % KEY_BYTES:
            sizes = [len(frame) for frame in frames]
            raise Malformed(f"frames of {sizes!r:.80} bytes behind get: accepted is one, of {KEY_BYTES} bytes for each key", request.id)
        keys = np.frombuffer(frames[0], np.uint64).reshape(-1, 2)
        self._admit(client, request.id, len(keys))
        leases, found = self._pin(keys, f"remote {request.client} {client.hex()}")
        try:
            self._send_blocks(client, request.id, leases, found)
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
            self._transfers.append(_Transfer(client, id, nbytes, leases, released))
            stats.transfers, stats.transfer_bytes = len(self._transfers), stats.transfer_bytes + nbytes

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

    def _revoked(self, id: int) -> _Refused:
        self._stats.revoked += 1
        return _Refused(id, "revoked", "the lease was revoked while the blocks were on their way: they may hold anything")

    def _settle(self) -> bool:
        """Unpin what has been released, and tell the clients that their blocks are whole, or that somebody took the lease away.

        Returns whether anything has been.
        """
        if not self._transfers:
            return False
        self._transport.poll()
        before, going = len(self._transfers), []
        for transfer in self._transfers:
            if not transfer.released() and not any(lease.closed for lease in transfer.leases):
                going.append(transfer)
            elif transfer.leases:
                self._finish(transfer)
        self._transfers = going
        self._stats.transfers, self._stats.transfer_bytes = len(going), sum(transfer.nbytes for transfer in going)
        return len(going) < before

    def _finish(self, transfer: _Transfer) -> None:
        whole = _unpin(transfer.leases)
        if self._socket.closed:
            return
        if whole:
            self._send(transfer.client, Released(transfer.id))
        else:
            error = self._revoked(transfer.id)
            self._refuse(transfer.client, error.id, error.code, str(error))


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

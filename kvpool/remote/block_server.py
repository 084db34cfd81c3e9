"""BlockServer: a thread that finds, pins and sends host blocks, and unpins them when the transport has let go of
them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from kvpool.common.arguments import number_argument
from kvpool.common.arrays import Bools, Uint64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.errors import BlockNotFound, KVPoolError, PoolClosed
from kvpool.pool.leases import Lease
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.listener import ServerKeys, ServerSecret, check_endpoint
from kvpool.remote.server import ClientSession, Refused, Server
from kvpool.remote.session import BLOCKS_MAX, KEY_BYTES, Blocks, Find, Found, Get, Hello, Malformed, Received, Welcome
from kvpool.remote.transport import InlineServer, ServerTransport, host_bytes, served
from kvpool.state import records
from kvpool.state.hashing import remote_password

POLL_MS, POLL_MS_STALLED, STALLED_TURNS = 1, 32, 100
"""How often the thread checks blocks that it has sent. The second is used after so many checks that found nothing.
While no blocks are sent, the thread sleeps."""
KEYS_PER_LOOK = 256
_NAME_MAX = 64
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """The most that a server does for its clients.

    Clients that stop reading must leave room for others. So a client that holds blocks gets more only if another
    ``bytes_per_client`` of the total stays free, for clients that hold none.

    Parameters
    ----------
    blocks_per_request : int, default 64
        Blocks that one message may request.
    requests_per_client : int, default 8
        Requests of a client that have been sent and not yet released.
    bytes_per_client : int, optional
        Bytes of those. By default an eighth of ``bytes_in_total``, or eight blocks if that is more, but at most half of
        the total.
    bytes_in_total : int, optional
        Bytes of the requests of all clients that have been sent and not yet released. By default half of the host tier.
    requests_waiting : int, default 1024
        Requests of all clients that have not been sent.
    connections : int, default 256
        Peers, with or without the password. More are refused.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    """

    blocks_per_request: int = 64
    requests_per_client: int = 8
    bytes_per_client: int | None = None
    bytes_in_total: int | None = None
    requests_waiting: int = 1024
    connections: int = 256

    def __post_init__(self) -> None:
        integer_argument("blocks_per_request", self.blocks_per_request, 1, BLOCKS_MAX)
        integer_argument("requests_per_client", self.requests_per_client, 1, 1 << 16)
        integer_argument("requests_waiting", self.requests_waiting, 1, 1 << 24)
        integer_argument("connections", self.connections, 1, 1 << 16)
        for name in ("bytes_per_client", "bytes_in_total"):
            if getattr(self, name) is not None:
                integer_argument(name, getattr(self, name), 1, 1 << 62)


@dataclass
class ServerStats:
    """What a server has done so far, and what it is sending.

    Attributes
    ----------
    requests : int
        Requests for blocks that were answered, with blocks or with none.
    refused : int
        Requests that were answered with an error, malformed ones too.
    malformed : int
        Malformed messages.
    dropped : int
        Answers that could not be sent, because the client has gone or has too many unread.
    blocks, bytes : int
        Blocks that were sent, and their bytes.
    questions : int
        Questions about which blocks are there.
    missing_blocks : int
        Requested keys that had no host block.
    revoked : int
        Requests whose leases were revoked before the blocks were released. The client received a request to discard
        them.
    transfers, transfer_bytes : int
        Requests that are sent now and not yet released, and their bytes.
    connections_refused : int
        Connections that were ended at once, because there were ``Limits.connections`` already.
    """

    requests: int = 0
    refused: int = 0
    malformed: int = 0
    dropped: int = 0
    blocks: int = 0
    bytes: int = 0
    questions: int = 0
    missing_blocks: int = 0
    revoked: int = 0
    transfers: int = 0
    transfer_bytes: int = 0
    connections_refused: int = 0


def fitting(limits: Limits, sizes: Sequence[tuple[int, int]]) -> Limits:
    """Limits under which every accepted request can be served: at least one block of each group of layers, and no more
    in total than given. ``sizes``: (bytes of a block, host blocks) of each group that is served."""
    size, host = max(nbytes for nbytes, _ in sizes), sum(nbytes * blocks for nbytes, blocks in sizes)
    total = max(size, host // 2) if limits.bytes_in_total is None else limits.bytes_in_total
    each = (
        max(size, min(total // 2, max(total // 8, 8 * size)))
        if limits.bytes_per_client is None
        else min(limits.bytes_per_client, total)
    )
    if each < size:
        raise ValueError(f"limits: {each} bytes do not hold one block of {size} bytes")
    most = each // min(nbytes for nbytes, _ in sizes)
    blocks = min(limits.blocks_per_request, most)
    return replace(limits, blocks_per_request=blocks, bytes_per_client=each, bytes_in_total=total)


class BlockServer(Closing):
    """Serves the host tier of a pool to clients that share its hash secret and its block layouts. A context manager.

    Parameters
    ----------
    cache : KVCacheManager
        The pool. It must have a host tier. Close it after the server. Its groups of layers may be of all kinds, but
        groups for cross attention are not served.
    endpoint : str, default ``"tcp://127.0.0.1:*"``
        ``*`` takes any free port; ``ipc://PATH`` works too. Other machines only with ``keys``.
    transport : ServerTransport, optional
        How the blocks travel. By default ``InlineServer()``, inside the replies.
    limits : Limits, optional
        How much clients may request.
    keys : ServerKeys, optional
        CURVE keys of the server and of its clients.
    stall_seconds : float, default 5.0
        A TCP client that reads no bytes for this long is disconnected, which releases its blocks. 0 means never.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    zmq.ZMQError
        For an endpoint that is not available.

    Notes
    -----
    Thread-safe. Changes only pins in the pool. The server's own thread finds, pins and sends blocks. It unpins them
    when the transport no longer reads them. No other thread ever waits for a client. The owner of a lease is
    ``remote NAME ID``. A client that stopped reading is listed in ``cache.leases``, and ``cache.revoke`` takes its
    blocks back. If the client reads again later, blocks that were overwritten no longer fit their authentication tag,
    and it drops them.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        endpoint: str = "tcp://127.0.0.1:*",
        *,
        transport: ServerTransport | None = None,
        limits: Limits | None = None,
        keys: ServerKeys | None = None,
        stall_seconds: float = 5.0,
    ) -> None:
        check_endpoint(endpoint, keys)
        server_limits = limits or Limits()
        stall_ms = round(1e3 * number_argument("stall_seconds", stall_seconds, 0.0, 1e6))
        if cache.host_blocks == 0:
            raise ValueError("cache: expected a host tier, which is what is served, got host_blocks=0")
        self._blocks = _HostTier(cache, InlineServer() if transport is None else transport, server_limits)
        # Every request has one answer. A client that leaves more of them unread exceeds its limit.
        waiting = 4 * server_limits.requests_per_client
        credentials = keys or ServerSecret(remote_password(cache.core.states.secret).encode())
        try:
            self._server = self._blocks.server = Server(
                self._blocks,
                endpoint,
                credentials,
                connections=server_limits.connections,
                stall_ms=stall_ms,
                frame_bytes=KEY_BYTES * BLOCKS_MAX,
                messages=waiting,
                answers=waiting,
            )
        except BaseException:
            self._blocks.release()
            raise
        self.endpoint = self._server.endpoint
        stays_here(self)
        self._server.start()

    def stats(self) -> ServerStats:
        """Return a copy of the figures.

        Returns
        -------
        ServerStats
            Each figure is right, but they may be some microseconds apart.
        """
        counts, under_way = self._server.counts, self._blocks.under_way
        return replace(
            self._blocks.stats,
            transfers=len(under_way.transfers),
            transfer_bytes=under_way.nbytes,
            refused=counts.failed,
            malformed=counts.malformed,
            dropped=counts.dropped,
            connections_refused=self._server.connections.refused,
        )

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, or the server has ended because the pool was closed."""
        return self._server.stopping

    def close(self, timeout: float = 1.0) -> None:
        """Stop serving, disconnect all clients and unpin all blocks. A second call does nothing.

        Waits for the thread, which takes hardly longer than ``timeout``.

        Parameters
        ----------
        timeout : float, default 1.0
            Seconds that transfers have to be released first.

        Raises
        ------
        ForkedProcess
            In a child of ``os.fork()``; so does leaving the context there.
        """
        linger_ms = round(1e3 * number_argument("timeout", timeout, 0.0, 1e6))
        if not self.closed:
            self._blocks.linger_ms = linger_ms
        self._server.close()
        self._blocks.release()


class Waiting(NamedTuple):
    """An accepted request for blocks of one group of layers. ``keys`` uint64[n, 2]."""

    client: ClientSession
    id: int
    group: int
    keys: Uint64s
    nbytes: int


class Sending(NamedTuple):
    """The blocks of one request, which the transport still uses. ``leases`` is empty once nothing is pinned for
    them."""

    client: ClientSession
    nbytes: int
    leases: list[Lease]
    released: Callable[[], bool]


class UnderWay:
    """The transfers and requests of one server. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: list[Waiting] = []
        self.transfers: list[Sending] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def accept(self, request: Waiting) -> None:
        """Queue a request. Raises Refused if its client exceeds its limits with this request, or with all of them."""
        limits, mine = self._limits, sum(other.client == request.client for other in self._waiting)
        bounds = (
            (len(request.keys), limits.blocks_per_request, "blocks in one request"),
            (request.nbytes, limits.bytes_per_client, "bytes in one request"),
            (mine + 1, limits.requests_per_client, "requests that wait for those before them"),
            (len(self._waiting) + 1, limits.requests_waiting, "requests that wait, of all clients"),
        )
        for count, most, what in bounds:
            if most is not None and count > most:
                raise Refused("limit", f"{what}: expected up to {most}, got {count}")
        self._waiting.append(request)

    def take(self) -> Waiting | None:
        """The oldest request for which there is room, or None. A request of a client without transfers is not overtaken
        by others that wait for room."""
        limits, blocked = self._limits, set[ClientSession]()
        each, total = limits.bytes_per_client or 0, limits.bytes_in_total or 0
        for place, request in enumerate(self._waiting):
            if request.client in blocked:
                continue
            mine = [transfer.nbytes for transfer in self.transfers if transfer.client == request.client]
            # Clients that read nothing hold what they have. The last share of the total is for clients that have
            # nothing yet.
            kept_free = min(each, total - each) if mine else 0
            if self.nbytes + request.nbytes + kept_free > total:
                if not mine:
                    return None
            elif len(mine) < limits.requests_per_client and sum(mine) + request.nbytes <= each:
                return self._waiting.pop(place)
            blocked.add(request.client)
        return None


class _HostTier:
    """What a ``Server`` serves of a pool. ``server`` must be set before its thread is started."""

    accepted = (Hello, Get, Find)
    server: Server

    def __init__(self, cache: KVCacheManager, transport: ServerTransport, limits: Limits) -> None:
        what = served(cache)
        self._cache, self._transport = cache, transport
        self._layout, self._origin = what.fingerprint, cache.block_keys([0]).origin[0]
        sizes = [(size, group.host_blocks) for size, group in zip(what.block_bytes, cache.groups, strict=True) if size]
        fits = fitting(limits, sizes)
        each = fits.bytes_per_client or 0
        self._welcome = Welcome(0, what.block_bytes, fits.blocks_per_request, fits.requests_per_client, each)
        self.under_way = UnderWay(fits)
        self.stats = ServerStats()
        self.linger_ms = 0
        self._idle_turns = 0
        if transport.serving:
            raise ValueError("transport: it is that of another server; each needs one of its own")
        transport.serving = True
        transport.start(host_bytes(cache))

    def release(self) -> None:
        """Let go of the transport, which another server may use then."""
        self._transport.close()
        self._transport.serving = False

    def has_room(self) -> bool:
        return True

    def turn(self) -> int | None:
        settled = self._settle()
        self._serve()
        self._idle_turns = 0 if settled else self._idle_turns + 1
        if not self.under_way.transfers:
            return None
        return POLL_MS if self._idle_turns < STALLED_TURNS else POLL_MS_STALLED

    def disconnect(self) -> None:
        self._linger(self.linger_ms)

    def disconnected(self) -> None:
        # The socket has dropped its messages, and the transport drops its readers. With them goes every use of the
        # pool's memory.
        self._transport.close()
        self._linger(max(self.linger_ms, 1000))
        for transfer in self.under_way.transfers:
            _log.warning(
                "client %s has not let go of %d bytes: they stay pinned", transfer.client.id.hex(), transfer.nbytes
            )

    def _linger(self, for_ms: int) -> None:
        end = time.monotonic() + for_ms / 1e3
        self._settle()
        while self.under_way.transfers and time.monotonic() < end:
            time.sleep(POLL_MS / 1e3)
            self._settle()

    # -- requests ----------------------------------------------------------------------------------

    def take(self, client: ClientSession, received: Received) -> None:
        request = received.message
        self._idle_turns = 0
        if isinstance(request, Hello):
            self._check(request, received)
            client.hello = request
            self.server.send(client, replace(self._welcome, id=request.id), self._transport.welcome())
            return
        if client.hello is None:
            raise Malformed("a request before hello")
        keys = _keys(received)
        if isinstance(request, Get):
            self._accept(client, request, keys)
        else:
            self._find(client, request, keys)

    def _check(self, hello: Hello, received: Received) -> None:
        """Raise unless the client may read blocks here at all."""
        if received.frames or received.blocks:
            raise Malformed(
                f"hello: expected no frames or blocks after it, got {len(received.frames)} and {len(received.blocks)}"
            )
        if len(hello.client) > _NAME_MAX or not hello.client.isprintable():
            raise Malformed(
                f"client: expected a name of up to {_NAME_MAX} printable characters, got {hello.client!a:.80}"
            )
        if hello.layout != self._layout:
            reason = (
                f"layout {hello.layout:.40} cannot read blocks of layout {self._layout}: both pools need one "
                "BlockLayout, or the same groups of layers"
            )
            raise Refused("layout", reason)
        if hello.origin != self._origin:
            raise Refused("secret", "the pools have different hash secrets")
        if hello.transport != self._transport.name:
            reason = f"transport {hello.transport!r:.40}: this server sends {self._transport.name!r}"
            raise Refused("transport", reason)

    def _accept(self, client: ClientSession, request: Get, keys: Uint64s) -> None:
        sizes = self._welcome.block_bytes
        if request.group >= len(sizes) or not sizes[request.group]:
            groups = [group for group, size in enumerate(sizes) if size]
            raise Malformed(f"group: expected one of {groups!r:.80}, got {request.group}")
        self.under_way.accept(Waiting(client, request.id, request.group, keys, len(keys) * sizes[request.group]))
        self._serve()

    def _find(self, client: ClientSession, request: Find, keys: Uint64s) -> None:
        """Answer which blocks are there. The pool is asked in pieces, so that nobody waits long for its lock.

        The socket accepts no message of more than BLOCKS_MAX keys.
        """
        pieces = [keys[first : first + KEYS_PER_LOOK] for first in range(0, len(keys), KEYS_PER_LOOK)]
        present = np.concatenate([self._of_pool(piece) for piece in pieces], axis=1)
        if self.server.send(client, Found(request.id), [np.packbits(present).tobytes()]):
            self.stats.questions += 1

    def _of_pool(self, keys: Uint64s) -> Bools:
        try:
            return self._cache.content.cached_blocks(keys, tier="host")
        except PoolClosed as error:
            raise Refused("closed", str(error)) from None

    # -- blocks ------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Pin and send requests for which there is room."""
        while (request := self.under_way.take()) is not None:
            self.server.guard(request.client, request.id, partial(self._send_blocks, request))

    def _pin(self, request: Waiting) -> tuple[list[Lease], Bools]:
        """Leases of the blocks that are there, in the order of their keys, and which keys those are."""
        keys, group, client = request.keys, request.group, request.client
        owner = f"remote {client.hello.client} {client.id.hex()}"
        try:
            return [self._cache.pin(keys, owner=owner, tier="host", group=group)], np.ones(len(keys), np.bool_)
        except PoolClosed as error:
            raise Refused("closed", str(error)) from None
        except BlockNotFound:
            each = [self._cache.find_and_pin_host(key, owner=owner, group=group) for key in keys]
            return [lease for lease in each if lease is not None], np.array([lease is not None for lease in each])

    def _send_blocks(self, request: Waiting) -> None:
        leases, present = self._pin(request)
        count = int(present.sum())
        reply, nbytes = Blocks(request.id, "".join("01"[bit] for bit in present.tolist())), request.nbytes
        try:
            if not count:
                self.server.send(request.client, reply)
            else:
                nbytes = count * self._welcome.block_bytes[request.group]
                rows = np.concatenate([lease.blocks for lease in leases])
                rows -= self._cache.groups[request.group].first_host_block
                offer = self._transport.offer(request.group, rows)
                mac = request.client.session.mac(offer.content)
                if any(lease.closed for lease in leases):  # else nobody has written there before they were sealed
                    raise Refused("revoked", "the lease was revoked before the blocks were sent")
                if offer.copied or not self._cache.core.transfer.guards & records.UNPIN_AFTER_RELEASE:
                    leases = self._unpin(leases)
                if not self.server.send(request.client, reply, offer.frames, offer.blocks, mac):
                    self._unpin(leases)
                    return
                transfer = Sending(request.client, nbytes, leases, offer.released)
                self.under_way.transfers.append(transfer)
        except BaseException:
            self._unpin(leases)
            raise
        stats = self.stats
        stats.requests += 1
        stats.blocks += count
        stats.missing_blocks += len(present) - count
        stats.bytes += nbytes if count else 0

    def _settle(self) -> bool:
        """Unpin what has been released, or whose lease somebody revoked. Returns whether there was any."""
        transfers = self.under_way.transfers
        if not transfers:
            return False
        self._transport.poll()
        going = []
        for transfer in transfers:
            if transfer.released() or any(lease.closed for lease in transfer.leases):
                self._unpin(transfer.leases)
            else:
                going.append(transfer)
        self.under_way.transfers = going
        return len(going) < len(transfers)

    def _unpin(self, leases: list[Lease]) -> list[Lease]:
        """Close leases. If somebody else has closed one before, the client finds that the blocks do not fit their
        seal, if others were written there."""
        self.stats.revoked += any(lease.closed for lease in leases)
        for lease in leases:
            try:
                lease.close()
            except KVPoolError:  # revoked, or the pool is closed and its leases with it
                pass
        return []


def _keys(received: Received) -> Uint64s:
    """The keys that a request names, uint64[n, 2]. Raises Malformed."""
    frames = [*received.frames, *received.blocks]
    if len(frames) != 1 or not frames[0].nbytes or frames[0].nbytes % KEY_BYTES:
        sizes, kind = [frame.nbytes for frame in frames], type(received.message).__name__.lower()
        raise Malformed(
            f"{kind}: expected one frame after it, of {KEY_BYTES} bytes for each key, got frames of {sizes!r:.80} bytes"
        )
    return np.frombuffer(bytes(frames[0]), np.uint64).reshape(-1, 2)

"""BlockClient: asks another worker's server for the blocks of a prompt, and imports what came under keys of its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import zmq

from kvpool.layout import integer_argument
from kvpool.manager import KVCacheManager
from kvpool.remote.endpoints import ClientKeys, ClientPassword, check_endpoint
from kvpool.remote.errors import RemoteError, RemoteTimeout
from kvpool.remote.exchange import Exchange
from kvpool.remote.messages import HEADER_BYTES_MAX, Failed, Get, Hello, Malformed, Welcome, decode, encode
from kvpool.remote.served import served_layout
from kvpool.remote.transport import Buffer, ClientTransport, InlineClient
from kvpool.retention import priority_argument
from kvpool.sequence import BlockKeys, key_rows

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockClient:
    """Fetches blocks from one server. A context manager.

    Connects at its first call, and anew after every error, so that nothing that was asked before an error is taken for an answer after it.

    Parameters
    ----------
    endpoint : a server's ``endpoint``. Other machines only with ``keys``.
    cache : the pool that takes the blocks, of one group of layers. It must have the server's block layout and hash secret.
    name : how the server calls this client's leases, up to 64 printable characters.
    transport : what the server uses; default ``InlineClient()``.
    keys : CURVE keys of this client and of the server.
    timeout_ms : how long the server may be silent while it owes an answer.
    blocks_per_message, messages_in_flight : what is asked for at a time; a server may set lower limits.

    One thread at a time: a call while another thread is inside one raises RuntimeError; give each thread a client. Calls wait for the
    network and hold no lock of the pool meanwhile. Raises ValueError, TypeError.
    """

    def __init__(
        self, endpoint: str, cache: KVCacheManager, *, name: str = "", transport: ClientTransport | None = None,
        keys: ClientKeys | None = None, timeout_ms: int = 10_000, blocks_per_message: int = 16, messages_in_flight: int = 4,
    ) -> None:  # fmt: skip
        self._endpoint, layout = check_endpoint(endpoint, keys), served_layout(cache)
        if not isinstance(name, str):
            raise TypeError(f"name={name!r:.80}: accepted is a string")
        if len(name) > 64 or not name.isprintable():
            raise ValueError(f"name={name!r:.80}: accepted are up to 64 printable characters")
        self._timeout_ms = integer_argument("timeout_ms", timeout_ms, 1, 1 << 31)
        self._blocks = integer_argument("blocks_per_message", blocks_per_message, 1, 4096)
        self._messages = integer_argument("messages_in_flight", messages_in_flight, 1, 1024)
        self._cache, self._keys = cache, keys
        self._transport = InlineClient() if transport is None else transport
        self._name, self._layout, self._origin = name, layout.fingerprint, cache.block_keys([0]).origin[0]
        self._block_bytes = layout.block_bytes
        # Numbers that no earlier life of this client has used.
        self._next_id = secrets.randbelow(1 << 60) + 1
        self._busy = threading.Lock()
        self._context: zmq.Context[Any] | None = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._welcome: Welcome | None = None

    # -- fetching --------------------------------------------------------------------------------

    def fetch(self, prompt: Any, *, priority: int = 35) -> int:
        """Import the full blocks that a request with this prompt would reuse and this pool does not have; returns how many entered.

        ``prompt``: BlockKeys of this pool, or tokens. Asks for what is behind the cached prefix, up to the first block that the server
        does not have. Changes the pool: blocks enter its host tier under keys that it computed itself, each as a whole.
        Raises RemoteTimeout and RemoteError, whose ``blocks`` entered before, and what ``import_blocks`` raises.
        """
        priority = priority_argument("priority", priority)
        with self._exclusive():
            keys = prompt if isinstance(prompt, BlockKeys) else self._cache.block_keys(prompt)
            size = self._cache.tokens_per_block
            # The last token of a prompt is never reused.
            first, last = self._cache.match_prefix(keys).full_tokens // size, (len(keys) - 1) // size
            entered = 0
            try:
                exchange = self._exchange(keys.keys[first:last].tobytes())
                for offset, blocks in exchange:
                    there = next((i for i, block in enumerate(blocks) if block is None), len(blocks))
                    if there:
                        entered += self._cache.import_blocks(keys, blocks[:there], first=first + offset, priority=priority)
                    if there < len(blocks):
                        exchange.stop()
            except RemoteError as error:
                error.blocks = entered
                raise
        return entered

    def fetch_blocks(self, keys: Any) -> list[Buffer | None]:
        """The bytes of host blocks by key (as ``pin`` takes them), None for those that the server does not have. Does not change the pool.

        Each is ``layout.block_bytes`` long, in host block layout, and was pinned until it was sent. Raises RemoteTimeout, RemoteError.
        """
        with self._exclusive():
            found: list[Buffer | None] = []
            for _, blocks in self._exchange(key_rows(keys).tobytes()):
                if self._transport.reuses_memory:
                    blocks = [None if block is None else memoryview(bytes(block)) for block in blocks]
                found.extend(blocks)
        return found

    def close(self) -> None:
        """Disconnect. Closing twice is fine; everything else raises ValueError afterwards."""
        with self._exclusive(closing=True):
            self._disconnect()
            context, self._context = self._context, None
            if context is not None:
                context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- the connection --------------------------------------------------------------------------

    @contextmanager
    def _exclusive(self, closing: bool = False) -> Iterator[None]:
        """One call at a time; a call that fails leaves no connection behind."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError("another thread is inside a call of this client: give each thread its own")
        try:
            if self._context is None and not closing:
                raise ValueError("the client is closed")
            yield
        except BaseException:
            self._disconnect()
            raise
        finally:
            self._busy.release()

    def _disconnect(self) -> None:
        socket, self._socket, self._welcome = self._socket, None, None
        self._transport.close()
        if socket is not None:
            socket.close(linger=0)

    def _exchange(self, keys: bytes) -> Exchange:
        if self._welcome is None:
            self._connect()
        assert self._socket is not None and self._welcome is not None
        welcome = self._welcome
        blocks = min(self._blocks, welcome.blocks_per_request, welcome.bytes // self._block_bytes)
        messages = min(self._messages, welcome.requests, welcome.bytes // (blocks * self._block_bytes))
        return Exchange(self._socket, self._transport, keys, self._get, blocks, messages, self._timeout_ms)

    def _get(self) -> Get:
        return Get(self._number(), self._name, self._layout, self._origin, self._transport.name)

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _connect(self) -> None:
        """Open a socket and learn the server's limits. Raises RemoteError where the two do not fit together."""
        assert self._context is not None
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.ipv6 = 0, "[" in self._endpoint
        socket.maxmsgsize = max(4 * HEADER_BYTES_MAX, self._blocks * self._block_bytes)
        (self._keys or ClientPassword(self._cache.remote_password)).apply(socket)
        refused = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        socket.connect(self._endpoint)
        hello = Hello(self._number(), self._name, self._layout, self._origin, self._transport.name)
        socket.send(encode(hello))
        try:
            came = zmq.select([socket, refused], [], [], self._timeout_ms / 1e3)[0]
        finally:
            socket.disable_monitor()
        if not came:
            hint = " and has the key that this client expects" if self._keys else ""
            raise RemoteTimeout(f"{self._endpoint} did not answer for {self._timeout_ms} ms: see that it runs{hint}")
        if socket not in came and self._keys:
            raise RemoteError("keys", f"{self._endpoint} does not know this client's key")
        if socket not in came:
            raise RemoteError(
                "secret",
                "the pools have different hash secrets, so that no key of one is known to the other: pass the same secret= to both "
                "KVCacheManagers",
            )
        frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
        try:
            welcome = decode(frames[0], (Welcome, Failed))
            if isinstance(welcome, Failed):
                raise RemoteError(welcome.code, welcome.reason)
            self._check(welcome, hello.id)
            blocks = min(self._blocks, welcome.blocks_per_request)
            self._transport.connect(frames[1:], self._block_bytes, blocks, min(self._messages, welcome.requests))
        except Malformed as error:
            raise RemoteError("malformed", f"{self._endpoint} sent {error}") from None
        self._welcome = welcome

    def _check(self, welcome: Welcome, id: int) -> None:
        if welcome.id != id:
            raise Malformed("a welcome to somebody else")
        if welcome.block_bytes != self._block_bytes:
            raise Malformed(f"blocks of {welcome.block_bytes} bytes: expected are {self._block_bytes}")
        if min(welcome.blocks_per_request, welcome.requests) < 1 or welcome.bytes < self._block_bytes:
            raise Malformed("limits under which no block can be asked for")

"""BlockClient: asks another worker's server for the blocks of a prompt, and imports them under keys that it computes
itself."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import zmq

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import priority_argument
from kvpool.entry.interrupt import DeferSignals
from kvpool.entry.process import Process
from kvpool.pool.keys import BlockKeys, key_rows
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.ending import end, new_context
from kvpool.remote.endpoints import ClientKeys, ClientPassword, check_endpoint
from kvpool.remote.exchange import Exchange, find
from kvpool.remote.frames import (
    BLOCKS_MAX,
    HEADER_BYTES_MAX,
    Failed,
    Find,
    Get,
    Hello,
    Malformed,
    Welcome,
    decode,
    encode,
)
from kvpool.remote.remote_errors import RemoteError, RemoteTimeout
from kvpool.remote.served import served
from kvpool.remote.transport import Buffer, ClientTransport, InlineClient
from kvpool.state.hashing import remote_password

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockClient:
    """Fetches blocks from one server. A context manager.

    It connects at its first call, and again after every error. So a late answer from before an error is never taken
    for a new one.

    Parameters
    ----------
    endpoint : a server's ``endpoint``. Other machines only with ``keys``.
    cache : the pool that takes the blocks. It must have the server's block layouts, in the same groups of layers, and
        its hash secret.
    name : the owner of this client's leases on the server, up to 64 printable characters.
    transport : the one that the server uses; default ``InlineClient()``.
    keys : CURVE keys of this client and of the server.
    timeout_ms : how long the server may be silent while it owes an answer.
    blocks_per_message, messages_in_flight : how much is requested at a time. A server may set lower limits.

    Only one thread at a time may call a client; a second one gets RuntimeError. Give each thread a client. Calls wait
    for the network, and hold no lock of the pool meanwhile. Raises ValueError, TypeError. All calls raise ForkedProcess
    in a child of ``os.fork()``.
    """

    def __init__(
        self,
        endpoint: str,
        cache: KVCacheManager,
        *,
        name: str = "",
        transport: ClientTransport | None = None,
        keys: ClientKeys | None = None,
        timeout_ms: int = 10_000,
        blocks_per_message: int = 16,
        messages_in_flight: int = 4,
    ) -> None:
        self._endpoint, what = check_endpoint(endpoint, keys), served(cache)
        if not isinstance(name, str):
            raise TypeError(f"name={name!r:.80}: accepted is a string")
        if len(name) > 64 or not name.isprintable():
            raise ValueError(f"name={name!r:.80}: accepted are up to 64 printable characters")
        self._timeout_ms = integer_argument("timeout_ms", timeout_ms, 1, 1 << 31)
        self._blocks = integer_argument("blocks_per_message", blocks_per_message, 1, 4096)
        self._messages = integer_argument("messages_in_flight", messages_in_flight, 1, 1024)
        self._cache, self._keys = cache, keys
        self._transport = InlineClient() if transport is None else transport
        self._name, self._layout, self._origin = name, what.fingerprint, cache.block_keys([0]).origin[0]
        self._parts, self._sizes = what.parts, what.block_bytes
        # Numbers that no client of this name has used before.
        self._next_id = secrets.randbelow(1 << 60) + 1
        self._busy, self._process = threading.Lock(), Process()
        self._context: zmq.Context[Any] | None = new_context()
        self._socket: zmq.Socket[bytes] | None = None
        self._welcome: Welcome | None = None

    # -- fetching --------------------------------------------------------------------------------

    def fetch(self, prompt: Any, *, priority: int = 35) -> int:
        """Import the full blocks that a request with this prompt would reuse and this pool does not have. Returns how
        many entered, in all groups of layers.

        ``prompt``: BlockKeys of this pool, or tokens. Asks for the blocks after the cached prefix, up to the first
        block that the server does not have. With a window, with recurrent layers or with several groups, it first asks
        which blocks the server has. Then it asks for those that the longest prefix of all groups needs: see
        ``KVCacheManager.lacking``.

        Changes the pool: blocks enter its host tier under keys that it computed itself, each as a whole. Raises
        RemoteTimeout and RemoteError, whose ``blocks`` entered before the error, and what ``import_blocks`` raises.
        """
        priority = priority_argument("priority", priority)
        with self._exclusive():
            keys = prompt if isinstance(prompt, BlockKeys) else self._cache.block_keys(prompt)
            entered = 0
            try:
                for group, places in self._wanted(keys):
                    exchange = self._exchange(keys.keys[places].tobytes(), group)
                    for offset, blocks in exchange:
                        there = next((i for i, block in enumerate(blocks) if block is None), len(blocks))
                        entered += self._import(keys, group, places[offset : offset + there], blocks, priority)
                        if there < len(blocks):
                            exchange.stop()
                    if exchange.stopped:
                        break
            except RemoteError as error:
                error.blocks = entered
                raise
        return entered

    def _wanted(self, keys: BlockKeys) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """The groups of layers that lack something of a prompt, and which of its full blocks they lack."""
        # The last token of a prompt is never reused.
        full, last = len(keys) // self._cache.tokens_per_block, (len(keys) - 1) // self._cache.tokens_per_block
        groups = [self._cache.groups[g] for g, size in enumerate(self._sizes) if size]
        if not keys.reuse:
            return []
        if len(groups) == 1 and groups[0].kind == "attention" and groups[0].window is None:
            first = self._cache.match_prefix(keys).full_tokens // self._cache.tokens_per_block
            return [(groups[0].index, np.arange(first, last))]
        there = np.zeros((len(self._sizes), full), np.bool_)
        socket, _ = self._connected()
        there[:, :last] = find(socket, keys.keys[:last].tobytes(), len(self._sizes), self._find, self._timeout_ms)
        lacking = self._cache.lacking(keys, there).blocks
        return [(group.index, lacking[group.index]) for group in groups if len(lacking[group.index])]

    def _import(
        self, keys: BlockKeys, group: int, places: npt.NDArray[np.int64], blocks: list[Buffer | None], priority: int
    ) -> int:
        """Store the first blocks of an answer, which are those of the prompt at ``places``. Returns how many
        entered."""
        entered = 0
        cuts = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        for begin, after in zip(cuts, cuts[1:], strict=False):
            if begin < after:
                first, own = int(places[begin]), blocks[begin:after]
                entered += self._cache.import_blocks(keys, own, first=first, priority=priority, group=group)
        return entered

    def fetch_blocks(self, keys: Any, *, group: int | None = None) -> list[Buffer | None]:
        """The bytes of host blocks by key (as ``pin`` takes them), None for a block that the server does not have. Does
        not change the pool.

        ``group``: the index of a group of layers, required if there are several. A group for cross attention is a
        ValueError. Each block has ``groups[group].block_bytes`` bytes, part after part, in host block layout, and was
        pinned until it was sent. Raises RemoteTimeout, RemoteError.
        """
        which = self._cache.core.config.group(group)
        if not self._sizes[which]:
            raise ValueError(f"group={which}: of a group for cross attention nothing is served; accepted are others")
        with self._exclusive():
            found: list[Buffer | None] = []
            for _, blocks in self._exchange(key_rows(keys).tobytes(), which):
                if self._transport.reuses_memory:
                    blocks = [None if block is None else memoryview(bytes(block)) for block in blocks]
                found.extend(blocks)
        return found

    def close(self) -> None:
        """Disconnect. A second call does nothing. All other calls raise ValueError from then on."""
        with self._exclusive(closing=True):
            self._disconnect()
            context, self._context = self._context, None
            if context is not None:
                end(context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- the connection --------------------------------------------------------------------------

    @contextmanager
    def _exclusive(self, closing: bool = False) -> Iterator[None]:
        """Allow one call at a time. A call that fails leaves no connection."""
        self._process.check(self)
        taken = False
        try:
            # A handler that raises right behind it finds that it was taken.
            with DeferSignals():
                taken = self._busy.acquire(blocking=False)
            if not taken:
                raise RuntimeError("another thread is inside a call of this client: give each thread its own")
            if self._context is None and not closing:
                raise ValueError("the client is closed")
            yield
        except BaseException:
            if taken:
                self._disconnect()
            raise
        finally:
            if taken:
                self._busy.release()

    def _disconnect(self) -> None:
        socket, self._socket, self._welcome = self._socket, None, None
        self._transport.close()
        if socket is not None:
            socket.close(linger=0)

    def _connected(self) -> tuple[zmq.Socket[bytes], Welcome]:
        if self._welcome is None:
            self._connect()
        assert self._socket is not None and self._welcome is not None
        return self._socket, self._welcome

    def _exchange(self, keys: bytes, group: int) -> Exchange:
        socket, welcome = self._connected()
        size = self._sizes[group]
        blocks = self._blocks_of(welcome, size)
        messages = min(self._messages, welcome.requests, welcome.bytes // (blocks * size))
        return Exchange(socket, self._transport, keys, group, self._get, blocks, messages, self._timeout_ms)

    def _blocks_of(self, welcome: Welcome, size: int) -> int:
        """How many blocks of this size one message may have."""
        return min(self._blocks, welcome.blocks_per_request, welcome.bytes // size)

    def _get(self, group: int) -> Get:
        return Get(self._number(), self._name, self._layout, self._origin, self._transport.name, group)

    def _find(self) -> Find:
        return Find(self._number(), self._name, self._layout, self._origin, self._transport.name)

    def _number(self) -> int:
        self._next_id += 1
        return self._next_id

    def _connect(self) -> None:
        """Open a socket and learn the server's limits. Raises RemoteError if the two pools do not fit together."""
        assert self._context is not None
        socket = self._socket = self._context.socket(zmq.DEALER)
        socket.linger, socket.ipv6 = 0, "[" in self._endpoint
        # Every request has up to two answers. A server that sends more is not read from until the next call.
        socket.rcvhwm = 2 * self._messages
        answer = len(self._sizes) * BLOCKS_MAX // 8 + 1
        socket.maxmsgsize = max(4 * HEADER_BYTES_MAX, answer, self._blocks * max(self._sizes))
        (self._keys or ClientPassword(remote_password(self._cache.core.states.secret))).apply(socket)
        refused = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        socket.connect(self._endpoint)
        hello = Hello(self._number(), self._name, self._layout, self._origin, self._transport.name)
        # A server that has refused the password already has ended the connection: a send that waits would never end.
        with suppress(zmq.Again):
            socket.send(encode(hello), zmq.NOBLOCK)
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
                "the pools have different hash secrets, so that no key of one is known to the other: pass the same "
                "secret= to both "
                "KVCacheManagers",
            )
        frames = [frame.buffer for frame in socket.recv_multipart(copy=False)]
        try:
            welcome = decode(frames[0], (Welcome, Failed))
            if isinstance(welcome, Failed):
                raise RemoteError(welcome.code, welcome.reason)
            self._check(welcome, hello.id)
            nbytes = max(size * self._blocks_of(welcome, size) for size in self._sizes if size)
            self._transport.connect(frames[1:], self._parts, nbytes, min(self._messages, welcome.requests))
        except Malformed as error:
            raise RemoteError("malformed", f"{self._endpoint} sent {error}") from None
        self._welcome = welcome

    def _check(self, welcome: Welcome, id: int) -> None:
        if welcome.id != id:
            raise Malformed("a welcome to somebody else")
        if welcome.block_bytes != self._sizes:
            raise Malformed(f"blocks of {welcome.block_bytes!r:.80} bytes: expected are {self._sizes!r:.80}")
        if min(welcome.blocks_per_request, welcome.requests) < 1 or welcome.bytes < max(self._sizes):
            raise Malformed("limits under which no block can be asked for")

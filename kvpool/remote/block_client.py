"""BlockClient: asks another worker's server for the blocks of a prompt, and imports them under keys that it computes
itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import zmq

from kvpool.common.arguments import number_argument, priority_argument, text_argument
from kvpool.common.arrays import Bools, Int64s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.process import Closing, stays_here
from kvpool.pool.keys import BlockKeys, Keys, Prompt, key_rows
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.connection import Connection, RemoteError, RemoteTimeout
from kvpool.remote.connections import end, new_context
from kvpool.remote.listener import ClientKeys, ClientSecret, check_endpoint
from kvpool.remote.session import BLOCKS_MAX, KEY_BYTES, Blocks, Find, Found, Get, Hello, Malformed, Received, Welcome
from kvpool.remote.transport import Arrival, Buffer, ClientTransport, InlineClient, neighbours, served
from kvpool.state.hashing import remote_password

ARRIVAL_POLL_MS = 1


@dataclass
class _Asked:
    """A request that has been sent, and its answer."""

    first: int
    count: int
    found: str | None = None
    arrival: Arrival | None = None
    mac: bytes = b""

    def complete(self) -> bool:
        return self.found is not None and (self.arrival is None or self.arrival.ready())


class Exchange:
    """Iterates over (place of the first key, its blocks and those of the next keys; None if the server has no block).

    ``keys`` are 16 bytes each, of blocks of one ``group`` of layers. A block is valid until the next step of the
    iteration. Raises RemoteTimeout when the server owes an answer and is silent. Raises RemoteError if the server
    refuses, or sends what no server sends; its code is "seal" for blocks that are not those that the server has sealed.
    """

    def __init__(
        self, link: Connection, transport: ClientTransport, keys: bytes, group: int, blocks: int, messages: int
    ) -> None:
        self._link = link
        self._transport = transport
        self._keys = keys
        self._group = group
        self._blocks, self._messages = blocks, messages
        self._sent, self._end = 0, len(keys) // KEY_BYTES
        self._waiting: dict[int, _Asked] = {}
        self.stopped = False

    def stop(self) -> None:
        """Send no more requests. Answers to those that were sent are received and dropped."""
        self.stopped, self._end = True, self._sent

    def __iter__(self) -> Iterator[tuple[int, list[Buffer | None]]]:
        try:
            while self._sent < self._end or self._waiting:
                while self._sent < self._end and len(self._waiting) < self._messages:
                    self._ask()
                oldest = next(iter(self._waiting))
                self._wait(self._waiting[oldest])
                request = self._waiting.pop(oldest)
                if not self.stopped:
                    yield request.first, self._in_place(request)
                if request.arrival is not None:
                    request.arrival.done()
        except Malformed as error:
            raise RemoteError("malformed", f"the server sent {error}") from None
        self._link.rest()

    def _ask(self) -> None:
        request, first = Get(self._link.number(), self._group), self._sent
        self._sent = min(first + self._blocks, self._end)
        self._waiting[request.id] = _Asked(first, self._sent - first)
        self._link.send(request, [self._keys[first * KEY_BYTES : self._sent * KEY_BYTES]])

    def _wait(self, request: _Asked) -> None:
        """Wait until a request is complete. Raises RemoteTimeout."""
        silent = time.monotonic()
        while not request.complete():
            # What is read in other ways than by messages is looked at often.
            received = self._link.receive((Blocks,), wait_ms=None if request.found is None else ARRIVAL_POLL_MS)
            if received is not None:
                self._take(received)
                silent = time.monotonic()
            elif time.monotonic() - silent > self._link.timeout_ms / 1e3:
                raise RemoteTimeout(f"blocks did not arrive for {self._link.timeout_ms} ms")

    def _take(self, received: Received) -> None:
        message = received.message
        request = self._waiting.get(message.id)
        if request is None or request.found is not None:
            raise Malformed(f"an answer to request {message.id}, which does not wait for one")
        if len(message.found) != request.count or message.found.strip("01"):
            raise Malformed(f"{message.found!r:.40} for the {request.count} keys of a request")
        count = message.found.count("1")
        if count:
            request.arrival, request.mac = self._transport.receive(received, self._group, count), received.mac
        elif received.frames or received.blocks:
            raise Malformed("frames without blocks")
        request.found = message.found

    def _in_place(self, request: _Asked) -> list[Buffer | None]:
        """The blocks that came, each at the place of its key. Raises RemoteError if they do not fit their seal."""
        arrival = request.arrival
        if arrival is not None and not self._link.verify_mac(arrival.content, request.mac):
            raise RemoteError("seal", "the blocks are not those that the server has sealed: they may hold anything")
        blocks = iter([] if arrival is None else arrival.blocks)
        return [next(blocks) if bit == "1" else None for bit in request.found or ""]


def find(link: Connection, keys: bytes, groups: int) -> Bools:
    """Which groups of layers of a server have the blocks of some keys, of 16 bytes each, on the host: bool[groups,
    keys].

    Raises RemoteTimeout, RemoteError.
    """
    answers, step = [np.empty((groups, 0), np.bool_)], KEY_BYTES * BLOCKS_MAX
    for piece in (keys[first : first + step] for first in range(0, len(keys), step)):
        count = len(piece) // KEY_BYTES
        received = link.ask(Find(link.number()), [piece], Found)
        sizes = [frame.nbytes for frame in received.frames]
        if sizes != [-(-groups * count // 8)] or received.blocks:
            raise RemoteError("malformed", f"the server sent {sizes!r:.80} bytes for {groups} x {count} bits")
        bits = np.unpackbits(np.frombuffer(received.frames[0], np.uint8), count=groups * count)
        answers.append(bits.reshape(groups, count).astype(np.bool_))
    return np.concatenate(answers, axis=1)


class BlockClient(Closing):
    """Fetches blocks from one server. A context manager.

    Parameters
    ----------
    endpoint : str
        A server's ``endpoint``. Other machines only with ``keys``.
    cache : KVCacheManager
        The pool that takes the blocks. It must have the server's block layouts, in the same groups of layers, and its
        hash secret.
    name : str, default ""
        The owner of this client's leases on the server, up to 64 printable characters.
    transport : ClientTransport, optional
        The one that the server uses. By default ``InlineClient()``.
    keys : ClientKeys, optional
        CURVE keys of this client and of the server.
    timeout : float, default 10.0
        Seconds that the server may be silent while a request is open.
    blocks_per_message : int, default 16
        Blocks that are requested in one message. A server may set a lower limit.
    messages_in_flight : int, default 4
        Requests that are open at a time. A server may set a lower limit.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type or value.
    ForkedProcess
        From all calls in a child of ``os.fork()``.

    Notes
    -----
    Only one thread at a time may call a client; a second one gets RuntimeError. Give each thread a client. Calls wait
    for the network, and hold no lock of the pool meanwhile. A client connects at its first call, and again after every
    error. So a late answer from before an error is never taken for a new one.
    """

    def __init__(
        self,
        endpoint: str,
        cache: KVCacheManager,
        *,
        name: str = "",
        transport: ClientTransport | None = None,
        keys: ClientKeys | None = None,
        timeout: float = 10.0,
        blocks_per_message: int = 16,
        messages_in_flight: int = 4,
    ) -> None:
        self._endpoint, what = check_endpoint(endpoint, keys), served(cache)
        name = text_argument("name", name)
        if len(name) > 64 or not name.isprintable():
            raise ValueError(f"name: expected up to 64 printable characters, got {name!r:.80}")
        self._timeout_ms = round(1e3 * number_argument("timeout", timeout, 1e-3, 1e6))
        self._blocks = integer_argument("blocks_per_message", blocks_per_message, 1, 4096)
        self._messages = integer_argument("messages_in_flight", messages_in_flight, 1, 1024)
        self._cache, self._keys = cache, keys
        self._transport = InlineClient() if transport is None else transport
        self._sizes, self._parts = what.block_bytes, what.parts
        self._hello = Hello(0, name, what.fingerprint, cache.block_keys([0]).origin[0], self._transport.name)
        self._busy = threading.Lock()
        stays_here(self)
        self._context: zmq.Context[Any] | None = new_context()
        self._link: Connection | None = None

    # -- fetching --------------------------------------------------------------------------------

    def fetch(self, prompt: Prompt, *, priority: int = 35) -> int:
        """Import the full blocks that a request with this prompt would reuse and this pool does not have.

        Requests the blocks after the cached prefix, up to the first block that the server does not have. With a window,
        with recurrent layers or with several groups, it first asks which blocks the server has. Then it requests those
        that the longest prefix of all groups needs: see ``CachedContent.missing_blocks``.

        Parameters
        ----------
        prompt : BlockKeys, or sequence of int
            BlockKeys of this pool, or tokens.
        priority : int, default 35
            Priority of the imported blocks, 0 to 100.

        Returns
        -------
        int
            Blocks that entered, in all groups of layers.

        Raises
        ------
        RemoteError, RemoteTimeout
            Their ``blocks`` entered before the error. Also what ``Imports.import_blocks`` raises.

        Notes
        -----
        Changes the pool: blocks enter its host tier under keys that it computed itself, each as a whole.
        """
        priority = priority_argument("priority", priority)
        with self._free(), self._disconnecting():
            keys = prompt if isinstance(prompt, BlockKeys) else self._cache.block_keys(prompt)
            entered = 0
            try:
                for group, places in self._wanted(keys):
                    exchange = self._exchange(keys.keys[places].tobytes(), group)
                    for offset, blocks in exchange:
                        leading = next((i for i, block in enumerate(blocks) if block is None), len(blocks))
                        entered += self._import(keys, group, places[offset : offset + leading], blocks, priority)
                        if leading < len(blocks):
                            exchange.stop()
                    if exchange.stopped:
                        break
            except RemoteError as error:
                error.blocks = entered
                raise
        return entered

    def _wanted(self, keys: BlockKeys) -> list[tuple[int, Int64s]]:
        """The groups of layers that lack something of a prompt, and which of its full blocks they lack."""
        # The last token of a prompt is never reused.
        full, last = len(keys) // self._cache.tokens_per_block, (len(keys) - 1) // self._cache.tokens_per_block
        groups = [self._cache.groups[g] for g, size in enumerate(self._sizes) if size]
        if not keys.reuse:
            return []
        if len(groups) == 1 and groups[0].kind == "attention" and groups[0].window is None:
            first = self._cache.match_prefix(keys).full_tokens // self._cache.tokens_per_block
            return [(groups[0].index, np.arange(first, last))]
        on_server = np.zeros((len(self._sizes), full), np.bool_)
        on_server[:, :last] = find(self._connected(), keys.keys[:last].tobytes(), len(self._sizes))
        lacking = self._cache.content.missing_blocks(keys, on_server).blocks
        return [(group.index, lacking[group.index]) for group in groups if len(lacking[group.index])]

    def _import(self, keys: BlockKeys, group: int, places: Int64s, blocks: list[Buffer | None], priority: int) -> int:
        """Store the first blocks of an answer, which are those of the prompt at ``places``. Returns how many
        entered."""
        entered = begin = 0
        for run in neighbours(places):
            run_blocks = [block for block in blocks[begin : begin + len(run)] if block is not None]
            entered += self._cache.imports.import_blocks(
                keys, run_blocks, first=int(run[0]), priority=priority, group=group
            )
            begin += len(run)
        return entered

    def fetch_blocks(self, keys: Keys, *, group: int | None = None) -> list[Buffer | None]:
        """Return the bytes of host blocks by key. Does not change the pool.

        Parameters
        ----------
        keys : BlockKeys, ndarray of uint64[n, 2], or sequence of bytes
            As ``KVCacheManager.pin`` takes them.
        group : int, optional
            Index of a group of layers, required if there are several.

        Returns
        -------
        list of memoryview or None
            For each key ``groups[group].block_bytes`` bytes, part after part, in host block layout; None if the server
            does not have the block. Each was pinned until it was sent.

        Raises
        ------
        TypeError, ValueError
            For an argument of the wrong type or value, and for a group for cross attention.
        RemoteError, RemoteTimeout
            If the server refuses, or does not answer.
        """
        which = self._cache.core.config.group(group)
        if not self._sizes[which]:
            raise ValueError(f"group: expected a group without cross attention, got {which}")
        with self._free(), self._disconnecting():
            fetched: list[Buffer | None] = []
            for _, blocks in self._exchange(key_rows(keys).tobytes(), which):
                if self._transport.reuses_memory:
                    blocks = [None if block is None else memoryview(bytes(block)) for block in blocks]
                fetched.extend(blocks)
        return fetched

    def close(self) -> None:
        """Disconnect. All other calls raise ValueError from then on. A second call does nothing."""
        with self._free(), self._disconnecting(closing=True):
            self._disconnect()
            context, self._context = self._context, None
            if context is not None:
                end(context)

    # -- the connection --------------------------------------------------------------------------

    def _free(self) -> threading.Lock:
        """The lock of a call, which is taken by ``with`` in the call itself. Raises RuntimeError if another one has it.
        Of two calls that find it free at the same moment, one waits."""
        if self._busy.locked():
            raise RuntimeError("another thread is inside a call of this client: give each thread its own")
        return self._busy

    @contextmanager
    def _disconnecting(self, closing: bool = False) -> Iterator[None]:
        """Leave no connection if the call fails. ``closing``: the client may be closed."""
        try:
            if self._context is None and not closing:
                raise ValueError("the client is closed")
            yield
        except BaseException:
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        self._transport.close()
        if link is not None:
            link.close()

    def _connected(self) -> Connection:
        if self._link is not None and self._link.ended():
            self._disconnect()
        if self._link is None or self._link.welcome is None:
            self._connect()
        assert self._link is not None
        self._link.timeout_ms = self._timeout_ms
        return self._link

    def _exchange(self, keys: bytes, group: int) -> Exchange:
        link = self._connected()
        blocks = self._blocks_of(link.welcome, self._sizes[group])
        messages = min(self._messages, link.welcome.requests, link.welcome.bytes // (blocks * self._sizes[group]))
        return Exchange(link, self._transport, keys, group, blocks, messages)

    def _blocks_of(self, welcome: Welcome, size: int) -> int:
        """How many blocks of this size one message may have."""
        return min(self._blocks, welcome.blocks_per_request, welcome.bytes // size)

    def _connect(self) -> None:
        """Learn the server's limits. Raises RemoteError if the two pools do not fit together."""
        assert self._context is not None
        credentials = self._keys or ClientSecret(remote_password(self._cache.core.states.secret).encode())
        answer = len(self._sizes) * BLOCKS_MAX // 8 + 1
        link = self._link = Connection(
            self._context,
            self._endpoint,
            credentials,
            timeout_ms=self._timeout_ms,
            # A server that sends more answers than it owes is not read from until the next call.
            frame_bytes=max(answer, self._blocks * max(self._sizes)),
            messages=self._messages,
        )
        try:
            received = link.greet(self._hello, Welcome)
        except RemoteError as error:
            self._explain(error)
        try:
            self._check(received.message)
            nbytes = max(size * self._blocks_of(received.message, size) for size in self._sizes if size)
            self._transport.connect(received.frames, self._parts, nbytes, self._messages)
        except Malformed as error:
            raise RemoteError("malformed", f"{self._endpoint} sent {error}") from None

    def _explain(self, error: RemoteError) -> NoReturn:
        """Raise the error, in words of pools."""
        if error.code == "credentials" and self._keys:
            raise RemoteError("keys", f"{self._endpoint} does not know this client's key") from None
        if error.code in ("credentials", "secret"):
            raise RemoteError(
                "secret",
                "the pools have different hash secrets, so that no key of one is known to the other: give both "
                "KVCacheManagers the same secret=",
            ) from None
        raise error

    def _check(self, welcome: Welcome) -> None:
        if welcome.block_bytes != self._sizes:
            raise Malformed(f"blocks of {welcome.block_bytes!r:.80} bytes: expected are {self._sizes!r:.80}")
        if min(welcome.blocks_per_request, welcome.requests) < 1 or welcome.bytes < max(self._sizes):
            raise Malformed("limits under which no block can be asked for")

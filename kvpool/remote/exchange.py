"""One fetch on the wire: requests for consecutive keys, several at a time. Their blocks come in order, each message
once all of it is there and fits its seal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvpool.remote.frames import BLOCKS_MAX, KEY_BYTES, Blocks, Find, Found, Get, Malformed
from kvpool.remote.link import Link
from kvpool.remote.remote_errors import RemoteError, RemoteTimeout
from kvpool.remote.session import Received
from kvpool.remote.transport import Arrival, Buffer, ClientTransport

ARRIVAL_POLL_MS = 1


@dataclass
class _Asked:
    """A request that has been sent, and its answer."""

    first: int
    count: int
    found: str | None = None
    arrival: Arrival | None = None
    seal: bytes = b""

    def complete(self) -> bool:
        return self.found is not None and (self.arrival is None or self.arrival.ready())


class Exchange:
    """Iterates over (place of the first key, its blocks and those of the next keys; None if the server has no block).

    ``keys`` are 16 bytes each, of blocks of one ``group`` of layers. A block is valid until the next step of the
    iteration. Raises RemoteTimeout when the server owes an answer and is silent. Raises RemoteError if the server
    refuses, or sends what no server sends; its code is "seal" for blocks that are not those that the server has sealed.
    """

    def __init__(
        self, link: Link, transport: ClientTransport, keys: bytes, group: int, blocks: int, messages: int
    ) -> None:
        self._link, self._transport, self._keys, self._group = link, transport, keys, group
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
            request.arrival, request.seal = self._transport.receive(received, self._group, count), received.seal
        elif received.frames or received.blocks:
            raise Malformed("frames without blocks")
        request.found = message.found

    def _in_place(self, request: _Asked) -> list[Buffer | None]:
        """The blocks that came, each at the place of its key. Raises RemoteError if they do not fit their seal."""
        arrival = request.arrival
        if arrival is not None and not self._link.is_sealed(arrival.content, request.seal):
            raise RemoteError("seal", "the blocks are not those that the server has sealed: they may hold anything")
        blocks = iter([] if arrival is None else arrival.blocks)
        return [next(blocks) if one == "1" else None for one in request.found or ""]


def find(link: Link, keys: bytes, groups: int) -> npt.NDArray[np.bool_]:
    """Which groups of layers of a server have the blocks of some keys, of 16 bytes each, on the host: bool[groups,
    keys].

    Raises RemoteTimeout, RemoteError.
    """
    found, step = [np.empty((groups, 0), np.bool_)], KEY_BYTES * BLOCKS_MAX
    for piece in (keys[first : first + step] for first in range(0, len(keys), step)):
        count = len(piece) // KEY_BYTES
        received = link.ask(Find(link.number()), [piece], Found)
        sizes = [frame.nbytes for frame in received.frames]
        if sizes != [-(-groups * count // 8)] or received.blocks:
            raise RemoteError("malformed", f"the server sent {sizes!r:.80} bytes for {groups} x {count} bits")
        bits = np.unpackbits(np.frombuffer(received.frames[0], np.uint8), count=groups * count)
        found.append(bits.reshape(groups, count).astype(np.bool_))
    return np.concatenate(found, axis=1)

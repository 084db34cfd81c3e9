"""One fetch on the wire: requests for consecutive keys, several at a time. Their blocks come in order, each message
once it is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from kvpool.remote.frames import (
    BLOCKS_MAX,
    KEY_BYTES,
    Blocks,
    Failed,
    Find,
    Found,
    Get,
    Malformed,
    Released,
    decode,
    encode,
)
from kvpool.remote.remote_errors import RemoteError, RemoteTimeout
from kvpool.remote.transport import Arrival, Buffer, ClientTransport

ARRIVAL_POLL_MS = 1


@dataclass
class _Request:
    """A request that has been sent. It is complete when its blocks have arrived and the server has said that they are
    whole."""

    first: int
    count: int
    found: str | None = None
    arrival: Arrival | None = None
    whole: bool = False

    def complete(self) -> bool:
        return self.whole and (self.arrival is None or self.arrival.ready())


class Exchange:
    """Iterates over (place of the first key, its blocks and those of the next keys; None if the server has no block).

    ``keys`` are 16 bytes each, of blocks of one ``group`` of layers. A block is valid until the next step of the
    iteration. Raises RemoteTimeout when the server owes an answer and is silent for ``timeout_ms``. Raises RemoteError
    if the server refuses, or sends what no server sends.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        transport: ClientTransport,
        keys: bytes,
        group: int,
        get: Callable[[int], Get],
        blocks: int,
        messages: int,
        timeout_ms: int,
    ) -> None:
        self._socket, self._transport, self._get = socket, transport, get
        self._keys, self._group = keys, group
        self._blocks, self._messages, self._timeout_ms = blocks, messages, timeout_ms
        self._sent, self._end = 0, len(keys) // KEY_BYTES
        self._waiting: dict[int, _Request] = {}
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
                if not self._waiting[oldest].complete():
                    self._wait()
                    continue
                request = self._waiting.pop(oldest)
                if not self.stopped:
                    yield request.first, _in_place(request)
                if request.arrival is not None:
                    request.arrival.done()
        except Malformed as error:
            raise RemoteError("malformed", f"the server sent {error}") from None

    def _ask(self) -> None:
        request, first = self._get(self._group), self._sent
        self._sent = min(first + self._blocks, self._end)
        self._waiting[request.id] = _Request(first, self._sent - first)
        _send(self._socket, [encode(request), self._keys[first * KEY_BYTES : self._sent * KEY_BYTES]])

    def _wait(self) -> None:
        """Take the next message of the server, or return when an arrival may be ready. Raises RemoteTimeout."""
        end = time.monotonic() + self._timeout_ms / 1e3
        while True:
            try:
                return self._take(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
            except zmq.Again:
                pass
            arriving = [one for one in self._waiting.values() if one.arrival is not None and not one.arrival.ready()]
            left_ms = max(0, round((end - time.monotonic()) * 1e3))
            if self._socket.poll(min(left_ms, ARRIVAL_POLL_MS) if arriving else left_ms):
                continue
            if any(one.arrival is not None and one.arrival.ready() for one in arriving):
                return
            if left_ms == 0:
                raise RemoteTimeout(
                    f"the server owes {len(self._waiting)} answers and was silent for {self._timeout_ms} ms"
                )

    def _take(self, frames: list[Any]) -> None:
        buffers = [frame.buffer for frame in frames]
        message = decode(buffers[0], (Blocks, Released, Failed))
        if isinstance(message, Failed):
            raise RemoteError(message.code, message.reason)
        request = self._waiting.get(message.id)
        if request is None:
            raise Malformed(f"an answer to request {message.id}, which does not wait for one")
        if isinstance(message, Released):
            if request.found is None or request.whole or len(buffers) > 1:
                raise Malformed("a release of blocks that it did not send")
            request.whole = True
            return
        if request.found is not None:
            raise Malformed("blocks that it has sent before")
        if len(message.found) != request.count or message.found.strip("01"):
            raise Malformed(f"{message.found!r:.40} for the {request.count} keys of a request")
        count = message.found.count("1")
        request.found, request.whole = message.found, message.done
        if count:
            request.arrival = self._transport.receive(buffers[1:], self._group, count)
        elif len(buffers) > 1:
            raise Malformed("frames without blocks")


def find(
    socket: zmq.Socket[bytes], keys: bytes, groups: int, find: Callable[[], Find], timeout_ms: int
) -> npt.NDArray[np.bool_]:
    """Which groups of layers of a server have the blocks of some keys, of 16 bytes each, on the host: bool[groups,
    keys].

    Raises RemoteTimeout, RemoteError.
    """
    found, step = [], KEY_BYTES * BLOCKS_MAX
    for piece in (keys[first : first + step] for first in range(0, len(keys), step)):
        request, count = find(), len(piece) // KEY_BYTES
        _send(socket, [encode(request), piece])
        if not socket.poll(timeout_ms):
            raise RemoteTimeout(f"the server owes an answer and was silent for {timeout_ms} ms")
        header, *frames = socket.recv_multipart()
        try:
            answer = decode(header, (Found, Failed))
            if isinstance(answer, Failed):
                raise RemoteError(answer.code, answer.reason)
            if answer.id != request.id:
                raise Malformed(f"an answer to request {answer.id}, which does not wait for one")
            if [len(frame) for frame in frames] != [-(-groups * count // 8)]:
                raise Malformed(f"frames of {[len(frame) for frame in frames]!r:.80} bytes for {groups} x {count} bits")
        except Malformed as error:
            raise RemoteError("malformed", f"the server sent {error}") from None
        bits = np.unpackbits(np.frombuffer(frames[0], np.uint8), count=groups * count)
        found.append(bits.reshape(groups, count).astype(np.bool_))
    return np.concatenate([np.empty((groups, 0), np.bool_), *found], axis=1)


def _in_place(request: _Request) -> list[Buffer | None]:
    """The blocks that came, each at the place of its key."""
    blocks = iter([] if request.arrival is None else request.arrival.blocks)
    return [next(blocks) if one == "1" else None for one in request.found or ""]


def _send(socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """Send a request, unless there is nobody to send it to any more: then no answer comes."""
    with suppress(zmq.Again):
        socket.send_multipart(frames, zmq.NOBLOCK)

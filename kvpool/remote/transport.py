"""How the bytes of blocks travel: a small interface, and its first implementation, frames of the ZeroMQ message itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import zmq

from kvpool.remote.messages import Malformed

HostBytes = npt.NDArray[np.uint8]
Buffer = memoryview
GATHER_BELOW = zmq.COPY_THRESHOLD
"""Bytes of a block under which it is cheaper to copy all blocks of a message into one frame than to send each from its place."""


class Offer(NamedTuple):
    """Blocks on their way to one reader."""

    frames: list[Any]
    """To be sent behind the header. Whoever keeps one keeps its memory from being released."""
    copied: bool
    """The pool's own memory is not read any more: it may be unpinned at once."""
    released: Callable[[], bool]
    """Whether the transport has let go of the memory, once the frames are sent. Does not wait."""


class Arrival(NamedTuple):
    """Blocks on their way from a server. They are complete once ``ready`` says so, and whole once the server says so."""

    blocks: list[Buffer]
    """Each ``block_bytes`` long; in memory that is used again after ``done``, where the transport reuses memory."""
    ready: Callable[[], bool]
    """Whether all bytes are here. Does not wait. Raises Malformed where they will never be."""
    done: Callable[[], None]
    """The blocks have been read."""


class ServerTransport(ABC):
    """The sending side. Used by the thread of one server; ``host`` is uint8[host_blocks, block_bytes], the host tier."""

    name: str

    @abstractmethod
    def start(self, host: HostBytes) -> None:
        """Learn what memory will be served, before anything else. May raise what the transport raises."""

    @abstractmethod
    def welcome(self) -> list[bytes]:
        """What a reader needs to know before its first request; goes behind the Welcome."""

    @abstractmethod
    def offer(self, rows: npt.NDArray[np.int64]) -> Offer:
        """Begin to send these rows of the host tier, which are pinned."""

    @abstractmethod
    def poll(self) -> None:
        """Take note of what readers have finished. Does not wait."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the host tier. Closing twice is fine."""


class ClientTransport(ABC):
    """The receiving side. Used by one client, a call at a time."""

    name: str
    reuses_memory: bool
    """Whether blocks of an Arrival are overwritten after its ``done``."""

    @abstractmethod
    def connect(self, frames: Sequence[Buffer], block_bytes: int, blocks: int, messages: int) -> None:
        """Take what the server sent behind its Welcome; up to ``messages`` messages of ``blocks`` blocks will be on their way at once.

        Raises Malformed.
        """

    @abstractmethod
    def receive(self, frames: Sequence[Buffer], count: int) -> Arrival:
        """Receive ``count`` blocks that a server has offered with these frames. Raises Malformed."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is on its way, and let go of the server. ``connect`` may follow."""


class InlineServer(ServerTransport):
    """Blocks are frames of the reply: a frame for each run of neighbours, sent from its place; one with a copy of all if they are small."""

    name = "inline"

    def start(self, host: HostBytes) -> None:
        self._host = host

    def welcome(self) -> list[bytes]:
        return []

    def offer(self, rows: npt.NDArray[np.int64]) -> Offer:
        copied = self._host.shape[1] < GATHER_BELOW
        sent = [self._host[rows]] if copied else [self._host[first:end] for first, end in _runs(rows)]
        frames = [zmq.Frame(one, track=True, copy=False) for one in sent]
        tracker = zmq.MessageTracker(*(frame.tracker for frame in frames))
        return Offer(frames, copied, lambda: tracker.done)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


class InlineClient(ClientTransport):
    """Blocks are frames of the reply, one or several behind each other in each."""

    name = "inline"
    reuses_memory = False

    def connect(self, frames: Sequence[Buffer], block_bytes: int, blocks: int, messages: int) -> None:
        if frames:
            raise Malformed(f"{len(frames)} frames behind the welcome: accepted are none")
        self._block_bytes = block_bytes

    def receive(self, frames: Sequence[Buffer], count: int) -> Arrival:
        size = self._block_bytes
        sizes = [frame.nbytes for frame in frames]
        if sum(sizes) != count * size or any(nbytes == 0 or nbytes % size for nbytes in sizes):
            raise Malformed(f"frames of {sizes!r:.80} bytes for {count} blocks of {size} bytes")
        blocks = [frame[at : at + size] for frame in frames for at in range(0, frame.nbytes, size)]
        return Arrival(blocks, lambda: True, lambda: None)

    def close(self) -> None:
        pass


def _runs(rows: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Rows as ranges [first, end) of rows that follow each other."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    firsts, lasts = rows[np.concatenate([[0], cuts])], rows[np.concatenate([cuts, [len(rows)]]) - 1]
    return list(zip(firsts.tolist(), (lasts + 1).tolist(), strict=True))

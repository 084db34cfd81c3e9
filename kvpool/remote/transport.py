"""Which blocks of a pool are served, and how their bytes travel: a small interface, and its first implementation,
frames of the ZeroMQ message itself."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq

from kvpool.common.arrays import Int64s, Uint8s
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.session import NUMBERS_MAX, Malformed, Received

Host = Sequence[Sequence[Uint8s]]
"""The host tier: for each group of layers, and each part of its blocks, uint8[host_blocks, bytes]."""
Parts = Sequence[Sequence[int]]
"""The bytes of each part of a block of each group."""
Buffer = memoryview
GATHER_BELOW = zmq.COPY_THRESHOLD
"""In bytes. Smaller blocks of a message are copied into one frame, which is cheaper than sending each from its
place."""


class Served(NamedTuple):
    """For each group, the bytes of each part of a block. A group for cross attention has none, since nobody can find
    its blocks.

    ``fingerprint`` is equal for pools whose blocks have the same content, in whatever order on the device, and with
    whatever interval between states.
    """

    parts: tuple[tuple[int, ...], ...]
    fingerprint: str

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """The bytes of a block of each group, 0 for a group that is not served."""
        return tuple(map(sum, self.parts))


def served(cache: KVCacheManager) -> Served:
    """What is served of a pool. Raises ValueError for a pool with more groups than a message can have."""
    if len(cache.groups) > NUMBERS_MAX:
        raise ValueError(f"cache: expected up to {NUMBERS_MAX} groups of layers, got {len(cache.groups)}")
    rules = [
        (group.kind, group.window, group.sinks, [layout.fingerprint for layout in group.layouts])
        for group in cache.groups
    ]
    text = repr((cache.tokens_per_block, rules)).encode()
    parts = tuple(
        () if group.kind == "cross" else tuple(layout.block_bytes for layout in group.layouts) for group in cache.groups
    )
    return Served(parts, hashlib.blake2b(text, digest_size=16, person=b"kvpool.groups").hexdigest())


def host_bytes(cache: KVCacheManager) -> Host:
    """The host tier as uint8[host_blocks, bytes], for each group and each part that is served."""
    return [
        [
            pool.reshape(-1).view(np.uint8).reshape(group.host_blocks, layout.block_bytes)
            for pool, layout in zip(pools, group.layouts, strict=True)
            if group.kind != "cross"
        ]
        for group, pools in zip(cache.groups, cache.memory.host_pools, strict=True)
    ]


class Offer(NamedTuple):
    """Blocks on their way to one reader."""

    frames: list[bytes]
    """What the reader needs to read them itself."""
    blocks: list[Any]
    """Or the blocks. While anybody refers to one of these frames, its memory is not released."""
    content: list[Uint8s]
    """The bytes of the blocks, one after the other, for their seal."""
    copied: bool
    """The pool's own memory is not read any more, so it may be unpinned at once."""
    released: Callable[[], bool]
    """Whether the transport has let go of the memory, once the frames are sent. Does not wait."""


class Arrival(NamedTuple):
    """Blocks on their way from a server. They are complete when ``ready`` says so, and valid if they fit their seal."""

    blocks: list[Buffer]
    """Each has the bytes of a block of its group, part after part. A transport that reuses memory does so after
    ``done``."""
    content: Sequence[Buffer]
    """The same bytes, in as few buffers as they came in."""
    ready: Callable[[], bool]
    """Whether all bytes are here. Does not wait. Raises Malformed if they will never come."""
    done: Callable[[], None]
    """Say that the blocks have been read."""


class ServerTransport(ABC):
    """The sending side. Used by the thread of one server."""

    name: str
    serving = False
    """Whether a server uses it."""

    @abstractmethod
    def start(self, host: Host) -> None:
        """Learn what memory will be served. Called before anything else. May raise what the transport raises."""

    def welcome(self) -> list[bytes]:
        """The frames that a reader needs before its first request. They are sent after the Welcome."""
        return []

    @abstractmethod
    def offer(self, group: int, rows: Int64s) -> Offer:
        """Begin to send these rows of a group's host tier, which are pinned."""

    def poll(self) -> None:  # noqa: B027
        """Note what readers have finished. Does not wait."""

    def close(self) -> None:  # noqa: B027
        """Let go of the host tier. A second call does nothing."""


class ClientTransport(ABC):
    """The receiving side. Used by one client, one call at a time."""

    name: str
    reuses_memory: bool
    """Whether blocks of an Arrival are overwritten after its ``done``."""

    @abstractmethod
    def connect(self, frames: Sequence[Buffer], parts: Parts, nbytes: int, messages: int) -> None:
        """Use what the server sent after its Welcome. Up to ``messages`` messages with ``nbytes`` of blocks each will
        be requested at a time.

        Raises Malformed.
        """

    @abstractmethod
    def receive(self, received: Received, group: int, count: int) -> Arrival:
        """Receive ``count`` blocks of a group that a server has offered with a message. Raises Malformed."""

    def close(self) -> None:  # noqa: B027
        """Abandon what is on its way, and let go of the server. ``connect`` may be called again."""


class InlineServer(ServerTransport):
    """Blocks are frames of the reply. Each run of neighbours is a frame, sent from its place. If blocks are small or
    have several parts, one frame has a copy of all."""

    name = "inline"

    def start(self, host: Host) -> None:
        self._host = host

    def offer(self, group: int, rows: Int64s) -> Offer:
        parts = self._host[group]
        copied = len(parts) > 1 or parts[0].shape[1] < GATHER_BELOW
        if copied:
            sent = [np.concatenate([part[rows] for part in parts], axis=1)]
        else:
            sent = [parts[0][run[0] : run[-1] + 1] for run in neighbours(rows)]
        frames = [zmq.Frame(array, track=True, copy=False) for array in sent]
        tracker = zmq.MessageTracker(*(frame.tracker for frame in frames))
        return Offer([], frames, sent, copied, lambda: tracker.done)


class InlineClient(ClientTransport):
    """Blocks are frames of the reply. A frame has one block, or several that follow each other."""

    name = "inline"
    reuses_memory = False

    def connect(self, frames: Sequence[Buffer], parts: Parts, nbytes: int, messages: int) -> None:
        if frames:
            raise Malformed(f"welcome: expected no frames after it, got {len(frames)}")
        self._parts = parts

    def receive(self, received: Received, group: int, count: int) -> Arrival:
        size = sum(self._parts[group])
        sizes = [frame.nbytes for frame in received.blocks]
        if received.frames or sum(sizes) != count * size or any(nbytes == 0 or nbytes % size for nbytes in sizes):
            raise Malformed(f"frames of {sizes!r:.80} bytes for {count} blocks of {size} bytes")
        blocks = [frame[at : at + size] for frame in received.blocks for at in range(0, frame.nbytes, size)]
        return Arrival(blocks, received.blocks, lambda: True, lambda: None)


def neighbours(rows: Int64s) -> list[Int64s]:
    """Rows, cut into runs of rows that follow each other."""
    return np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if len(rows) else []

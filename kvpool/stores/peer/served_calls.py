"""The calls that clients of a StoreServer send: checked, then made on its store in memory of the server's own."""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from kvpool.remote.frames import Malformed, Message, decode
from kvpool.stores.peer.wire import (
    CALLS,
    KEYS_MAX,
    StoreCall,
    StoreChange,
    StoreClear,
    StoreDone,
    StoreFind,
    StoreForget,
    StoreHello,
    StoreLoad,
    StoreSave,
    codes_of,
    frames_argument,
    rows_of,
)
from kvpool.stores.store import CANCELLED, KEY_BYTES, MODEL_BYTES, OK, SEAL_BYTES, TAG_BYTES, Bytes, Space, Store

WAIT_MS_MAX = 600_000
_SESSIONS_MAX = 4096
_FINGERPRINT = bytes(16)
"""The server's store has keys of any model. They differ because the clients derive them from the model."""


class Request(NamedTuple):
    """A checked call of one client. ``deadline``: in seconds of ``time.monotonic``. ``tag``: of a save or a clear.
    ``stale``: a save that was sent before a drop and begins after it."""

    client: bytes
    message: StoreCall
    keys: Bytes
    seals: Bytes
    blocks: Bytes
    tag: bytes
    deadline: float
    stale: bool = False


Reply = tuple[Message, list[Any]]


@dataclass
class ServedStats:
    """What a StoreServer has done for its clients."""

    calls: int = 0
    """Calls that the store has answered."""
    failed: int = 0
    """Calls that gave an error, or whose client had stopped waiting."""
    found_blocks: int = 0
    saved_blocks: int = 0
    loaded_blocks: int = 0
    malformed: int = 0
    """Messages that no client sends."""
    refused: int = 0
    """Clients with blocks of another size."""
    dropped: int = 0
    """Answers that could not be sent, because the client has gone or reads nothing."""
    under_way: int = 0
    """Calls that wait for the store, or are made now."""
    connections_refused: int = 0


class Eras:
    """Knows which saves were sent before the last drop of the same client, of the latest clients. The caller holds a
    lock."""

    def __init__(self) -> None:
        self._eras: OrderedDict[str, int] = OrderedDict()

    def drop(self, message: StoreChange) -> None:
        """A drop begins."""
        self._eras[message.session] = max(message.era, self._eras.pop(message.session, 0))
        if len(self._eras) > _SESSIONS_MAX:
            self._eras.popitem(last=False)

    def is_over(self, message: StoreChange) -> bool:
        """Whether a save comes too late."""
        return message.era < self._eras.get(message.session, 0)


class StoreCalls:
    """Makes calls of clients on a store. ``parse`` is for one thread, ``answer`` for ``threads`` threads.

    The store is opened here, in memory for ``threads`` calls of ``blocks_per_call`` blocks. Raises what ``store.open``
    raises.
    """

    def __init__(self, store: Store, block_bytes: int, blocks_per_call: int) -> None:
        self._store, self.threads = store, store.threads
        self.block_bytes, self.blocks_per_call = block_bytes, blocks_per_call
        # Whole pages, as direct I/O wants them.
        raw = mmap.mmap(-1, -(-self.threads * blocks_per_call * block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        slots = self.threads * blocks_per_call
        self._memory = np.frombuffer(raw, np.uint8, slots * block_bytes).reshape(slots, block_bytes)
        self._lock, self._stats = threading.Lock(), ServedStats()
        store.open(Space(_FINGERPRINT, self._memory))

    def parse(self, client: bytes, frames: list[Any]) -> Request | StoreHello:
        """The call that frames make. Raises Malformed."""
        message = decode(frames[0] if frames else b"", (StoreHello, *CALLS))
        if message.id == 0:
            raise Malformed("id=0: accepted are 1 and more")
        try:
            return self._hello(message, frames[1:]) or self._call(client, message, frames[1:])
        except Malformed as error:
            error.id = error.id or message.id
            raise

    def _hello(self, message: Message, frames: list[Any]) -> StoreHello | None:
        if not isinstance(message, StoreHello):
            return None
        frames_argument(frames, 0)
        return message

    def _call(self, client: bytes, message: StoreCall, frames: list[Any]) -> Request:
        if not 1 <= message.wait_ms <= WAIT_MS_MAX:
            raise Malformed(f"wait_ms={message.wait_ms}: accepted are 1 to {WAIT_MS_MAX}")
        deadline = time.monotonic() + message.wait_ms / 1e3
        if isinstance(message, StoreClear):
            frames_argument(frames, 0)
            keys, seals, blocks = (rows_of(b"", 0, width) for width in (KEY_BYTES, SEAL_BYTES, self.block_bytes))
            return Request(client, message, keys, seals, blocks, _tag(message.tag, MODEL_BYTES, TAG_BYTES), deadline)
        saves = isinstance(message, StoreSave)
        frames_argument(frames, 3 if saves else 1)
        most = self.blocks_per_call if isinstance(message, (StoreSave, StoreLoad)) else KEYS_MAX
        count, rest = divmod(memoryview(frames[0]).nbytes, KEY_BYTES)
        if rest or not 1 <= count <= most:
            raise Malformed(f"keys of {memoryview(frames[0]).nbytes} bytes: accepted are 1 to {most} x {KEY_BYTES}")
        of_save, tag = (frames[1:] if saves else (b"", b"")), b""
        if isinstance(message, StoreSave):
            tag = _tag(message.tag, TAG_BYTES)
        keys = rows_of(frames[0], count, KEY_BYTES)
        seals = rows_of(of_save[0], count if saves else 0, SEAL_BYTES)
        blocks = rows_of(of_save[1], count if saves else 0, self.block_bytes)
        return Request(client, message, keys, seals, blocks, tag, deadline)

    def answer(self, request: Request, thread: int, stopping: Callable[[], bool]) -> Reply:
        """Make a call, in the part of the memory that belongs to this thread. Raises what the store raises."""
        message, id = request.message, request.message.id
        rows = np.arange(len(request.keys))

        def stop() -> bool:
            return stopping() or time.monotonic() >= request.deadline

        if stop():
            raise TimeoutError("the caller waits no longer")
        if isinstance(message, StoreFind):
            return self._done("found", id, codes_of(self._store.find(request.keys), len(rows)))
        if isinstance(message, StoreForget):
            count = int(self._store.forget(request.keys))
            self.count(calls=1)
            return StoreDone(id, count), []
        if isinstance(message, StoreClear):
            return StoreDone(id, self._clear(request.tag)), []
        if request.stale:
            return self._done("saved", id, np.full(len(rows), CANCELLED, np.uint8))
        if isinstance(message, StoreSave):
            rows += thread * self.blocks_per_call
            self._memory[rows] = request.blocks
            codes = self._store.save(request.keys, rows, request.seals, request.tag, message.limit, stop)
            return self._done("saved", id, codes_of(codes, len(rows)))
        rows += thread * self.blocks_per_call
        # The store gets a copy, which it may write to: other rows are those of other threads.
        answer, seals = self._store.load(request.keys, rows.copy(), stop)
        codes = codes_of(answer, len(rows))
        seals = np.array(seals, np.uint8).reshape(len(rows), SEAL_BYTES)
        # A copy: the next call of this thread uses the memory while these bytes are sent.
        return self._done("loaded", id, codes, seals, self._memory[rows[codes == OK]])

    def _clear(self, tag: bytes) -> int:
        # Its space is of no model, so that blocks are told apart by their tags alone.
        if getattr(self._store, "clears", 0) < TAG_BYTES:
            raise NotImplementedError(f"the store {self._store.name!r} of this server does not know tags")
        count = int(self._store.clear(tag))
        self.count(calls=1)
        return count

    def count(self, **more: int) -> None:
        """Add to figures."""
        with self._lock:
            for name, value in more.items():
                setattr(self._stats, name, getattr(self._stats, name) + value)

    def stats(self) -> ServedStats:
        """A copy of the figures."""
        with self._lock:
            return replace(self._stats)

    def _done(self, kind: str, id: int, codes: Any, *frames: Any) -> Reply:
        self.count(calls=1, **{f"{kind}_blocks": int(np.count_nonzero(codes == OK))})
        return StoreDone(id, 0), [codes, *frames]

    def store_stats(self) -> dict[str, int]:
        return self._store.stats()

    def close(self) -> None:
        """Close the store. No call may be under way."""
        self._store.close()


def _tag(text: str, *sizes: int) -> bytes:
    """A tag, or the beginning of one, of one of these sizes."""
    try:
        tag = bytes.fromhex(text)
    except ValueError:
        tag = b""
    if len(tag) not in sizes or len(text) != 2 * len(tag):
        raise Malformed(f"tag={text!r:.40}: accepted are {' or '.join(str(2 * size) for size in sizes)} hex digits")
    return tag

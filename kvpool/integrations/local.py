"""What the plug-ins of local engines have in common: prompts in blocks, and states of whole prompts in pieces, in a
HostCache with stores behind it, for an engine that waits until what it asked for is there.

What comes from stores comes window by window. A window has as many blocks as may wait for their reader
(``load_share``); it is read before the next one is asked for. So the memory bounds what is found, and not the window.

A *key* stands for a prompt: for all its tokens, and so for a prefix of all prompts that begin with them. Its block has
the KV of its last tokens. A *state* is bytes that only the engine understands, for a prompt of any length.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvpool.common.arrays import Bools, Int64s, Uint8s
from kvpool.errors import BlockNotFound, OutOfBlocks
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.tier import HostTier
from kvpool.hostcache.warming import warm_host_cache
from kvpool.integrations.options import EngineOptions
from kvpool.storage.store import parts
from kvpool.storage.urls import open_store

if TYPE_CHECKING:
    from kvpool.hostcache.host_lease import HostLease
    from kvpool.hostcache.reserved_keys import Reserved
    from kvpool.pool.explain import Missed
    from kvpool.storage import HostStorageManager

_TURN_SECONDS, _POLL_SECONDS = 0.001, 0.05
_INDEXED, _AFAR = 64, 1024
SIZE_BYTES = 8
"""What comes before bytes that say how many they are."""
Bytes = Uint8s
Places = Int64s


class LocalBlocks:
    """Blocks of one model: an index, its memory, and the stores below it.

    ``memory`` in bytes is for as many blocks of ``block_bytes`` as fit. ``{part}`` in the text of a store stands for a
    name of the identity. ``history`` is that of the HostCache. Raises ValueError if no block fits, and what opening a
    store raises. Calls wait for stores, for at most ``options.load_seconds`` a question. The caller holds ``lock``: a
    thread takes it to begin saves.
    """

    def __init__(
        self,
        block_bytes: int,
        identity: ModelIdentity,
        memory: int,
        options: EngineOptions,
        lock: threading.RLock,
        history: int = 0,
    ) -> None:
        if memory < block_bytes:
            raise ValueError(f"host_bytes: expected {block_bytes} bytes or more, for one block, got {memory}")
        warm_host_cache([options.policy] if options.policy != "lru" else [])
        self.block_bytes, self._patience = block_bytes, options.load_seconds
        self._storage: HostStorageManager | None = None
        self._names: list[str] = []
        # The stores from which the blocks came that were looked for last.
        self._origins: dict[bytes, int | None] = {}
        self._request_count = 0
        self.at_a_time = _INDEXED
        """how many keys can be looked up at once at little cost"""
        self.skipped = Counter[str]()
        """what was not kept as a whole, or not found as a whole, by reason: "crowded", "gone" """
        with ExitStack() as ends:
            blocks = memory // block_bytes
            self._cache = ends.enter_context(
                HostCache(blocks, block_bytes, identity=identity, policy=options.policy, history=history)
            )
            self._tier = ends.enter_context(HostTier.of(self._cache))
            self._window = max(1, int(options.load_share * blocks))
            if options.stores:
                self._storage = ends.enter_context(self._open(options, identity))
                self._lock, self._closing = lock, threading.Event()
                ends.callback(self._closing.set)
                threading.Thread(target=self._poll, name="kvpool-local", daemon=True).start()
            self._ends = ends.pop_all()
        self._index: HostCache | HostStorageManager = self._storage or self._cache

    def _open(self, options: EngineOptions, identity: ModelIdentity) -> HostStorageManager:
        from kvpool.storage import HostStorageManager

        stores = [open_store(text, part=identity.fingerprint) for text in options.stores]
        self._names = [store.name for store in stores]
        if not all(store.indexed for store in stores):
            self.at_a_time = _AFAR
        return HostStorageManager(self._cache, self._tier, stores, **options.keeping)

    @property
    def memory(self) -> Bytes:
        """uint8[blocks, block_bytes], in place. Rows are for the holder of a lease, or the callback that writes
        them."""
        return self._tier.blocks

    @property
    def used(self) -> int:
        """Blocks with content."""
        usage = self._cache.usage()
        return usage.evictable + usage.pinned

    # -- blocks --------------------------------------------------------------------------------------

    @contextmanager
    def _request(self) -> Iterator[str]:
        """Name the look-ups of one call. When it ends, blocks that have come for it and that it has not read take no
        room from other loads."""
        self._request_count += 1
        request = f"kvpool local {self._request_count}"
        try:
            yield request
        finally:
            if self._storage is not None:
                self._storage.finish(request)

    def _answers(self, keys: Sequence[bytes], request: str) -> Uint8s:
        return self._cache.lookup(keys) if self._storage is None else self._storage.lookup(keys, request)

    def lookup(self, keys: Sequence[bytes], request: str = "") -> Bools:
        """Whether the block of each key is here, once the loads of all have ended. Those beyond a window are not
        loaded. ``request``: the name under which blocks that come wait for their reader."""
        answers = self._answers(keys, request)
        end = time.monotonic() + self._patience
        while HostCache.PENDING in answers and time.monotonic() < end:
            self.poll()
            time.sleep(_TURN_SECONDS)
            answers = self._answers(keys, request)
        return answers == HostCache.HERE

    def here(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are here, as many as the memory has blocks at most."""
        count = 0
        for lease, _ in self._windows(keys[: self._cache.host_blocks], used=False):
            count += len(lease.keys)
        return count

    @contextmanager
    def opened(self, keys: Sequence[bytes]) -> Iterator[tuple[Bytes, Places]]:
        """Memory that has the blocks of keys, and their rows in it: this one, while all are here at a time, or else a
        copy. Raises BlockNotFound."""
        try:
            lease = self.pin(keys)
        except BlockNotFound:
            copy = self._copied(keys)
            yield copy, np.arange(len(copy))
            return
        with lease:
            yield self.memory, lease.blocks

    def _copied(self, keys: Sequence[bytes]) -> Bytes:
        """uint8[keys, block_bytes]: a copy of the blocks of keys. Raises BlockNotFound."""
        copy = np.empty((len(keys), self.block_bytes), np.uint8)
        count = 0
        for lease, first in self._windows(keys, used=True):
            count = first + len(lease.keys)
            np.take(self.memory, lease.blocks, axis=0, out=copy[first:count], mode="clip")
        if count < len(keys):
            raise BlockNotFound(f"keys: expected {len(keys)} blocks that are here or in a store, got {count}")
        return copy

    def _windows(self, keys: Sequence[bytes], *, used: bool) -> Iterator[tuple[HostLease, int]]:
        """Pin the blocks of the first keys that are here or come from a store, window by window, each until the next
        one is asked for. Gives each lease and the place of its first key. Ends at the first block that does not come.
        ``used``: whether it counts as a use.

        Others' blocks may wait for their reader too, so that only a part of a window comes. Reading it makes room.
        """
        first = 0
        self._origins.clear()
        with self._request() as request:
            while first < len(keys):
                window = keys[first : first + self._window]
                away = np.flatnonzero(~self.lookup(window, request))
                count = int(away[0]) if len(away) else len(window)
                if not count:
                    return
                try:
                    if self._storage is not None:
                        self._origins.update((key, self._storage.origin(key)) for key in window[:count])
                    lease = self._index.pin(window[:count], owner=request)
                except BlockNotFound:
                    return
                try:
                    yield lease, first
                finally:
                    lease.close(used=used)
                first += count

    def story(self, keys: Sequence[bytes], here: int, width: int) -> tuple[Counter[str], list[Missed]]:
        """For the log: from where the first keys have come that are ``here``, in tokens, as the last ``here`` has found
        it, and why the others are not. ``width``: tokens of a block."""
        came = Counter[str]()
        for key in keys[:here]:
            store = self._origins.get(key)
            came["host" if store is None else self._names[store]] += width
        return came, [self._index.explain(key, width) for key in keys[here:]]

    def pin(self, keys: Sequence[bytes]) -> HostLease:
        """Hold blocks while they are read. Raises BlockNotFound."""
        return self._index.pin(keys)

    def put(self, keys: Sequence[bytes], write: Callable[[Places, Places], None]) -> None:
        """Keep the blocks of keys that are not here, of as many first ones as there is room for. ``write`` gets the
        places of these keys, and the rows that it fills; whatever it raises, nothing is kept."""
        self._cache.touch(keys)
        wanted = keys[: self._cache.host_blocks]
        try:
            taken = self._cache.reserve(wanted)
        except OutOfBlocks as error:
            wanted = wanted[: error.free]
            taken = self._cache.reserve(wanted)
        if len(wanted) < len(keys):
            self.skipped["crowded"] += 1
        if taken.keys:
            self._write(wanted, taken, write)
        if self._cache.policy != "lru":
            self._index.touch(wanted, turn=True)

    def _write(self, wanted: Sequence[bytes], taken: Reserved, write: Callable[[Places, Places], None]) -> None:
        try:
            places = {key: place for place, key in enumerate(wanted)}
            write(np.array([places[key] for key in taken.keys], np.int64), taken.blocks)
        except BaseException:
            self._cache.abort(taken.keys)
            raise
        self._index.publish(taken.keys)

    # -- states --------------------------------------------------------------------------------------

    def put_state(self, key: bytes, state: bytes) -> None:
        """Keep a state, if there is room for all of it."""
        data = np.frombuffer(len(state).to_bytes(SIZE_BYTES, "little") + state, np.uint8)
        pieces = [data[piece] for piece in parts(len(data), self.block_bytes)]
        if len(pieces) > self._cache.host_blocks:
            self.skipped["crowded"] += 1
            return

        def write(places: Places, rows: Places) -> None:
            for place, row in zip(places.tolist(), rows.tolist(), strict=True):
                self.memory[row, : len(pieces[place])] = pieces[place]
                self.memory[row, len(pieces[place]) :] = 0

        self.put(_pieces_of(key, len(pieces)), write)

    def longest_state(self, keys: Sequence[bytes]) -> int | None:
        """The place of the first key whose state has its beginning here. Give the longest prompt first."""
        for some in parts(len(keys), self.at_a_time):
            pieces = [_pieces_of(key, 1)[0] for key in keys[some]]
            # They are not read after the lookup: those of one lookup take no room from those of the next.
            with self._request() as request:
                places = np.flatnonzero(self.lookup(pieces, request)).tolist()
            if places:
                return some.start + int(places[0])
        return None

    def state(self, key: bytes) -> bytes | None:
        """A copy of the state of a key. None if not all of it comes; what has lost a part is counted as "gone"."""
        try:
            head = self._copied(_pieces_of(key, 1))[0]
        except BlockNotFound:
            return None
        size = SIZE_BYTES + int.from_bytes(head[:SIZE_BYTES].tobytes(), "little")
        count = -(-size // self.block_bytes)
        try:
            if count <= self._cache.host_blocks:
                return self._copied(_pieces_of(key, count)).reshape(-1)[SIZE_BYTES:size].tobytes()
        except BlockNotFound:
            pass
        self.skipped["gone"] += 1
        return None

    def explain_state(self, key: bytes, tokens: int) -> Missed:
        """For the log: why ``tokens`` tokens do not come from the state of a key."""
        return self._index.explain(_pieces_of(key, 1)[0], tokens)

    # -- stores --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Begin saves and loads, and note those that have ended."""
        if self._storage is not None:
            self._storage.poll()

    def _poll(self) -> None:
        """``poll`` between calls. Runs in a thread of its own."""
        while not self._closing.wait(_POLL_SECONDS):
            with self._lock:
                if not self._closing.is_set():
                    self.poll()

    def drain(self, timeout: float) -> bool:
        """Wait until all is saved, at most ``timeout`` seconds. Returns whether it is."""
        return self._storage is None or self._storage.drain(timeout)

    def clear(self) -> None:
        """Drop everything, in stores too."""
        self._index.clear()

    def close(self) -> None:
        self._ends.close()


def prefix_keys(tokens: Sequence[int], step: int, settings: bytes = b"") -> list[bytes]:
    """Keys of all prefixes of whole blocks of ``step`` tokens. The first key stands for no token, and is that of no
    block. ``settings``: all else that the KV of a token depends on, and that requests may differ in."""
    data, keys = np.array(tokens, np.int64).tobytes(), [bytes(32)]
    if settings:
        keys = [hashlib.blake2b(settings, digest_size=32, person=b"kvpool settings").digest()]
    for block in range(len(tokens) // step):
        block_tokens = data[8 * block * step : 8 * (block + 1) * step]
        keys.append(hashlib.blake2b(keys[-1] + block_tokens, digest_size=32).digest())
    return keys


def state_keys(tokens: Sequence[int], step: int, lengths: range, settings: bytes = b"") -> list[bytes]:
    """Keys of the states of prefixes of any lengths. ``settings`` as for ``prefix_keys``."""
    blocks, data = prefix_keys(tokens, step, settings), np.array(tokens, np.int64).tobytes()
    return [
        hashlib.blake2b(
            blocks[n // step] + data[8 * (n - n % step) : 8 * n], digest_size=32, person=b"kvpool state"
        ).digest()
        for n in lengths
    ]


def state_key(tokens: Sequence[int], step: int, settings: bytes = b"") -> bytes:
    """The key of the state of all of these tokens. ``settings`` as for ``prefix_keys``."""
    return state_keys(tokens, step, range(len(tokens), len(tokens) + 1), settings)[0]


def _pieces_of(key: bytes, count: int) -> list[bytes]:
    return [key + number.to_bytes(4, "little") for number in range(count)]

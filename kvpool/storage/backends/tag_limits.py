"""What goes from a store. TagLimits: how many blocks each namespace may have in one that does not know namespaces.
Victims: which block is evicted next by another policy than LRU."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Bools
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.identity import ModelIdentity
from kvpool.state.arrays import PolicyName
from kvpool.storage.store import KEY_BYTES, NO_LIMIT, OK, REFUSED, Bytes


class Added(NamedTuple):
    """What became of keys: which may be saved; which of them were not counted before; and which keys, of any, have to
    leave the store first."""

    accepted: list[bool]
    new: list[bytes]
    gone: list[bytes]


_ANY = ModelIdentity("any", "any", "any", "any", "any")


class Victims:
    """The order in which a store evicts up to ``most`` keys, by a policy: that of a HostCache without memory.

    ``oldest``: keys that are there, the oldest first; nobody knows any more which were used together. Not thread-safe.
    """

    def __init__(self, policy: PolicyName, most: int, oldest: Iterable[bytes]) -> None:
        self._cache = HostCache(most, 1, identity=_ANY, policy=policy)
        self._add([*oldest][::-1])

    def _add(self, keys: list[bytes]) -> None:
        self._cache.publish(self._cache.reserve(keys).keys)

    def use(self, keys: list[bytes]) -> None:
        """Keys that are in the store are saved or loaded together, in the order of a prompt: they are a turn."""
        self._add(keys)
        self._cache.touch(keys, turn=True)

    def drop(self, key: bytes) -> None:
        """A key has left the store."""
        self._cache.forget([key])

    def first(self, count: int) -> list[bytes]:
        """The keys that are evicted next, the first one first."""
        return self._cache.eviction_candidates(None, self._cache.usage().empty + count, count)


TRACKED_MAX = 1 << 18
"""How many keys are kept in mind: about 50 MB."""


class TagLimits:
    """The keys that were saved under each tag, the oldest first. Thread-safe.

    Only tags with a limit are added. If there are more than ``most`` keys of all tags, the oldest go, and have to leave
    the store too, so that every key that counts is known.
    """

    def __init__(self, most: int = TRACKED_MAX) -> None:
        self._most, self._count = most, 0
        self._keys: OrderedDict[bytes, OrderedDict[bytes, None]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def save(
        self, tag: bytes, keys: Bytes, limit: int, save: Callable[[Bools], Bytes], drop: Callable[[Bytes], None]
    ) -> Bytes:
        """The codes of ``save`` for those of the keys that may be saved, and REFUSED for the others. ``drop(keys)``
        makes room before. If it raises, nothing is saved."""
        if limit >= NO_LIMIT:
            return save(np.ones(len(keys), bool))
        named = [key.tobytes() for key in keys]
        added = self.add(tag, named, limit)
        codes, may = np.full(len(keys), REFUSED, np.uint8), np.array(added.accepted, bool)
        try:
            if added.gone:
                try:
                    drop(np.frombuffer(b"".join(added.gone), np.uint8).reshape(-1, KEY_BYTES))
                except BaseException:
                    self.restore(tag, added.gone)
                    raise
            codes[may] = save(may)
        finally:
            saved = {key for key, code in zip(named, codes.tolist(), strict=True) if code == OK}
            self.discard(tag, [key for key in added.new if key not in saved])
        return codes

    def add(self, tag: bytes, keys: list[bytes], limit: int) -> Added:
        """Add keys that are about to be saved. Those that are not saved then have to be discarded."""
        accepted, added, gone, own_keys = list[bool](), list[bytes](), list[bytes](), set(keys)
        with self._lock:
            for key in keys:
                tag_keys = self._keys.setdefault(tag, OrderedDict())
                known = key in tag_keys
                if not known and 0 < limit <= len(tag_keys) and next(iter(tag_keys)) not in own_keys:
                    gone += self._drop_oldest(tag, len(tag_keys) - limit + 1)
                accepted.append(known or len(tag_keys) < limit)
                if accepted[-1]:
                    self._put(tag, key, last=True)
                    added += [] if known else [key]
            if self._keys.get(tag):
                self._keys.move_to_end(tag)
            else:
                self._keys.pop(tag, None)
            while self._count > self._most:
                gone += self._drop_oldest(next(iter(self._keys)), 1)
        return Added(accepted, added, gone)

    def discard(self, tag: bytes, keys: list[bytes]) -> None:
        """These keys are not in the store any more, or never came there."""
        with self._lock:
            tag_keys = self._keys.get(tag, OrderedDict())
            for key in keys:
                if key in tag_keys:
                    del tag_keys[key]
                    self._count -= 1
            if not tag_keys:
                self._keys.pop(tag, None)

    def restore(self, tag: bytes, keys: list[bytes]) -> None:
        """These keys could not leave the store: they count as the oldest."""
        with self._lock:
            for key in reversed(keys):
                self._put(tag, key, last=False)

    def _put(self, tag: bytes, key: bytes, last: bool) -> None:
        tag_keys = self._keys.setdefault(tag, OrderedDict())
        self._count += key not in tag_keys
        tag_keys[key] = None
        tag_keys.move_to_end(key, last=last)

    def _drop_oldest(self, tag: bytes, count: int) -> list[bytes]:
        tag_keys = self._keys[tag]
        gone = [tag_keys.popitem(last=False)[0] for _ in range(min(count, len(tag_keys)))]
        self._count -= len(gone)
        if not tag_keys:
            del self._keys[tag]
        return gone

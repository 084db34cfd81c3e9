"""GoneKeys: why the last keys that have left a HostCache are gone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvpool.pool.explain import MissReason


class GoneKeys:
    """The last ``capacity`` keys that have left a cache, with the reason and the time. Not thread-safe: the cache calls
    it under its lock."""

    __slots__ = ("_keys", "_others", "capacity")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._keys: OrderedDict[bytes, tuple[MissReason, int]] = OrderedDict()
        # Whether keys have gone that are not remembered.
        self._others = capacity == 0

    def note(self, keys: Iterable[bytes], reason: MissReason, now_ms: int) -> None:
        """Remember why keys have gone."""
        if not self.capacity:
            return
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = reason, now_ms
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)
            self._others = True

    def note_unnamed(self) -> None:
        """Note that keys have gone that are not listed."""
        self._others = True

    def reason_of(self, key: bytes) -> tuple[MissReason, int | None]:
        """Why a key is gone, and when it went. Or "never_seen" or "unknown", and None."""
        gone = self._keys.get(key)
        if gone is not None:
            return gone
        return ("unknown" if self._others else "never_seen"), None

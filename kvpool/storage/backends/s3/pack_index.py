"""PackIndex: which block is in which object of a bucket, and what was dropped.

A *pack* is an object with the blocks of one save. It is written once, under a name that nobody else gives, and never
changed. So a drop is written down elsewhere, in a *log*: the log has a number that grows with each drop, and a pack has
the number that was the log's when its save began. A drop concerns the packs with a smaller number, whenever they
arrive and whoever has sent them.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvpool.storage.store import MODEL_BYTES, TAG_BYTES

NAME_BYTES = TAG_BYTES
"""So many first bytes of a key name a block here. Names of blocks and tags stand in one log."""
DROPS_MAX = 1 << 16
"""The log has so many names. One more drops all blocks that were saved before."""
LOG_BYTES_MAX = 32 + DROPS_MAX * (NAME_BYTES + 8)
_NAMED = 4
"""A pack of so many blocks has their names in its own. One of more begins with them."""
_PACK = re.compile(
    r"[0-9a-f]{12}-([0-9a-f]{10})-([0-9a-f]{32})-[0-9a-f]{16}-(?:([0-9]{1,9})|([0-9a-f]{32}(?:\.[0-9a-f]{32})*))"
)


class Pack(NamedTuple):
    """An object with blocks. ``number``: of the log when its save began. ``names``: of its blocks, in their order."""

    name: str
    number: int
    tag: bytes
    blocks: int
    names: tuple[bytes, ...]

    @classmethod
    def new(cls, now: int, number: int, tag: bytes, names: Sequence[bytes]) -> Pack:
        """One that nobody else has. ``now``: unix milliseconds, so that names are in the order of time."""
        suffix = ".".join(name.hex() for name in names) if len(names) <= _NAMED else str(len(names))
        return cls(
            f"{now:012x}-{number:010x}-{tag.hex()}-{os.urandom(8).hex()}-{suffix}",
            number,
            tag,
            len(names),
            tuple(names),
        )

    @classmethod
    def parse(cls, name: str) -> Pack | None:
        """What a name says: ``names`` are empty where the object has them. None for other names."""
        match = _PACK.fullmatch(name)
        if match is None:
            return None
        names = tuple(map(bytes.fromhex, match[4].split("."))) if match[4] else ()
        return cls(name, int(match[1], 16), bytes.fromhex(match[2]), int(match[3] or len(names)), names)

    @property
    def begins(self) -> int:
        """Bytes before its first block."""
        return 0 if self.blocks <= _NAMED else self.blocks * NAME_BYTES


class DropLog(NamedTuple):
    """What was dropped. Immutable.

    ``number``: of the last drop. ``floor``: packs with a smaller number count no more. ``names``: blocks and tags, with
    the number of their last drop; that of a whole model is its tag's beginning and zeros. ``e_tag``: the server's name
    for this content, "" if there is none.
    """

    number: int = 0
    floor: int = 0
    names: Mapping[bytes, int] = {}
    e_tag: str = ""

    def drops(self, pack: Pack) -> bool:
        """Whether all blocks of a pack are dropped."""
        tags = pack.tag, whole(pack.tag[:MODEL_BYTES])
        return pack.number < max(self.floor, *(self.names.get(tag, 0) for tag in tags))

    def dropped(self, name: bytes, pack: Pack) -> bool:
        """Whether this block of a pack is dropped."""
        return self.drops(pack) or pack.number < self.names.get(name, 0)

    def then(self, names: Iterable[bytes], now: int, oldest: int) -> DropLog:
        """The log with one more drop. ``now``: unix seconds, so that numbers grow also after a log was lost.
        ``oldest``: no pack is there, or may still come, with a smaller number."""
        number = max(self.number + 1, now)
        kept = {name: dropped for name, dropped in self.names.items() if dropped > oldest}
        kept.update(dict.fromkeys(names, number))
        return DropLog(number, self.floor, kept) if len(kept) <= DROPS_MAX else DropLog(number, number)

    def encode(self, secret: bytes) -> bytes:
        pairs = [name + number.to_bytes(8, "little") for name, number in self.names.items()]
        body = self.number.to_bytes(8, "little") + self.floor.to_bytes(8, "little") + b"".join(pairs)
        return _mac(body, secret) + body

    @classmethod
    def decode(cls, data: bytes, secret: bytes, e_tag: str) -> DropLog | None:
        """None for what ``encode`` did not make."""
        body, size = data[16:], NAME_BYTES + 8
        if len(data) < 32 or len(data) > LOG_BYTES_MAX or data[:16] != _mac(body, secret):
            return None
        pairs = [body[first : first + size] for first in range(16, len(body), size)]
        names = {pair[:NAME_BYTES]: int.from_bytes(pair[NAME_BYTES:], "little") for pair in pairs}
        return cls(int.from_bytes(body[:8], "little"), int.from_bytes(body[8:16], "little"), names, e_tag)


def whole(tag: bytes) -> bytes:
    """The name in the log of a tag, or of the beginning of one."""
    return tag.ljust(NAME_BYTES, b"\0")


def _mac(body: bytes, secret: bytes) -> bytes:
    return hashlib.blake2b(body, key=secret, digest_size=16, person=b"kvpool s3 drops").digest()


class PackIndex:
    """The blocks of up to ``most`` that are known, the oldest packs first, and the log as it was last read.
    Thread-safe."""

    def __init__(self, most: int) -> None:
        self.most, self._lock = most, threading.Lock()
        self._packs: OrderedDict[str, Pack] = OrderedDict()
        self._places: dict[bytes, tuple[Pack, int]] = {}
        self._left = ""  # the youngest pack that is not known any more
        self.log = DropLog()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: str) -> bool:
        """Whether a pack is known, or would be the first to leave."""
        return name in self._packs or name <= self._left

    @property
    def packs(self) -> int:
        """How many are known."""
        return len(self._packs)

    def find(self, names: Iterable[bytes]) -> list[tuple[Pack, int] | None]:
        """In which pack each block is, and at which place of it."""
        with self._lock:
            return [self._places.get(name) for name in names]

    def add(self, pack: Pack) -> bool:
        """Learn of a pack. Returns whether any block of it counts."""
        with self._lock:
            self._packs[pack.name] = pack
            counts = False
            for place, name in enumerate(() if self.log.drops(pack) else pack.names):
                if self.log.names.get(name, 0) <= pack.number:
                    counts = True
                    # Of two packs, the one that fewer drops concern.
                    if name not in self._places or self._places[name][0].number <= pack.number:
                        self._places[name] = pack, place
            # Those that arrive dropped have no places.
            while max(len(self._places), len(self._packs)) > self.most:
                left, oldest = self._packs.popitem(last=False)
                self._left = max(self._left, left)
                self._forget(oldest)
            return counts

    def discard(self, pack: Pack) -> None:
        """It is not in the bucket any more."""
        with self._lock:
            self._packs.pop(pack.name, None)
            self._forget(pack)

    def remove(self, names: Iterable[bytes]) -> list[Pack]:
        """These blocks count no more, for this worker. Returns the packs that have none any more."""
        with self._lock:
            return self._remove(names)[1]

    def adopt(self, log: DropLog) -> tuple[int, list[Pack]]:
        """Take a log that is newer. Returns how many blocks it drops, and the packs that have none any more."""
        with self._lock:
            if log.number < self.log.number:
                return 0, []
            self.log, places = log, self._places
            gone = [name for name, number in log.names.items() if name in places and places[name][0].number < number]
            for pack in [pack for pack in self._packs.values() if log.drops(pack)]:
                gone += [name for name in pack.names if name in places and places[name][0] is pack]
            return self._remove(gone)

    def _remove(self, names: Iterable[bytes]) -> tuple[int, list[Pack]]:
        removed = [self._places.pop(name) for name in dict.fromkeys(names) if name in self._places]
        touched = {pack.name: pack for pack, _ in removed}.values()
        empty = [pack for pack in touched if not any(self._is_in(name, pack) for name in pack.names)]
        for pack in empty:
            self._packs.pop(pack.name, None)
        return len(removed), empty

    def _is_in(self, name: bytes, pack: Pack) -> bool:
        place = self._places.get(name)
        return place is not None and place[0] is pack

    def _forget(self, pack: Pack) -> None:
        for name in pack.names:
            if self._is_in(name, pack):
                del self._places[name]

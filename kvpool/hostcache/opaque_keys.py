"""Opaque keys: packed for the verbs, and unpacked as bytes again."""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s, Uint8s
from kvpool.errors import BlockNotFound
from kvpool.state.hostcache import KEY_BYTES, KEY_WORDS

# Read-only, like the data of keys: so the verbs are compiled once.
_NO_DATA = np.empty(0, np.uint8)
_NO_DATA.flags.writeable = False
# The sizes of keys that all have as many bytes.
_ALL_OF = {size: np.array([size], np.int64) for size in range(1, KEY_BYTES + 1)}
_AT_ONCE = 128


class Packed(NamedTuple):
    """Keys in memory of the call's own: see ``state.hostcache``. ``keys`` has them as plain bytes."""

    keys: tuple[bytes, ...]
    data: Uint8s
    sizes: Int64s
    words: Int32s
    found: Int64s


def packed(keys: Iterable[bytes], *, known: bool = False) -> Packed:
    """Pack keys. Raises TypeError and ValueError, which name the key. ``known``: they were checked before."""
    key_tuple = tuple(keys) if known else keys_argument(keys)
    n = len(key_tuple)
    lengths = [*map(len, key_tuple)]
    # Counting takes a third of the time of a set or an array.
    sizes = _ALL_OF.get(lengths[0]) if n and lengths.count(lengths[0]) == n else None
    if sizes is None:
        for i, key in enumerate(key_tuple):
            key_argument(f"keys[{i}]", key)
        sizes = np.array(lengths, np.int64)
    data = np.frombuffer(b"".join(key_tuple), np.uint8) if key_tuple else _NO_DATA
    return Packed(key_tuple, data, sizes, np.empty((n, KEY_WORDS), np.int32), np.empty((n, 3), np.int64))


def one_key() -> Packed:
    """Room for one key. Its bytes and its length are written later."""
    data, sizes = np.zeros(KEY_BYTES, np.uint8), np.zeros(1, np.int64)
    return packed([bytes(KEY_BYTES)])._replace(data=data, sizes=sizes)


def keys_argument(keys: object) -> tuple[bytes, ...]:
    """Several keys as plain bytes. Raises TypeError and ValueError, which name the key."""
    key_tuple = _tuple_of(keys)
    if [*map(type, key_tuple)].count(bytes) < len(key_tuple):
        key_tuple = tuple(key_argument(f"keys[{i}]", key) for i, key in enumerate(key_tuple))
    return key_tuple


def _tuple_of(keys: Any) -> tuple[Any, ...]:
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"keys: expected several keys, such as a list of bytes, got {keys!r:.80}")
    try:
        iterator = iter(keys)
    except TypeError:
        raise TypeError(f"keys: expected several keys, such as a list of bytes, got {keys!r:.80}") from None
    return tuple(iterator)


def key_argument(name: str, key: object) -> bytes:
    """A key as plain bytes, even if it is of a subclass. Raises TypeError, ValueError."""
    if not isinstance(key, bytes):
        raise TypeError(f"{name}: expected bytes, got {key!r:.80}")
    exact_key = bytes(key)
    if not 1 <= len(exact_key) <= KEY_BYTES:
        raise ValueError(f"{name}: expected 1 to {KEY_BYTES} bytes, got {len(exact_key)}")
    return exact_key


@functools.lru_cache(maxsize=128)
def _rows(size: int, count: int) -> struct.Struct:
    """Reads rows of words whose keys have one size. Made anew each time, it takes as long as to read them."""
    return struct.Struct(f"4x{size}s{KEY_BYTES - size}x" * count)


def unpacked(words: Int32s) -> list[bytes]:
    """The keys of int32[n, 17]."""
    sizes = words[:, 0].tolist()
    if sizes and sizes.count(sizes[0]) == len(sizes):
        # One call for many of them: a key at a time takes as long as the rest of a verb.
        keys: list[bytes] = []
        for first in range(0, len(sizes), _AT_ONCE):
            part = words[first : first + _AT_ONCE]
            keys += _rows(sizes[0], len(part)).unpack(part.tobytes())
        return keys
    rows = words.view(np.uint8)
    return [rows[i, 4 : 4 + size].tobytes() for i, size in enumerate(sizes)]


def missing(wanted: Packed, needed: str) -> BlockNotFound:
    """The error for the key that a verb has refused."""
    return BlockNotFound(f"key {wanted.keys[int(wanted.found[0, 0])].hex()} is not {needed}")

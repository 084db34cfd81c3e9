"""Keys of content: a keyed chain hash over (parent key, tokens, extra ids) of a block, and the digests that start each
chain.

The function is SipHash-2-4 with 128 bits of output (Aumasson and Bernstein, 2012), a pseudo-random function: without
the secret nobody can find two prompts whose keys agree. The namespace (salt, adapter) enters through the root, the
"parent key" of first blocks.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from kvpool.common.jit import inline
from kvpool.state.records import PARENT_IN_KEY

U = np.uint64
V0, V1, V2, V3 = U(0x736F6D6570736575), U(0x646F72616E646F6D), U(0x6C7967656E657261), U(0x7465646279746573)


@inline
def _round(v0, v1, v2, v3):
    v0 += v1
    v2 += v3
    v1 = ((v1 << U(13)) | (v1 >> U(51))) ^ v0
    v3 = ((v3 << U(16)) | (v3 >> U(48))) ^ v2
    v0 = (v0 << U(32)) | (v0 >> U(32))
    v2 += v1
    v0 += v3
    v1 = ((v1 << U(17)) | (v1 >> U(47))) ^ v2
    v3 = ((v3 << U(21)) | (v3 >> U(43))) ^ v0
    v2 = (v2 << U(32)) | (v2 >> U(32))
    return v0, v1, v2, v3


@inline
def _absorb(v0, v1, v2, v3, word):
    v3 ^= word
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ word, v1, v2, v3


@inline
def _four_rounds(v0, v1, v2, v3):
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0, v1, v2, v3


@inline
def _begin(secret0, secret1):
    return V0 ^ U(secret0), V1 ^ U(secret1) ^ U(0xEE), V2 ^ U(secret0), V3 ^ U(secret1)


@inline
def _end(v0, v1, v2, v3, tail, parent0, parent1, guards):
    """The key of a block whose tokens have been absorbed."""
    if guards & PARENT_IN_KEY:
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(parent0))
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(parent1))
    v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, tail)
    v0, v1, v2, v3 = _four_rounds(v0, v1, v2 ^ U(0xEE), v3)
    low = v0 ^ v1 ^ v2 ^ v3
    v0, v1, v2, v3 = _four_rounds(v0, v1 ^ U(0xDD), v2, v3)
    return np.int64(low), np.int64(v0 ^ v1 ^ v2 ^ v3)


@inline
def block_key(tokens, extra, secret0, secret1, parent0, parent1, guards):
    """The key of one full block.

    ``tokens`` int32[T]; ``extra`` int64[T], or int64[0] if no token has an extra id. All other arguments and the two
    results are int64 that stand for 64 bits. A block whose extra ids are all zero has the same key as one without extra
    ids.
    """
    v0, v1, v2, v3 = _begin(secret0, secret1)
    n = len(tokens)
    for i in range(n >> 1):
        word = U(np.uint32(tokens[2 * i])) | (U(np.uint32(tokens[2 * i + 1])) << U(32))
        v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, word)
    tail = U(16 + 4 * n) << U(56)
    if n & 1:
        tail |= U(np.uint32(tokens[n - 1]))
    some = False
    for i in range(len(extra)):
        some |= extra[i] != 0
    if some:
        for i in range(len(extra)):
            v0, v1, v2, v3 = _absorb(v0, v1, v2, v3, U(extra[i]))
    return _end(v0, v1, v2, v3, tail, parent0, parent1, guards)


LANES = 16


@inline
def _absorb_lanes(v, row):
    for j in range(LANES):
        v[0, j], v[1, j], v[2, j], v[3, j] = _absorb(v[0, j], v[1, j], v[2, j], v[3, j], v[row, j])


@inline
def keys_in_lanes(group, words, parent0, parent1, out, v):
    """Write the keys of LANES blocks to ``out`` int64[LANES, 2], given that of the block before. They have no extra
    ids.

    The parent comes last in a key. So the tokens of several blocks, ``words`` uint64[LANES, T / 2], are absorbed side
    by side, in the lanes of vectors, before the key of the first is known. ``v`` uint64[6, LANES] is scratch. Returns
    the last key.
    """
    for j in range(LANES):
        v[0, j], v[1, j], v[2, j], v[3, j] = _begin(group.secret0, group.secret1)
        v[4, j] = words[j, 0]
    last = words.shape[1] - 1
    for i in range(last + 1):
        # The next words: a vector that is loaded right after its parts were stored waits for them.
        for j in range(LANES):
            v[4 + (i + 1) % 2, j] = words[j, min(i + 1, last)]
        _absorb_lanes(v, 4 + i % 2)
    tail = U(16 + 8 * words.shape[1]) << U(56)
    for j in range(LANES):
        parent0, parent1 = _end(v[0, j], v[1, j], v[2, j], v[3, j], tail, parent0, parent1, group.guards)
        out[j, 0], out[j, 1] = parent0, parent1
    return parent0, parent1


@inline
def key_in(group, tokens, extra, parent0, parent1):
    """``block_key`` under the secret of a pool, of which ``group`` is a header."""
    return block_key(tokens, extra, group.secret0, group.secret1, parent0, parent1, group.guards)


def _field(value: bytes | str | int | None) -> bytes:
    """One namespace field as bytes, such that different values, of one type or of two, have different bytes."""
    if value is None:
        return b"n"
    kind, data = b"b", value
    if isinstance(value, str):
        kind, data = b"s", value.encode()
    elif isinstance(value, int):
        kind, data = b"i", str(value).encode()
    assert isinstance(data, bytes)
    return kind + len(data).to_bytes(8, "little") + data


def block_secret(secret: bytes) -> tuple[int, int]:
    """The SipHash key derived from the pool's secret, as two signed 64-bit integers."""
    digest = hashlib.blake2b(key=secret, digest_size=16, person=b"kvpool.blocks").digest()
    words = np.frombuffer(digest, np.int64)
    return int(words[0]), int(words[1])


@functools.lru_cache(maxsize=4096)
def namespace_root(
    secret: bytes, salt: bytes | str | None, adapter_id: int | str | None, in_key: bool = True
) -> tuple[int, int, int]:
    """(namespace, root0, root1): the tag that blocks of this namespace carry, and the key that their chains start from.

    Signed 64-bit integers from a keyed BLAKE2b. ``in_key=False`` is the guard "namespace_in_key" taken out.
    """
    fields = _field(salt) + _field(adapter_id)
    tag = hashlib.blake2b(fields, key=secret, digest_size=8, person=b"kvpool.tag").digest()
    root = hashlib.blake2b(fields if in_key else b"", key=secret, digest_size=16, person=b"kvpool.root").digest()
    words = np.frombuffer(tag + root, np.int64)
    return int(words[0]), int(words[1]), int(words[2])


def remote_password(secret: bytes) -> str:
    """What workers with the same secret show each other before their first message. Not public."""
    return hashlib.blake2b(key=secret, digest_size=32, person=b"kvpool.password").hexdigest()


def fingerprint(secret: bytes) -> str:
    """A public name of the secret, by which two pools see that their keys agree."""
    return hashlib.blake2b(key=secret, digest_size=16, person=b"kvpool.public").hexdigest()

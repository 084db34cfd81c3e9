"""Digests: of the bytes alone, however they are cut, and other bytes or another key give others."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kvpool.common.arrays import digest
from kvpool.common.arrays.digest import Digest, check_library

pytest.importorskip("cryptography")

KEY = bytes(range(32))


def some_bytes(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def ghash(data: bytes) -> bytes:
    """AES-GCM's code of data that is not encrypted, as the standard says it, a bit at a time."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    cipher = Cipher(algorithms.AES256(KEY), modes.ECB()).encryptor()
    factor, state = int.from_bytes(cipher.update(bytes(16)), "big"), 0
    padded = data + bytes(-len(data) % 16) + (8 * len(data)).to_bytes(8, "big") + bytes(8)
    for start in range(0, len(padded), 16):
        state ^= int.from_bytes(padded[start : start + 16], "big")
        product, shifted = 0, factor
        for bit in range(127, -1, -1):
            product ^= shifted if state >> bit & 1 else 0
            shifted = shifted >> 1 ^ (0xE1 << 120 if shifted & 1 else 0)
        state = product
    mask = int.from_bytes(cipher.update(bytes(15) + b"\1"), "big")
    return (state ^ mask).to_bytes(16, "big")


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000])
def test_a_digest_is_what_the_standard_says(count: int) -> None:
    data = some_bytes(count)
    assert Digest(KEY).of([data]) == ghash(data.tobytes())


def test_a_digest_does_not_depend_on_how_the_bytes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    data = some_bytes(4096)
    whole = Digest(KEY).of([data])
    assert len(whole) == 16
    for cut in (0, 1, 16, 4095, 4096):
        assert Digest(KEY).of([data[:cut], data[cut:]]) == whole
    assert Digest(KEY).of([data.reshape(64, 64)]) == Digest(KEY).of([data.view(np.int64)]) == whole
    assert Digest(KEY).of([memoryview(data), np.empty((0, 8)), b""]) == whole
    monkeypatch.setattr(digest, "_AT_ONCE", 100)
    assert Digest(KEY).of([data]) == whole


def test_other_bytes_and_another_key_give_another_digest() -> None:
    data = some_bytes(512)
    changed = []
    for place in range(len(data)):
        other = data.copy()
        other[place] ^= 1 << place % 8
        changed.append(Digest(KEY).of([other]))
    changed += [Digest(KEY).of([data]), Digest(bytes(32)).of([data]), Digest(KEY).of([data, b"\0"])]
    changed.append(Digest(KEY).of([data[:-1]]))
    assert len({*changed}) == len(changed)


def test_threads_that_share_a_digest_get_what_each_gets_alone() -> None:
    shared, buffers = Digest(KEY), [some_bytes(1 << 16, seed) for seed in range(8)]
    expected = [Digest(KEY).of([buffer]) for buffer in buffers]
    with ThreadPoolExecutor(len(buffers)) as threads:
        for _ in range(50):
            assert list(threads.map(lambda buffer: shared.of([buffer]), buffers)) == expected


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, r'a store needs cryptography: pip install ".\[stores\]"'),
        (SimpleNamespace(__version__="49.1.0"), r'cryptography 50, and this is 49.1.0: pip install -U ".\[stores\]"'),
    ],
)
def test_a_library_that_is_missing_or_too_old_is_named(
    module: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_library("a store", "stores")
    monkeypatch.setitem(sys.modules, "cryptography", module)
    with pytest.raises(ImportError, match=said):
        check_library("a store", "stores")

"""Bad input raises at once, names the argument, and changes nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool import BlockLayout, HostCache, HostTier, ModelIdentity
from kvpool.errors import BlockNotFound
from tests.hostcache.conftest import IDENTITY, keys, store

Make = Callable[..., HostCache]

BAD_KEYS: list[tuple[Any, type[Exception], str]] = [
    (b"ab", TypeError, "keys: expected several keys, such as a list of bytes, got b'ab'"),
    ("ab", TypeError, "keys: expected several keys, such as a list of bytes, got 'ab'"),
    (None, TypeError, "keys: expected several keys, such as a list of bytes, got None"),
    (7, TypeError, "keys: expected several keys, such as a list of bytes, got 7"),
    (["a"], TypeError, "keys[0]: expected bytes, got 'a'"),
    ([b"a", None], TypeError, "keys[1]: expected bytes, got None"),
    ([b"a", bytearray(b"b")], TypeError, "keys[1]: expected bytes, got bytearray(b'b')"),
    ([b"a", memoryview(b"b")], TypeError, "keys[1]: expected bytes, got <memory at "),
    ([b"a", b""], ValueError, "keys[1]: expected 1 to 64 bytes, got 0"),
    ([b"x" * 65], ValueError, "keys[0]: expected 1 to 64 bytes, got 65"),
]


@pytest.mark.parametrize("verb", ["lookup", "reserve", "publish", "abort", "pin", "touch", "forget"])
@pytest.mark.parametrize(("bad", "error", "message"), BAD_KEYS)
def test_keys_are_bytes(make: Make, verb: str, bad: Any, error: type[Exception], message: str) -> None:
    cache = make()
    with pytest.raises(error, match=re.escape(message)):
        getattr(cache, verb)(bad)
    assert cache.stats().empty == 4


@pytest.mark.parametrize(
    ("bad", "error"), [("a", TypeError), (None, TypeError), (b"", ValueError), (b"x" * 65, ValueError)]
)
def test_a_single_key_is_bytes(make: Make, bad: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="key"):
        make().find(bad)


class Digest(bytes):
    """What an engine may call its keys."""


def test_keys_of_a_subclass_of_bytes_are_plain_bytes(make: Make) -> None:
    cache = make()
    names = [Digest(b"a"), Digest(b"long key"), b"c"]
    taken = cache.reserve(names * 2)
    assert taken.keys == (b"a", b"long key", b"c") and {type(key) for key in taken.keys} == {bytes}
    assert cache.lookup([b"a", b"long key", Digest(b"l")]).tolist() == [cache.PENDING, cache.PENDING, cache.ABSENT]
    assert cache.find(Digest(b"a")) == cache.PENDING
    with pytest.raises(BlockNotFound, match=b"x".hex()):
        cache.pin([Digest(b"x")])
    with pytest.raises(ValueError, match=r"keys\[0\]: expected 1 to 64 bytes, got 65"):
        cache.lookup([Digest(b"x" * 65)])


def test_keys_of_any_length_and_from_any_iterable(make: Make) -> None:
    cache = make(64)
    names = [b"k" * n for n in range(1, 65)]
    assert cache.reserve(iter(names)).keys == tuple(names)
    assert cache.publish(dict.fromkeys(names)) == 64
    assert cache.lookup(name for name in names).tolist() == [cache.HERE] * 64
    assert cache.reserve([b"\0", b"\0\0", b"\0\0\0"]).evicted == [b"k" * 64, b"k" * 63, b"k" * 62], "zeros count"


def test_an_iterable_that_fails_leaves_the_cache_alone(make: Make) -> None:
    def failing(error: type[Exception]) -> Iterator[bytes]:
        yield b"a"
        raise error("no more")

    cache = make()
    for error in (RuntimeError, TypeError):
        with pytest.raises(error, match="no more"):
            cache.reserve(failing(error))
    assert cache.stats().empty == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"host_blocks": 0}, ValueError, "host_blocks: expected 1 to 2147483647, got 0"),
        ({"host_blocks": 1 << 31}, ValueError, "host_blocks: expected 1 to 2147483647, got 2147483648"),
        ({"host_blocks": True}, TypeError, "host_blocks: expected an integer, got True"),
        ({"block_bytes": 0}, ValueError, "block_bytes: expected 1 to 2147483647, got 0"),
        ({"block_bytes": 1.5}, TypeError, "block_bytes: expected an integer, got 1.5"),
        ({"block_bytes": []}, TypeError, "block_bytes: expected a number, a BlockLayout or a list of them, got []"),
        ({"identity": "llama"}, TypeError, "identity: expected a ModelIdentity, got 'llama'"),
        ({"secret": b"short"}, ValueError, "secret"),
        ({"event_capacity": -1}, ValueError, "event_capacity: expected 0 to 2147483648, got -1"),
        ({"policy": "fifo"}, ValueError, "policy: expected one of lru, reuse, agent, adaptive, got 'fifo'"),
        ({"clock": 5}, TypeError, "clock: expected a function that returns milliseconds, got 5"),
    ],
)
def test_arguments_of_a_cache(make: Make, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        make(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"priority": 101}, ValueError),
        ({"priority": -1}, ValueError),
        ({"priority": "high"}, TypeError),
        ({"ttl_ms": 0}, ValueError),
        ({"deadline_seconds": 0}, ValueError),
        ({"deadline_seconds": -1}, ValueError),
        ({"deadline_seconds": True}, TypeError),
        ({"deadline_seconds": "1"}, TypeError),
        ({"deadline_seconds": float("nan")}, ValueError),
        ({"ttl_ms": 1.0}, TypeError),
    ],
)
def test_arguments_of_a_reservation(make: Make, options: dict[str, Any], error: type[Exception]) -> None:
    cache = make()
    with pytest.raises(error, match=next(iter(options))):
        cache.reserve(keys("a"), **options)
    assert cache.find(b"a") == cache.ABSENT


@pytest.mark.parametrize("clock", [lambda: -1, lambda: 1 << 60, lambda: "now"])
def test_a_clock_that_is_none_changes_nothing(make: Make, clock: Any) -> None:
    ticks: list[Any] = [lambda: 0]
    cache = make(clock=lambda: ticks[0]())
    store(cache, "a")
    lease, ticks[0] = cache.pin(keys("a")), clock
    for call in (lambda: cache.reserve(keys("b")), lambda: cache.touch(keys("a")), lease.close, cache.refresh):
        with pytest.raises((TypeError, ValueError), match=r"clock\(\)"):
            call()
    ticks[0] = lambda: 1
    lease.close()


@pytest.mark.parametrize("name", ["model", "revision", "kv_dtype", "layout", "hash_version"])
@pytest.mark.parametrize(
    ("bad", "error"), [("", ValueError), (None, TypeError), (7, TypeError), ("x" * 4097, ValueError)]
)
def test_an_identity_needs_all_that_distinguishes_models(name: str, bad: Any, error: type[Exception]) -> None:
    fields = dict.fromkeys(["model", "revision", "kv_dtype", "layout", "hash_version"], "x")
    with pytest.raises(error, match=name):
        ModelIdentity(**{**fields, name: bad})


def test_no_two_identities_are_alike() -> None:
    first, other = ModelIdentity("a", "bc", "d", "e", "f"), ModelIdentity("ab", "c", "d", "e", "f")
    assert first.fingerprint != other.fingerprint and first != other


def test_layouts_stand_for_their_fingerprints() -> None:
    layouts = [BlockLayout(2, 2, 8, 4), BlockLayout(2, 4, 8, 4)]
    identity = ModelIdentity("m", "r", "float16", layouts, "v")
    assert identity.layout == " ".join(layout.fingerprint for layout in layouts)
    with HostCache(2, layouts, identity=identity) as cache, HostTier.of(cache) as tier:
        assert cache.block_bytes == tier.block_bytes == sum(layout.block_bytes for layout in layouts)


LAYOUT = BlockLayout(2, 2, 8, 4, "float16")


def identity(kv_dtype: str, layout: Any = "text") -> ModelIdentity:
    return ModelIdentity("m", "r", kv_dtype, layout, "v")


@pytest.mark.parametrize("kv_dtype", ["float32", "fp32", "bfloat16", "torch.bfloat16", "fp8", "int8", " Float64 "])
def test_an_identity_with_another_type_than_the_blocks_is_refused(kv_dtype: str) -> None:
    for call in (
        lambda: identity(kv_dtype, LAYOUT),
        lambda: HostCache(2, LAYOUT, identity=identity(kv_dtype)),
        lambda: HostTier(2, [LAYOUT], identity=identity(kv_dtype)),
    ):
        with pytest.raises(ValueError, match=r"^identity.kv_dtype: expected float16, .+, got .+"):
            call()


@pytest.mark.parametrize(
    ("kv_dtype", "dtypes"),
    [
        ("float16", ["float16"]),
        ("half", ["float16"]),
        ("torch.float16", ["float16"]),
        ("as MLX has it", ["float16"]),
        ("float16", ["float32", "float16"]),
        ("bfloat16", ["uint16"]),
        ("fp8_e4m3", ["float8_e4m3fnuz"]),
        ("fp8_e5m2", ["int8"]),
        ("float32", ["uint8"]),
    ],
)
def test_an_identity_with_a_type_that_the_blocks_can_hold_is_accepted(kv_dtype: str, dtypes: list[str]) -> None:
    layouts = [BlockLayout(2, 2, 8, 4, dtype) for dtype in dtypes]
    with HostCache(2, layouts, identity=identity(kv_dtype, layouts)) as cache:
        assert cache.identity.kv_dtype == kv_dtype


@pytest.mark.parametrize(
    "other",
    [(2, 2, 8, 8), (2, 2, 16, 4), (1, 2, 8, 4), (2, 1, 8, 4), (2, 2, 8, 4, "float16", 1)],
    ids=["tokens_per_block", "head_dim", "layers", "kv_heads", "planes"],
)
def test_an_identity_with_another_layout_than_the_blocks_is_refused(other: Any) -> None:
    whose = identity("float16", BlockLayout(*other))
    for copied in (whose, pickle.loads(pickle.dumps(whose))):
        with pytest.raises(ValueError, match="^identity.layout: expected .+, got BlockLayout"):
            HostCache(2, LAYOUT, identity=copied)


def test_a_worker_may_have_a_share_of_the_layout_of_the_identity() -> None:
    whole = identity("float16", BlockLayout(8, 4, 8, 4))
    HostCache(2, LAYOUT, identity=whole).close()
    HostCache(2, 4096, identity=whole).close()


def test_a_cache_and_its_tier_know_each_other(make: Make) -> None:
    cache = make()
    with HostTier.of(cache) as tier, HostTier(5, 64, identity=IDENTITY) as other:
        assert tier.fingerprint == cache.fingerprint != other.fingerprint

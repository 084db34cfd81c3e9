"""Bad input raises at once, names the argument, and changes nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvpool import BlockLayout, HostCache, HostTier, ModelIdentity
from kvpool.errors import BlockNotFound
from tests.hostcache.conftest import Make, keys, store

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


class Digest(bytes):
    """What an engine may call its keys."""


def test_keys_of_a_subclass_of_bytes_are_plain_bytes(make: Make) -> None:
    cache = make()
    taken = cache.reserve([Digest(b"a"), Digest(b"long key"), b"c"] * 2)
    assert taken.keys == (b"a", b"long key", b"c") and {type(key) for key in taken.keys} == {bytes}
    assert cache.lookup([b"a", Digest(b"l")]).tolist() == [cache.PENDING, cache.ABSENT]
    assert cache.find(Digest(b"a")) == cache.PENDING
    with pytest.raises(BlockNotFound, match=b"x".hex()):
        cache.pin([Digest(b"x")])


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


OPTIONS: list[tuple[str, str, list[Any], list[Any]]] = [
    ("make", "host_blocks", [True], [0, 1 << 31]),
    ("make", "block_bytes", [1.5, []], [0]),
    ("make", "identity", ["llama"], []),
    ("make", "secret", [], [b"short"]),
    ("make", "event_capacity", [], [-1]),
    ("make", "policy", [], ["fifo"]),
    ("make", "clock", [5], []),
    ("reserve", "priority", ["high"], [101, -1]),
    ("reserve", "ttl_ms", [1.0], [0]),
    ("reserve", "deadline_seconds", [True, "1"], [0, -1, float("nan")]),
    ("find", "key", ["a", None], [b"", b"x" * 65]),
]
"""For each argument of a call: values of a wrong type, and others that it does not take."""


@pytest.mark.parametrize(("call", "name", "types", "values"), OPTIONS)
def test_bad_arguments_are_refused_by_name(make: Make, call: str, name: str, types: Any, values: Any) -> None:
    cache = make()
    verbs: dict[str, Callable[[Any], object]] = {
        "make": lambda bad: make(**{name: bad}),
        "reserve": lambda bad: cache.reserve(keys("a"), **{name: bad}),
        "find": cache.find,
    }
    for error, bad_values in ((TypeError, types), (ValueError, values)):
        for bad in bad_values:
            with pytest.raises(error, match=f"^{name}: expected .+, got .+"):
                verbs[call](bad)
    assert cache.stats().empty == 4


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


def test_a_cache_and_its_tier_have_the_layouts_of_the_identity() -> None:
    layouts = [BlockLayout(2, 2, 8, 4), BlockLayout(2, 4, 8, 4)]
    several = identity("float16", layouts)
    assert several.layout == " ".join(layout.fingerprint for layout in layouts)
    with HostCache(2, layouts, identity=several) as cache, HostTier.of(cache) as tier:
        assert cache.block_bytes == tier.block_bytes == sum(layout.block_bytes for layout in layouts)
        assert tier.fingerprint == cache.fingerprint

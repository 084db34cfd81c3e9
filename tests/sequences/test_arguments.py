"""Bad input for every argument of every public call: the right error, which names the argument and the value, and not a
byte changed."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine import Engine, open_engine
from kvpool import KVCacheManager, Lease, OutOfBlocks, PoolClosed
from kvpool.errors import BlockNotFound, LeaseExpired, OutOfSequences, PoolBusy, UnknownSequence
from kvpool.state import records as fields
from parts import reach
from tests import debug


class Stranger:
    """An object that is not an argument of any call."""

    def __repr__(self) -> str:
        return "Stranger()"


HUGE = [2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30]
SCRATCH = {fields.H.detail, fields.H.bound, fields.H.need, fields.H.extra_at, fields.H.has_extra}


class Busy(NamedTuple):
    """A pool in use: two sequences, cached blocks on both tiers, a lease, and the ids that are wrong in one way or
    another."""

    engine: Engine
    cache: KVCacheManager
    live: int
    other: int
    released: int
    foreign: int
    lease: Lease


@pytest.fixture
def busy() -> Iterator[Busy]:
    engine, stranger = open_engine(4, 16, 8, event_capacity=64, max_sequences=4), open_engine(4, 4, 0)
    engine.seed(range(9), committed=9)
    engine.cache.content.offload(list(range(8)))
    live, other, gone = engine.add(range(100, 106)), engine.add([7]), engine.add([8])
    engine.release(gone)
    lease = engine.cache.pin(engine.prompt(range(8)).keys, owner="reader")
    yield Busy(engine, engine.cache, live.id, other.id, gone.id, stranger.add([1, 2, 3, 4]).id, lease)
    if not engine.cache.closed:
        engine.check_all()
        engine.cache.verify()
    for each in (engine, stranger):
        each.cache.close()


def picture(cache: KVCacheManager) -> tuple[Any, ...]:
    """All that a call may change."""
    header = np.delete(cache.core.tokens.groups[0], list(SCRATCH))
    return (
        debug.dump(cache.core.tokens),
        header.tobytes(),
        [lease.id for lease in cache.leases],
        cache.core.transfer._decided,
    )


def refused(
    cache: KVCacheManager,
    call: Callable[[], object],
    error: type[Exception] | tuple[type[Exception], ...],
    message: str,
) -> None:
    before = picture(cache)
    with pytest.raises(error) as raised:
        call()
    assert picture(cache) == before, "a call that raised has changed the pool"
    assert re.search(message, str(raised.value)), f"{message!r} is not in {raised.value!s}"
    assert type(raised.value).__module__.startswith(("builtins", "kvpool")), type(raised.value)


# -- prompts -----------------------------------------------------------------------------------------

PROMPT_CALLS = ["block_keys", "match_prefix", "blocks_needed", "add_sequence", "reserve", "prefetch", "offload"]
BAD_TOKENS: list[tuple[Any, type[Exception], str]] = [
    ([], ValueError, "none"),
    (np.zeros(0, np.int32), ValueError, "none"),
    (None, TypeError, "None"),
    ("abc", TypeError, "abc"),
    (b"abc", TypeError, "abc"),
    ([1.5], TypeError, r"1\.5"),
    (["a"], TypeError, "a"),
    ([None], TypeError, "None"),
    (np.zeros(3), TypeError, "float64"),
    (np.array([True]), TypeError, "bool"),
    (np.array([1, None]), TypeError, "object"),
    (np.zeros((2, 2), np.int32), ValueError, r"\(2, 2\)"),
    ([2**31], ValueError, str(2**31)),
    ([0, -(2**31) - 1], ValueError, str(-(2**31) - 1)),
    *((wrap([3, -1]), ValueError, "from 0 to .*-1") for wrap in (list, tuple, collections.deque, np.array, np.int32)),
    (np.int64([5, -1]), ValueError, "-1"),
    ([-7] * 99, ValueError, "-7"),
    *((wrap([7, True, 9]), TypeError, r"\[1\].*True") for wrap in (list, tuple, collections.deque)),
    ([0] * 99 + [False], TypeError, r"\[99\].*False"),
    ([True], TypeError, "True"),
    (np.array([2**31]), ValueError, str(2**31)),
    (np.array([2**64 - 1], np.uint64), ValueError, str(2**64 - 1)),
    *(([1, n], ValueError, str(n)) for n in HUGE),
    (5, (ValueError, TypeError), ""),
    (1.5, (ValueError, TypeError), ""),
    (True, (ValueError, TypeError), ""),
    ({1, 2}, (ValueError, TypeError), ""),
    (Stranger(), (ValueError, TypeError), ""),
]


@pytest.mark.parametrize("call", PROMPT_CALLS)
def test_bad_tokens_are_refused(busy: Busy, call: str) -> None:
    for tokens, error, value in BAD_TOKENS:
        print(repr(tokens))
        named = "prompt" if tokens is None and call == "blocks_needed" else f"(token|prompt|key).*{value}"
        refused(busy.cache, lambda tokens=tokens: reach(busy.cache, call)(tokens), error, f"(?s){named}")


@pytest.mark.parametrize(
    ("tokens", "error"),
    [([3, -1], ValueError), (np.int32([-1]), ValueError), ([3, True], TypeError), ((False, 3), TypeError)],
    ids=str,
)
def test_tokens_that_come_later_are_checked_too(busy: Busy, tokens: Any, error: type[Exception]) -> None:
    keys = busy.cache.block_keys([1, 2, 3])
    for call in (
        lambda: busy.cache.append_tokens(busy.live, tokens),
        lambda: busy.cache.add_sequence_batch([[1, 2], tokens]),
        lambda: busy.cache.plan_batch([[1, 2], tokens]),
        lambda: keys.extend(tokens),
    ):
        refused(busy.cache, call, error, r"^(tokens|prompt)\S*: expected .+, got (-1|True|False)$")


def test_zeros_and_ones_are_tokens(busy: Busy) -> None:
    for tokens in (
        [0, 1] * 500,
        [0],
        (1,),
        [2**31 - 1, 0],
        collections.deque([1, 0]),
        range(2),
        bytearray(b"\x01\x00"),
    ):
        expected = np.array(list(tokens), np.int32)
        assert np.array_equal(busy.cache.block_keys(tokens).tokens, expected)  # type: ignore[arg-type]
        assert np.array_equal(busy.cache.block_keys(expected).tokens, expected)


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        *(({"salt": bad}, TypeError, "salt: .*") for bad in (5, True, 1.5, bytearray(b"x"), [1])),
        ({"salt": "\ud800"}, ValueError, ""),
        *(({"adapter_id": bad}, TypeError, "adapter_id: .*") for bad in (True, np.bool_(True), 1.5, b"x", [1])),
        *(
            ({"extra_ids": bad}, TypeError, "extra_ids")
            for bad in ("abc", [1, 2, 3.0], np.zeros(3), np.ones(3, bool), [True] * 3, [None] * 3)
        ),
        *(({"extra_ids": bad}, ValueError, "extra_ids.*[024]") for bad in ([], [1, 2], [1] * 4)),
        *(({"extra_ids": [1, 2, bad]}, ValueError, f"extra_ids.*{bad}") for bad in HUGE[1:]),
        ({"extra_ids": np.full(3, 2**63, np.uint64)}, ValueError, f"extra_ids.*{2**63}"),
        ({"extra_ids": np.zeros((3, 1), int)}, ValueError, r"extra_ids.*\(3, 1\)"),
    ],
    ids=lambda v: f"{v!r:.40}",
)
def test_bad_namespaces_are_refused(busy: Busy, names: dict[str, Any], error: type[Exception], message: str) -> None:
    refused(busy.cache, lambda: busy.cache.block_keys([1, 2, 3], **names), error, message)


@pytest.mark.parametrize("call", PROMPT_CALLS[1:])
@pytest.mark.parametrize(
    "options", [{"secret": b"another secret, 32 bytes of it.."}, {"T": 2}], ids=["secret", "tokens_per_block"]
)
def test_keys_of_another_pool_are_refused(busy: Busy, call: str, options: dict[str, Any]) -> None:
    stranger = open_engine(options.get("T", 4), 4, 0, secret=options.get("secret", busy.cache.core.states.secret))
    keys = stranger.prompt(range(8))
    stranger.cache.close()
    refused(
        busy.cache,
        lambda: reach(busy.cache, call)(keys),
        ValueError,
        "keys.*another pool|another secret|tokens_per_block",
    )
    refused(busy.cache, lambda: busy.cache.add_sequence_batch([[1], keys]), ValueError, "another secret")
    refused(busy.cache, lambda: busy.cache.plan_batch([[1], keys]), ValueError, "another secret")


def test_keys_of_a_pool_with_the_same_secret_are_accepted(busy: Busy) -> None:
    twin = open_engine(4, 4, 0, secret=busy.cache.core.states.secret)
    assert busy.cache.match_prefix(twin.prompt(range(9))).full_tokens == 8
    twin.cache.close()


# -- admission ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"retention": 5}, TypeError, "retention: .*5"),
        *(({"retention": [bad]}, TypeError, r"retention\[0\]: .*") for bad in (5, (0, None), (0, 1, 2, 3, 4), None)),
        *(
            ({"retention": [bad]}, TypeError, rf"retention\[0\]\.{name}: .*")
            for name, bad in (
                ("start", (True, 5, 35)),
                ("start", (None, 5, 35)),
                ("start", ("0", 5, 35)),
                ("end", (0, 5.0, 35)),
                ("priority", (0, 5, None)),
                ("priority", (0, 5, 35.0)),
                ("ttl_ms", (0, 5, 35, 1.5)),
                ("ttl_ms", (0, 5, 35, True)),
            )
        ),
        *(
            ({"retention": [bad]}, ValueError, rf"retention\[0\].{name}")
            for name, bad in (
                ("start: .*got -1", (-1, None, 35)),
                (f"start: .*got {2**63}", (2**63, None, 35)),
                (f"end: .*got {2**64}", (0, 2**64, 35)),
                ("priority: .*got 101", (0, None, 101)),
                ("priority: .*got -1", (0, None, -1)),
                ("ttl_ms: .*got 0", (0, 5, 35, 0)),
                ("ttl_ms: .*got -1", (0, 5, 35, -1)),
                (f"ttl_ms: .*got {2**31}", (0, 5, 35, 2**31)),
            )
        ),
        *(({"retention": [bad]}, ValueError, r"retention\[0\]: .*end") for bad in ((3, 3, 35), (3, 2, 35))),
        *(
            ({"retention": bad}, ValueError, "retention: .*overlap")
            for bad in (
                [(0, None, 35), (4, 8, 35)],
                [(0, 5, 35), (4, 8, 35)],
                [(4, 8, 35), (0, 5, 35)],
                [(0, None, 35), (5, None, 35)],
            )
        ),
        *(
            ({name: bad}, TypeError, f"{name}: .*")
            for name in ("decode_priority", "decode_ttl_ms")
            for bad in (True, 35.0, "35", [35])
        ),
        *(({"decode_priority": bad}, ValueError, f"decode_priority: .*{bad}") for bad in (-1, 101, *HUGE)),
        ({"decode_priority": None}, TypeError, "decode_priority: .*None"),
        *(({"decode_ttl_ms": bad}, ValueError, f"decode_ttl_ms: .*{bad}") for bad in (0, -1, 2**31, *HUGE)),
    ],
    ids=lambda v: f"{v!r:.60}",
)
def test_bad_options_of_an_admission_are_refused(
    busy: Busy, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    refused(busy.cache, lambda: busy.cache.add_sequence([1, 2, 3], **options), error, message)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        (None, {}, TypeError, ""),
        (5, {}, TypeError, "prompts: .*5"),
        ([5], {}, (TypeError, ValueError), "prompt"),
        ("ab", {}, TypeError, "prompt"),
        ([[1], []], {}, ValueError, "prompt.*none"),
        ([[1], None], {}, TypeError, "prompt.*None"),
        ([1, 2], {}, (TypeError, ValueError), "prompt"),
        ([[1]], {"retention": []}, ValueError, "retention: expected 1, one for each of the prompts, got 0"),
        ([[1]], {"retention": [None] * 2}, ValueError, "retention: expected 1, one for each of the prompts, got 2"),
        ([[1]], {"retention": 5}, TypeError, ""),
        ([[1]], {"retention": [(0, None, 35)]}, TypeError, r"retention\[0\]: .*0"),
        *(([[1]], {"allow_partial_batch": bad}, TypeError, "allow_partial_batch: .*") for bad in ("no", None, 1, [])),
        ([[1], [1] * 60], {}, OutOfBlocks, "device tier: 16 blocks needed"),
        (
            [[1], [1] * 65],
            {},
            ValueError,
            r"prompts\[1\]: 17 device blocks are needed at once, of 16: it can never fit",
        ),
        ([[1], [2], [3]], {}, OutOfSequences, "3 sequences needed, 2 free"),
    ],
    ids=lambda v: f"{v!r:.40}",
)
def test_bad_batches_are_refused(
    busy: Busy, prompts: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    refused(busy.cache, lambda: busy.cache.add_sequence_batch(prompts, **options), error, message)


def test_a_prompt_beyond_max_sequence_tokens_is_refused() -> None:
    engine = open_engine(4, 8, 0, max_sequence_tokens=8)
    refused(
        engine.cache,
        lambda: engine.cache.add_sequence_batch([[1], [1] * 9]),
        ValueError,
        r"prompts\[1\]: .*max_sequence_tokens=8",
    )
    admission = engine.cache.add_sequence_batch([[1], [1] * 9, [2] * 7], allow_partial_batch=True)
    assert list(admission.refused) == [1] and "max_sequence_tokens=8: it can never fit" in admission.refused[1]
    ids = admission.ids[[0, 2]]
    refused(
        engine.cache,
        lambda: engine.cache.append_tokens(ids, [1, 2, 3], [1, 2]),
        ValueError,
        f"{ids[1]} .*max_sequence_tokens=8",
    )
    refused(
        engine.cache,
        lambda: engine.cache.blocks_needed(sequences=ids, new_tokens=2),
        ValueError,
        f"{ids[1]} .*max_sequence_tokens=8",
    )
    engine.cache.close()


# -- sequences ---------------------------------------------------------------------------------------

ID_CALLS: dict[str, Callable[[KVCacheManager, Any], object]] = {
    "append_tokens": lambda cache, ids: cache.append_tokens(ids, [1] * np.size(ids), [1] * np.size(ids)),
    "commit": lambda cache, ids: cache.commit(ids),
    "rewind": lambda cache, ids: cache.rewind(ids, [1] * np.size(ids)),
    "keep": lambda cache, ids: cache.accept_drafts(ids, [0] * np.size(ids), [], [0] * np.size(ids)),
    "release": lambda cache, ids: cache.release(ids),
    "blocks_needed": lambda cache, ids: cache.blocks_needed(sequences=ids, new_tokens=[1] * np.size(ids)),
    "evictable_after_release": lambda cache, ids: cache.evictable_after_release(ids),
    "block_table": lambda cache, ids: cache.block_table(ids),
    "copy_batch_block_offsets": lambda cache, ids: cache.tables.copy_batch_block_offsets(
        np.zeros((4, 16), np.int32), ids
    ),
    "load_targets": lambda cache, ids: cache.imports.load_targets(ids),
    "fork": lambda cache, ids: cache.fork(ids),
    "reorder": lambda cache, ids: cache.reorder(ids, [0] * np.size(ids)),
    "swap_out": lambda cache, ids: cache.swap_out(ids),
    "cached_tokens": lambda cache, ids: cache.cached_tokens(ids),
    "sequence_length": lambda cache, ids: cache.sequence_length(ids),
    "committed_tokens": lambda cache, ids: cache.committed_tokens(ids),
}
BAD_IDS: list[tuple[Any, Any, str]] = [
    (None, TypeError, ": .*None"),
    ("abc", TypeError, "abc"),
    ([1.0], TypeError, r"1\.0"),
    (np.zeros(1), TypeError, "float64"),
    ([None], TypeError, "None"),
    (np.array([True]), TypeError, "bool"),
    ([[0]], TypeError, "0"),
    (1.5, (TypeError, ValueError), ""),
    (True, (TypeError, ValueError), ""),
    (np.zeros((1, 1), int), ValueError, r"\(1, 1\)"),
    ({0}, (TypeError, ValueError), ""),
    *(([n], ValueError, str(n)) for n in HUGE[1:]),
    (np.array([2**63], np.uint64), ValueError, str(2**63)),
]
WRONG_IDS: list[tuple[Callable[[Busy], Any], type[Exception]]] = [
    (lambda busy: [busy.released], UnknownSequence),
    (lambda busy: [busy.foreign], UnknownSequence),
    (lambda busy: [-1], UnknownSequence),
    (lambda busy: [busy.live + (1 << 32)], UnknownSequence),
    (lambda busy: [busy.live + 2], UnknownSequence),
    (lambda busy: [2**63 - 1], UnknownSequence),
    (lambda busy: [-(2**63)], UnknownSequence),
    (lambda busy: [busy.live, busy.released], UnknownSequence),
    (lambda busy: [busy.live, busy.live], ValueError),
]


@pytest.mark.parametrize("call", ID_CALLS)
def test_what_are_not_ids_is_refused(busy: Busy, call: str) -> None:
    for ids, error, value in BAD_IDS:
        print(repr(ids))
        refused(busy.cache, lambda ids=ids: ID_CALLS[call](busy.cache, ids), error, f"(ids|sequences).*{value}")


@pytest.mark.parametrize("call", ID_CALLS)
def test_wrong_ids_are_named(busy: Busy, call: str) -> None:
    for make_ids, error in WRONG_IDS:
        ids = make_ids(busy)
        print(ids)
        refused(busy.cache, lambda ids=ids: ID_CALLS[call](busy.cache, ids), error, str(ids[-1]))


def test_a_second_release_is_refused(busy: Busy) -> None:
    busy.engine.live.clear()
    busy.cache.release([busy.live, busy.other])
    for ids in ([busy.live], [busy.other, busy.live], busy.live):
        refused(busy.cache, lambda ids=ids: busy.cache.release(ids), UnknownSequence, str(np.ravel(ids)[0]))


COUNT_CALLS: dict[str, Callable[[Busy, Any], object]] = {
    "append_tokens": lambda busy, counts: busy.cache.append_tokens([busy.live, busy.other], [1, 2, 3], counts),
    "commit": lambda busy, counts: busy.cache.commit([busy.live, busy.other], counts),
    "rewind": lambda busy, counts: busy.cache.rewind([busy.live, busy.other], counts),
    "keep": lambda busy, counts: busy.cache.accept_drafts([busy.live, busy.other], [0, 0], [], counts),
    "blocks_needed": lambda busy, counts: busy.cache.blocks_needed(
        sequences=[busy.live, busy.other], new_tokens=counts
    ),
}


BAD_COUNTS: list[tuple[Any, Any, str]] = [
    ("abc", TypeError, "abc"),
    ([1.0, 1.0], TypeError, r"1\.0"),
    (np.ones(2), TypeError, "float64"),
    ([None, 1], TypeError, "None"),
    (np.ones(2, bool), TypeError, "bool"),
    ([[1], [1]], TypeError, "1"),
    (np.ones((2, 1), int), ValueError, r"\(2, 1\)"),
    ([1], ValueError, "1"),
    ([1, 1, 1], ValueError, "3"),
    ([], ValueError, "0"),
    ([1, -1], ValueError, "-1"),
    *(([1, n], ValueError, str(n)) for n in HUGE),
    ([2**62] * 2, ValueError, str(2**62)),
    ([2**63 - 1, 2**63 - 1], ValueError, ""),
    (1.5, (TypeError, ValueError), ""),
    (True, (TypeError, ValueError), ""),
    ({1}, (TypeError, ValueError), ""),
    ([True, True], TypeError, "True"),
]


@pytest.mark.parametrize("call", COUNT_CALLS)
def test_bad_counts_are_refused(busy: Busy, call: str) -> None:
    for counts, error, value in BAD_COUNTS:
        print(repr(counts))
        named = f"(?s)(counts|new_tokens).*{value}"
        refused(busy.cache, lambda counts=counts: COUNT_CALLS[call](busy, counts), error, named)


def test_counts_out_of_a_sequences_range_name_it(busy: Busy) -> None:
    cache, live, other = busy.cache, busy.live, busy.other
    cache.commit(live, [5])
    for call in (
        lambda: cache.commit([other, live], [1, 4]),
        lambda: cache.commit([other, live], [1, 7]),
        lambda: cache.rewind([other, live], [1, 7]),
    ):
        refused(cache, call, ValueError, f"sequence {live}, got ")
    refused(cache, lambda: cache.append_tokens([live, other], [1, 2]), ValueError, "counts")
    refused(cache, lambda: cache.append_tokens([live, other], [1, 2], [1, 2]), ValueError, "counts.* 3, tokens has 2")
    refused(cache, lambda: cache.append_tokens(live, range(100)), ValueError, "it can never fit")
    for bad in (-1, 2**31, True, 1.5, None):
        refused(
            cache, lambda bad=bad: cache.blocks_needed([1], new_tokens=bad), (TypeError, ValueError), "new_tokens: .*"
        )
    refused(cache, lambda: cache.blocks_needed([1], sequences=[live]), TypeError, "sequences: .*")


# -- pins, and the pool as a whole -------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        None,
        "abc",
        b"x" * 15,
        5,
        [5],
        [1.0, 2.0],
        np.zeros(3, np.uint64),
        [2**64, 1],
        Stranger(),
        ["x" * 16],
        [[1], [2, 3]],
        memoryview(np.zeros(16)),
    ],
    ids=lambda v: f"{v!r:.30}".partition(" at 0x")[0],
)
def test_bad_keys_are_refused(busy: Busy, bad: Any) -> None:
    refused(busy.cache, lambda: busy.cache.find_and_pin_host(bad), (TypeError, ValueError), "key")
    for keys in (bad, [bad], [b"x" * 16, bad]):
        refused(busy.cache, lambda keys=keys: busy.cache.pin(keys), (TypeError, ValueError), "key")
    for keys in (
        np.zeros((1, 2)),
        np.zeros((1, 3), np.uint64),
        np.zeros((1, 2), np.int32),
        np.zeros((1, 1, 2), np.uint64),
    ):
        refused(busy.cache, lambda keys=keys: busy.cache.pin(keys), ValueError, r"keys.*\(1, ")
        refused(
            busy.cache,
            lambda keys=keys: busy.cache.content.offload(keys),
            (TypeError, ValueError),
            "keys|tokens|prompt",
        )


def test_pins_of_what_is_not_there_are_refused(busy: Busy) -> None:
    cache, key = busy.cache, busy.engine.prompt(range(8)).keys
    assert cache.find_and_pin_host(b"x" * 16) is None
    refused(cache, lambda: cache.pin([key[0], b"\xab" * 16]), BlockNotFound, "ab" * 16)
    refused(cache, lambda: cache.pin(busy.engine.prompt(range(50, 54)), tier="device"), BlockNotFound, "on the device")
    for bad in (-1, 24, 15, 2**40, [0, 15]):
        refused(cache, lambda bad=bad: cache.pin_blocks(bad), BlockNotFound, f"block {np.ravel(bad)[-1]} ")
    for bad in ("abc", [1.5], None, [[0]], [2**64], [True]):
        refused(cache, lambda bad=bad: cache.pin_blocks(bad), (TypeError, ValueError), "ids")
    for tier in ("gpu", 0, 1, True, b"host", [1]):
        refused(cache, lambda tier=tier: cache.pin(key, tier=tier), (TypeError, ValueError), "tier: .*")
    for owner in (None, 5, b"reader"):
        for call, what in ((cache.pin, key), (cache.pin_blocks, 0), (cache.find_and_pin_host, key[0])):
            refused(cache, lambda call=call, what=what, owner=owner: call(what, owner=owner), TypeError, "owner: .*")
        refused(cache, lambda owner=owner: cache.revoke(owner), TypeError, "owner: .*")


@pytest.mark.parametrize("end", ["close", "with", "revoke"])
def test_a_lease_ends_once(busy: Busy, end: str) -> None:
    if end == "close":
        busy.lease.close()
    elif end == "revoke":
        assert busy.cache.revoke("reader") == 1
    else:
        with busy.lease:
            pass
    assert busy.lease.closed and busy.cache.leases == []
    refused(busy.cache, busy.lease.close, LeaseExpired, f"lease {busy.lease.id} of 'reader'")
    with pytest.raises(LeaseExpired), busy.lease:
        pass
    assert busy.cache.revoke("reader") == busy.cache.revoke("nobody") == 0


STREAM_CALLS: dict[str, Callable[[Busy, Any], object]] = {
    "add_sequence": lambda busy, stream: busy.cache.add_sequence([1], stream=stream),
    "add_sequence_batch": lambda busy, stream: busy.cache.add_sequence_batch([[1]], stream=stream),
    "append_tokens": lambda busy, stream: busy.cache.append_tokens(busy.live, [1], stream=stream),
    "commit": lambda busy, stream: busy.cache.commit(busy.live, stream=stream),
    "rewind": lambda busy, stream: busy.cache.rewind(busy.live, [1], stream=stream),
    "keep": lambda busy, stream: busy.cache.accept_drafts(busy.live, [0], [], stream=stream),
    "release": lambda busy, stream: busy.cache.release(busy.live, stream=stream),
    "reserve": lambda busy, stream: busy.cache.imports.reserve([1], stream=stream),
    "load_targets": lambda busy, stream: busy.cache.imports.load_targets(busy.live, stream=stream),
    "block_table": lambda busy, stream: busy.cache.block_table(busy.live, stream=stream),
    "copy_batch_block_offsets": lambda busy, stream: busy.cache.tables.copy_batch_block_offsets(
        np.zeros((1, 16), np.int32), busy.live, stream=stream
    ),
}


@pytest.mark.parametrize("call", STREAM_CALLS)
def test_bad_streams_are_refused(busy: Busy, call: str) -> None:
    for stream in ("x", 1.5, True, object(), -1, 2**64):
        error = ValueError if stream in (-1, 2**64) else TypeError
        refused(busy.cache, lambda stream=stream: STREAM_CALLS[call](busy, stream), error, "stream: .*")


def test_other_bad_arguments_are_refused(busy: Busy) -> None:
    for bad in (-1, 2**63, 1.5, True, "x"):
        refused(
            busy.cache, lambda bad=bad: busy.cache.content.refresh(bad), (TypeError, ValueError), f"now_ms: .*{bad!r}"
        )
    for bad in ("no", None, 0, [1]):
        refused(busy.cache, lambda bad=bad: busy.cache.clear(force=bad), TypeError, "force: .*")
        refused(busy.cache, lambda bad=bad: busy.cache.release(busy.live, store=bad), TypeError, "store: .*")
    refused(busy.cache, busy.cache.clear, PoolBusy, "2 live sequences")
    refused(busy.cache, lambda: busy.cache.clear(False), PoolBusy, "2 live sequences")


def test_everything_but_stats_and_close_is_refused_by_a_closed_pool(busy: Busy) -> None:
    cache, key, lease = busy.cache, busy.engine.prompt(range(4)).keys, busy.lease
    busy.engine.live.clear()
    report = cache.close()
    assert sorted(report.sequences) == sorted([busy.live, busy.other]) and len(report.leases) == 1
    calls: list[Callable[[], object]] = [
        *(lambda call=call: call(cache, [busy.live]) for call in ID_CALLS.values()),
        *(lambda name=name: reach(cache, name)([1]) for name in PROMPT_CALLS[1:]),
        lambda: cache.add_sequence_batch([[1]]),
        lambda: cache.pin(key),
        lambda: cache.pin_blocks(0),
        lambda: cache.find_and_pin_host(key[0]),
        lambda: cache.revoke("reader"),
        cache.content.refresh,
        cache.events,
        cache.verify,
        cache.clear,
        lambda: cache.clear(force=True),
        lease.close,
        lambda: cache.memory.device_pool,
        lambda: cache.memory.host_pool,
    ]
    for call in calls:
        refused(cache, call, PoolClosed, "")
    assert (
        cache.closed
        and lease.closed
        and cache.leases == []
        and cache.close() == report
        and cache.stats().sequences == 2
    )

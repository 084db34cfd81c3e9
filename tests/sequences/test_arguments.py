"""Bad input for every argument of every public call: the right error, which names the argument, what is expected and
what came, and not a byte changed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine import Engine, open_engine
from kvpool import (
    KVCacheManager,
    Lease,
    OutOfBlocks,
    PoolClosed,
    RetentionRange,
)
from kvpool.device.base import Stream
from kvpool.errors import BlockNotFound, LeaseExpired, OutOfSequences, PoolBusy, UnknownSequence
from kvpool.state import records as fields
from parts import reach
from tests import debug

HUGE = [2**63, 2**64, -(2**63) - 1, 10**30]
SCRATCH = {fields.H.detail, fields.H.bound, fields.H.need, fields.H.extra_at, fields.H.has_extra}


class Busy(NamedTuple):
    """A pool in use: two sequences, cached blocks on both tiers, a lease, and ids that are wrong."""

    engine: Engine
    cache: KVCacheManager
    live: int
    other: int
    released: int
    foreign: int
    lease: Lease

    @property
    def both(self) -> list[int]:
        return [self.live, self.other]


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


def refused(cache: KVCacheManager, call: Callable[[], object], error: Any, message: str = "") -> None:
    before = picture(cache)
    with pytest.raises(error) as raised:
        call()
    assert picture(cache) == before, "a call that raised has changed the pool"
    assert re.search(message, str(raised.value)), f"{message!r} is not in {raised.value!s}"
    assert type(raised.value).__module__.startswith(("builtins", "kvpool")), type(raised.value)


def named(name: str) -> str:
    """The form of a message about an argument with this name."""
    return rf"(?s)^(\w+, )?({name})[\w\[\].()]*(, \w+)*: expected .+, got .+"


# -- values that an argument does not take ------------------------------------------------------------


Call = Callable[[Any, Any], object]
"""A call on a busy pool, with the value of an argument."""


def call_of(name: str) -> Call:
    return lambda at, value: reach(at.cache, name)(value)


PROMPT_CALLS = ["match_prefix", "blocks_needed", "add_sequence", "reserve", "prefetch", "offload"]
ID_CALLS: dict[str, Callable[[KVCacheManager, Any], object]] = {
    "append_tokens": lambda cache, ids: cache.append_tokens(ids, [1] * np.size(ids), [1] * np.size(ids)),
    "rewind": lambda cache, ids: cache.rewind(ids, [1] * np.size(ids)),
    "keep": lambda cache, ids: cache.accept_drafts(ids, [0] * np.size(ids), [], [0] * np.size(ids)),
    "blocks_needed": lambda cache, ids: cache.blocks_needed(sequences=ids, new_tokens=[1] * np.size(ids)),
    "copy_batch_block_offsets": lambda cache, ids: cache.tables.copy_batch_block_offsets(
        np.zeros((4, 16), np.int32), ids
    ),
    "reorder": lambda cache, ids: cache.reorder(ids, [0] * np.size(ids)),
    **{
        name: lambda cache, ids, name=name: reach(cache, name)(ids)  # type: ignore[misc]
        for name in "commit release evictable_after_release block_table load_targets fork swap_out cached_tokens "
        "sequence_length committed_tokens".split()
    },
}
STREAM_CALLS: list[Call] = [
    lambda at, stream: at.cache.add_sequence([1], stream=stream),
    lambda at, stream: at.cache.add_sequence_batch([[1]], stream=stream),
    lambda at, stream: at.cache.append_tokens(at.live, [1], stream=stream),
    lambda at, stream: at.cache.commit(at.live, stream=stream),
    lambda at, stream: at.cache.rewind(at.live, [1], stream=stream),
    lambda at, stream: at.cache.accept_drafts(at.live, [0], [], stream=stream),
    lambda at, stream: at.cache.release(at.live, stream=stream),
    lambda at, stream: at.cache.imports.reserve([1], stream=stream),
    lambda at, stream: at.cache.imports.load_targets(at.live, stream=stream),
    lambda at, stream: at.cache.block_table(at.live, stream=stream),
    lambda at, stream: at.cache.tables.copy_batch_block_offsets(np.zeros((1, 16), np.int32), at.live, stream=stream),
]
COUNT_CALLS: list[Call] = [
    lambda at, counts: at.cache.append_tokens(at.both, [1, 2, 3], counts),
    lambda at, counts: at.cache.commit(at.both, counts),
    lambda at, counts: at.cache.rewind(at.both, counts),
    lambda at, counts: at.cache.accept_drafts(at.both, [0, 0], [], counts),
    lambda at, counts: at.cache.blocks_needed(sequences=at.both, new_tokens=counts),
]
NO_KEYS = [None, "abc", 5, object()]
NO_PAIRS = [np.zeros(3, np.uint64), np.zeros((1, 3), np.uint64), np.zeros((1, 1, 2), np.uint64)]
NO_NUMBERS = ["abc", b"abc", [1.5], ["a"], [None], np.zeros(3), np.array([True]), [True], 1.5, True, {1}, object()]
"""What is not an array or a sequence of integers."""
TOO_LARGE = [*([1, n] for n in HUGE), np.array([2**63], np.uint64)]
NO_TOKENS = [np.array([1, None]), (False, 3), deque([7, True]), [0] * 99 + [False]]
BAD_TOKENS = [*TOO_LARGE, np.zeros((2, 2), np.int32), [2**31], [0, -(2**31) - 1], [-7] * 99, np.int64([5, -1])]
BAD_TOKENS += [wrap([3, -1]) for wrap in (list, tuple, deque, np.array, np.int32)]


class Wrong(NamedTuple):
    """Values that calls do not take: those of a wrong type, and others."""

    name: str
    calls: Sequence[Call]
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()

    def check(self, at: Busy) -> None:
        for error, values in ((TypeError, self.types), (ValueError, self.values)):
            for value in values:
                for place, call in enumerate(self.calls):
                    print(f"{value!r} for call {place}")
                    refused(at.cache, partial(call, at, value), error, named(self.name))


def option(call: str, name: str, types: Sequence[Any] = (), values: Sequence[Any] = ()) -> Wrong:
    """An option of a call for a prompt of three tokens."""
    return Wrong(name, [lambda at, value: reach(at.cache, call)([1, 2, 3], **{name: value})], types, values)


NUMBER = [True, 1.5, "4", [4]]
WRONG = [
    Wrong(
        "tokens|prompt|keys?",
        [call_of(name) for name in ("block_keys", *PROMPT_CALLS)],
        [*NO_NUMBERS, *NO_TOKENS],
        [[], *BAD_TOKENS],
    ),
    Wrong(
        "tokens|prompts?",
        [
            lambda at, tokens: at.cache.append_tokens(at.live, tokens),
            lambda at, tokens: at.cache.add_sequence_batch([[1, 2], tokens]),
            lambda at, tokens: at.cache.plan_batch([[1, 2], tokens]),
            lambda at, tokens: at.cache.block_keys([1, 2, 3]).extend(tokens),
        ],
        [None, *NO_NUMBERS, *NO_TOKENS],
        BAD_TOKENS,
    ),
    Wrong(
        "prompts?", [call_of("add_sequence_batch"), call_of("plan_batch")], [None, 5, "ab", [5], [1, 2]], [[[1], []]]
    ),
    option("block_keys", "salt", [5, True, 1.5, bytearray(b"x"), [1]]),
    option("block_keys", "adapter_id", [True, np.bool_(True), 1.5, b"x", [1]]),
    option(
        "block_keys",
        "extra_ids",
        ["abc", [1, 2, 3.0], np.zeros(3), np.ones(3, bool), [True] * 3, [None] * 3],
        [[], [1, 2], [1] * 4, *([1, 2, n] for n in HUGE), np.full(3, 2**63, np.uint64), np.zeros((3, 1), int)],
    ),
    option("block_keys", "reuse", [1]),
    option("block_keys", "publish", [1]),
    Wrong("extra_ids", [lambda at, ids: at.cache.block_keys([1]).extend([1], extra_ids=ids)], [["x"]], [[1, 2]]),
    option(
        "add_sequence",
        "retention",
        [
            *(5, [5], [(0, None)], [(0, 1, 2, 3, 4)], [None], RetentionRange(0, None, 35), [(True, 5, 35)]),
            *([(None, 5, 35)], [("0", 5, 35)], [(0, 5.0, 35)], [(0, 5, None)], [(0, 5, 35.0)], [(0, 5, 35, 1.5)]),
        ],
        [
            *([(-1, None, 35)], [(2**63, None, 35)], [(0, 2**64, 35)], [(0, None, 101)], [(0, None, -1)]),
            *([(0, 5, 35, 0)], [(0, 5, 35, 2**31)], [(3, 3, 35)], [(3, 2, 35)]),
            *([(0, None, 35), (4, 8, 35)], [(4, 8, 35), (0, 5, 35)], [(0, None, 35), (5, None, 35)]),
        ],
    ),
    option("add_sequence", "decode_priority", [None, *NUMBER], [-1, 101, *HUGE]),
    option("add_sequence", "decode_ttl_ms", NUMBER, [0, -1, 2**31, *HUGE]),
    option("add_sequence", "encoder_tokens", (), [3]),
    option("reserve", "retention", [5, "x", [5]], [[(0, 4, 101, None)]]),
    option("reserve", "deadline_seconds", [True, "10", [10]], [0, -1, 1 << 31, float("nan")]),
    Wrong(
        "retention",
        [lambda at, value: at.cache.add_sequence_batch([[1]], retention=value)],
        [5, [(0, None, 35)]],
        [[], [None] * 2],
    ),
    Wrong(
        "allow_partial_batch",
        [lambda at, value: at.cache.add_sequence_batch([[1]], allow_partial_batch=value)],
        ["no", None, 1, []],
    ),
    Wrong(
        "ids|sequences",
        [lambda at, ids, call=call: call(at.cache, ids) for call in ID_CALLS.values()],  # type: ignore[misc]
        [None, *NO_NUMBERS, [[0]]],
        [np.zeros((1, 1), int), *TOO_LARGE],
    ),
    Wrong("ids", [lambda at, ids: at.cache.resume(ids)], ["x"]),
    Wrong(
        "counts|new_tokens",
        COUNT_CALLS,
        [*NO_NUMBERS, [[1], [1]], np.ones(2), [True, True]],
        [np.ones((2, 1), int), [1], [1] * 3, [], [1, -1], *TOO_LARGE, [2**62] * 2, [2**63 - 1] * 2],
    ),
    Wrong(
        "new_tokens", [lambda at, count: at.cache.blocks_needed([1], new_tokens=count)], [True, 1.5, None], [-1, 2**31]
    ),
    Wrong("parents", [lambda at, parents: at.cache.reorder(at.both, parents)], [[0, 0.5]], [[0], [0, 2], [0, -1]]),
    Wrong("n", [lambda at, n: at.cache.fork(at.live, n)], [1.5], [-1]),
    Wrong("stream", STREAM_CALLS, ["x", 1.5, True, object(), Stream("x")], [-1, 2**64]),
    Wrong(
        "key",
        [
            lambda at, key: at.cache.find_and_pin_host(key),
            lambda at, key: at.cache.pin([b"x" * 16, key]),
        ],
        [*NO_KEYS, [5], [1.0, 2.0], ["x" * 16], [[1], [2, 3]], np.zeros(3, np.uint64), [2**64, 1]],
        [b"x" * 15, memoryview(np.zeros(16))],
    ),
    Wrong("keys?", [lambda at, keys: at.cache.pin(keys)], [*NO_KEYS, b"x" * 15, [5]], NO_PAIRS),
    Wrong("keys|tokens|prompt", [lambda at, keys: at.cache.content.offload(keys)], (), NO_PAIRS[1:]),
    Wrong(
        "prompt|keys?|tokens",
        [lambda at, keys: at.cache.content.forget(keys)],
        ["text"],
        [[], [b"short"], np.zeros((2, 3), np.uint64)],
    ),
    Wrong(
        "namespace|salt|adapter_id",
        [lambda at, value: at.cache.content.forget(namespace=value)],
        ["A", ("A",), (1, None), (None, 1.5)],
    ),
    Wrong("priority", [lambda at, value: at.cache.content.set_priority([1], value)], [None], [101, -1]),
    Wrong("ttl_ms", [lambda at, value: at.cache.content.set_priority([1], 5, ttl_ms=value)], ["x"], [0]),
    Wrong("ids", [lambda at, ids: at.cache.pin_blocks(ids)], ["abc", [1.5], None, [[0]], [True]], [[2**64]]),
    Wrong("tier", [lambda at, tier: at.cache.pin(at.lease.keys, tier=tier)], (), ["gpu"]),
    Wrong(
        "owner",
        [
            lambda at, owner: at.cache.pin(at.lease.keys, owner=owner),
            lambda at, owner: at.cache.pin_blocks(0, owner=owner),
            lambda at, owner: at.cache.imports.reserve([1], owner=owner),
            lambda at, owner: at.cache.revoke(owner),
        ],
        [None, 5, b"reader"],
    ),
    Wrong("now_ms", [lambda at, now: at.cache.content.refresh(now)], [1.5, True, "x"], [-1, 2**63]),
    Wrong("force", [lambda at, force: at.cache.clear(force=force)], ["no", None, 0, [1]]),
    Wrong(
        "store",
        [
            lambda at, store: at.cache.release(at.live, store=store),
            lambda at, store: at.cache.reorder(at.both, [0, 0], store=store),
        ],
        ["no", None, 1],
    ),
    Wrong("stop", [lambda at, stop: at.cache.release(at.live, stop=stop)], (), ["tired"]),
    Wrong("session", [lambda at, session: at.cache.release(at.both, session=session)], (), ["a"]),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_bad_values_are_refused_by_name(busy: Busy, wrong: Wrong) -> None:
    wrong.check(busy)


# -- prompts, and what is admitted ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"secret": b"another secret, 32 bytes of it.."}, {"T": 2}], ids=["secret", "tokens_per_block"]
)
def test_keys_of_another_pool_are_refused(busy: Busy, options: dict[str, Any]) -> None:
    cache = busy.cache
    stranger, twin = (
        open_engine(options.get("T", 4), 4, 0, secret=options.get("secret", cache.core.states.secret)),
        open_engine(4, 4, 0, secret=cache.core.states.secret),
    )
    keys, own = stranger.prompt(range(8)), twin.prompt(range(9))
    for each in (stranger, twin):
        each.cache.close()
    for call in (
        *(reach(cache, name) for name in [*PROMPT_CALLS, "forget", "cached_blocks"]),
        lambda keys: cache.content.set_priority(keys, 5),
        lambda keys: cache.add_sequence_batch([[1], keys]),
        lambda keys: cache.plan_batch([[1], keys]),
    ):
        refused(cache, lambda call=call: call(keys), ValueError, "another pool|another secret|tokens_per_block")  # type: ignore[misc]
    assert cache.match_prefix(own).full_tokens == 8, "one with the same secret has the same keys"


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([[1], [1] * 60], OutOfBlocks, "device tier: 16 blocks needed"),
        ([[1], [1] * 65], ValueError, r"prompts\[1\]: 17 device blocks are needed at once, of 16: it can never fit"),
        ([[1], [2], [3]], OutOfSequences, "3 sequences needed, 2 free"),
    ],
    ids=["blocks", "never", "sequences"],
)
def test_batches_that_do_not_fit_are_refused(busy: Busy, prompts: Any, error: type[Exception], message: str) -> None:
    refused(busy.cache, lambda: busy.cache.add_sequence_batch(prompts), error, message)


def test_a_prompt_beyond_max_sequence_tokens_is_refused() -> None:
    engine = open_engine(4, 8, 0, max_sequence_tokens=8)
    cache, prompts = engine.cache, [[1], [1] * 9, [2] * 7]
    refused(cache, lambda: cache.add_sequence_batch(prompts), ValueError, r"prompts\[1\]: .*max_sequence_tokens=8")
    admission = cache.add_sequence_batch(prompts, allow_partial_batch=True)
    assert list(admission.refused) == [1] and "max_sequence_tokens=8: it can never fit" in admission.refused[1]
    ids = admission.ids[[0, 2]]
    for call in (
        lambda: cache.append_tokens(ids, [1, 2, 3], [1, 2]),
        lambda: cache.blocks_needed(sequences=ids, new_tokens=2),
    ):
        refused(cache, call, ValueError, f"{ids[1]} .*max_sequence_tokens=8")
    cache.close()


# -- sequences ---------------------------------------------------------------------------------------

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
def test_wrong_ids_are_named(busy: Busy, call: str) -> None:
    for make_ids, error in WRONG_IDS:
        ids = make_ids(busy)
        print(ids)
        refused(busy.cache, lambda ids=ids: ID_CALLS[call](busy.cache, ids), error, str(ids[-1]))  # type: ignore[misc]


def test_counts_out_of_a_sequences_range_name_it(busy: Busy) -> None:
    cache, live, other = busy.cache, busy.live, busy.other
    cache.commit(live, [5])
    for call in (
        lambda: cache.commit([other, live], [1, 4]),
        lambda: cache.commit([other, live], [1, 7]),
        lambda: cache.rewind([other, live], [1, 7]),
    ):
        refused(cache, call, ValueError, f"sequence {live}, got ")
    refused(cache, lambda: cache.append_tokens(busy.both, [1, 2]), ValueError, "counts")
    refused(cache, lambda: cache.append_tokens(busy.both, [1, 2], [1, 2]), ValueError, "counts.* 3, tokens has 2")
    refused(cache, lambda: cache.accept_drafts(busy.both, [0, 0], [0]), ValueError, "counts")
    refused(cache, lambda: cache.blocks_needed([1], sequences=[live]), TypeError, "sequences: .*")


@pytest.mark.parametrize(
    ("tokens", "counts"), [([], [2**61] * 8), ([1, 2], [2**62] * 3 + [2**62 + 2]), ([], [2**63 - 1] * 2 + [2])]
)
def test_counts_whose_sum_wraps_are_refused(tokens: list[int], counts: list[int]) -> None:
    engine = open_engine(4, 16, 4)
    cache, ids = engine.cache, [engine.add([10 * i]).id for i in range(len(counts))]
    refused(cache, lambda: cache.append_tokens(ids, tokens, counts), ValueError, "counts")
    refused(cache, lambda: cache.blocks_needed(sequences=ids, new_tokens=counts), ValueError, "new_tokens")
    cache.close()


# -- pins, and the pool as a whole -------------------------------------------------------------------


def test_pins_of_what_is_not_there_are_refused(busy: Busy) -> None:
    cache, key = busy.cache, busy.engine.prompt(range(8)).keys
    assert cache.find_and_pin_host(b"x" * 16) is None
    refused(cache, lambda: cache.pin([key[0], b"\xab" * 16]), BlockNotFound, "ab" * 16)
    refused(cache, lambda: cache.pin(busy.engine.prompt(range(50, 54)), tier="device"), BlockNotFound, "on the device")
    for bad in (-1, 24, 15, 2**40, [0, 15]):
        refused(cache, lambda bad=bad: cache.pin_blocks(bad), BlockNotFound, f"block {np.ravel(bad)[-1]} ")  # type: ignore[misc]


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


def test_a_pool_in_use_is_not_cleared(busy: Busy) -> None:
    refused(busy.cache, busy.cache.clear, PoolBusy, "2 live sequences")


def test_everything_but_stats_and_close_is_refused_by_a_closed_pool(busy: Busy) -> None:
    cache, key, lease = busy.cache, busy.engine.prompt(range(4)).keys, busy.lease
    busy.engine.live.clear()
    report = cache.close()
    assert sorted(report.sequences) == sorted(busy.both) and len(report.leases) == 1
    calls: list[Callable[[], object]] = [
        *(lambda call=call: call(cache, [busy.live]) for call in ID_CALLS.values()),  # type: ignore[misc]
        *(lambda name=name: reach(cache, name)([1]) for name in [*PROMPT_CALLS, "forget", "cached_blocks"]),  # type: ignore[misc]
        lambda: cache.content.set_priority([1], 5),
        lambda: cache.add_sequence_batch([[1]]),
        lambda: cache.pin(key),
        lambda: cache.pin_blocks(0),
        lambda: cache.find_and_pin_host(key[0]),
        lambda: cache.revoke("reader"),
        lambda: cache.free_blocks,
        lambda: cache.free_blocks_per_group,
        lambda: cache.clear(force=True),
        lambda: cache.memory.device_pool,
        lambda: cache.memory.host_pool,
        *(cache.content.refresh, cache.events, cache.verify, cache.clear, cache.exclusive().__enter__, lease.close),
    ]
    for call in calls:
        refused(cache, call, PoolClosed)
    assert cache.closed and lease.closed and cache.leases == [] and cache.close() == report
    assert cache.stats().sequences == 2


# -- messages that misled ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda at: at.cache.add_sequence_batch([1, 2, 3]), "prompts[0]: expected a sequence of integers, got 1"),
        (
            lambda at: at.cache.add_sequence([1], retention=RetentionRange(0, None, 35)),
            "retention: expected a list of ranges, got RetentionRange(start=0, end=None, priority=35, ttl_ms=None)",
        ),
        (
            lambda at: at.cache.append_tokens(at.live, [-1]),
            "tokens: expected token ids from 0 to 2147483647, got -1",
        ),
    ],
)
def test_messages_that_misled(busy: Busy, call: Callable[[Any], object], message: str) -> None:
    refused(busy.cache, lambda: call(busy), (TypeError, ValueError), f"^{re.escape(message)}$")


def test_an_unknown_argument_is_one_of_the_class_that_was_called(busy: Busy) -> None:
    call: Any = busy.cache.add_sequence
    refused(busy.cache, lambda: call([1], salt="a"), TypeError, r"^KVCacheManager\.add_sequence\(\) got an unexpected")

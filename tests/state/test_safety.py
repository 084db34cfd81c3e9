"""What callers do by accident or on purpose must not break memory, mix up prompts, or wedge the pool."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest

from engine import Engine, small_layout
from kvpool import BlockKeys, KVCacheManager
from kvpool.device.cpu import CpuDevice
from kvpool.errors import (
    BlockNotFound,
    DeviceError,
    InsufficientMemory,
    LeaseExpired,
    OutOfBlocks,
    UnknownSequence,
)
from kvpool.pool.keys import Scope
from kvpool.state import records

Make = Callable[..., Engine]


class Interceptor(CpuDevice):
    """Runs ``before`` once, ahead of the next copy."""

    before: Callable[[], Any] | None = None

    def copy_blocks(self, moves: Any, stream: Any = None) -> None:
        hook, self.before = self.before, None
        if hook is not None:
            hook()
        super().copy_blocks(moves, stream)


def refuse() -> None:
    raise DeviceError("no")


@contextmanager
def full_pool(**options: Any) -> Iterator[tuple[KVCacheManager, Interceptor]]:
    """A pool of one device block, which holds a cached prompt: the next one offloads it."""
    device = Interceptor()
    with KVCacheManager(small_layout(4), device_blocks=1, host_blocks=2, device=device, **options) as cache:
        sequence = cache.add_sequence([0, 1, 2, 3])
        cache.commit(sequence)
        cache.release(sequence)
        yield cache, device
        cache.verify()
    device.close()


@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: a[:], memoryview, lambda a: a.view(np.recarray)])
def test_keys_survive_a_reused_token_buffer(make: Make, wrap: Callable[[Any], Any]) -> None:
    cache, buffer, images = make().cache, np.arange(9, dtype=np.int32), np.ones(9, np.int64)
    keys, with_images = cache.block_keys(wrap(buffer)), cache.block_keys(range(9), extra_ids=images)
    buffer[:], images[:] = 99, 2
    assert keys.tokens.tolist() == [*range(9)]
    assert with_images.extra_ids is not None and with_images.extra_ids.tolist() == [1] * 9
    sequence = cache.add_sequence(keys)
    cache.commit(sequence)
    cache.release(sequence)
    assert cache.match_prefix([99] * 9).tokens == 0
    assert cache.match_prefix(range(9)).tokens == 8


def forged_keys(engine: Engine, prompt: BlockKeys, like: BlockKeys) -> BlockKeys:
    """A prompt whose keys are those of another one, and which counts as hashed by the pool."""
    scope = Scope(None, None, (prompt.namespace, *prompt.root), prompt.origin)
    extra = None if prompt.extra_ids is None else prompt.extra_ids.copy()
    return BlockKeys.of_private(prompt.tokens.copy(), like.keys.copy(), extra, scope, engine.cache.core.states.groups)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_key_that_collides_is_not_a_hit(make: Make, guarded: bool) -> None:
    """With the comparison of tokens taken out, the prompt would get the other's KV."""
    engine = make()
    engine.seed(range(9), committed=8)
    forged = forged_keys(engine, engine.prompt(range(50, 59)), engine.prompt(range(9)))
    if not guarded:
        engine.cache.core.states.disable_guard("tokens_at_hit")
    assert engine.cache.match_prefix(forged).tokens == (0 if guarded else 8)


@pytest.mark.parametrize(
    ("cached", "asked"),
    [([5] * 9, [6] * 9), ([5] * 9, None), (None, [5] * 9), ([5] * 9, [5] * 7 + [6] * 2)],
    ids=["other ids", "none are asked for", "none are cached", "the last differ"],
)
def test_a_key_that_collides_is_not_a_hit_for_other_extra_ids(
    make: Make, cached: list[int] | None, asked: list[int] | None
) -> None:
    """The same tokens, about another image."""
    engine = make()
    engine.seed(range(9), committed=8, extra_ids=cached)
    engine.cache.block_keys([1], extra_ids=[1])
    forged = forged_keys(engine, *(engine.prompt(range(9), extra_ids=extra) for extra in (asked, cached)))
    same = sum(1 for cached_id, other in zip(cached or [0] * 9, asked or [0] * 9, strict=True) if cached_id == other)
    assert engine.cache.match_prefix(forged).full_tokens == same // 4 * 4


@pytest.mark.parametrize("tier", ["device", "host"])
def test_content_whose_key_collides_is_not_published(make: Make, tier: str) -> None:
    """What has the key stays, on either tier, and is not a copy of what came later."""
    engine = make(P=4, S=4)
    engine.seed(range(9), committed=8)
    if tier == "host":
        engine.release(engine.add(range(100, 116)), store=False)
    other = engine.cache.add_sequence(forged_keys(engine, engine.prompt(range(50, 59)), engine.prompt(range(9))))
    engine.cache.commit(other)
    engine.cache.release(other, store=False)
    assert engine.add(range(9)).cached == 8, "and its bytes were compared"


@pytest.mark.parametrize("batch", [True, False])
def test_a_pickle_with_keys_of_another_prompt_is_refused(make: Make, batch: bool) -> None:
    """Its block would be found after the other prompt's beginning, where its tokens never stood."""
    engine = make()
    theirs, mine = engine.cache.block_keys([*range(8), 9]), engine.cache.block_keys([*range(50, 54), *range(4, 8), 9])
    build, arguments = mine.__reduce__()
    keys, root = np.stack([mine.keys[0], theirs.keys[1]]), engine.cache.block_keys([1], salt="theirs")
    lies = [(1, keys), (2, "theirs"), (3, 7), (4, [1] * 9), (5, (root.namespace, *root.root))]
    for place, lie in lies:
        forged = build(*arguments[:place], lie, *arguments[place + 1 :])
        with pytest.raises(ValueError, match="are not those of their tokens"):
            engine.cache.add_sequence_batch([mine, forged]) if batch else engine.cache.block_keys(forged)
    assert engine.cache.add_sequence(build(*arguments)) >= 0


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda keys: pickle.loads(pickle.dumps(keys))])
def test_copied_keys_own_what_they_point_to(make: Make, duplicate: Callable[[Any], Any]) -> None:
    engine = make()
    engine.seed(range(9), committed=8)
    keys = engine.cache.block_keys(range(9), extra_ids=None)
    other = duplicate(keys)
    del keys
    gc.collect()
    filler = [np.full(9, 7777, np.int32) for _ in range(1000)]
    assert engine.cache.match_prefix(other).tokens == 8 and len(filler) == 1000
    for array in (other.tokens, other.keys):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_keys_are_refused_by_a_pool_with_another_secret(make: Make) -> None:
    with pytest.raises(ValueError, match="another secret"):
        make().cache.add_sequence(make().cache.block_keys([1, 2, 3, 4, 5]))
    first, other = (make(secret=b"0123456789abcdef").cache for _ in range(2))
    assert other.add_sequence(first.block_keys([1, 2, 3, 4, 5])) >= 0


def test_subclasses_of_builtins_do_not_share_a_namespace(make: Make) -> None:
    class Named(int):
        def __str__(self) -> str:
            return "adapter"

        def __repr__(self) -> str:
            return "adapter"

    class Same(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 1

    cache = make().cache
    namespaces = [cache.block_keys([1], adapter_id=a).namespace for a in (Named(1), Named(2), 1, "1")]
    assert namespaces[0] == namespaces[2] and len(set(namespaces)) == 3
    assert cache.block_keys([1], salt=Same("a")).namespace != cache.block_keys([1], salt=Same("b")).namespace
    assert cache.block_keys([1], salt="a").namespace != cache.block_keys([1], salt=b"a").namespace


@pytest.mark.parametrize("names", [{}, {"salt": "a"}, {"salt": "b", "adapter_id": 1}], ids=str)
def test_the_namespace_tag_alone_keeps_prompts_apart(make: Make, names: dict[str, Any]) -> None:
    """Taken out of the keys, as if they collided, it is still compared at a hit of a whole block, and of a part."""
    engine = make()
    engine.cache.core.states.disable_guard("namespace_in_key")
    engine.seed(range(7), committed=7, salt="b")
    assert engine.prompt(range(7), **names).keys.tolist() == engine.prompt(range(7), salt="b").keys.tolist()
    for tokens in ([*range(8)], [*range(5)], [*range(3), 9]):
        assert engine.reusable(tokens, **names) == 0 and engine.add(tokens, **names).cached == 0
    assert engine.reusable(range(8), salt="b") == 7


def test_no_two_names_of_a_namespace_are_taken_for_each_other(make: Make) -> None:
    cache = make().cache
    names = [*product((None, "", b"", "1", b"1"), (None, "", 1, "1", 0)), ("as", "b"), ("a", "sb")]
    keys = [cache.block_keys([1] * 4, salt=salt, adapter_id=adapter) for salt, adapter in names]
    assert len({prompt.namespace for prompt in keys}) == len(names)
    assert len({tuple(prompt.keys[0].tolist()) for prompt in keys}) == len(names)


def test_what_a_lease_shows_is_not_what_it_unpins(make: Make) -> None:
    engine = make(P=4, S=4)
    leases = []
    for start in (0, 10):
        engine.seed(range(start, start + 4), committed=4)
        engine.cache.content.offload(range(start, start + 4))
        leases.append(engine.cache.pin(engine.cache.block_keys(range(start, start + 4)), tier="host"))
    lease, other = leases
    with pytest.raises(ValueError, match="WRITEABLE"):
        lease.blocks.flags.writeable = True
    lease.close()
    engine.cache.verify()
    with pytest.raises(LeaseExpired):
        lease.close()
    other.close()


def test_what_holds_nothing_cannot_be_pinned(make: Make) -> None:
    engine = make(P=2, S=2)
    sequence = engine.add(range(4))
    empty = 1 - engine.table(sequence)[0]
    for ids in ([empty], [3], [*engine.table(sequence), empty], [4], [-1]):
        with pytest.raises(BlockNotFound, match=f"block {ids[-1]} is unknown or holds nothing"):
            engine.cache.pin_blocks(ids)
        assert engine.cache.leases == [] and engine.cache.stats().device.pinned == 0


def test_the_id_of_a_sequence_that_has_ended_is_nobodys(make: Make) -> None:
    cache = make(max_sequences=1).cache
    ended = cache.add_sequence([1, 2, 3])
    cache.release(ended)
    running = cache.add_sequence([4, 5])
    assert running & 0xFFFFFFFF == ended & 0xFFFFFFFF, "the same row"
    for late in (lambda: cache.append_tokens(ended, [9]), lambda: cache.commit(ended), lambda: cache.release(ended)):
        with pytest.raises(UnknownSequence):
            late()
    assert cache.sequence_length(running) == 2


def test_a_pin_whose_copy_failed_is_not_a_pin() -> None:
    with full_pool() as (cache, device):
        keys, transfer = cache.block_keys([0, 1, 2, 3]), cache.core.transfer
        drain = transfer.drain

        def reader() -> None:
            # Another thread's pin arrives between the decision to offload and its copy, which then fails.
            transfer.drain = drain  # type: ignore[method-assign]
            device.before = refuse
            assert cache.find_and_pin_host(keys.keys[0]) is None
            drain()

        transfer.drain = reader  # type: ignore[method-assign]
        cache.release(cache.add_sequence([9]))
        assert cache.stats().lost_blocks == 1 and not cache.leases
        with pytest.raises(BlockNotFound):
            cache.pin(keys)


def test_a_failed_copy_is_accounted_for_without_the_callers_clock() -> None:
    gone: list[bool] = []

    def clock() -> int:
        assert not gone, "the clock was asked while a failure was accounted for"
        return 0

    def fail() -> None:
        gone.append(True)
        refuse()

    with full_pool(clock=clock) as (cache, device):
        device.before = fail
        sequence = cache.add_sequence([9])
        assert gone and cache.stats().lost_blocks == 1 and not cache.core.transfer.waiting
        cache.verify()
        gone.clear()
        cache.release(sequence)


def test_an_exit_in_a_copy_leaves_it_to_the_next_call() -> None:
    with full_pool() as (cache, device):
        device.before = sys.exit
        with pytest.raises(SystemExit):
            cache.add_sequence([9])
        (left,) = cache.sequences
        assert cache.core.transfer.waiting
        cache.release(left, store=False)
        assert not cache.core.transfer.waiting and cache.match_prefix([0, 1, 2, 3, 4]).host_tokens == 4
        assert cache.stats().lost_blocks == 0


def test_a_pool_that_cannot_be_built_gives_its_device_back() -> None:
    device, layout = CpuDevice(), small_layout(1)
    with pytest.raises((InsufficientMemory, MemoryError)):
        KVCacheManager(layout, device_blocks=1 << 20, device=device, max_sequences=1 << 24, max_sequence_tokens=1 << 30)
    KVCacheManager(layout, device_blocks=4, device=device).close()
    device.close()


def test_a_rewind_may_use_what_it_gives_back(make: Make) -> None:
    engine = make(P=4)
    sequence = engine.commit(engine.add(range(13)))
    block = engine.table(sequence)[1]
    with engine.cache.pin_blocks(block):
        assert engine.free() == 0
        engine.rewind(sequence, 7)
        assert engine.table(sequence)[1] != block
        with pytest.raises(OutOfBlocks):
            engine.cache.append_tokens(sequence.id, range(9))
    engine.release(sequence)
    assert records.NONE not in engine.order()

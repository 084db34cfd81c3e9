"""Keys that grow: a next turn, a chunk and a resumed request hash only new blocks, and get the same keys."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

from engine import Make
from group_engine import Open
from kvpool import BlockKeys
from kvpool.errors import UnknownSequence
from kvpool.pool import keys as keys_module
from kvpool.pool.keys import Scope

NAMES: list[dict[str, Any]] = [{}, {"salt": "A"}, {"salt": b"B", "adapter_id": 3}]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many blocks each hashing has hashed, of those that had to hash some."""
    counts: list[int] = []
    plain = keys_module.requests.describe_and_hash

    def counting(*args: Any) -> int:
        count = plain(*args)
        counts.extend([count] if count else [])
        return count

    monkeypatch.setattr(keys_module.requests, "describe_and_hash", counting)
    return counts


def same(keys: BlockKeys, other: BlockKeys) -> bool:
    """Whether two prompts are the same in all that a pool sees."""

    def seen(keys: BlockKeys) -> tuple[Any, ...]:
        extra = None if keys.extra_ids is None else keys.extra_ids.tolist()
        names = (keys.salt, keys.adapter_id, keys.namespace, keys.root, keys.origin, keys.reuse, keys.publish)
        return keys.tokens.tolist(), keys.keys.tolist(), extra, names

    return seen(keys) == seen(other)


# -- extend ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_extended_keys_are_those_of_the_whole_prompt(make: Make, names: dict[str, Any]) -> None:
    seed = Random().getrandbits(32)
    print(f"seed={seed}")
    random, cache = Random(seed), make(T=4).cache
    for _ in range(100):
        tokens = [random.randrange(1000) for _ in range(random.choice((20, 40, 700)))]
        extra = [random.choice((0, 0, 7)) for _ in tokens] if random.random() < 0.5 else None
        cut = random.randint(1, len(tokens) - 1)
        parts = [None, None] if extra is None else [extra[:cut], extra[cut:]]
        grown = cache.block_keys(tokens[:cut], extra_ids=parts[0], **names).extend(tokens[cut:], extra_ids=parts[1])
        assert same(grown, cache.block_keys(tokens, extra_ids=extra, **names))


def test_a_next_turn_hashes_the_blocks_that_it_fills_and_no_others(make: Make, hashed: list[int]) -> None:
    keys = make(T=4).cache.block_keys(list(range(4002)))
    assert hashed == [1000]
    for count, blocks in ((1, 0), (1, 1), (4, 1), (3, 0), (401, 101), (0, 0)):
        hashed.clear()
        keys = keys.extend(list(range(count)))
        assert sum(hashed) == blocks


def test_what_was_hashed_is_not_looked_at_again(make: Make) -> None:
    """Keys that are not those of their tokens stay what they are."""
    cache = make(T=4).cache
    right, other = cache.block_keys(list(range(9))), cache.block_keys(list(range(50, 59)))
    scope = Scope(None, None, (right.namespace, *right.root), right.origin)
    forged = BlockKeys.of_private(right.tokens.copy(), other.keys.copy(), None, scope, cache.core.states.groups)
    grown = forged.extend([1, 2, 3])
    assert grown.keys[:2].tolist() == other.keys.tolist()
    assert grown.keys[2].tolist() != right.extend([1, 2, 3]).keys[2].tolist()


def test_keys_in_the_place_of_tokens_or_of_a_key_are_refused_by_name(make: Make) -> None:
    """NumPy asks them for an item, which says nothing of the argument."""
    cache = make().cache
    keys = cache.block_keys([1, 2, 3, 4, 5])
    sequence = cache.add_sequence(keys)
    with pytest.raises(TypeError, match="tokens: expected integers, got"):
        cache.append_tokens(sequence, keys)
    with pytest.raises(TypeError, match="tokens: expected integers, got"):
        keys.extend(keys)
    with pytest.raises(TypeError, match=r"key: expected 16 bytes"):
        cache.content.forget([keys])
    cache.release(sequence)


def test_keys_are_extended_by_several_and_stay_what_they_are(make: Make) -> None:
    engine = make(T=4)
    keys = engine.cache.block_keys(list(range(10)), salt="A", extra_ids=[1] * 10)
    before, new = pickle.dumps(keys), np.arange(6, dtype=np.int32)
    first, other = keys.extend(new, extra_ids=[2] * 6), keys.extend([2, 2])
    new[:] = 99
    assert pickle.dumps(keys) == before and first.tokens.tolist() == [*range(10), *range(6)]
    assert first.keys[:2].tolist() == other.keys[:2].tolist() == keys.keys.tolist()
    expected = engine.cache.block_keys([*range(10), 2, 2, 3], salt="A", extra_ids=[1] * 10 + [0] * 3).keys.tolist()
    engine.cache.close()
    assert other.extend([3]).keys.tolist() == expected, "even when the pool is closed"


def test_a_copy_is_extended_by_a_pool_that_has_the_secret(make: Make) -> None:
    here, there, stranger = make(secret=bytes(16)), make(secret=bytes(16)), make(secret=bytes(17))
    keys = here.cache.block_keys(list(range(9)), salt="A", reuse=False, publish=False)
    for lost in (pickle.loads(pickle.dumps(keys)), copy.copy(keys), copy.deepcopy(keys)):
        with pytest.raises(ValueError, match=r"KVCacheManager.block_keys\(copy\)"):
            lost.extend([1])
        restored = there.cache.block_keys(lost)
        assert same(restored, keys)
        assert same(restored.extend([1, 2, 3]), keys.extend([1, 2, 3]))
        with pytest.raises(ValueError, match="another secret"):
            stranger.cache.block_keys(lost)
    for names in ({"salt": "A"}, {"extra_ids": [1] * 9}, {"reuse": False}):
        with pytest.raises(TypeError, match="expected none with BlockKeys"):
            there.cache.block_keys(keys, **names)  # type: ignore[arg-type]


# -- slices ------------------------------------------------------------------------------------------------------------


def test_a_slice_has_the_keys_of_its_tokens_and_hashes_nothing(make: Make, hashed: list[int]) -> None:
    cache = make(T=4).cache
    extra = [0] * 9 + [5] * 8
    keys = cache.block_keys(list(range(17)), salt="A", extra_ids=extra, publish=False)
    hashed.clear()
    slices = [keys[:n] for n in range(1, 18)]
    assert not hashed
    for n, part in enumerate(slices, 1):
        assert same(part, cache.block_keys(list(range(n)), salt="A", extra_ids=extra[:n], publish=False))
        assert same(part.extend(list(range(n, 17)), extra_ids=extra[n:]), keys)
    assert same(keys[:100], keys) and same(keys[:-1], keys[:16]) and same(keys[0:8], keys[:8])
    assert same(keys[:9][:5], keys[:5])


def test_a_slice_outlives_what_it_was_cut_from(make: Make) -> None:
    engine = make(T=4, P=8)
    part = engine.cache.block_keys(np.arange(4000, 8000))[:9]
    filled = [np.arange(9000, 13000) for _ in range(50)]
    sequence = engine.cache.add_sequence(part)
    assert len(filled) == 50 and engine.cache.keys_of(sequence).tokens.tolist() == list(range(4000, 4009))
    engine.cache.release(sequence)


@pytest.mark.parametrize(
    ("which", "error"),
    [
        *((slice(*bounds), ValueError) for bounds in ((1, 4), (0, 0), (None, None, 2), (5, None), (-3, None))),
        (0, TypeError),
    ],
)
def test_slices_that_are_not_a_prompt_are_refused(make: Make, which: Any, error: type[Exception]) -> None:
    keys: Any = make().cache.block_keys(list(range(9)))
    with pytest.raises(error, match="expected a slice"):
        keys[which]
    with pytest.raises(TypeError, match="not iterable"):
        list(keys)


def test_chunks_of_a_prompt_share_its_hashes(make: Make, hashed: list[int]) -> None:
    """Chunked prefill: only what is computed next has blocks, and no chunk is hashed again."""
    engine = make(T=4, P=8)
    whole = engine.cache.block_keys(list(range(26)))
    hashed.clear()
    request = engine.admitted(engine.cache.add_sequence(whole[:8]), list(range(8)))
    for first in range(8, 26, 8):
        engine.commit(request)
        engine.append(request, list(range(first, min(first + 8, 26))))
    assert not hashed
    engine.commit(request)
    assert same(engine.cache.keys_of(request.id), whole) and not hashed
    engine.release(request)
    assert engine.cache.match_prefix(whole).tokens == 25


# -- keys of live sequences --------------------------------------------------------------------------------------------


def test_full_blocks_that_are_not_committed_are_hashed(make: Make, hashed: list[int]) -> None:
    engine = make(T=4, P=8)
    request = engine.add(list(range(9)))
    engine.append(request, list(range(9, 17)))
    hashed.clear()
    assert same(engine.cache.keys_of(request.id), engine.cache.block_keys(list(range(17))))
    assert hashed[0] == 2, "the blocks of the prompt have their keys from the start"


def test_sequences_without_tokens_and_unknown_ones_are_named(make: Make, open_: Open) -> None:
    engine, states = make(T=4), open_({"kind": "recurrent"})
    request = engine.add([1, 2])
    engine.rewind(request, 2)
    with pytest.raises(ValueError, match=f"{request.id} has no tokens"):
        engine.cache.keys_of(request.id)
    with pytest.raises(UnknownSequence):
        engine.cache.keys_of([77 << 32])
    with pytest.raises(ValueError, match="named twice"):
        engine.cache.keys_of([request.id] * 2)
    with pytest.raises(ValueError, match="have no tokens"):
        states.cache.keys_of(states.add([1, 2, 3]).id)


def test_tokens_that_a_window_has_passed_are_those_of_another_group(open_: Open) -> None:
    mixed, windowed = open_({"kind": "recurrent"}, {"window": 4}, {}), open_({"window": 4})
    request = mixed.commit(mixed.add(range(17)))
    assert same(mixed.cache.keys_of(request.id), mixed.cache.block_keys(range(17)))
    request = windowed.commit(windowed.add(range(17)))
    with pytest.raises(ValueError, match="a window has passed tokens of a sequence"):
        windowed.cache.keys_of(request.id)


def test_names_are_those_of_live_sequences_however_many_namespaces_there_were(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpool.pool.core.Names.LEAST", 4)
    engine = make(T=4, P=16)
    first = engine.add([1, 2, 3], salt="kept", adapter_id="lora")
    for i in range(40):
        engine.release(engine.add([1, 2, 3], salt=f"tenant {i}"))
    keys = engine.cache.keys_of(first.id)
    assert (keys.salt, keys.adapter_id) == ("kept", "lora")
    assert len(engine.cache.core.names.known) < 40

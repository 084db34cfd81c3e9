"""Drafts: what was accepted stays, in order and across blocks, with its tokens, bytes and keys; the rest goes; errors
change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, Request, small_layout
from kvpool import DeviceError, KVCacheManager, OutOfBlocks, PoolClosed, UnknownSequence
from kvpool.device import CpuDevice
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.work import Work
from kvpool.device.wrapper import WrappedDevice
from kvpool.state import debug

Make = Callable[..., Engine]
# A tree: 0 and 1 are roots; 0 -> 2, 3; 1 -> 4; 3 -> 5; 4 -> 6; 5 -> 7.
TREE = [-1, -1, 0, 0, 1, 3, 4, 5]
TOKENS = [50, 51, 52, 53, 54, 55, 56, 57]
PATHS = [[], [0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5], [1, 4, 6], [0, 3, 5, 7]]


class Counting(WrappedDevice):
    """Counts moves of tokens, and fails them while ``error`` is set."""

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.launches = 0
        self.error: DeviceError | None = None

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self.launches += 1
        if self.error is not None:
            raise self.error
        self.inner.enqueue(work, stream)


def everything(cache: KVCacheManager) -> Any:
    return debug.dump(cache.core.tokens), cache.core.transfer._decided, cache.device_pool.tobytes()


def fork(engine: Engine, parent: Request) -> Request:
    """Another sequence with the blocks of one, all of them shared."""
    return engine.fork(parent)[0]


@pytest.mark.parametrize("path", PATHS, ids=str)
@pytest.mark.parametrize("prompt", [1, 3, 4, 6])
def test_the_accepted_path_has_its_bytes_and_is_found_under_its_tokens(
    make: Make, prompt: int, path: list[int]
) -> None:
    engine = make(T=4, P=8)
    tokens = list(range(1, prompt + 1))
    sequence = engine.commit(engine.add(tokens))
    engine.keep(engine.draft(sequence, TOKENS, TREE), len(TREE), path)
    kept = tokens + [TOKENS[i] for i in path]
    assert engine.cache.sequence_length(sequence.id) == len(kept)
    assert [token for token, _ in sequence.items] == kept
    engine.append(sequence, [70, 71])
    engine.finish(sequence)
    assert engine.add([*kept, 70, 71]).cached == len(kept) + 1


def test_all_drafts_may_stay_and_all_may_go(make: Make) -> None:
    engine = make(T=4, P=8)
    sequence = engine.draft(engine.commit(engine.add([1, 2])), [5, 6, 7], [-1, 0, 1])
    engine.keep(sequence, 3, [0, 1, 2])
    assert engine.cache.sequence_length(sequence.id) == 5
    engine.keep(sequence, 3, [])
    assert engine.cache.sequence_length(sequence.id) == 2


def test_a_batch_keeps_what_each_of_its_sequences_accepted(make: Make) -> None:
    engine = make(T=4, P=16)
    sequences = [engine.draft(engine.commit(engine.add([i] * (i + 2))), TOKENS, TREE) for i in range(4)]
    paths = [[1, 4, 6], [], [0], [0, 3, 5, 7]]
    engine.cache.keep(
        [s.id for s in sequences], [len(TREE)] * 4, [i for path in paths for i in path], [len(path) for path in paths]
    )
    for sequence, path in zip(sequences, paths, strict=True):
        engine.kept(sequence, len(TREE), path)


def test_a_batch_moves_in_one_launch_and_accepted_prefixes_in_none() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    ids = cache.add_sequence_batch([[1, 2, 3], [4, 5], [6]]).ids
    cache.commit(ids)
    cache.append_tokens(ids, [7] * 15, [5] * 3)
    cache.keep(ids, [5] * 3, [0, 1, 0], [2, 1, 0])
    assert device.launches == 0 and cache.sequence_length(ids).tolist() == [5, 3, 1]
    cache.append_tokens(ids, [7] * 15, [5] * 3)
    cache.keep(ids, [5] * 3, [1, 0, 4], [1, 2, 0])
    assert device.launches == 1 and cache.sequence_length(ids).tolist() == [6, 5, 1]
    cache.verify()
    cache.release(ids)
    cache.close()


def test_extra_ids_move_with_their_tokens(make: Make) -> None:
    engine = make(T=2, P=8)
    sequence = engine.add([1, 2, 3, 4, 5, 6], extra_ids=[0, 0, 0, 9, 0, 8])
    # What an engine has not committed may be a draft, also of a prompt. The bytes are not what this is about.
    engine.cache.keep(sequence.id, 5, [2, 4])
    engine.cache.append_tokens(sequence.id, [7])
    engine.cache.commit(sequence.id)
    engine.cache.release(sequence.id)
    del engine.live[sequence.id]
    assert engine.reusable([1, 4, 6, 7, 7]) == 1
    assert engine.reusable([1, 4, 6, 7, 7], extra_ids=[0, 9, 8, 0, 0]) == 4


WRONG = [
    ({"drafts": [4]}, ValueError, "drafts: sequence .* has 3 tokens that are not committed"),
    ({"drafts": [-1]}, ValueError, "drafts"),
    ({"drafts": [1, 2]}, ValueError, "drafts"),
    ({"accepted": [1, 1]}, ValueError, r"accepted\[1\]"),
    ({"accepted": [2, 1]}, ValueError, r"accepted\[1\]"),
    ({"accepted": [0, 3]}, ValueError, r"accepted\[1\].* below the 3 drafts"),
    ({"accepted": [-1]}, ValueError, r"accepted\[0\]"),
    ({"accepted": [0, 1, 2, 3]}, ValueError, r"accepted\[3\]"),
    ({"accepted": [0.5]}, TypeError, "accepted"),
    ({"accepted": [True]}, TypeError, "accepted"),
    ({"accepted": [1], "counts": [2]}, ValueError, "counts add up to 2, accepted has 1"),
    ({"accepted": [1], "counts": [-1]}, ValueError, "counts"),
    ({"ids": 12345}, UnknownSequence, "12345"),
    ({"ids": [0, 1], "drafts": [1, 1]}, ValueError, "counts"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_a_keep_that_is_refused_says_why_and_changes_nothing(
    make: Make, change: Any, error: type[Exception], message: str
) -> None:
    engine = make(T=4, P=8)
    sequence = engine.draft(engine.commit(engine.add([1, 2, 3])), [5, 6, 7], [-1, -1, 1])
    before = everything(engine.cache)
    arguments = {"ids": sequence.id, "drafts": [3], "accepted": [1, 2], **change}
    with pytest.raises(error, match=message):
        engine.cache.keep(**arguments)
    assert everything(engine.cache) == before


def test_one_bad_sequence_refuses_the_whole_batch(make: Make) -> None:
    engine = make(T=4, P=8)
    both = [engine.draft(engine.commit(engine.add([i, 2, 3])), [5, 6, 7], [-1, -1, 1]) for i in range(2)]
    before = everything(engine.cache)
    with pytest.raises(ValueError, match=r"accepted\[3\]"):
        engine.cache.keep([s.id for s in both], [3, 3], [1, 2, 0, 3], [2, 2])
    with pytest.raises(ValueError, match="named twice"):
        engine.cache.keep([both[0].id] * 2, [3, 3], [1, 2], [2, 0])
    assert everything(engine.cache) == before


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_blocks_that_others_hold_are_copied_before_tokens_are_moved_in_them(make: Make, path: list[int]) -> None:
    engine = make(T=4, P=12)
    parent = engine.draft(engine.commit(engine.add([1, 2, 3])), TOKENS, TREE)
    child = fork(engine, parent)
    engine.keep(child, len(TREE), path)
    engine.check(parent)
    engine.append(child, [80])
    engine.keep(parent, len(TREE), [1, 4, 6])
    engine.check(child)


@pytest.mark.parametrize("path", [[0, 3, 5, 7], [1], [0], []], ids=str)
def test_sequences_that_share_blocks_may_be_kept_in_one_call(make: Make, path: list[int]) -> None:
    engine = make(T=4, P=12)
    parent = engine.draft(engine.commit(engine.add([1, 2, 3])), TOKENS, TREE)
    both = [parent, fork(engine, parent)]
    for paths in ([[1, 4, 6], path], [path[:0], path[:0]]):
        drafts = len(TREE) if paths[0] else 0
        engine.cache.keep(
            [s.id for s in both], [drafts] * 2, [i for one in paths for i in one], [len(one) for one in paths]
        )
        for sequence, one in zip(both, paths, strict=True):
            engine.kept(sequence, drafts, one)


def test_a_copy_that_has_no_room_is_refused_and_changes_nothing(make: Make) -> None:
    engine = make(T=4, P=4)
    parent = engine.draft(engine.commit(engine.add([1, 2, 3])), TOKENS, TREE)
    child = fork(engine, parent)
    engine.add([7])
    before = everything(engine.cache)
    with pytest.raises(OutOfBlocks):
        engine.cache.keep(child.id, len(TREE), [1, 4])
    assert everything(engine.cache) == before


def test_a_move_that_fails_fails_its_sequence_and_no_other() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    bad, good = cache.add_sequence_batch([[1, 2, 3], [4, 5]]).ids.tolist()
    cache.commit([bad, good])
    cache.append_tokens([bad, good], [7] * 10, [5, 5])
    device.error = DeviceError("told to")
    cache.keep(bad, 5, [1, 3])
    device.error = None
    with pytest.raises(DeviceError, match="lost a block"):
        cache.commit(bad)
    cache.keep(good, 5, [1, 3])
    cache.commit(good)
    cache.verify()
    cache.release([bad, good])
    assert cache.match_prefix([4, 5, 7, 7, 1]).tokens == 4
    assert cache.stats().lost_blocks > 0 and cache.match_prefix([1, 2, 3, 7, 7]).tokens == 0
    cache.close()


def test_a_device_that_fails_for_good_while_tokens_move_closes_the_pool() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    sequence = cache.add_sequence([1, 2, 3])
    cache.append_tokens(sequence, [7] * 5)
    device.error = DeviceError("told to", sticky=True)
    cache.keep(sequence, 5, [1, 3])
    with pytest.raises(PoolClosed, match="told to"):
        cache.commit(sequence)
    cache.close()


@pytest.mark.parametrize("seed", range(8))
def test_any_steps_end_as_a_list_of_tokens_would(make: Make, seed: int) -> None:
    print(f"seed {seed}")
    random = np.random.default_rng(seed)
    engine = make(T=int(random.integers(1, 6)), P=24, S=8)
    live = [engine.commit(engine.add(random.integers(0, 9, random.integers(1, 9)).tolist())) for _ in range(3)]
    for _ in range(30):
        each = []
        for sequence in live:
            count = int(random.integers(0, 9))
            parents = [int(random.integers(-1, i)) if i else -1 for i in range(count)]
            engine.draft(sequence, random.integers(0, 9, count).tolist(), parents)
            path, at = [], count - 1 if count and random.random() < 0.8 else -1
            while at >= 0:
                path.append(at)
                at = parents[at]
            each.append((sequence, count, path[::-1]))
        engine.cache.keep(
            [s.id for s in live],
            [n for _, n, _ in each],
            [i for _, _, p in each for i in p],
            [len(p) for _, _, p in each],
        )
        for sequence, count, path in each:
            engine.kept(sequence, count, path)
            if random.random() < 0.5:
                engine.commit(sequence)
        if sum(map(len, live)) > 50:
            engine.release(engine.commit(live.pop(0)))
            live.append(engine.commit(engine.add(random.integers(0, 9, random.integers(1, 9)).tolist())))

"""Drafts: what was accepted stays, in order and across blocks, with its tokens, bytes and keys; the rest goes; errors
change nothing."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from engine import Engine, Make, Request, small_layout
from kvpool import KVCacheManager, OutOfBlocks, PoolClosed
from kvpool.device import CpuDevice, Device, SimDevice
from kvpool.device.base import NULL_STREAM, Stream, WrappedDevice
from kvpool.device.work import Work
from kvpool.errors import DeviceError, UnknownSequence
from tests import debug

# A tree: 0 and 1 are roots; 0 -> 2, 3; 1 -> 4; 3 -> 5; 4 -> 6; 5 -> 7.
TREE = [-1, -1, 0, 0, 1, 3, 4, 5]
TOKENS = [50, 51, 52, 53, 54, 55, 56, 57]
PATHS = [[], [0], [1], [0, 2], [0, 3], [1, 4], [0, 3, 5], [1, 4, 6], [0, 3, 5, 7]]


class Counting(WrappedDevice):
    """Counts moves of tokens, and fails them while ``error`` is set."""

    def __init__(self, device: Device | None = None) -> None:
        super().__init__(device or CpuDevice())
        self.launches = 0
        self.error: DeviceError | None = None

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM) -> None:
        self.launches += 1
        if self.error is not None:
            raise self.error
        self.inner.enqueue(work, stream)


def everything(cache: KVCacheManager) -> Any:
    return debug.dump(cache.core.tokens), cache.core.transfer._decided, cache.memory.device_pool.tobytes()


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
    engine.accept_drafts(engine.draft(sequence, TOKENS, TREE), len(TREE), path)
    kept = tokens + [TOKENS[i] for i in path]
    assert engine.cache.sequence_length(sequence.id) == len(kept)
    assert [token for token, _ in sequence.items] == kept
    assert engine.cache.stats().dropped_tokens == len(TREE) - len(path)
    engine.append(sequence, [70, 71])
    engine.finish(sequence)
    assert engine.add([*kept, 70, 71]).cached == len(kept) + 1


def test_a_batch_moves_in_one_launch_and_accepted_prefixes_in_none() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    ids = cache.add_sequence_batch([[1, 2, 3], [4, 5], [6]]).ids
    cache.commit(ids)
    cache.append_tokens(ids, [7] * 15, [5] * 3)
    cache.accept_drafts(ids, [5] * 3, [0, 1, 0], [2, 1, 0])
    assert device.launches == 0 and cache.sequence_length(ids).tolist() == [5, 3, 1]
    cache.append_tokens(ids, [7] * 15, [5] * 3)
    cache.accept_drafts(ids, [5] * 3, [1, 0, 4], [1, 2, 0])
    assert device.launches == 1 and cache.sequence_length(ids).tolist() == [6, 5, 1]
    cache.verify()
    cache.release(ids)
    cache.close()


WRONG: list[tuple[str, list[Any], str]] = [
    ("drafts", [[4]], "drafts: sequence .* has 3 tokens that are not committed"),
    ("drafts", [[-1], [1, 2]], "drafts"),
    ("accepted", [[1, 1], [2, 1], [0, 3]], r"accepted\[1\]"),
    ("accepted", [[-1], [0, 1, 2, 3], [0.5], [True]], "accepted"),
    ("counts", [[1], [-1]], "counts"),
    ("ids", [12345], "12345"),
]


def test_a_keep_that_is_refused_says_why_and_changes_nothing(make: Make) -> None:
    engine = make(T=4, P=8)
    sequence = engine.draft(engine.commit(engine.add([1, 2, 3])), [5, 6, 7], [-1, -1, 1])
    before = everything(engine.cache)
    for name, values, message in WRONG:
        for value in values:
            arguments: Any = {"ids": sequence.id, "drafts": [3], "accepted": [1, 2], name: value}
            with pytest.raises((TypeError, ValueError, UnknownSequence), match=message):
                engine.cache.accept_drafts(**arguments)
            assert everything(engine.cache) == before, value


def test_a_copy_that_has_no_room_is_refused_and_changes_nothing(make: Make) -> None:
    engine = make(T=4, P=4)
    parent = engine.draft(engine.commit(engine.add([1, 2, 3])), TOKENS, TREE)
    child = fork(engine, parent)
    engine.add([7])
    before = everything(engine.cache)
    with pytest.raises(OutOfBlocks):
        engine.cache.accept_drafts(child.id, len(TREE), [1, 4])
    assert everything(engine.cache) == before


def test_a_move_that_fails_fails_its_sequence_and_no_other() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    bad, good = cache.add_sequence_batch([[1, 2, 3], [4, 5]]).ids.tolist()
    cache.commit([bad, good])
    cache.append_tokens([bad, good], [7] * 10, [5, 5])
    device.error = DeviceError("set to fail")
    cache.accept_drafts(bad, 5, [1, 3])
    device.error = None
    with pytest.raises(DeviceError, match="lost a block"):
        cache.commit(bad)
    cache.accept_drafts(good, 5, [1, 3])
    cache.commit(good)
    cache.verify()
    cache.release([bad, good])
    assert cache.match_prefix([4, 5, 7, 7, 1]).tokens == 4
    assert cache.stats().lost_blocks > 0 and cache.match_prefix([1, 2, 3, 7, 7]).tokens == 0
    cache.close()


def test_an_interrupt_between_the_moves_of_two_sequences_fails_only_the_one_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Counting(SimDevice())
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    moved, in_doubt = cache.add_sequence_batch([[1, 2, 3], [4, 5]]).ids.tolist()
    cache.commit([moved, in_doubt])
    for sequence in (moved, in_doubt):
        cache.append_tokens(sequence, [7] * 5, stream=device.create_stream(str(sequence)))
    enqueue = device.enqueue

    def interrupted(work: Work, stream: Stream = NULL_STREAM) -> None:
        if device.launches:
            signal.raise_signal(signal.SIGINT)
        enqueue(work, stream)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(device, "enqueue", interrupted)
        cache.accept_drafts([moved, in_doubt], [5, 5], [1, 3, 1, 3], [2, 2])
    cache.commit(moved)
    with pytest.raises(DeviceError, match="lost a block"):
        cache.commit(in_doubt)
    assert device.launches == 1
    cache.release([moved, in_doubt])
    cache.close()


def test_a_device_that_fails_for_good_while_tokens_move_closes_the_pool() -> None:
    device = Counting()
    cache = KVCacheManager(small_layout(4), device_blocks=16, device=device)
    sequence = cache.add_sequence([1, 2, 3])
    cache.append_tokens(sequence, [7] * 5)
    device.error = DeviceError("set to fail", sticky=True)
    cache.accept_drafts(sequence, 5, [1, 3])
    with pytest.raises(PoolClosed, match="set to fail"):
        cache.commit(sequence)
    cache.close()

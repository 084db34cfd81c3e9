"""Arguments that change, lie or call back: each of these once corrupted memory, or let something out that it should
not."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from engine import Make, small_layout
from kvpool import BlockKeys, ModelIdentity, PagedKV, scatter_kv
from kvpool.common.arrays.strided import as_strided
from kvpool.errors import OutOfSequences, UnknownSequence
from kvpool.pool import StepTables
from kvpool.tools.planner import Surveyor
from kvpool.tools.replay.content import Request

FLIPPED_COUNTS = """
import mmap, os
import numpy as np
shared = mmap.mmap(-1, 8 * 64)
counts = np.frombuffer(shared, np.int64)
counts[:] = 1
parent = os.getpid()
if os.fork() == 0:
    while os.getppid() == parent:
        for _ in range(10_000):
            counts[-1] = 2_000_000
            counts[-1] = 1
    os._exit(0)
import kvpool
layout = kvpool.BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=4, dtype="uint8")
cache = kvpool.KVCacheManager(layout, device_blocks=512, device="cpu", max_sequences=64, max_sequence_tokens=64)
ids = cache.add_sequence_batch([[i] for i in range(64)]).ids
tokens, one, taken, refused = np.arange(64, dtype=np.int32), np.ones(64, np.int64), 0, 0
while min(taken, refused) < 300:
    try:
        cache.append_tokens(ids, tokens, counts)
    except ValueError:
        refused += 1
        continue
    taken += 1
    cache.verify()
    cache.rewind(ids, one)
print("whole")
"""
"""Memory that another process writes to: no lock of the interpreter's orders that."""


def test_counts_that_change_during_the_call_break_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FLIPPED_COUNTS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "whole" in done.stdout, (done.returncode, done.stderr[-500:])


# -- BlockKeys ---------------------------------------------------------------------------------------


def test_unpickled_keys_do_not_sit_on_the_memory_of_their_sender(make: Make) -> None:
    engine = make()
    buffers: list[Any] = []
    data = pickle.dumps(
        engine.cache.block_keys(list(range(9)), extra_ids=[1] * 9), protocol=5, buffer_callback=buffers.append
    )
    mine = [bytearray(buffer.raw()) for buffer in buffers]
    keys = pickle.loads(data, buffers=mine)
    for buffer in mine:
        buffer[:] = b"\xff" * len(buffer)
    assert keys.tokens.tolist() == list(range(9)) and keys.extra_ids.tolist() == [1] * 9
    assert keys.keys.tolist() == engine.cache.block_keys(list(range(9)), extra_ids=[1] * 9).keys.tolist()


def test_arrays_that_jitted_code_trusts_cannot_be_made_writable(make: Make) -> None:
    cache = make().cache
    keys, sequence = cache.block_keys(list(range(9)), extra_ids=[1] * 9), cache.add_sequence([1, 2, 3])
    paged = PagedKV.of(np.zeros((2, 2, 4, 4, 2, 3), np.uint16), "| L P B T H D")
    with cache.imports.reserve(list(range(20, 25))) as reservation:
        targets = cache.imports.load_targets(sequence)[0]
        for array in (keys.tokens, keys.keys, keys.extra_ids, paged.bases, reservation.blocks, targets.blocks):
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
    with pytest.raises(ValueError, match="WRITEABLE"):
        cache.block_table(sequence).table.flags.writeable = True
    with pytest.raises(AttributeError):
        keys.root = 0  # type: ignore[misc]


def test_keys_that_are_not_those_of_their_tokens_are_refused(make: Make) -> None:
    keys = make().cache.block_keys(list(range(9)))
    right = [keys.tokens, keys.keys, None, None, None, (keys.namespace, *keys.root), keys.origin]
    assert BlockKeys(*right).keys.tolist() == keys.keys.tolist()  # type: ignore[arg-type]
    for place, wrong in (
        (0, [np.arange(400), np.zeros(9)]),
        (1, [keys.keys[:1], keys.keys[:0], keys.keys.astype(np.int64)]),
        (2, [5]),
        (4, [np.ones(8, np.int64)]),
        (5, [(1, 2), (1 << 64, 2, 3)]),
        (6, [("x", 0), "x"]),
    ):
        for value in wrong:
            with pytest.raises((TypeError, ValueError)):
                BlockKeys(*right[:place], value, *right[place + 1 :])  # type: ignore[arg-type]


def test_keys_are_made_once(make: Make) -> None:
    """Jitted code may read their arrays at this moment: another ``__init__``, or the state in a pickle, would free
    them."""
    cache = make().cache
    keys, other = cache.block_keys(list(range(9))), cache.block_keys([1, 2])
    before = keys.__reduce__()[1]
    keys.__init__(*other.__reduce__()[1])  # type: ignore[misc]
    with pytest.raises(TypeError, match="no state"):
        keys.__setstate__((None, {"_tokens": other.tokens}))
    # A pickle that sets a state, as nobody's does: BUILD of (None, {"_tokens": True}) on what REDUCE has made.
    forged = pickle.dumps(keys)[:-1] + b"N}\x8c\x07_tokens\x88s\x86b."
    with pytest.raises(TypeError, match="no state"):
        pickle.loads(forged)
    assert all(np.array_equal(value, another) for value, another in zip(keys.__reduce__()[1], before, strict=True))


# -- copies of what has addresses ----------------------------------------------------------------------


@pytest.mark.parametrize("remade", [copy.copy, copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_the_tables_of_a_copy_are_written_and_no_others(make: Make, remade: Callable[[Any], Any]) -> None:
    cache = make().cache
    sequence, step = cache.add_sequence(list(range(5))), StepTables(slot_mapping=np.zeros(9, np.int64))
    cache.tables.step_tables(sequence, 0, 5, out=step)
    new, expected = remade(step), step.slot_mapping[:5].tolist()
    shared = new.slot_mapping is step.slot_mapping
    step.slot_mapping[:] = new.slot_mapping[:] = -7
    cache.tables.step_tables(sequence, 0, 5, out=new)
    assert new.slot_mapping[:5].tolist() == expected and (shared or (step.slot_mapping == -7).all())


@pytest.mark.parametrize("kind", ["StridedArray", "PagedKV"])
def test_what_has_addresses_does_not_pickle_and_its_copy_keeps_the_memory(kind: str) -> None:
    memory = np.zeros((2, 2, 4, 4, 2, 3), np.uint16)
    shared: Any = PagedKV.of(memory, "| L P B T H D") if kind == "PagedKV" else as_strided("memory", memory)
    assert copy.copy(shared) is shared and copy.deepcopy([shared])[0] is shared
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(shared)


@pytest.mark.parametrize(
    "interface", [5, {}, {"typestr": "<i8", "shape": (1,)}, {"typestr": "<i8", "data": None, "shape": (1,)}]
)
def test_an_array_interface_that_is_none_is_a_type_error(interface: Any) -> None:
    class Odd:
        __array_interface__ = interface

    paged = PagedKV.of(np.zeros((2, 2, 4, 4, 2, 3), np.uint16), "| L P B T H D")
    with pytest.raises(TypeError, match="slot_mapping"):
        scatter_kv(paged, Odd(), np.ones((2, 2, 1, 6), np.uint16))


def test_what_is_checked_when_it_is_made_is_checked_when_it_is_unpickled() -> None:
    identity, layout = ModelIdentity("a", "b", "c", "d", "e"), small_layout(4)
    assert identity.fingerprint and pickle.loads(pickle.dumps(identity)) == identity
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout
    function, fields = identity.__reduce__()
    with pytest.raises((TypeError, ValueError)):
        function(*fields[:1], 5.5, *fields[2:])


# -- objects that lie --------------------------------------------------------------------------------


def test_a_subclass_of_an_array_is_asked_for_nothing(make: Make) -> None:
    class Lying(np.ndarray[Any, Any]):
        def __len__(self) -> int:
            return 1_000_000

        shape = property(lambda self: (1_000_000,))  # type: ignore[assignment]

    engine = make()
    assert engine.cache.block_keys(np.arange(9, dtype=np.int32).view(Lying)).tokens.tolist() == list(range(9))
    ids = engine.cache.add_sequence_batch([[1, 2], [3]]).ids
    assert engine.cache.sequence_length(ids.view(Lying)).tolist() == [2, 1]
    engine.cache.release(ids)


def test_a_list_that_its_own_numbers_change_counts_as_it_was(make: Make) -> None:
    class Number:
        def __index__(self) -> int:
            tokens.clear()
            return 7

    tokens: list[Any] = [Number(), 2, 3]
    assert make().cache.block_keys(tokens).tokens.tolist() == [7, 2, 3]


def test_an_object_that_gives_its_own_memory_is_copied(make: Make) -> None:
    class Own:
        def __init__(self) -> None:
            self.memory = np.arange(9, dtype=np.int32)

        def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
            return self.memory

    tokens = Own()
    keys = make().cache.block_keys(tokens)
    tokens.memory[:] = 5
    assert keys.tokens.tolist() == list(range(9))


def test_the_clock_is_never_asked_inside_the_state_lock(make: Make) -> None:
    engine = make(max_sequences=4)
    cache = engine.cache

    def clock() -> int:
        assert not cache.core.lock._is_owned()  # type: ignore[attr-defined]
        return 5

    cache.core.clock = clock
    sequence = cache.add_sequence([1, 2, 3])
    cache.append_tokens(sequence, [4, 5, 6])
    cache.accept_drafts(sequence, [3], [0, 2])
    cache.commit(sequence)
    cache.rewind(sequence, [1])
    cache.release(sequence)
    cache.clear()


def test_blocks_that_are_there_are_asked_for_nothing(make: Make) -> None:
    class Lying(np.ndarray[Any, Any]):
        def __getitem__(self, index: Any) -> Any:
            return self

        def copy(self, order: Any = "C") -> Any:
            return np.ones((1, 1), np.bool_)

    cache = make().cache
    keys, there = cache.block_keys(list(range(17))), np.ones((1, 4), np.bool_)
    assert (
        cache.content.missing_blocks(keys, there.view(Lying)).tokens
        == cache.content.missing_blocks(keys, there).tokens
        > 0
    )


def test_a_number_that_says_it_is_an_ellipsis_is_a_number(make: Make) -> None:
    class Equal(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    cache = make().cache
    export = cache.memory.export("device")
    assert np.shares_memory(np.asarray(export[tuple(Equal(0) for _ in export.shape)]), cache.memory.device_pool)


class Number:
    def __index__(self) -> int:
        return 1 << 70


class Array:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return None


class Tensor:
    """Says that it has memory, and has none."""

    def __init__(self, device: Any, capsule: Any = None) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule


def test_what_is_not_an_array_is_refused_by_name(make: Make) -> None:
    cache = make().cache
    sequence = cache.add_sequence([1, 2, 3])
    calls: dict[str, Callable[[Any], object]] = {
        "prompt": cache.match_prefix,
        "ids": cache.commit,
        "tokens": partial(cache.append_tokens, sequence),
        "counts": partial(cache.rewind, sequence),
        "key": cache.pin,
    }
    tensors = [Tensor(None), Tensor(5), Tensor(()), Tensor(("a", 0)), Tensor((1, 0)), Tensor((1, 0), object())]
    for given in ([Number()], Array(), *tensors, memoryview(np.ones((2, 2)))):
        for name, call in calls.items():
            with pytest.raises((TypeError, ValueError), match=name):
                call(given)
    cache.release(sequence)


# -- what was let out --------------------------------------------------------------------------------


def test_a_lease_is_settled_by_blocks_of_the_pools_own(make: Make) -> None:
    """Another thread finds it in ``leases`` before the block that takes it has ended."""
    cache = make().cache
    sequence = cache.add_sequence(list(range(8)))
    cache.commit(sequence)
    cache.release(sequence)
    keys = cache.block_keys(list(range(8)))
    with cache.exclusive():
        lease = cache.pin(keys, stream=0)
        with pytest.raises(ValueError, match="read-only"):
            lease.blocks[:] = 1 << 40
    lease.close()


def test_a_fork_that_must_be_refused_allocates_nothing(make: Make) -> None:
    cache = make(max_sequences=4).cache
    ids = cache.add_sequence_batch([[1], [2]]).ids
    tracemalloc.start()
    try:
        with pytest.raises(OutOfSequences) as raised:
            cache.fork(ids, 1 << 24)
        with pytest.raises(UnknownSequence):
            cache.fork([int(ids[0]), 1 << 40], 1 << 24)
        with pytest.raises(OutOfSequences):
            cache.fork(ids, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (raised.value.needed, raised.value.free) == (2 << 24, 2) and peak < 1 << 20
    cache.release(ids)


def test_a_request_with_fewer_ids_than_tokens_is_refused() -> None:
    surveyor = Surveyor(4)
    for request in (
        Request(0, 0, 1_000_000, 0, hash_ids=np.arange(2, dtype=np.uint64), tokens_per_id=4),
        Request(0, 0, 1_000_000, 0, tokens=np.arange(8, dtype=np.int32)),
        Request(0, 0, 8, -8, tokens=np.arange(8, dtype=np.int32)),
    ):
        with pytest.raises(ValueError, match="expected ids for all"):
            surveyor.record(request)
    assert surveyor.requests == 0

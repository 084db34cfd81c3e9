"""An engine whose stream lags far behind: what the pool does meanwhile is right when the stream gets there, and wrong
without each guard."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvpool import KVCacheManager
from kvpool.common.arrays.layout import BlockLayout
from tests.device.pools import seen
from tests.gpu.machines import Machine

pytestmark = pytest.mark.gpu
LAYOUT = BlockLayout(2, 2, 16, 4, dtype="int32")


def write(machine: Machine, cache: KVCacheManager, sequence: int, value: int, stream: Any) -> None:
    """Enqueue an engine's write of all blocks of a sequence."""
    for block in cache.block_table(sequence).dense()[0].tolist():
        for layer in range(LAYOUT.layers):
            for plane in range(LAYOUT.planes):
                machine.fill(cache.memory.device_pool[layer, plane, block], value, stream)


def host_bytes(cache: KVCacheManager, prompt: list[int]) -> np.ndarray:
    """The host copy of a prompt of one block, once it is there."""
    with cache.pin(cache.block_keys(prompt).keys, tier="host") as lease:
        return cache.memory.host_pool[int(lease.blocks[0]) - cache.device_blocks].copy()


@pytest.mark.parametrize("guarded", [True, False])
def test_an_offload_takes_what_the_engine_has_not_written_yet(machine: Machine, path: str, guarded: bool) -> None:
    with KVCacheManager(LAYOUT, device_blocks=1, host_blocks=2, device="cuda") as cache:
        if not guarded:
            cache.core.disable_guard("copy_reads_after_engine")
        engine = machine.stream()
        prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
        go = machine.stall(engine)
        for value, prompt in enumerate(prompts, start=1):
            sequence = cache.add_sequence(prompt, stream=engine)
            write(machine, cache, sequence, value, engine)
            cache.commit(sequence, stream=engine)
            cache.release(sequence, stream=engine)
        assert machine.busy(engine)
        early = None if guarded else host_bytes(cache, prompts[0])
        go()
        if guarded:
            assert (host_bytes(cache, prompts[0]) == 1).all()
        else:
            assert not (early == 1).any()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_block_is_not_onboarded_into_before_the_engine_is_done_with_it(
    machine: Machine, path: str, guarded: bool
) -> None:
    with KVCacheManager(LAYOUT, device_blocks=1, host_blocks=2, device="cuda") as cache:
        if not guarded:
            cache.core.disable_guard("copy_writes_after_engine")
        engine, loader = machine.stream(), machine.stream()
        for value, prompt in enumerate(([1, 2, 3, 4], [5, 6, 7, 8]), start=1):
            sequence = cache.add_sequence(prompt, stream=loader)
            write(machine, cache, sequence, value, loader)
            cache.commit(sequence, stream=loader)
            cache.release(sequence, stream=loader)
        cache.core.device.synchronize()
        # The engine gets to its block after that has been given back and onboarded into.
        go = machine.stall(engine)
        held = cache.add_sequence([9, 10, 11], stream=engine)
        write(machine, cache, held, 3, engine)
        cache.release(held, store=False, stream=engine)
        assert cache.content.prefetch([1, 2, 3, 4, 99]) == 1
        if not guarded:
            cache.core.device.synchronize(cache.core.device.record(cache.core.transfer.order._streams[1]))  # type: ignore[union-attr]
        go()
        cache.core.device.synchronize()
        assert (seen(cache.memory.device_pool) == (1 if guarded else 3)).all()


@pytest.mark.parametrize("guarded", [True, False])
def test_a_staged_table_is_the_one_of_its_call(machine: Machine, guarded: bool) -> None:
    with KVCacheManager(LAYOUT, device_blocks=4, device="cuda", max_sequences=2) as cache:
        engine, table = machine.stream(), machine.empty((2, 5))
        warm = cache.add_sequence([0], stream=engine)
        cache.tables.copy_batch_block_offsets(table, [warm], stream=engine)
        cache.release(warm, store=False, stream=engine)
        cache.core.device.synchronize()
        if not guarded:
            cache.core.disable_guard("staged_buffers_retire_by_event")
        go = machine.stall(engine)
        first = cache.add_sequence([1, 2, 3, 4, 5], stream=engine)
        wanted = cache.block_table(first).dense(5)[0].copy()
        cache.tables.copy_batch_block_offsets(table, [first], rows=[0], stream=engine)
        cache.release(first, store=False, stream=engine)
        # As long as the first: without the guard, its rows are taken for those of the first, which stay inside the
        # table.
        second = cache.add_sequence(list(range(20, 25)), stream=engine)
        other = cache.block_table(second).dense(5)[0].copy()
        cache.tables.copy_batch_block_offsets(table, [second], rows=[1], stream=engine)
        assert machine.busy(engine)
        go()
        cache.core.device.synchronize()
        assert (seen(table)[0].tolist() == wanted.tolist()) == guarded
        assert seen(table)[1].tolist() == other.tolist()
        cache.release(second)


def test_a_table_handed_over_as_csr_is_the_one_of_its_call(machine: Machine) -> None:
    with KVCacheManager(LAYOUT, device_blocks=8, device="cuda", max_sequences=4) as cache:
        engine, wanted = machine.stream(), []
        batches = [[machine.empty((size,)) for size in (2, 6, 1)] for _ in range(2)]
        cache.core.device.synchronize()
        go = machine.stall(engine)
        for parts, prompt in zip(batches, (range(9), range(50, 63)), strict=True):
            sequence = cache.add_sequence(list(prompt), stream=engine)
            wanted.append(cache.block_table(sequence).csr())
            cache.tables.copy_batch_block_csr(*parts, sequence, stream=engine)
            cache.release(sequence, store=False, stream=engine)
        assert machine.busy(engine) and cache.stats().uploads == cache.stats().most_uploads == 2
        go()
        cache.core.device.synchronize()
        for parts, expected in zip(batches, wanted, strict=True):
            for part, values in zip(parts, expected, strict=True):
                np.testing.assert_array_equal(part.get()[: len(values)], values)
        assert cache.stats().uploads == 0
        with pytest.raises(TypeError, match="indices.*host memory"):
            cache.tables.copy_batch_block_csr(batches[0][0], np.zeros(6, np.int32), batches[0][2], [])

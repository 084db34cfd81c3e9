"""Compiles all code that a pool runs, or loads it from disk, so that the first request does not wait for it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import numpy as np

from kvpool.common.arguments import first_outside, integer_argument
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.paged import PagedKV
from kvpool.common.jit.cache import WARM_UP, announcer
from kvpool.common.jit.helpers import Helpers, cores
from kvpool.device.memory.kv_copy import load_kernel
from kvpool.hostcache.host_cache import HostCache
from kvpool.hostcache.host_copies import HostCopies
from kvpool.hostcache.identity import ModelIdentity
from kvpool.hostcache.tier import HostTier
from kvpool.pool.config import LayerGroup
from kvpool.pool.hints import HintAction
from kvpool.pool.keys import key_rows
from kvpool.pool.manager import KVCacheManager
from kvpool.state import control, saving
from kvpool.state.arrays import PolicyName

_WIDTH = 4


def warm_up(*caches: PagedKV, processes: int | None = 1) -> None:
    """Compile everything that a serving process runs: make every kind of call once, on small pools.

    When this returns, all jitted code is ready. Otherwise a serving process compiles it at its first request, which
    takes about 24 s of CPU once per version, or loads it, which takes tens of milliseconds for each call.

    Parameters
    ----------
    *caches : PagedKV
        Memory on a GPU, for whose layouts the kernels of ``gather_kv`` and ``scatter_kv`` are compiled too, with
        staging buffers without gaps.
    processes : int, optional
        Number of processes that compile, this one among them, 1 by default. None takes as many as there are cores. They
        share the files of the cache of compiled code. If one fails, the log names it, and this one does its work.

    Raises
    ------
    DeviceError
        For a kernel that cannot be compiled.

    Notes
    -----
    Touches no other GPU, and no other pool. Any thread may call it.
    """
    count = cores() if processes is None else integer_argument("processes", processes, 1, 256)
    for paged in caches:
        load_kernel(paged)
    with Helpers("from kvpool.hostcache.warming import run_all; run_all()", count) as helpers:
        with announcer.expecting(WARM_UP, helpers.start):
            run_all()


def run_all() -> None:
    """Every kind of call."""
    from kvpool.device.sim import SimDevice  # only tests need it, so the package does not import it

    layout = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=_WIDTH, dtype="uint8")
    runs: list[tuple[SimDevice | None, PolicyName]] = [(None, "agent"), (SimDevice(progress=1), "adaptive")]
    for device, policy in runs:
        with KVCacheManager(
            layout, device_blocks=16, host_blocks=8, device=device or "cpu", event_capacity=64, policy=policy
        ) as cache:
            _live(cache)
            _between_requests(cache)
        if device is not None:
            device.close()
    _groups(layout)
    warm_host_cache(("agent", "adaptive"))


def warm_host_cache(policies: Iterable[PolicyName] = ()) -> None:
    """All calls of a host cache on a few keys, its copies on the CPU, and the rows of jobs of stores. And what
    these ``policies`` add."""
    keys, pages = [b"a", b"b"], np.zeros((4, 16), np.uint8)
    identity = ModelIdentity("warm", "up", "uint8", "pages", "1")
    with HostCache(3, 16, identity=identity, event_capacity=8) as cache, HostTier.of(cache) as tier:
        with HostCopies(tier, PagedKV.of([pages], "L | B D"), device="cpu") as copies:
            for _ in range(2):
                taken = cache.reserve(keys)
                copies.copy_in(range(len(taken.blocks)), taken.slots)
                cache.publish(taken.keys)
                with cache.pin(keys) as lease:
                    copies.copy_out([2, 3], lease.slots)
                keys = [b"b", b"c"]
        cursor = cache.open_dirty_cursor(pending=True)
        cache.read_dirty(cursor, keys)
        cache.eviction_candidates(cursor, 1, 1)
        cache.eviction_candidates(None, 1, 1)
        cache.close_dirty_cursor(cursor)
        cache.pin(keys).close(used=False)
        cache.lookup(keys)
        cache.find(b"a")
        cache.touch(keys)
        cache.forget(keys)
        cache.reserve(keys)
        cache.abort(keys)
        cache.refresh()
        cache.clear()
    for policy in policies:
        HostCache(3, 16, identity=identity, policy=policy).close()
    first_outside(np.zeros(1, np.int64), 0)


def _groups(layout: BlockLayout) -> None:
    """Run the code that only pools of several groups use: recurrent states, and copies in more than one region. What is
    for windows and encoders is compiled for a pool that has them."""
    state = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=1, dtype="uint8")
    groups = [LayerGroup(layout, window=_WIDTH), LayerGroup(layout, kind="cross")]
    KVCacheManager(groups=groups, device_blocks=[4, 4], device="cpu").close()
    groups = [LayerGroup(layout), LayerGroup(state, kind="recurrent")]
    with KVCacheManager(groups=groups, device_blocks=[4, 4], host_blocks=[4, 4], device="cpu") as cache:
        tokens = np.arange(_WIDTH + 1, dtype=np.int32)
        sequence = cache.add_sequence(tokens)
        cache.tables.state_blocks(sequence, group=1)
        _ = cache.free_blocks_per_group
        cache.blocks_needed(tokens, group=1)
        cache.commit(sequence)
        cache.content.offload(tokens)
        cache.release(sequence)


def _live(cache: KVCacheManager) -> None:
    """All calls on live sequences: hits, partial hits, evictions, growth, staged tables, beams, drafts."""
    tokens = np.arange(8 * _WIDTH, dtype=np.int32)
    for shift in (0, 0, 100, 200, 0):
        keys = cache.block_keys(tokens[: 6 * _WIDTH + 1] + np.int32(shift))
        cache.match_prefix(keys)
        cache.blocks_needed(keys)
        cache.plan_batch([keys])
        ids = cache.add_sequence_batch([keys], retention=[[(0, _WIDTH, 80, 1000)]]).ids
        cache.blocks_needed(sequences=ids, new_tokens=1)
        cache.append_tokens(ids, tokens[:2], np.array([2]))
        cache.commit(ids, cache.block_table(ids, stream=0).lengths)
        target = np.zeros((1, 16), np.int32)
        cache.tables.copy_batch_block_offsets(target, ids)
        cache.tables.copy_batch_block_csr(np.zeros(2, np.int32), np.zeros(16, np.int32), np.zeros(1, np.int32), ids)
        step = cache.tables.step_tables(ids, stream=0)
        cache.tables.copy_step_tables(step, ids)
        cache.rewind(ids, np.array([3]))
        cache.evictable_after_release(ids)
        cache.imports.load_targets(ids)
        cache.release(ids)
        _ = cache.free_blocks
    sequence = cache.add_sequence(tokens[:2])
    both = [sequence, *cache.fork(sequence, 1).tolist()]
    cache.reorder(both, [0, 0])
    cache.append_tokens(both, tokens[:6], [3, 3])
    cache.accept_drafts(both, [3, 3], [1, 2, 0], [2, 1])
    cache.swap_out(both)
    cache.resume(both)
    with suppress(ValueError):
        cache.append_tokens(sequence, np.zeros(16 * _WIDTH, np.int32))
    cache.release(both, stop="tool_use")
    extra = cache.add_sequence(cache.block_keys(tokens, salt="s", extra_ids=tokens))
    cache.release(extra, store=False)


def _between_requests(cache: KVCacheManager) -> None:
    """Pins, moves on demand, loaders, imports, and the calls that concern the whole pool."""
    keys = cache.block_keys(np.arange(6 * _WIDTH + 1, dtype=np.int32))
    cache.content.offload(keys)
    cache.content.prefetch(keys)
    cache.content.cached_blocks(keys)
    cache.content.missing_blocks(keys, np.ones((1, 6), np.bool_))
    cache.content.set_priority(keys, 80)
    action: HintAction = {
        "action_id": "warm",
        "action_type": "retain",
        "action_version": 1,
        "payload": {"keys": keys.keys},
    }
    cache.content.hints({"protocol_version": 1, "message_id": "up", "actions": [action]})
    rows = key_rows(keys)
    cursor = cache.core.decide(None, saving.open_dirty_cursor, True)
    at, report = np.zeros(3, np.int64), np.empty((1, saving.FOUND), np.int64)
    cache.core.decide(None, saving.stored, cursor, at, report)
    cache.core.decide(None, saving.sweep, cursor, 1, at, report)
    cache.core.decide(None, saving.victims, cursor, np.ones(1, np.int64), report)
    cache.core.decide(None, saving.close_dirty_cursor, cursor)
    cache.core.decide(None, saving.put_back, 0, np.zeros(0, np.int64), np.zeros((0, 3), np.int64))
    cache.core.decide(None, control.evict_first, 0, rows, True, cache.now())
    cache.pin(keys.keys[:1]).close()
    lease = cache.find_and_pin_host(keys.keys[0])
    if lease is not None:
        cache.pin_blocks(lease.blocks).close()
        lease.close()
    with cache.imports.reserve(np.arange(500, 500 + _WIDTH, dtype=np.int32)) as reservation:
        reservation.commit()
    cache.imports.reserve(np.arange(500, 501 + _WIDTH, dtype=np.int32)).abort()
    cache.imports.import_blocks(
        cache.block_keys(np.arange(900, 900 + _WIDTH, dtype=np.int32)), [bytes(cache.layout.block_bytes)]
    )
    cache.keys_of(live := cache.add_sequence(keys))
    cache.content.forget(keys)
    cache.content.forget(keys.keys[:1])
    cache.content.forget(namespace=("s", None))
    cache.release(live)
    cache.content.refresh()
    cache.events()
    cache.stats()
    cache.verify()
    cache.clear()

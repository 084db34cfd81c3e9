"""Two tiers and pins: offload, onboard, inclusion, leases by key and by block, every byte compared after the move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from kvpool import EvictionOptions
from kvpool.errors import LeaseExpired, OutOfBlocks, PoolBusy
from tests import debug

Make = Callable[..., Engine]


def seed_block(engine: Engine, first: int = 0, priority: int | None = None) -> bytes:
    """Cache one full block of tokens first..first+3; its key."""
    retention = None if priority is None else [(0, None, priority, None)]
    engine.seed(range(first, first + 4), committed=4, retention=retention)
    return engine.keys(range(first, first + 4))[0]


def push_out(engine: Engine) -> None:
    """Take the device blocks that nobody holds."""
    engine.release(engine.add(range(100, 100 + 4 * engine.free())), store=False)


def dump(engine: Engine) -> Any:
    return debug.dump(engine.cache.core.tokens)


@pytest.mark.parametrize(("priority", "offloaded"), [(29, 0), (30, 1)])
def test_the_threshold_decides_between_offload_and_forget(make: Make, priority: int, offloaded: int) -> None:
    engine = make(P=1, S=4, event_capacity=64)
    key = seed_block(engine, 0, priority)
    engine.cache.events()
    engine.add([99])
    stats = engine.cache.stats()
    assert (stats.offloaded_blocks, stats.forgotten_device_blocks) == (offloaded, 1 - offloaded)
    assert (key in engine.cached("host")) == bool(offloaded)
    kinds = [(event.kind, event.tier) for event in engine.cache.events()]
    assert kinds == ([("stored", "host")] if offloaded else []) + [("removed", "device")]


def test_content_that_nobody_reused_may_be_forgotten(make: Make) -> None:
    engine = make(P=2, S=2, eviction=EvictionOptions(offload_min_reuse=2))
    seed_block(engine)
    key = seed_block(engine, 10)
    engine.release(engine.add([10, 11, 12, 13, 5]))
    engine.add_batch([[90], [91]])
    assert list(engine.cached("host")) == [key]


def test_uses_are_those_of_the_content_not_of_one_copy(make: Make) -> None:
    engine = make(P=3, S=1, eviction=EvictionOptions(offload_min_reuse=2))
    key = seed_block(engine)
    assert engine.cache.content.offload(range(4)) == 1
    engine.release(engine.add([0, 1, 2, 3, 5]))
    engine.release(*engine.add_batch([[90], [91], [92]]))
    assert engine.cache.content.prefetch(range(4)) == 1
    seed_block(engine, 10)
    assert engine.cache.content.offload(range(10, 14)) == 1, "the host copy is given up"
    engine.add_batch([[90], [91], [92]])
    assert list(engine.cached("host")) == [key], "used twice, so worth a copy"


def test_uses_have_an_end_and_do_not_begin_again(make: Make) -> None:
    engine = make(P=2, S=2, eviction=EvictionOptions(offload_min_reuse=2))
    key = seed_block(engine)
    engine.cache.core.tokens.blocks["uses"][engine.cached()[key]] = 65535
    engine.release(engine.add([0, 1, 2, 3, 5]))
    engine.add_batch([[90], [91]])
    assert list(engine.cached("host")) == [key]


def test_the_host_keeps_what_matters_more_than_what_comes(make: Make) -> None:
    engine = make(P=1, S=1)
    kept, _, equal = (seed_block(engine, first, priority) for first, priority in ((0, 60), (10, 50), (20, 60)))
    assert list(engine.cached("host")) == [kept]
    engine.add([99])
    assert list(engine.cached("host")) == [equal], "of two that matter as much, what comes last stays"


def test_an_unfull_end_is_forgotten_and_not_offloaded(make: Make) -> None:
    engine = make(P=2, S=2)
    engine.seed(range(6), committed=6)
    push_out(engine)
    assert [*engine.cached("host")] == engine.keys(range(4)) and engine.cache.stats().offloaded_blocks == 1
    assert engine.reusable(range(6)) == 4


def test_a_kept_host_copy_saves_the_second_offload(make: Make) -> None:
    engine = make(P=1, S=2)
    key = seed_block(engine)
    engine.release(engine.add([99]))
    assert engine.cache.content.prefetch(range(4)) == 1
    assert key in engine.cached() and key in engine.cached("host")
    engine.add([98])
    stats = engine.cache.stats()
    assert (stats.offloaded_blocks, stats.onboarded_blocks, stats.offloads_saved) == (1, 1, 1)
    assert key not in engine.cached() and key in engine.cached("host")
    assert stats.offloaded_bytes == stats.onboarded_bytes == engine.cache.layout.block_bytes


def test_a_host_hit_comes_back_with_its_bytes(make: Make) -> None:
    engine = make(P=4, S=4)
    engine.seed(range(13), committed=12)
    push_out(engine)
    match = engine.cache.match_prefix(range(13))
    assert (match.device_tokens, match.host_tokens) == (0, 12)
    assert engine.add(range(13)).cached == 12
    stats = engine.cache.stats()
    assert stats.host.redundant == 3, "the copies stay, as first victims"
    assert (stats.reused_host_tokens, stats.reused_host_blocks, stats.onboarded_blocks) == (12, 3, 3)


def test_redundant_copies_are_the_first_host_victims(make: Make) -> None:
    engine = make(P=3, S=2)
    both = {seed_block(engine, 0, 30), seed_block(engine, 10, 100)}
    assert engine.cache.content.offload(range(10, 14)) == 1
    engine.add_batch([[50], [60]])
    assert set(engine.cached("host")) == both
    engine = make(P=3, S=1)
    copied = seed_block(engine, 10, 100)
    assert engine.cache.content.offload(range(10, 14)) == 1
    other = seed_block(engine, 20, 30)
    engine.add_batch([[50], [60]])
    assert list(engine.cached("host")) == [other], "although the copy's priority is 100"
    assert copied in engine.cached()


def test_content_that_is_computed_again_makes_its_host_copy_redundant(make: Make) -> None:
    engine = make(P=2, S=2)
    first, again = seed_block(engine), seed_block(engine, 10)
    push_out(engine)
    assert len(engine.cached("host")) == 2 and not engine.cached()
    engine.commit(engine.add(range(10, 14)))  # the last token of a prompt is never reused, and so its block is computed
    assert engine.order("host")[0] == engine.cached("host")[again]
    new = seed_block(engine, 20)
    engine.cache.content.offload(range(20, 24))
    assert set(engine.cached("host")) == {first, new}, "what is nowhere else stays"


def test_a_duplicate_takes_over_when_the_published_block_is_offloaded(make: Make) -> None:
    engine = make(P=4, S=4)
    first, second = engine.add(range(4)), engine.add(range(4))
    engine.commit(first)
    engine.commit(second)
    engine.release(first)
    push_out(engine)
    (key,) = engine.keys(range(4))
    assert key in engine.cached("host") and not engine.cached()
    engine.commit(second)
    assert engine.cached()[key] in engine.table(second)
    assert engine.add(range(5)).cached == 4 and engine.cache.stats().onboarded_blocks == 0


def test_a_host_block_that_a_batch_hits_twice_is_onboarded_once(make: Make) -> None:
    engine = make(P=4, S=4)
    seed_block(engine)
    push_out(engine)
    first, second = engine.add_batch([[0, 1, 2, 3, 50], [0, 1, 2, 3, 60]])
    assert (first.cached, second.cached) == (4, 4)
    assert engine.table(first)[0] == engine.table(second)[0]
    stats = engine.cache.stats()
    assert (stats.onboarded_blocks, stats.reused_host_blocks) == (1, 2)


def test_offload_keeps_the_device_copy(make: Make) -> None:
    engine = make(P=4, S=1)
    engine.seed(range(9), committed=8)
    assert engine.cache.content.offload(range(8)) == 1, "the host has room for one"
    engine.cache.verify()
    assert len(engine.cached()) == 2 and len(engine.cached("host")) == 1
    assert engine.free("host") == 1
    engine.release(engine.add(range(9)))
    push_out(engine)


def assert_refused(engine: Engine, *prompts: list[int]) -> OutOfBlocks:
    """A batch does not fit, and leaves every byte of state."""
    before = dump(engine)
    with pytest.raises(OutOfBlocks) as raised:
        engine.cache.add_sequence_batch(prompts)
    assert dump(engine) == before
    return raised.value


@pytest.mark.parametrize("P", [6, 8], ids=["a hit is on the host", "hits follow each other in a list"])
def test_a_failure_late_in_a_batch_leaves_every_byte_of_state(make: Make, P: int) -> None:
    engine = make(P=P, S=4)
    engine.seed(range(9), committed=8)
    engine.seed(range(20, 29), committed=8)
    engine.cache.content.offload(range(20, 28))
    engine.add(range(100, 112))
    assert_refused(engine, [*range(9)], [*range(6), 77], [*range(200, 216)], [20, 21, 22, 23, 5])


def test_a_refused_batch_that_shares_a_beginning_leaves_every_byte_of_state(make: Make) -> None:
    """The block that two requests hold goes back to its list with the first of them, which is undone last."""
    engine = make(P=8)
    long, short, other = [*range(12)], [*range(4), *range(20, 24)], [*range(4), *range(30, 34)]
    engine.release(*[engine.commit(engine.add(tokens)) for tokens in (long, short, other)])
    assert_refused(engine, [*short, 9], [*long, 9], [*range(200, 216)])


def test_a_refused_batch_lets_go_of_the_sources_of_partial_copies(make: Make) -> None:
    engine = make(P=6)
    engine.seed(range(7), committed=7)
    running = engine.add(range(100, 112))
    assert_refused(engine, [*range(6), 77, *range(30, 40)])
    assert_refused(engine, [*range(6), 77], [*range(6), 78], [*range(30, 46)])
    engine.release(running)
    assert len(engine.order()) == 6


def test_a_batch_that_has_no_room_for_its_onboards_is_refused(make: Make) -> None:
    engine = make(P=3, S=3)
    engine.seed(range(8), committed=8)
    push_out(engine)
    held = engine.add([50])
    refused = assert_refused(engine, [*range(9)])
    assert (refused.needed, refused.free) == (3, 2)
    engine.release(held)
    assert engine.add(range(9)).cached == 8


# -- pins --------------------------------------------------------------------------------------


def test_a_hit_on_a_pinned_block_leaves_it_pinned(make: Make) -> None:
    engine = make(P=2)
    seed_block(engine)
    lease = engine.cache.pin(engine.prompt(range(4)).keys)
    engine.release(engine.add(range(5)))
    assert engine.free() == 1 and engine.cache.stats().device.pinned == 1
    sequence = engine.add(range(5))
    lease.close()
    assert engine.free() == 0 and engine.cache.stats().device.pinned == 0
    engine.release(sequence)
    assert engine.free() == 2


def test_reset_leaves_pinned_bytes_alone(make: Make) -> None:
    engine = make(P=4, S=2)
    key = seed_block(engine)
    engine.cache.content.offload(range(4))
    lease = engine.cache.find_and_pin_host(key)
    pinned = int(lease.blocks[0])
    before = engine.block(pinned).copy()
    engine.live.pop(engine.add(range(5)).id)
    with pytest.raises(PoolBusy):
        engine.cache.clear()
    engine.cache.clear(force=True)
    engine.cache.verify()
    assert (engine.free(), engine.free("host")) == (4, 1) and not engine.cached() and not engine.cached("host")
    assert engine.cache.find_and_pin_host(key) is None
    seed_block(engine)
    engine.cache.content.offload(range(4))
    stored = dict(engine.cached("host"))
    assert stored != {key: pinned}, "stored anew elsewhere"
    assert np.array_equal(engine.block(pinned), before)
    lease.close()
    engine.cache.verify()
    assert engine.free("host") == 2 and engine.cached("host") == stored


def test_a_revoked_lease_takes_nobody_elses_pin(make: Make) -> None:
    engine = make(P=4)
    keys = [seed_block(engine)]
    gone, kept = engine.cache.pin(keys, owner="gone"), engine.cache.pin(keys, owner="kept")
    assert engine.cache.revoke("gone") == 1 and engine.cache.revoke("gone") == 0
    with pytest.raises(LeaseExpired):
        gone.close()
    assert engine.free() == 3
    kept.close()
    assert engine.free() == 4


def test_who_reads_under_a_lease_learns_that_it_was_revoked_meanwhile(make: Make) -> None:
    engine = make(P=4)
    keys = [seed_block(engine)]
    with pytest.raises(LeaseExpired, match="reader"), engine.cache.pin(keys, owner="reader"):
        engine.cache.revoke("reader")
    with pytest.raises(KeyError, match="its own"), engine.cache.pin(keys, owner="reader"):
        engine.cache.revoke("reader")
        raise KeyError("its own")


# ----------------------------------------
# Both tiers hold as much as one cache of their sum, also inside a call: evictions go where its onboards came from.


def cached_on_the_host(engine: Engine, tokens: range, committed: int) -> None:
    """Cache a prompt, and let blocks of other prompts push it out of the device."""
    engine.seed(tokens, committed=committed)
    for first in range(1000, 1000 + 100 * engine.cache.device_blocks, 100):
        engine.seed(range(first, first + engine.T), committed=engine.T)


def forgotten(engine: Engine) -> int:
    stats = engine.cache.stats()
    return stats.forgotten_device_blocks + stats.forgotten_host_blocks


def test_evictions_go_where_the_onboards_of_the_same_call_came_from(make: Make) -> None:
    """Six contents fill both tiers. A seventh block is needed, and one content goes."""
    engine = make(T=3, P=4, S=2, partial_reuse=False)
    cached_on_the_host(engine, range(8), 8)
    assert forgotten(engine) == 0
    assert engine.add(range(8)).cached == 6
    assert forgotten(engine) == 1
    assert engine.cache.stats().redundant_dropped == 2
    assert [engine.reusable(range(first, first + 4)) for first in (1000, 1100, 1200, 1300)] == [0, 3, 3, 3]


def test_a_part_of_what_another_request_onboards_frees_its_host_block(make: Make) -> None:
    """The part was copied before the other request needs a block."""
    engine = make(T=3, P=5, S=2)
    cached_on_the_host(engine, range(6), 6)
    before = forgotten(engine)
    first, second = engine.add_batch([[0, 1, 2, 3, 70], [0, 1, 2, 3, 4, 5, 80]])
    assert (first.cached, second.cached) == (4, 6)
    assert (engine.cache.stats().redundant_dropped, forgotten(engine) - before) == (2, 2)


def test_what_goes_in_any_case_goes_first(make: Make) -> None:
    """Evictions go where forgotten content was, and few wait for an onboard that comes before them: a short chain."""
    engine = make(T=3, P=8, S=8, partial_reuse=False)
    for first in range(0, 800, 100):
        engine.seed(range(first, first + 3), committed=3)
    cached_on_the_host(engine, range(2000, 2012), 12)
    cut, depths = engine.cache.core.transfer._levels.cut, []

    def counted(moves: Any) -> Any:
        levels = list(cut(moves))
        depths.append(len(levels))
        return iter(levels)

    engine.cache.core.transfer._levels.cut = counted  # type: ignore[method-assign]
    assert engine.add([*range(2000, 2012), *range(90, 102)]).cached == 12
    assert depths == [3] and forgotten(engine) == 8

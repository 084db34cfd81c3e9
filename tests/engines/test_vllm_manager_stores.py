"""The scheduler's side of the plug-in for vLLM with stores below its host tier, called as vLLM calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

vllm = pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

from vllm.v1.kv_offload.base import Medium  # noqa: E402

from kvpool.storage import (  # noqa: E402
    MemoryStore,
    urls,
)
from tests.engines.vllm_lab import (  # noqa: E402
    HIT,
    MISS,
    PENDING,
    Clock,
    Stored,
    keys,
    request,
)
from tests.stores.lab import Wrong  # noqa: E402


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """The stores of all managers that a test has made are closed after it."""
    yield
    while Stored.made:
        Stored.made.pop().real.shutdown()


def test_a_chunk_that_was_evicted_is_loaded_from_the_store() -> None:
    manager = Stored(4)
    manager.fill(1, 2)
    assert manager.real.has_pending_work(), "the store is to save them"
    assert manager.await_states(1, 2) == [HIT, HIT]
    manager.wait_saved(2)
    manager.real.on_request_finished(request())
    for number in (3, 4, 5, 6):
        manager.fill(number)
        assert manager.await_states(number) == [HIT]
    assert manager.lookup(1) == [PENDING]
    assert manager.await_states(1) == [HIT]
    (block,) = manager.load("a", 1)
    assert (manager.tier.blocks[block] == 1).all()
    manager.complete_load("a", 1)
    counted = manager.counted()
    assert counted["vllm:kvpool_store_loaded_chunks"] == 1
    defined = vllm.KVPoolOffloadingSpec.build_metric_definitions({})
    assert {name.partition(":(")[0] for name in counted} <= set(defined)


@pytest.mark.parametrize("saved", [False, True])
def test_a_store_that_took_too_long_is_a_miss_whatever_the_next_store_has(saved: bool) -> None:
    """A worker may still write the one host block that the chunk has, so nothing is loaded into it."""
    clock = Clock()
    manager = Stored(4, clock)
    if saved:
        manager.fill(1, 2, 3, 4)
        manager.wait_saved(4)
        manager.real.on_request_finished(request())
        manager.fill(5, 6, 7, 8)
        manager.wait_saved(4)
        manager.real.on_request_finished(request())
    _, (late,), _ = manager.prepare_store(1)
    clock.now += 60_000
    assert manager.await_states(1) == [MISS]
    # Those around it come nevertheless.
    assert manager.await_states(2, 1, 3) == ([HIT, MISS, HIT] if saved else [MISS] * 3)
    if saved:
        lease = manager.cache.pin(keys(2, 3))
        assert [int(manager.tier.blocks[block, 0]) for block in lease.blocks] == [2, 3]
        lease.close()
    manager.complete_store(1)
    assert manager.cache.overdue() == []
    assert manager.counted().get("vllm:kvpool_failed_stores", 0) == 0
    manager.now += 10
    assert manager.await_states(1) == [HIT if saved else MISS]
    manager.cache.verify()


@pytest.mark.parametrize("taken", [0, 2])
def test_an_ended_request_leaves_the_room_for_loads_to_the_next_one(taken: int) -> None:
    """Whether it was aborted before it took a chunk, or has taken fewer than it looked for."""
    stored = Stored(16)
    for first in range(0, 48, 8):
        stored.fill(*range(first, first + 8))
        stored.wait_saved(8)
        stored.cache.forget(keys(*range(first, first + 8)))
    for number in range(6):
        name, chunks = f"r{number}", keys(*range(8 * number, 8 * number + 8))
        assert PENDING in [stored.real.lookup(key, request(name)) for key in chunks]
        while stored.real._storage.stats().searching:
            stored.step()
        assert [stored.real.lookup(key, request(name)) for key in chunks] == [HIT] * 8, name
        if taken:
            stored.load(name, 8 * number, 8 * number + 1)
            stored.complete_load(name, 8 * number, 8 * number + 1)
        else:
            stored.real.on_request_finished(request(name))
    assert stored.real._storage.stats().refused == 0


def test_a_prompt_longer_than_the_host_loads_its_beginning_and_computes_the_rest() -> None:
    """vLLM asks once for a request that has loaded something. Nothing is left waiting, and nothing stays pinned."""
    manager = Stored(8)
    for number in (prompt := tuple(range(1, 21))):
        manager.fill(number)
        manager.wait_saved(1)
    manager.cache.forget(keys(*prompt))
    states = manager.await_states(*prompt)
    came = prompt[: states.index(MISS)]
    assert states == [HIT] * len(came) + [MISS] * (20 - len(came)) and 0 < len(came) <= 4, "half of the tier"
    assert [manager.tier.blocks[block, 0] for block in manager.load("long", *came)] == [*came]
    manager.complete_load("long", *came)
    assert not manager.real.has_pending_work()
    # What is computed has room: a pinned chunk would not go.
    assert len(manager.store(*range(101, 109))) == 8


def test_the_log_has_a_line_for_each_request_while_somebody_reads_it(caplog: pytest.LogCaptureFixture) -> None:
    manager, context = Stored(4), request("a secret of nobody\n")
    manager.real.prefill.tokens_per_block = 16

    def serve() -> str:
        caplog.clear()
        manager.real.on_new_request(context)
        for number, key in enumerate(keys(1, 5, 9), 3):
            context.set_offload_key_position(key, 16 * number)
            while manager.real.lookup(key, context) == PENDING:
                manager.step()
        manager.real.prepare_load(keys(1, 5), context)
        manager.real.complete_load(set(keys(1, 5)), context)
        manager.real.on_request_finished(context)
        return caplog.text

    manager.fill(1, 5)
    manager.wait_saved(2)
    manager.cache.forget(keys(1))
    with caplog.at_level("DEBUG", "vllm.kvpool"):
        said = serve()
        assert "request 'a secret of nobody\\n': device=32 " in said and "nobody\n'" not in said
        assert {"host=16", "memory=16", "never_seen=16", "stores:absent=16"} <= set(said.split())
        assert "device=32 host=32 " in serve(), "what has come stays in the host"
    with caplog.at_level("INFO", "vllm.kvpool"):
        assert "device=" not in serve() and not manager.real._stories


def test_a_chunk_whose_copy_failed_is_not_saved() -> None:
    manager = Stored(4)
    _, blocks, _ = manager.prepare_store(1)
    manager.real.report(vllm.WorkerReport(failed_blocks=set(blocks)))
    manager.complete_store(1)
    assert not manager.real.has_pending_work()
    assert manager.await_states(1) == [MISS]


def test_a_chunk_that_is_filled_in_part_is_found_and_not_saved() -> None:
    """A store gives whole chunks, and the worker would take it for one."""
    manager = Stored(4)
    _, blocks, _ = manager.prepare_store(1, 2)
    manager.real.report(vllm.WorkerReport(partial_blocks={blocks[0]}))
    manager.complete_store(1, 2)
    assert manager.await_states(1, 2) == [HIT, HIT]
    manager.wait_saved(1)
    manager.cache.forget(keys(1, 2))
    assert manager.await_states(1, 2) == [MISS, HIT]


@pytest.mark.parametrize("again", ["by the store", "by the engine"])
def test_a_chunk_that_comes_back_whole_is_not_filled_in_part_any_more(again: str) -> None:
    """Into any host block, also that in which it was filled in part."""
    manager = Stored(1)
    manager.fill(1)
    manager.wait_saved(1)
    manager.cache.forget(keys(1))
    (block,) = manager.store_in_part(1)
    manager.fill(2)
    manager.wait_saved(1)
    if again == "by the store":
        assert manager.await_states(1) == [HIT]
    else:
        manager.fill(1)
    spec = manager.real.prepare_load(keys(1), request())
    assert (spec.blocks, spec.partial) == ((block,), ())
    manager.complete_load("r", 1)


def test_a_host_block_of_a_chunk_in_part_is_whole_for_the_chunk_that_a_store_brings() -> None:
    manager = Stored(1)
    manager.fill(1)
    manager.wait_saved(1)
    (block,) = manager.store_in_part(2)
    assert manager.await_states(1) == [HIT]
    spec = manager.real.prepare_load(keys(1), request())
    assert (spec.blocks, spec.partial) == ((block,), ())
    assert (manager.tier.blocks[block] == 1).all()
    manager.complete_load("r", 1)


def test_chunks_in_part_that_have_left_the_cache_are_not_remembered_for_ever() -> None:
    manager = Stored(2)
    for number in range(50):
        manager.store_in_part(number)
    assert len(manager.real._chunks) <= 6
    spec = manager.real.prepare_load(keys(48, 49), request())
    assert spec.partial == spec.blocks


def test_a_reset_retracts_events_of_stores() -> None:
    manager, known = Stored(4), set[int]()
    list(manager.real.take_events())

    def follow() -> set[int]:
        for event in manager.real.take_events():
            numbers = set(manager.numbers(event.keys)) if event.medium is Medium.STORAGE else set()
            known.difference_update(numbers) if event.removed else known.update(numbers)
        return known

    manager.fill(1, 2)
    manager.wait_saved(2)
    assert follow() == {1, 2}
    manager.real.reset_cache()
    assert follow() == set() and manager.await_states(1, 2) == [MISS, MISS]


@pytest.mark.parametrize(
    ("kinds", "source"),
    [(["disk"], "DISK"), (["memory"], "HOST"), (["memory", "disk"], "HOST"), (["disk"] * 2, "DISK")],
)
def test_what_a_store_has_brought_is_reported_to_the_first_that_loads_it(
    kinds: list[str], source: str, tmp_path: Path
) -> None:
    """With several stores, it is the one that has brought it."""
    where = {"memory": "memory:?capacity=1MiB", "disk": "disk:{}?capacity=1MiB"}
    manager = Stored(2, stores=tuple(where[kind].format(tmp_path / str(at)) for at, kind in enumerate(kinds)))
    manager.fill(1, 2)
    manager.wait_saved(2 * len(kinds))
    manager.cache.forget(keys(1))
    assert manager.await_states(1, 2) == [HIT, HIT]
    manager.load("a", 1, 2)
    sources = [manager.real.get_load_source(key, request("a")).name for key in keys(1, 2)]
    assert sources == [source, "HOST"]
    manager.complete_load("a", 1, 2)
    manager.load("b", 1)
    assert manager.real.get_load_source(*keys(1), request("b")).name == "HOST", "it is on the host now"
    manager.complete_load("b", 1)


@pytest.mark.parametrize("seconds", [0.001, 100.0])
def test_a_hit_is_loaded_only_where_that_is_faster_than_to_compute_it(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk takes the engine 10 ms. Before that is known, no load is waited for."""
    slow = Wrong(MemoryStore(1 << 20))
    monkeypatch.setattr(urls, "open_store", lambda text, **names: slow)
    manager = Stored(64, load="faster", load_seconds=1000.0, retry_seconds=0.001)
    manager.fill(*range(32))
    manager.wait_saved(32)
    slow.before["load"] = lambda: setattr(manager, "now", manager.now + seconds)

    def hits(rounds: int) -> int:
        count = 0
        for _ in range(rounds):
            manager.cache.forget(keys(*range(32)))
            manager.now += 1.0
            states = manager.await_states(*range(16))
            count += states == [HIT] * 16
        return count

    assert hits(3) <= 1, "one load tries the store, as long as nobody waits for it"
    manager.real.prefill.begin(8)
    manager.now += 1000.0
    manager.real.prefill.end()
    assert manager.real.prefill.policies[0].block_seconds < 1e-6, "a step without a prompt says nothing"
    manager.real.prefill.begin(100)
    manager.real.prefill.begin(100)
    assert manager.real.prefill.spare() == 0.0, "nobody knows"
    for _ in range(2):
        manager.now += 1.0
        manager.real.prefill.end()
    manager.real.prefill.end()
    assert manager.real.prefill.policies[0].block_seconds == pytest.approx(0.01)
    assert (hits(40) > 20) == (seconds < 1.0)
    manager.real.prefill.begin(100)
    manager.real.prefill.begin(100)
    manager.now += 0.5
    assert manager.real.prefill.spare() == pytest.approx(1.5), "of the two steps that have begun"
    for _ in range(2):
        manager.now += 0.75
        manager.real.prefill.end()
    for tokens, took in ((200, 0.5), (400, 0.1)):
        manager.real.prefill.begin(tokens)
        manager.now += took
        manager.real.prefill.end()
    assert manager.real.prefill.policies[0].block_seconds > 0.0, "of larger steps that were faster, too"


def test_routers_learn_what_a_store_has_and_what_it_has_lost(tmp_path: Path) -> None:
    manager = Stored(8, stores=("memory:?capacity=128", f"disk:{tmp_path}/s?capacity=1MiB"))
    list(manager.real.take_events())
    for number in (1, 2, 3):
        manager.fill(number)
        manager.wait_saved(2)
    manager.cache.forget(keys(1, 2, 3))
    assert manager.await_states(1, 2, 3) == [HIT, HIT, HIT], "the disk has all, and the memory two"
    events = [
        (event.ownership, event.locality.name, event.removed, manager.numbers(event.keys))
        for event in manager.real.take_events()
        if event.medium is Medium.STORAGE
    ]
    owners = {owner for owner, *_ in events}
    assert len(owners) == 2 and {locality for _, locality, *_ in events} == {"LOCAL"}
    stored = {
        owner: sorted(sum((keys for name, _, gone, keys in events if name == owner and not gone), []))
        for owner in owners
    }
    assert list(stored.values()) == [[1, 2, 3]] * 2
    assert [keys for *_, gone, keys in events if gone] == [[1]]

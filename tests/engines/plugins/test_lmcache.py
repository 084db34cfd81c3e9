"""LMCache's own storage manager and its checks over a store: objects come back byte for byte, or not at all."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

plugin = pytest.importorskip(
    "kvpool.integrations.lmcache",
    reason="needs LMCache: python -m tests.engines plugins build, then python -m tests.engines plugins test",
    exc_type=ImportError,
)

import torch  # noqa: E402
from lmcache.v1.check.check_mode_test_l2_adapter import run_test_mode  # noqa: E402

from kvpool.integrations import staged  # noqa: E402
from tests.engines.plugins import lmcache_lab as lab  # noqa: E402
from tests.engines.plugins.lmcache_lab import LARGE, SMALL, keys, memory_object  # noqa: E402
from tests.stores.lab import Gate, Wrong, fail  # noqa: E402

SIZE = 4096
LAYOUT = lab.MemoryLayoutDesc([torch.Size([SIZE])], [torch.uint8])


@pytest.fixture
def make(stores: dict[str, Wrong]) -> Iterator[Callable[..., Any]]:
    made = []

    def make(**params: Any) -> Any:
        adapter = lab.adapter(**params)
        made.append(adapter)
        return adapter

    yield make
    for adapter in made:
        adapter.close()


def objects(count: int, first: int | None = None) -> list[Any]:
    return [memory_object(SIZE, None if first is None else first + number) for number in range(count)]


def same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_objects_of_two_groups_come_back_byte_for_byte_after_a_restart(stores: dict[str, Wrong]) -> None:
    groups = {0: (keys(6), SMALL), 1: (keys(6, group=1), LARGE)}
    with closing(lab.manager()) as before:
        stored = lab.Stored(before)
        content = [lab.write(before, group_keys, layout, seed=group) for group, (group_keys, layout) in groups.items()]
        assert stored.wait([key for group_keys, _ in groups.values() for key in group_keys])
    assert len(stores) == 2, "each size of objects has a store of its own"
    with closing(lab.manager()) as after:
        result = lab.fetch(after, groups)
        assert [row.popcount() for row in result.l2_hit_cells] == [6, 6]
        for (group_keys, _), expected in zip(groups.values(), content, strict=True):
            assert same(lab.read(after, group_keys), expected)


def test_lmcache_computes_what_the_store_has_damaged(stores: dict[str, Wrong]) -> None:
    wanted = keys(6)
    with closing(lab.manager()) as before:
        stored = lab.Stored(before)
        content = lab.write(before, wanted, SMALL, seed=1)
        assert stored.wait(wanted)
    (store,) = stores.values()
    taken = store.inner.load

    def lie(names: Any, rows: Any, stop: Any) -> Any:
        answer = taken(names, rows, stop)
        store.memory[rows[2]] ^= 1
        return answer

    store.inner.load = lie
    with closing(lab.manager()) as after:
        result = lab.fetch(after, {0: (wanted, SMALL)})
        kept = result.hit_cells[0].get_indices_list()
        assert kept and 2 not in kept
        assert same(lab.read(after, [wanted[place] for place in kept]), [content[place] for place in kept])


def test_lmcaches_own_check_of_adapters_passes(stores: dict[str, Wrong], capsys: pytest.CaptureFixture[str]) -> None:
    spec = {
        "type": "plugin",
        "module_path": "kvpool.integrations.lmcache",
        "class_name": "KVPoolL2Adapter",
        "adapter_params": {"stores": "disk:/kv/{part}", "weights": "1", "kv_dtype": "fp8_e4m3"},
    }
    asyncio.run(run_test_mode("toy", l2_adapter=[json.dumps(spec)], obj_size=1024, num_keys=5))
    printed = capsys.readouterr().out
    assert "FAIL" not in printed and "Failed" not in printed, printed
    assert "5/5" in printed and "0/5" not in printed, printed


def test_tasks_of_objects_outside_of_lmcaches_memory(make: Any) -> None:
    adapter = make(staging_bytes=4 * SIZE)
    stored_keys, content = keys(9), objects(9, first=0)
    result = lab.store(adapter, stored_keys, content)
    assert result.is_successful() and result.bytes_transferred() == 9 * SIZE
    assert lab.look_up(adapter, [*keys(1, first=50), *stored_keys], {0: LAYOUT}) == list(range(1, 10))
    empty = objects(10)
    assert lab.load(adapter, [*stored_keys, *keys(1, first=50)], empty) == list(range(9))
    assert same([item.raw_tensor for item in empty[:9]], [item.raw_tensor for item in content])
    usage = adapter.get_usage()
    assert usage.total_bytes_used == 9 * SIZE and usage.bytes_by_cache_salt == {"": 9 * SIZE}
    assert adapter.report_status()["is_healthy"]


def waited_for(opened: list[staged.StagedBlocks]) -> int:
    """Objects that were found, and that count as ahead of those of other requests."""
    return sum(len(blocks._hits._open) for blocks in opened if blocks._hits is not None)


def test_lmcache_unlocks_what_it_has_found_and_does_not_load(
    stores: dict[str, Wrong], opened: list[staged.StagedBlocks]
) -> None:
    """A part of a second group is missing, so that the end of the first one is of no use."""
    with closing(lab.manager()) as before:
        stored = lab.Stored(before)
        for group, count, layout in ((0, 6, SMALL), (1, 3, LARGE)):
            lab.write(before, keys(count, group=group), layout, seed=group)
        assert stored.wait([*keys(6), *keys(3, group=1)])
    opened.clear()
    with closing(lab.manager(load="faster", compute_seconds=60)) as after:
        result = lab.fetch(after, {0: (keys(6), SMALL), 1: (keys(6, group=1), LARGE)})
        assert [row.popcount() for row in result.l2_hit_cells] == [3, 3]
        assert waited_for(opened) == 0
        assert len(lab.read(after, [*keys(3), *keys(3, group=1)])) == 6


@pytest.mark.parametrize(
    "other",
    [
        keys(1, model="other")[0],
        keys(1, group=1)[0],
        keys(1, salt="tenant")[0],
        keys(1, first=1)[0],
        lab.ObjectKey(keys(1)[0].chunk_hash, "toy", 1),
    ],
    ids=["model", "group", "salt", "hash", "rank"],
)
def test_nothing_is_found_under_another_key(other: Any, make: Any) -> None:
    adapter = make()
    assert lab.store(adapter, keys(1), objects(1, first=0)).is_successful()
    layouts = {0: LAYOUT, 1: LAYOUT}
    assert lab.look_up(adapter, [other, *keys(1)], layouts) == [1]
    assert lab.load(adapter, [other, *keys(1)], objects(2)) == [1]


def test_each_rank_has_the_layout_that_its_last_object_had(make: Any) -> None:
    """Ranks of one model may keep objects of different sizes. LMCache need not say the layout again."""
    adapter = make()
    (first,), second = keys(1), lab.ObjectKey(keys(1)[0].chunk_hash, "toy", 1)
    assert lab.store(adapter, [first], objects(1, first=0)).is_successful()
    assert lab.store(adapter, [second], [memory_object(2 * SIZE, 1)]).is_successful()
    assert lab.look_up(adapter, [first, second], {}) == [0, 1]
    adapter.delete([first])
    assert lab.look_up(adapter, [first, second], {}) == [1]


def test_nothing_is_found_of_another_layout_or_other_weights(make: Any) -> None:
    adapter = make()
    assert lab.store(adapter, keys(1), objects(1, first=0)).is_successful()
    halves = lab.MemoryLayoutDesc([torch.Size([SIZE // 2])], [torch.bfloat16])
    assert lab.look_up(adapter, keys(1), {0: halves}) == []
    adapter.close()
    assert lab.look_up(make(weights="2"), keys(1), {0: LAYOUT}) == []
    assert lab.look_up(make(kv_dtype="fp8_e5m2"), keys(1), {0: LAYOUT}) == []
    assert lab.look_up(make(), keys(1), {0: LAYOUT}) == [0]


def test_objects_of_bytes_need_a_name_of_the_type_of_their_elements(make: Any) -> None:
    """Engines keep all 8-bit types as bytes."""
    adapter = make(kv_dtype="")
    assert not lab.store(adapter, keys(1), objects(1, first=0)).is_successful()
    assert lab.look_up(adapter, keys(1), {0: LAYOUT}) == [] == lab.load(adapter, keys(1), objects(1))


def test_a_load_that_is_late_writes_nothing_after_its_task_has_ended(
    make: Any, stores: dict[str, Wrong], opened: list[staged.StagedBlocks]
) -> None:
    adapter = make()
    asked = keys(3)
    lab.store(adapter, asked, objects(3, first=0))
    (store,), (blocks,) = stores.values(), opened
    gate = Gate()
    store.before["load"], blocks.seconds["load"] = gate, 0.2
    empty = objects(3)
    while not gate.reached.is_set():
        blocks.worker.health.resume()
        assert lab.load(adapter, asked, empty) == []
    assert adapter.report_status()["troubles"][f"{SIZE} load late"] >= 3
    gate.open()
    assert blocks.worker.drain(600)
    assert not any(item.raw_tensor.any() for item in empty)
    blocks.seconds["load"] = 60
    blocks.worker.health.resume()
    assert lab.load(adapter, asked, empty) == [0, 1, 2] and adapter.report_status()["is_healthy"]


@pytest.mark.parametrize("broken", ["open", "find", "load", "save"])
def test_a_dead_store_gives_results_without_objects(
    broken: str, make: Any, stores: dict[str, Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make()
    asked = keys(3)
    if broken == "open":
        no_device = OSError("no such device")
        monkeypatch.setattr(staged, "open_store", lambda text, **names: (_ for _ in ()).throw(no_device))
    else:
        lab.store(adapter, asked, objects(3, first=0))
        (store,) = stores.values()

        store.before[broken] = fail
    results = {
        "save": lambda: lab.store(adapter, asked, objects(3, first=9)).is_successful(),
        "find": lambda: lab.look_up(adapter, asked, {0: LAYOUT}),
        "load": lambda: lab.load(adapter, asked, objects(3)),
    }
    for kind in results if broken == "open" else [broken]:
        assert not results[kind]()
    assert adapter.report_status()["is_healthy"] == (broken == "open")


def test_deleted_objects_are_gone_and_counted_once(make: Any) -> None:
    adapter = make()
    lab.store(adapter, keys(3), objects(3, first=0))
    adapter.delete(keys(2))
    adapter.delete([*keys(2), *keys(1, model="unknown")])
    assert lab.look_up(adapter, keys(3), {0: LAYOUT}) == [2]
    assert adapter.get_usage().bytes_by_cache_salt == {"": SIZE}


def test_sizes_without_a_store_of_their_own_are_not_kept(make: Any) -> None:
    adapter = make(stores="disk:/kv")
    result = lab.store(adapter, keys(2), [memory_object(SIZE, 0), memory_object(2 * SIZE, 1)])
    assert not result.is_successful()
    assert lab.load(adapter, keys(1), objects(1)) == [0]


def test_tasks_beyond_the_bound_end_at_once(
    make: Any, stores: dict[str, Wrong], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugin, "_TASKS_MAX", 1)
    adapter = make()
    lab.store(adapter, keys(1), objects(1, first=0))
    gate = Gate()
    (store,) = stores.values()
    store.before["load"] = gate
    first = adapter.submit_load_task(keys(1), objects(1))
    assert gate.reached.wait(600)
    second, third = (adapter.submit_load_task(keys(1), objects(1)) for _ in range(2))
    assert adapter.query_load_result(third).popcount() == 0
    assert adapter.query_load_result(first) is None and adapter.query_load_result(second) is None
    gate.open()
    while (result := adapter.query_load_result(second)) is None:
        lab.wait_for(adapter.get_load_event_fd())
    assert result.popcount() == 1 and adapter.query_load_result(first).popcount() == 1


def test_closing_ends_tasks_that_wait(make: Any, stores: dict[str, Wrong]) -> None:
    adapter = make()
    lab.store(adapter, keys(1), objects(1, first=0))
    gate = Gate()
    (store,) = stores.values()
    store.before["load"] = gate
    tasks = [adapter.submit_load_task(keys(1), objects(1)) for _ in range(3)]
    assert gate.reached.wait(600)
    closing = threading.Thread(target=adapter.close)
    closing.start()
    lab.wait_for(adapter.get_load_event_fd())
    gate.open()
    closing.join()
    assert [adapter.query_load_result(task).popcount() for task in tasks] == [0, 0, 0]

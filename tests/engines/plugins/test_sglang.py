"""SGLang's own controller and host memory over a store: pages come back byte for byte, or not at all."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

plugin = pytest.importorskip(
    "kvpool.integrations.sglang",
    reason="needs SGLang: python -m tests.engines plugins build, then python -m tests.engines plugins test",
    exc_type=ImportError,
)

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import storage_namespace_seed  # noqa: E402

from kvpool.integrations import staged  # noqa: E402
from kvpool.integrations.options import EnginePlugin  # noqa: E402
from tests.engines.plugins import sglang_lab as lab  # noqa: E402
from tests.engines.plugins.sglang_lab import PAGE, SLOW, PoolName, PoolTransfer, back_up, fetch, host_pool  # noqa: E402
from tests.stores.lab import Wrong, fail  # noqa: E402

TOKENS = list(range(1000, 1000 + 10 * PAGE))
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


@pytest.fixture
def attach(stores: dict[str, Wrong]) -> Iterator[Callable[..., Any]]:
    attached = []

    def attach(pool: Any, *, metrics: bool = False, **options: Any) -> Any:
        controller = lab.controller(pool, metrics, **{"stores": "disk:/kv/{part}", **SLOW, **options})
        attached.append(controller)
        return controller

    yield attach
    for controller in attached:
        controller.detach_storage_backend()


@pytest.mark.parametrize("interface", ["generic", "v1", "v1 without views"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_byte_for_byte_after_a_restart(
    layout: str, interface: str, attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = host_pool(layout)
    assert plugin._views(pool)
    if interface == "v1 without views":
        monkeypatch.setattr(plugin, "_views", lambda pool: False)
    interface_v1 = int(interface != "generic")
    before = attach(pool, interface_v1=interface_v1, staging_bytes=4 * 512)
    kept = pool.alloc(10 * PAGE)[torch.arange(10 * PAGE).view(10, PAGE).flip(0).flatten()]
    pages = lab.write(pool, kept, seed=1)
    assert back_up(before, kept, TOKENS) == len(TOKENS)
    before.detach_storage_backend()

    fresh = host_pool(layout)
    after = attach(fresh, interface_v1=interface_v1)
    indices, came, _ = fetch(after, [*TOKENS, *range(7 * PAGE)])
    assert came == len(TOKENS)
    assert lab.same(lab.read(fresh, indices), pages)
    assert fetch(after, [7, *TOKENS])[1] == 0


@pytest.mark.parametrize("interface", [0, 1], ids=["generic", "v1"])
def test_the_pages_after_a_wrong_one_are_computed_and_the_wrong_one_is_forgotten(
    interface: int, attach: Any, stores: dict[str, Wrong]
) -> None:
    pool = host_pool("page_first")
    controller = attach(pool, interface_v1=interface)
    kept = pool.alloc(10 * PAGE)
    pages = lab.write(pool, kept, seed=2)
    back_up(controller, kept, TOKENS)
    (store,) = stores.values()
    taken = store.inner.load

    def lie(keys: Any, rows: Any, stop: Any) -> Any:
        answer = taken(keys, rows, stop)
        store.memory[rows[3]] ^= 1
        return answer

    store.inner.load = lie
    indices, came, _ = fetch(controller, TOKENS)
    assert came == 3 * PAGE
    assert lab.same(lab.read(pool, indices[:came]), pages[:3])
    store.inner.load = taken
    assert fetch(controller, TOKENS)[1] == 3 * PAGE


@pytest.mark.parametrize("broken", ["find", "load", "save", "all"])
def test_a_dead_store_is_a_miss_and_no_thread_of_sglang_ends(
    broken: str,
    attach: Any,
    stores: dict[str, Wrong],
    opened: list[staged.StagedBlocks],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = host_pool("layer_first")
    controller = attach(pool, interface_v1=1)
    kept = pool.alloc(10 * PAGE)
    pages = lab.write(pool, kept, seed=5)
    back_up(controller, kept, TOKENS)
    (store,) = stores.values()

    store.before.update(dict.fromkeys(["find", "load", "save"] if broken == "all" else [broken], fail))
    other = list(range(10 * PAGE))
    with caplog.at_level(logging.ERROR):
        assert back_up(controller, kept, other) == (0 if broken in ("save", "all") else len(other))
        assert fetch(controller, TOKENS)[1] == 0 or broken == "save"
    assert not [record for record in caplog.records if record.exc_info]
    store.before.clear()
    opened[0].worker.health.resume()
    indices, came, _ = fetch(controller, TOKENS)
    assert came == len(TOKENS) and lab.same(lab.read(pool, indices), pages)


@pytest.mark.parametrize("names", ["{part}", "{rank}-{dp_rank}"])
def test_replicas_of_attention_have_a_folder_each(names: str, tmp_path: Path) -> None:
    pytest.importorskip("kvpool.storage.backends.disk")
    from kvpool.integrations.sglang import KVPoolHiCacheStorage

    opened = []
    for dp_rank in (0, 1):
        options = lab.config(stores=f"disk:{tmp_path}/{names}?capacity=1MiB", weights="r", dp_rank=dp_rank)
        opened.append(KVPoolHiCacheStorage(options))
        opened[-1].register_mem_pool_host(host_pool("page_first"))
    assert len(list(tmp_path.iterdir())) == 2
    for storage in opened:
        storage.close()


def transfers(**keys: Any) -> list[PoolTransfer]:
    return [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV, **keys)]


def test_pools_beside_kv_are_kept_and_found_with_it(attach: Any, stores: dict[str, Wrong]) -> None:
    pools = {PoolName.KV: host_pool("page_first"), PoolName.DRAFT: host_pool("page_first", torch.float16, layers=1)}
    controller = attach(lab.grouped(pools), interface_v1=1)
    kept = pools[PoolName.KV].alloc(10 * PAGE)
    pages = {name: lab.write(pool, kept, seed=6 + place) for place, (name, pool) in enumerate(pools.items())}
    assert back_up(controller, kept, TOKENS, extra_pools=transfers()) == len(TOKENS)
    assert len(stores) == 2, "each pool has a store of its own"
    indices, came, _ = fetch(controller, TOKENS, transfers())
    assert came == len(TOKENS)
    for name, pool in pools.items():
        assert lab.same(lab.read(pool, indices), pages[name])


def test_a_pool_beside_kv_that_has_less_limits_the_hit(attach: Any) -> None:
    pools = {PoolName.KV: host_pool("page_first"), PoolName.DRAFT: host_pool("page_first", layers=1)}
    backend = attach(lab.grouped(pools)).storage_backend
    kept = pools[PoolName.KV].alloc(6 * PAGE)
    keys = [f"{number:064x}" for number in range(6)]
    assert backend.batch_set_v1(keys, kept) == [True] * 6
    some = torch.cat([kept[:PAGE], kept[3 * PAGE : 5 * PAGE]])
    (draft,) = transfers(keys=[keys[0], *keys[3:5]], host_indices=some)
    assert backend.batch_set_v2([draft]) == {PoolName.DRAFT: [True] * 3}

    def asked(policy: str, trailing: int = 1) -> Any:
        transfer = PoolTransfer(PoolName.DRAFT, keys=keys[:trailing], hit_policy=PoolHitPolicy(policy))
        hits = backend.batch_exists_v2(keys, [transfer])
        return hits.kv_hit_pages, hits.extra_pool_hit_pages.get(PoolName.DRAFT, 0), hits.restorable_prefix_pages

    assert asked("all_pages") == (1, 1, [1])
    assert asked("trailing_pages", 1) == (5, 5, [1, 4, 5])
    assert asked("trailing_pages", 2) == (5, 5, [1, 5])
    assert asked("trailing_pages", 3) == (1, 1, [1])
    assert asked("block_groups") == (6, 0, [1, 2, 3, 4, 5, 6])
    assert backend.batch_exists_v2(["unknown", *keys]).kv_hit_pages == 0


def test_what_does_not_fit_is_refused_page_by_page(attach: Any) -> None:
    pool = host_pool("page_first")
    backend = attach(pool).storage_backend
    page = pool.get_dummy_flat_data_page()
    assert backend.set("a", page) and backend.exists("a") and not backend.exists("b")
    assert backend.get("a", torch.empty_like(page)) is not None and backend.get("b", page) is None
    assert backend.get("a", page[:-1]) is None and backend.get("a") is None
    assert not backend.set("c", page[:-1]) and not backend.set("c", None) and not backend.exists("c")
    assert backend.batch_get_v1(["a"], torch.arange(PAGE - 1)) == [False]
    assert backend.batch_set_v1(["a"], torch.arange(2 * PAGE)) == [False]
    assert backend.batch_get_v2([PoolTransfer(PoolName.SWA, keys=["a"])]) == {PoolName.SWA: [False]}
    assert backend.batch_set_v2([PoolTransfer(PoolName.KV, keys=["a"])]) == {PoolName.KV: [False]}


def test_sglangs_clear_leaves_nothing_to_be_found(attach: Any) -> None:
    pools = {PoolName.KV: host_pool("page_first")}
    controller = attach(lab.grouped(pools))
    kept = pools[PoolName.KV].alloc(10 * PAGE)
    back_up(controller, kept, TOKENS)
    assert controller.clear_storage_backend() and fetch(controller, TOKENS)[1] == 0


@pytest.mark.parametrize(
    "change",
    [
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"layout": "layer_first"},
        {"dtype": torch.float16},
        {"weights": "2"},
        {"kv_dtype": "fp8_e4m3"},
        {"version": "0.5.22"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_nothing_is_found_of_another_model_or_share_or_layout(
    change: dict[str, Any], attach: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = attach(host_pool("page_first"), stores="memory:shared")
    kept = controller.mem_pool_host.alloc(10 * PAGE)
    back_up(controller, kept, TOKENS)
    keys = lab.names_of(TOKENS)
    config, options = controller.storage_config, dict(controller.storage_config.extra_config)
    options.update({name: change[name] for name in ("weights", "kv_dtype") if name in change})
    fields = {name: change[name] for name in change if hasattr(config, name)}
    if "version" in change:
        monkeypatch.setattr(EnginePlugin, "version", lambda self: change["version"])

    def hits_of(changed: bool) -> int:
        pool = host_pool(
            change.get("layout", "page_first") if changed else "page_first",
            change.get("dtype", torch.bfloat16) if changed else torch.bfloat16,
        )
        own_config = dataclasses.replace(config, extra_config=options, **fields) if changed else config
        backend = StorageBackendFactory.create_backend("dynamic", own_config, pool)
        backend.register_mem_pool_host(pool)
        hits = backend.batch_exists(keys)
        backend.close()
        return hits

    assert hits_of(changed=True) == 0
    if "version" not in change:
        assert hits_of(changed=False) == 10


def test_salts_and_adapters_begin_chains_of_their_own() -> None:
    """SGLang appends the id of an adapter to ``extra_key``, and names pages by chains that begin with this seed."""
    namespaces = [(None, None), ("adapter", None), ("other", None), (None, "adapter"), ("a", "b"), ("", None)]
    seeds = {storage_namespace_seed(*namespace) for namespace in namespaces}
    assert len(seeds) == len(namespaces)
    assert len({lab.names_of([1, 2, 3, 4], seed)[0] for seed in seeds}) == len(namespaces)


def test_pages_of_bytes_are_found_for_one_type_of_elements_only(stores: dict[str, Wrong]) -> None:
    """SGLang keeps all 8-bit types as bytes."""
    pool = host_pool("page_first", dtype=torch.uint8)
    kept, keys = pool.alloc(len(TOKENS)), lab.names_of(TOKENS)

    def backend(**options: Any) -> Any:
        backend_made = StorageBackendFactory.create_backend(
            "dynamic", lab.config(stores="disk:/kv", weights="1", **options), pool
        )
        backend_made.register_mem_pool_host(pool)
        return backend_made

    with pytest.raises(ValueError, match=r"kv_dtype: expected a text .*since torch.uint8 may be any type"):
        backend()
    with closing(backend(kv_dtype="fp8_e4m3")) as opened:
        assert all(opened.batch_set_v1(keys, kept))
    with closing(backend(kv_dtype="fp8_e5m2")) as other:
        assert other.batch_exists(keys) == 0 and not any(other.batch_get_v1(keys, kept))
    with closing(backend(kv_dtype="fp8_e4m3")) as opened:
        assert all(opened.batch_get_v1(keys, kept))


def test_ranks_of_mla_share_pages_and_need_a_store_that_they_share() -> None:
    pool = host_pool("page_first")
    config = lab.config(is_mla_model=True, tp_rank=1, tp_size=2, weights="1", stores="memory:?capacity=1MiB")
    with pytest.raises(ValueError, match="mooncake, peer, s3"):
        StorageBackendFactory.create_backend("dynamic", config, pool)


def test_a_second_pool_needs_a_store_of_its_own(attach: Any) -> None:
    pools = {PoolName.KV: host_pool("page_first"), PoolName.DRAFT: host_pool("page_first", layers=1)}
    with pytest.raises(ValueError, match=r"\{part\}"):
        attach(lab.grouped(pools), stores="disk:/kv")

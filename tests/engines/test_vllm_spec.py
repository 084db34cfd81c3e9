"""What a user writes into vLLM's configuration: sizes, and what is refused, with words that say what to write."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

vllm = pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

import torch  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (  # noqa: E402
    derive_canonical_mappings,
)
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.kv_offload import base  # noqa: E402
from vllm.v1.kv_offload.config import (  # noqa: E402
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

import kvpool  # noqa: E402
from tests.engines import serve  # noqa: E402

BLOCK_BYTES = 4096


def config(
    extra: dict[str, Any],
    *,
    workers: int = 1,
    stages: int = 1,
    context: int = 1,
    per_chunk: int = 1,
    rank: int = 0,
    agnostic: bool = False,
    **more: Any,
) -> Any:
    world = workers * stages * context
    parallel = OffloadingParallelConfig(rank, world, workers, stages, context, 1, 0, 1, None, agnostic)
    groups = (OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),)
    config = OffloadingConfig(
        groups,
        BLOCK_BYTES,
        False,
        extra,
        "engine",
        OffloadingModelConfig("toy", "float16"),
        OffloadingCacheConfig(16, per_chunk),
        parallel,
    )
    return replace(config, **more)


def serving(algorithm: str = "sha256", *, latent: bool = False) -> Any:
    """What kvpool's connector says to its spec in the scheduler's process."""
    model = SimpleNamespace(compute_hash=lambda: "settings", max_model_len=64, use_mla=latent)
    caching = SimpleNamespace(prefix_caching_hash_algo=algorithm, enable_prefix_caching=not latent)
    kind = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float16)
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind)])
    settings = SimpleNamespace(cache_config=caching, model_config=model)
    return vllm.deployed(vllm.Deployment(settings, groups, True))


@pytest.mark.parametrize(("workers", "per_chunk", "blocks"), [(1, 1, 256), (2, 1, 128), (1, 4, 64), (4, 4, 16)])
def test_host_memory_is_that_of_all_workers(workers: int, per_chunk: int, blocks: int) -> None:
    spec = vllm.KVPoolOffloadingSpec(config({"host_bytes": "1MiB"}, workers=workers, per_chunk=per_chunk))
    assert spec.host_blocks == blocks
    assert spec.share == per_chunk * BLOCK_BYTES


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (config({}), "host_bytes"),
        (config({"host_bytes": 4095}), "4096 bytes"),
        (config({"host_bytes": "1GiB"}, canonical_layout=True), "canonical_layout=True.*does not certify"),
        (config({"host_bytes": "1GiB"}, worker_kv_bytes_per_block=0), "no bytes"),
        (
            config({"host_bytes": "1GiB", "stores": ["memory:"]}, context=2),
            "expected none without tensor and pipeline",
        ),
        (config({"host_bytes": "1GiB", "stores": ["memory:"]}), '"kv_connector": "KVPoolOffloadingConnector"'),
    ],
)
def test_what_is_not_supported_is_said_at_the_start(made: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        vllm.KVPoolOffloadingSpec(made)


def test_latent_attention_is_refused_where_vllm_computes_other_tokens_after_a_prefix() -> None:
    """With a tier that is not kvpool's, vLLM says other tokens too."""
    with serving(latent=True), pytest.raises(ValueError, match="latent attention on this CPU"):
        vllm.KVPoolOffloadingSpec(config({"host_bytes": "1MiB"}))


LASTING = {"host_bytes": "1GiB", "stores": ["disk:/a"], "weights": "1"}


def test_only_hashes_with_a_random_start_need_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_accepted(algorithm: str, **changes: Any) -> None:
        with serving(algorithm):
            assert vllm.KVPoolOffloadingSpec(config(LASTING | changes)).stored_as is not None

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert_accepted("sha256")
    assert_accepted("sha256_cbor")
    assert_accepted("xxhash", stores=["memory:"])
    with pytest.raises(ValueError, match="PYTHONHASHSEED=0, got .xxhash"):
        assert_accepted("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert_accepted("xxhash")


FIRST_REQUESTS = """
import sys
import numpy as np, torch
from kvpool.integrations.options import EngineOptions
from tests.engines import test_vllm_spec as specs, vllm_lab as managers
stores, per_chunk = sys.argv[1] == "stores", int(sys.argv[2])
with specs.serving():
    spec = specs.vllm.KVPoolOffloadingSpec(specs.config({"host_bytes": "64KiB"}, per_chunk=per_chunk))
worker = specs.worker_of(spec, [torch.zeros((12, specs.BLOCK_BYTES // 2), dtype=torch.int8) for _ in range(2)])
real = spec.get_manager()
compiled = specs.serve.compilations()
manager = managers.Stored(4) if stores else managers.Manager(4, 64)
for numbers in ((1, 2), (3, 4), (2, 5)):
    manager.store(*numbers)
    manager.real.on_request_finished(managers.request())
    manager.lookup(*numbers, 9)
    manager.load("a", *numbers)
    manager.complete_load("a", *numbers)
    manager.counted()
    list(manager.real.take_events())
if stores:
    manager.wait_saved(1)
    manager.await_states(1, 3, 9)
manager.load("b", 5)
manager.real.load_failed("b")
manager.complete_load("b", 5)
manager.real.reset_cache()
manager.real.shutdown()
base, blocks = specs.base, list(range(per_chunk))
for job, device in ((1, ([1, 2, 3][:per_chunk], (per_chunk, 0), (0, 0))), (3, (blocks, (0, per_chunk), (0, 0)))):
    worker.submit_store(job, base.GPULoadStoreSpec(*device), specs.vllm.HostBlocks((3,)))
    worker.submit_load(job + 1, specs.vllm.HostBlocks((3,), ()), base.GPULoadStoreSpec(*device))
    worker.wait({job, job + 1})
    assert all(one.success for one in worker.get_finished())
worker.shutdown()
print(compiled)
"""


@pytest.mark.parametrize("stores", ["none", "stores"])
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_no_request_compiles_anything(stores: str, per_chunk: int) -> None:
    command = [sys.executable, "-c", FIRST_REQUESTS, stores, str(per_chunk)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["[]"]), done.stderr[-3000:]


def test_what_is_compiled_leaves_no_trace() -> None:
    """A worker copies a block to the host and back before any request has one."""
    worker, tensors = small_worker(fill=7)
    assert all((tensor == 7).all() for tensor in tensors)
    worker.submit_load(1, vllm.HostBlocks((0,)), base.GPULoadStoreSpec([5], (1, 0), (0, 0)))
    worker.wait({1})
    assert [result.success for result in worker.get_finished()] == [False], "nobody has stored it"
    worker.shutdown()


def test_the_index_and_the_memory_of_every_worker_belong_together() -> None:
    specs = [vllm.KVPoolOffloadingSpec(config({"host_bytes": "1MiB"}, workers=2)) for _ in range(2)]
    assert specs[0].identity == specs[1].identity
    other = vllm.KVPoolOffloadingSpec(config({"host_bytes": "1MiB"}, workers=2, engine_id="another"))
    assert other.identity != specs[0].identity


def worker_of(spec: Any, tensors: list[Any]) -> Any:
    """The worker for two groups over the same tensors."""
    refs = [[base.CanonicalKVCacheRef(index, BLOCK_BYTES // 2) for index in range(len(tensors))]] * 2
    caches = [base.CanonicalKVCacheTensor(tensor, BLOCK_BYTES // 2) for tensor in tensors]
    return spec.get_worker(base.CanonicalKVCaches(caches, refs))


def small_worker(per_chunk: int = 1, fill: int = 0) -> tuple[Any, list[Any]]:
    """A worker, and the tensors that it copies."""
    tensors = [torch.full((12, BLOCK_BYTES // 2), fill, dtype=torch.int8) for _ in range(2)]
    spec = vllm.KVPoolOffloadingSpec(config({"host_bytes": "64KiB"}, per_chunk=per_chunk))
    return worker_of(spec, tensors), tensors


@pytest.mark.parametrize(
    ("recovers", "expedited", "survives"), [(True, False, True), (False, False, False), (True, True, False)]
)
def test_a_failed_load_is_a_success_only_where_somebody_computes_it(
    recovers: bool, expedited: bool, survives: bool
) -> None:
    worker, _ = small_worker()
    worker.recovers = recovers
    worker.submit_load(1, vllm.HostBlocks((3,)), base.GPULoadStoreSpec([7], (1, 0), (0, 0)), expedited)
    assert [result.success for result in worker.get_finished()] == [survives]
    assert (worker.take_failed(), worker.take_failed()) == ({1}, set())
    worker.shutdown()


@pytest.mark.parametrize(("partial", "comes"), [((), True), ((3,), False), (None, False)])
def test_a_worker_loads_what_a_store_has_brought_where_the_scheduler_says_that_it_is_whole(
    partial: Any, comes: bool
) -> None:
    worker, _ = small_worker(per_chunk=2)
    worker.submit_store(1, base.GPULoadStoreSpec([1], (1, 0), (0, 0)), vllm.HostBlocks((3,)))
    worker.wait({1})
    worker.submit_load(2, vllm.HostBlocks((3,), partial), base.GPULoadStoreSpec([7, 8], (2, 0), (0, 0)))
    worker.wait({2})
    assert [result.success for result in worker.get_finished()] == [True, comes]
    reports = [worker.take_report(vllm.WorkerReport({})) for _ in range(2)]
    assert [(report.failed_blocks, report.partial_blocks) for report in reports] == [(set(), {3}), (set(), set())]
    worker.shutdown()


def test_a_worker_stores_and_loads_what_vllm_names() -> None:
    """As in ``tests/v1/kv_offload/cpu/test_gpu_worker.py`` of vLLM: two groups over the same tensors, chunks of two
    blocks, and a load that begins in the middle of one."""
    worker, tensors = small_worker(per_chunk=2)
    random = np.random.default_rng(7)
    for tensor in tensors:
        tensor.numpy()[...] = random.integers(-128, 128, tensor.shape, dtype=np.int8)
    wanted = [tensor.clone() for tensor in tensors]
    worker.submit_store(1, base.GPULoadStoreSpec([1, 2, 3, 4, 9, 8], (4, 2), (0, 4)), vllm.HostBlocks((3, 0, 5)))
    assert [(result.job_id, result.success, result.transfer_size) for result in worker.get_finished()] == [
        (1, True, 6 * BLOCK_BYTES)
    ]
    for tensor in tensors:
        tensor.zero_()
    worker.submit_load(2, vllm.HostBlocks((3, 0, 5)), base.GPULoadStoreSpec([7, 6, 5, 11, 10], (3, 2), (1, 4)))
    worker.wait({2})
    assert [result.success for result in worker.get_finished()] == [True]
    for tensor, before in zip(tensors, wanted, strict=True):
        np.testing.assert_array_equal(tensor[[7, 6, 5]], before[[2, 3, 4]])
        np.testing.assert_array_equal(tensor[[11, 10]], before[[9, 8]])
        assert not tensor[[0, 1, 2, 3, 4, 8, 9]].any()
    worker.shutdown()


# -- several workers ------------------------------------------------------------------------------------


@pytest.fixture
def first_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of one engine are made in this process, the first one first."""
    said: list[Any] = []

    def from_first_worker(given: Any, parallel: Any) -> Any:
        if parallel.rank == 0:
            said[:] = [given]
        return said[0]

    monkeypatch.setattr(vllm, "from_first_worker", from_first_worker)


def workers_of(caches: list[base.CanonicalKVCaches], extra: dict[str, Any], **more: Any) -> tuple[list[Any], list[Any]]:
    """The specs of all workers, and the workers with these caches."""
    specs = [vllm.KVPoolOffloadingSpec(config(extra, rank=rank, **more)) for rank in range(len(caches))]
    return specs, [spec.get_worker(cache) for spec, cache in zip(specs, caches, strict=True)]


def caches_of(tensors: list[Any], mappings: list[Any] | None = None) -> base.CanonicalKVCaches:
    """One group of layers, each with a tensor."""
    pages = [tensor.shape[1] for tensor in tensors]
    refs = [
        base.CanonicalKVCacheRef(index, page, mapping)
        for index, (page, mapping) in enumerate(zip(pages, mappings or [None] * len(pages), strict=True))
    ]
    canonical = [base.CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, pages, strict=True)]
    return base.CanonicalKVCaches(canonical, [refs])


def moved(worker: Any, job: int, blocks: list[int], hosts: tuple[int, ...], *, load: bool, partial: Any = ()) -> bool:
    """Whether a store or a load has succeeded."""
    device = base.GPULoadStoreSpec(blocks, (len(blocks),), (0,))
    if load:
        worker.submit_load(job, vllm.HostBlocks(hosts, partial), device)
    else:
        worker.submit_store(job, device, vllm.HostBlocks(hosts))
    worker.wait({job})
    return all(result.success for result in worker.get_finished())


def noise(seed: int, layers: int, *shape: int) -> list[Any]:
    random = np.random.default_rng(seed)
    return [torch.from_numpy(random.integers(-128, 128, shape, dtype=np.int8)) for _ in range(layers)]


def test_what_all_workers_have_alike_is_kept_once(first_says: None) -> None:
    """Latent attention: vLLM has the first worker store, and all load."""
    tensors = [noise(seed, 2, 12, BLOCK_BYTES // 2) for seed in (1, 2)]
    more = {"workers": 2, "replicated_layout": True}
    specs, workers = workers_of([caches_of(tensor) for tensor in tensors], {"host_bytes": "64KiB"}, **more)
    assert [spec.host_blocks for spec in specs] == [16, 16] and all(spec.replicated_layout for spec in specs)
    assert moved(workers[0], 1, [1, 2], (3, 0), load=False)
    assert moved(workers[1], 2, [7, 8], (3, 0), load=True), "it attaches what the first one has"
    for first, second in zip(*tensors, strict=True):
        np.testing.assert_array_equal(second[[7, 8]], first[[1, 2]])
    assert not moved(workers[1], 3, [7], (3,), load=True, partial=(3,)), "it has not seen what is missing there"
    for worker in workers:
        worker.shutdown()


@pytest.mark.parametrize("stores", [False, True])
def test_stages_have_their_own_layers(first_says: None, stores: bool) -> None:
    shares = [noise(seed, layers, 12, 512) for seed, layers in ((1, 2), (2, 2 if stores else 3))]
    extra = {"host_bytes": "64KiB"} | ({"stores": ["memory:"], "weights": "1"} if stores else {})
    specs, workers = [], []
    with serving():
        for rank, tensors in enumerate(shares):
            nbytes = 512 * len(tensors)
            made = config(extra, stages=2, rank=rank, worker_kv_bytes_per_block=nbytes, engine_id="e")
            specs.append(vllm.KVPoolOffloadingSpec(made))
            workers.append(specs[-1].get_worker(caches_of(tensors)))
    assert {spec.host_blocks for spec in specs} == {32}
    before = [[tensor.clone() for tensor in tensors] for tensors in shares]
    for worker, tensors in zip(workers, shares, strict=True):
        assert moved(worker, 1, [4, 5], (31, 2), load=False)
        for tensor in tensors:
            tensor.zero_()
    for worker, tensors, old in zip(workers, shares, before, strict=True):
        assert moved(worker, 2, [9, 8], (31, 2), load=True)
        for tensor, values in zip(tensors, old, strict=True):
            np.testing.assert_array_equal(tensor[[9, 8]], values[[4, 5]])
        worker.shutdown()
    if stores:
        assert specs[0].stored_as == specs[1].stored_as is not None
        with (
            serving(),
            pytest.raises(ValueError, match="pipeline_parallel_size: expected stages with equally many layers .*got 2"),
        ):
            vllm.KVPoolOffloadingSpec(config(extra, stages=2, rank=1, worker_kv_bytes_per_block=1536)).get_tier()


HEADS, TOKENS, HEAD = 4, 8, 16
LAYOUTS = {
    "packed NHD": ("b t h kd", "b h t kd"),
    "packed HND": ("b h t kd", "b h t kd"),
    "split NHD": ("b k t h d", "b k t h d"),
    "split HND": ("b k h t d", "b k t h d"),
}


def shard(layout: str, values: np.ndarray, rank: int, workers: int) -> tuple[Any, Any]:
    """A worker's memory of a layer, as vLLM sees it, and as [blocks, bytes]. ``values`` [b, k, t, h, d]: of all
    heads."""
    memory, seen = LAYOUTS[layout]
    part = values[:, :, :, rank * HEADS // workers : (rank + 1) * HEADS // workers]
    order = memory.replace("kd", "k d").split()
    lain = np.ascontiguousarray(part.transpose([*map("b k t h d".split().index, order)]))
    if "kd" in memory:
        lain = lain.reshape(*lain.shape[:3], -1)
    tensor = torch.from_numpy(lain)
    view = tensor.permute([*map(memory.split().index, seen.split())])
    return view, tensor.view(torch.int8).reshape(len(lain), -1)


def certified(layout: str, values: list[np.ndarray], rank: int, workers: int) -> base.CanonicalKVCaches:
    """A worker's caches, with what vLLM says of their layout."""
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS // workers, head_size=HEAD, dtype=torch.float16)
    names = [f"layer.{index}" for index in range(len(values))]
    both = [shard(layout, value, rank, workers) for value in values]
    parallel = SimpleNamespace(
        tensor_parallel_size=workers,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        world_size=workers,
        rank=rank,
        cp_kv_cache_interleave_size=1,
    )
    model = SimpleNamespace(get_total_num_kv_heads=lambda: HEADS)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=names)]
    mappings = derive_canonical_mappings(
        SimpleNamespace(parallel_config=parallel, model_config=model),
        SimpleNamespace(num_blocks=len(values[0]), kv_cache_groups=groups),
        {name: view for name, (view, _) in zip(names, both, strict=True)},
    )
    return caches_of([flat for _, flat in both], [mappings[name] for name in names])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_chunk", [1, 2])
def test_a_host_block_is_the_same_with_any_number_of_workers(layout: str, per_chunk: int, first_says: None) -> None:
    """In the canonical layout: what one number of workers has stored, another loads."""
    random, blocks = np.random.default_rng(6), 6
    shape = (blocks, 2, TOKENS, HEADS, HEAD)
    values = [random.integers(0, 1 << 15, shape).astype(np.uint16).view(np.float16) for _ in range(3)]
    page, nothing = 2 * TOKENS * HEADS * HEAD * 2, [np.zeros_like(value) for value in values]
    tiers, identities = {}, set()
    for workers in (1, 2, 4):
        more = {
            "workers": workers,
            "canonical_layout": True,
            "agnostic": True,
            "per_chunk": per_chunk,
            "worker_kv_bytes_per_block": 3 * page // workers,
            "kv_cache_layout": "LBNHC",
        }
        full = [certified(layout, values, rank, workers) for rank in range(workers)]
        empty = [certified(layout, nothing, rank, workers) for rank in range(workers)]
        specs, storing = workers_of(full, {"host_bytes": 8 * 3 * page * per_chunk}, **more)
        identities.add(specs[0].identity)
        hosts = (5, 1)[: 4 // per_chunk // 2]
        stored = [4, 1, 5, 2][: len(hosts) * per_chunk]
        assert all(moved(worker, 1, stored, hosts, load=False) for worker in storing)
        tier = tiers[workers] = kvpool.HostTier.attach(specs[0].description)
        assert (tier.blocks[list(hosts)] == tiers[1].blocks[list(hosts)]).all(), "the bytes of one worker"
        others, loading = workers_of(empty, {"host_bytes": 8 * 3 * page * per_chunk}, **more)
        kvpool.HostTier.attach(others[0].description).blocks[...] = tiers[1].blocks
        assert all(moved(worker, 1, stored, hosts, load=True) for worker in loading)
        for cache, other in zip(full, empty, strict=True):
            for a, b in zip(cache.tensors, other.tensors, strict=True):
                np.testing.assert_array_equal(b.tensor[stored], a.tensor[stored])
        for worker in (*storing, *loading):
            worker.shutdown()
    assert len(identities) == 1


def test_a_layer_that_vllm_does_not_certify_is_refused_in_the_canonical_layout(first_says: None) -> None:
    made = config({"host_bytes": "64KiB"}, canonical_layout=True, agnostic=True, kv_cache_layout="LBNHC")
    with pytest.raises(ValueError, match="does not certify the layout of all layers"):
        vllm.KVPoolOffloadingSpec(made).get_worker(caches_of(noise(1, 2, 12, 512)))


def test_the_commands_that_are_shown_are_what_the_tests_run() -> None:
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    commands = re.findall(r"vllm serve (.*?)```", page, re.DOTALL)
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with_stores = {"stores": ["disk:/var/kvpool/llama?capacity=200GiB"], "weights": "revision 1a2b3c"}
    for command, extra in zip(commands, ({}, with_stores), strict=True):
        model, *options = shlex.split(command)
        parsed = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options])).kv_transfer_config
        wanted = serve.transfer({"host_bytes": "8GiB", **extra})
        assert {name: getattr(parsed, name) for name in wanted} == wanted

"""SGLang's own cache controller over host memory on a CPU: what the tests of its storage share.

SGLang compiles its hash of tokens when it first needs it, with a compiler that may not be there. Here Python makes the
names of pages.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from tests.engines.plugins.absent import stand_in

stand_in()

from sglang.srt.managers import cache_controller  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle  # noqa: E402
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, PoolTransfer  # noqa: E402
from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller  # noqa: E402
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool as LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

PLAIN, HYBRID = cache_controller.HiCacheController, hybrid_cache_controller.HybridCacheController
LAYERS, HEADS, WIDTH, PAGE, TOKENS = 2, 2, 8, 4, 64
WAIT_S = 600
RANKS = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
NAMES = {
    "backend_name": "kvpool",
    "module_path": "kvpool.integrations.sglang",
    "class_name": "KVPoolHiCacheStorage",
}

SLOW = dict.fromkeys(("find_seconds", "load_seconds", "save_seconds"), 600)
"""Deadlines against hanging."""


def names_of(tokens: list[int], prior: str | None = None, page_size: int = PAGE) -> list[str]:
    """The names of the pages of a prompt: a chain of hashes, as SGLang's are."""
    names, name = [], prior or ""
    for start in range(0, len(tokens) - page_size + 1, page_size):
        name = hashlib.sha256(f"{name} {tokens[start : start + page_size]}".encode()).hexdigest()
        names.append(name)
    return names


for module in (cache_controller, hybrid_cache_controller):
    module.get_storage_hash_str = names_of


def group() -> Any:
    """A process group of one."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    get_parallel().override_permanently(**RANKS)
    return torch.distributed.group.WORLD


def host_pool(layout: str, dtype: torch.dtype = torch.bfloat16, label: str = "kv", layers: int = LAYERS) -> Any:
    """SGLang's host memory for keys and values."""
    k, v = (tuple(torch.zeros(TOKENS, HEADS, WIDTH, dtype=dtype) for _ in range(layers)) for _ in "kv")
    pointers = [torch.tensor([tensor.data_ptr() for tensor in part], dtype=torch.uint64) for part in (k, v)]
    buffers = KVBuffers(k=k, v=v, k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=HEADS,
        head_dim=WIDTH,
        v_head_dim=WIDTH,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    with host_memory_budget_scope(1 << 30):
        return MHATokenToKVPoolHost(
            info,
            4.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=TOKENS,
            start_layer=0,
            end_layer=layers - 1,
            pool_label=label,
        )


def allocator() -> Any:
    """What the controller asks about the device's memory."""
    device = SimpleNamespace(device="cpu", layer_num=LAYERS, register_layer_transfer_counter=lambda counter: None)
    return SimpleNamespace(get_kvcache=lambda: device)


def controller(pool: Any, metrics: bool = False, **options: Any) -> Any:
    """SGLang's controller, with the plug-in as its backend."""
    kind = HYBRID if isinstance(pool, HostPoolGroup) else PLAIN
    return kind(
        allocator(),
        pool,
        PAGE,
        group(),
        threading.Event(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="toy",
        storage_backend_extra_config={**NAMES, "weights": "1", **options},
        enable_storage_metrics=metrics,
    )


def grouped(pools: dict[PoolName, Any]) -> Any:
    """Host pools of which the first is the anchor."""
    entries = [
        PoolEntry(name, pool, None, lambda layer: layer, is_primary_index_anchor=place == 0)
        for place, (name, pool) in enumerate(pools.items())
    ]
    return HostPoolGroup(entries)


def write(pool: Any, indices: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """Fill pages with random bytes. Returns them as flat pages."""
    random = torch.Generator().manual_seed(seed)
    pages = []
    for index in indices[::PAGE].tolist():
        blank = pool.get_dummy_flat_data_page()
        page = torch.randint(0, 256, (blank.nbytes,), generator=random, dtype=torch.uint8).view(blank.dtype)
        pool.set_from_flat_data_page(index, page)
        pages.append(page.view(torch.uint8))
    return pages


def read(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """Flat pages, as bytes."""
    return [pool.get_data_page(index).view(torch.uint8) for index in indices[::PAGE].tolist()]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def config(**fields: Any) -> HiCacheStorageConfig:
    """The configuration that the controller passes to the plug-in. Options are among the fields."""
    extra = {name: fields.pop(name) for name in ("stores", "weights", "kv_dtype") if name in fields}
    known = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "toy",
    }
    return HiCacheStorageConfig(**{**known, **fields}, extra_config={**NAMES, **extra})


def back_up(controller: Any, indices: torch.Tensor, tokens: list[int], **more: Any) -> int:
    """What the scheduler does to keep pages: it names them, and waits for the acknowledgement.
    Returns how many tokens were kept."""
    controller.write_storage(indices, tokens, hash_value=names_of(tokens), **more)
    return controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens


def fetch(controller: Any, tokens: list[int], transfers: list[PoolTransfer] | None = None) -> Any:
    """What the scheduler does to bring pages back: it asks for hits, allocates host memory for them, and waits for all
    acknowledgements. Returns the host memory, how many tokens came, and what came of other pools."""
    more = {} if transfers is None else {"extra_pools": transfers}
    handle = CacheRequestHandle("request", 0) if isinstance(controller, HYBRID) else "request"
    controller.prefetch(handle, tokens, **more)
    operation = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    if not operation.storage_hit_count:
        return None, 0, {}
    indices = controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
    operation.host_indices = indices
    controller.prefetch_buffer.put(operation)
    came, pools = 0, {}
    while not (ack := controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
        came = came if ack.completed_tokens is None else ack.completed_tokens
        pools |= ack.pool_hits or {}
    return indices, came, pools

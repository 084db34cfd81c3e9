"""A store below SGLang's hierarchical cache, for its storage backend ``dynamic`` to load by module path. Only SGLang
imports this module.

A page of SGLang is a block: the bytes of all layers of one rank, in the order of the host pool's layout. Each host pool
(``kv`` and, in some models, others beside it) has a store of its own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from kvpool.integrations.options import PART, SGLANG, SHARED
from kvpool.integrations.staged import StagedBlocks, check_store, leading
from kvpool.storage.store import Bytes

with SGLANG.imports():
    import torch
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
    )

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache
    from sglang.srt.observability.metrics_collector import StorageMetrics

log = SGLANG.log

_REPORTS = 1024
_LOADS, _SAVES = "prefetch", "backup"
"""SGLang's words for loads and saves."""
Page = TypeVar("Page")


class _Pool(NamedTuple):
    """A host pool of SGLang, and the blocks that its pages are."""

    host: HostKVCache
    blocks: StagedBlocks
    dtype: torch.dtype
    """of the elements of a flat page"""
    views: bool
    """Whether ``get_data_page`` gives the memory of a page, and not a copy of it."""

    def save(self, index: int, row: Bytes) -> None:
        """Copy a page to a row."""
        page = _bytes(self.host.get_data_page(index, flat=False))
        np.copyto(row.reshape(page.shape), page)

    def load(self, index: int, row: Bytes) -> None:
        """Copy a row to a page."""
        if self.views:
            page = _bytes(self.host.get_data_page(index, flat=False))
            np.copyto(page, row.reshape(page.shape))
        else:
            self.host.set_from_flat_data_page(index, torch.from_numpy(row).view(self.dtype))


class KVPoolHiCacheStorage(HiCacheStorage):
    """SGLang's pages in a store. SGLang makes one in each rank, and calls it from several threads of its own.

    Its options are in ``--hicache-storage-backend-extra-config``, beside ``backend_name``, ``module_path`` and
    ``class_name``: those of `StagedOptions`. ``{part}`` in ``stores`` stands for the pool and the rank.

    Every call waits for the store, at most ``find_seconds``, ``load_seconds`` or ``save_seconds``. None raises: what
    fails is a page that is not there.

    Raises
    ------
    TypeError, ValueError
        For options that are missing or not accepted.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        SGLANG.checked_version()
        self._config = storage_config
        self._options = SGLANG.read(storage_config.extra_config or {})
        self._ranks = {"rank": storage_config.tp_rank, "dp_rank": storage_config.dp_rank}
        check_store(self._options, **self._ranks)
        one_writer = storage_config.is_mla_model and storage_config.tp_size > 1
        if one_writer and self._options.kind not in SHARED:
            raise ValueError(
                f"stores: expected a store that all ranks share ({', '.join(SHARED)}), since with MLA only some ranks "
                f"write, got {self._options.stores!r:.80}"
            )
        self._pools: dict[str, _Pool] = {}
        self._reports: dict[str, deque[tuple[int, float]]] = {kind: deque(maxlen=_REPORTS) for kind in (_LOADS, _SAVES)}

    # -- memory --------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: HostKVCache) -> None:
        """Open the store of the pool ``kv``. Raises what ``StagedBlocks`` raises, which ends the attachment."""
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: HostKVCache, host_pool_name: PoolName) -> None:
        """Open the store of a pool, unless it is open. Raises ValueError for a pool that has no pages of bytes or
        whose type of elements is not known, and what ``StagedBlocks`` raises."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        page = _flat_page(name, host_pool)
        self._options.check_dtypes([page.dtype])
        size, known = page.nbytes, self._pools.get(name)
        if known is not None and known.host is host_pool:
            return
        if known is not None:
            known.blocks.close()
        elif self._pools and not self._options.separate:
            raise ValueError(
                f"stores: expected a text with {PART}, so that each pool has one, got {self._options.stores!r:.80} for "
                f"{', '.join([*self._pools, name])}"
            )
        rank = self._rank(name, host_pool)
        # Replicas of attention have the same bytes, but no two processes may have one folder.
        replica = self._config.dp_rank if self._options.kind not in SHARED else 0
        part = f"{name}-{rank}" + (f"-dp{replica}" if replica else "")
        layers = f"layers {getattr(host_pool, 'start_layer', 0)} to {getattr(host_pool, 'end_layer', 'the last')}"
        blocks = StagedBlocks.open(
            SGLANG,
            self._options,
            part,
            size,
            model=self._config.model_name or "unnamed",
            elements=str(page.dtype),
            layout=f"{name}, {rank}, {host_pool.layout}, {host_pool.page_size} tokens, {size} bytes a page, {layers}",
            **self._ranks,
        )
        self._pools[name] = _Pool(host_pool, blocks, page.dtype, _views(host_pool))

    def _rank(self, name: str, host_pool: HostKVCache) -> str:
        """Whose share of the KV it is. Ranks that have the same bytes have the same name."""
        config = self._config
        shared = config.is_mla_model and name != PoolName.MAMBA.value and not hasattr(host_pool, "head_num")
        tensor = (0, 1) if shared else (config.tp_rank, config.tp_size)
        parts = {
            "tp": tensor,
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
            "dcp": (config.dcp_rank, config.dcp_size),
        }
        return "-".join(f"{kind}{rank}of{size}" for kind, (rank, size) in parts.items())

    # -- pages of the pool kv ------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages there are."""
        return leading(self._find(PoolName.KV, keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Write pages to tensors of the size of a page. Returns those that came, and None for others."""
        pool = self._pools.get(PoolName.KV.value)
        targets = _fitting(target_locations, pool)
        came = self._move(_LOADS, pool, keys, targets, lambda target, row: np.copyto(_bytes(target).reshape(-1), row))
        return [targets[at] if ok else None for at, ok in enumerate(came)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Save tensors of the size of a page. Returns whether the store has all of them."""
        pool = self._pools.get(PoolName.KV.value)
        pages = _fitting(values, pool)
        return all(self._move(_SAVES, pool, keys, pages, lambda page, row: np.copyto(row, _bytes(page).reshape(-1))))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages to the places of the pool that ``host_indices`` names, an index for each token."""
        return self._transfer(_LOADS, PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Save pages of the pool."""
        return self._transfer(_SAVES, PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys))

    # -- pages of several pools ----------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many of the first pages can be restored, given what the other pools need beside ``kv``."""
        leading_pages = leading(self._find(PoolName.KV, keys))
        hits: dict[str, int] = {PoolName.KV: leading_pages} if leading_pages else {}
        lengths = list(range(1, leading_pages + 1))
        for transfer in pool_transfers or ():
            # Groups of pages gate no hit, and a pool that is not reported has no verdict.
            if not lengths or transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            needed = max(1, len(transfer.keys or ())) if trailing else leading_pages
            able = _restorable(self._find(transfer.name, keys[:leading_pages]), needed)
            if able:
                hits[transfer.name] = able[-1]
            lengths = sorted(set(lengths).intersection(able))
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(_LOADS, transfer) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._transfer(_SAVES, transfer) for transfer in transfers}

    # -- the rest ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Find no page any more that was saved until now. The store drops them, so that a process that opens it later
        does not find them either. Pages that this process saves from now on are found by no other."""
        confirmed = [pool.blocks.clear() for pool in self._pools.values()]
        if not all(confirmed):
            log.warning(
                "clear: the store has not dropped the old pages yet. If this process ends before it does, the "
                "next one finds them, unless its weights have another name"
            )
        if self._options.kind in SHARED:
            log.warning(
                "clear: until it is started again with another name for its weights, this process shares no pages"
            )
        return True

    def get_stats(self) -> StorageMetrics | None:
        """Pages and GB/s of the calls since the last time, in SGLang's own form. None if metrics are off."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        for kind, reports in self._reports.items():
            while reports:
                pages, speed = reports.popleft()
                getattr(metrics, f"{kind}_pgs").append(pages)
                getattr(metrics, f"{kind}_bandwidth").append(speed)
        return metrics

    def close(self) -> None:
        """End all calls, and close the stores. Waits at most 10 s for each."""
        for pool in self._pools.values():
            pool.blocks.close()

    def _find(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(str(name))
        if pool is None:
            return [False] * len(keys)
        # What the other pools need is judged with the pages of ``kv``.
        return (pool.blocks.find_hit if name == PoolName.KV else pool.blocks.find)(_names(keys))

    def _transfer(self, kind: str, transfer: PoolTransfer) -> list[bool]:
        """Load or save pages of a host pool, whose indices are those of tokens."""
        pool, indices, keys = self._pools.get(str(transfer.name)), transfer.host_indices, transfer.keys or ()
        if pool is None or indices is None:
            return [False] * len(keys)
        size = getattr(pool.host, "page_size", 1) or 1
        if indices.numel() != size * len(keys):
            log.error("kvpool: %d indices for %d pages", indices.numel(), len(keys))
            return [False] * len(keys)
        return self._move(kind, pool, keys, indices[::size].tolist(), pool.load if kind == _LOADS else pool.save)

    def _move(
        self,
        kind: str,
        pool: _Pool | None,
        keys: Sequence[str],
        pages: Sequence[Page],
        copy: Callable[[Page, Bytes], None],
    ) -> list[bool]:
        """Load or save pages, one for each key, or none. ``copy(page, row)`` copies one to or from its row."""
        if pool is None or len(pages) != len(keys):
            return [False] * len(keys)
        call = pool.blocks.load if kind == _LOADS else pool.blocks.save
        began = time.perf_counter()
        done = call(_names(keys), lambda at, row: copy(pages[at], row))
        spent = time.perf_counter() - began
        if self._config.enable_storage_metrics and any(done):
            self._reports[kind].append((sum(done), sum(done) * pool.blocks.block_bytes / spent / 1e9))
        return done


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _restorable(present: Sequence[bool], needed: int) -> list[int]:
    """The lengths of prefixes whose last ``needed`` pages there are, or all of them where they have fewer."""
    able, run = [], 0
    for end, is_present in enumerate(present, 1):
        run = run + 1 if is_present else 0
        if run >= min(needed, end):
            able.append(end)
    return able


def _fitting(tensors: Sequence[Any] | None, pool: _Pool | None) -> list[torch.Tensor]:
    """The tensors, if each is the bytes of a page on the CPU. None of them otherwise."""
    pages = list(tensors or ())
    right = pool is not None and all(
        isinstance(tensor, torch.Tensor)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.nbytes == pool.blocks.block_bytes
        for tensor in pages
    )
    return pages if right else []


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor, as bytes. NumPy copies it, as PyTorch waits for threads of its own to copy a page, which
    takes long where all cores are in use."""
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data


def _views(host_pool: HostKVCache) -> bool:
    """Whether a page is a view of the memory of a pool, which stays in place."""
    memory = getattr(host_pool, "kv_buffer", None)
    if not isinstance(memory, torch.Tensor) or getattr(host_pool, "shared_allocation_domain", None) is not None:
        return False
    page = host_pool.get_data_page(0, flat=False)
    return bool(page.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr())


def _flat_page(name: str, host_pool: HostKVCache) -> torch.Tensor:
    """A tensor of the type and size of a page. Raises ValueError if the pool has none."""
    try:
        page: torch.Tensor | None = host_pool.get_dummy_flat_data_page()
    except (AttributeError, NotImplementedError):
        page = None
    if page is None or not page.nbytes:
        raise ValueError(f"SGLang's host pool {name} ({type(host_pool).__name__}) gives no pages of bytes")
    return page

"""A store behind SGLang's hierarchical cache, for its storage backend ``dynamic`` to load by module path. Only SGLang
imports this module.

A page of SGLang is a block: the bytes of all layers of one rank, in the order of the host pool's layout. Each host pool
(``kv`` and, in some models, others beside it) has a store of its own.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import kvpool
from kvpool.engines.staged import PART, SHARED, StagedBlocks, StoreOptions
from kvpool.stores.store import Bytes

TESTED = ("0.5.23",)
"""The versions of SGLang whose code the tests call."""


def _version() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


try:
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
except ImportError as error:
    raise ImportError(
        f"kvpool.engines.sglang works with SGLang {', '.join(TESTED)}; SGLang {_version()} is installed: {error}"
    ) from error

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

log = logging.getLogger("sglang.kvpool")

OWN_OPTIONS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys of the extra configuration that are SGLang's."""
_REPORTS = 1024


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
    ``class_name``: ``store`` and ``revision``, and optionally ``kv_dtype``, ``staging`` and ``deadline``, as in
    ``StoreOptions``. ``{part}`` in ``store`` stands for the pool and the rank.

    Every call waits for the store, at most ``deadline`` seconds. None raises: what fails is a page that is not there.

    Raises
    ------
    TypeError, ValueError
        For options that are missing or not accepted.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        version = _version()
        if version not in TESTED:
            log.warning("kvpool was tested with SGLang %s; this is %s", ", ".join(TESTED), version)
        self._config = storage_config
        self._options = StoreOptions.of(storage_config.extra_config or {}, OWN_OPTIONS)
        one_writer = storage_config.is_mla_model and storage_config.tp_size > 1
        if one_writer and self._options.kind not in SHARED:
            raise ValueError(
                f"store={self._options.store!r:.80}: with MLA only some ranks write, and all read. Accepted is a store "
                f"that they share: {', '.join(SHARED)}"
            )
        self._version = version
        self._pools: dict[str, _Pool] = {}
        self._reports: dict[str, deque[tuple[int, float]]] = {
            kind: deque(maxlen=_REPORTS) for kind in ("prefetch", "backup")
        }

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
                f"store={self._options.store!r:.80}: there are pools beside {', '.join(self._pools)}: {name}. Accepted "
                f"is a text with {PART}, so that each has a store"
            )
        rank = self._rank(name, host_pool)
        # Replicas of attention have the same bytes, but no two processes may have one folder.
        replica = self._config.dp_rank if self._options.kind not in SHARED else 0
        store = self._options.make(f"{name}-{rank}" + (f"-dp{replica}" if replica else ""))
        layers = f"layers {getattr(host_pool, 'start_layer', 0)} to {getattr(host_pool, 'end_layer', 'the last')}"
        layout = f"{name}, {rank}, {host_pool.layout}, {host_pool.page_size} tokens, {size} bytes a page, {layers}"
        identity = kvpool.ModelIdentity(
            model=self._config.model_name or "unnamed",
            revision=self._options.revision,
            kv_dtype=f"{page.dtype} {self._options.kv_dtype}".rstrip(),
            layout=layout,
            hash_version=f"sglang {self._version}",
        )
        blocks = StagedBlocks(store, size, identity, staging=self._options.staging, deadline=self._options.deadline)
        log.info("kvpool: pages of the pool %s, %d bytes each, are kept in the store %s", name, size, store.name)
        self._pools[name] = _Pool(host_pool, blocks, page.dtype, _views(host_pool))

    def _rank(self, name: str, host_pool: HostKVCache) -> str:
        """Whose share of the KV it is. Ranks that have the same bytes have the same name."""
        config = self._config
        shared = config.is_mla_model and name != PoolName.MAMBA.value and not hasattr(host_pool, "head_num")
        tensor = (0, 1) if shared else (config.tp_rank, config.tp_size)
        parts = {
            "tp": tensor, "pp": (config.pp_rank, config.pp_size), "cp": (config.attn_cp_rank, config.attn_cp_size),
            "dcp": (config.dcp_rank, config.dcp_size),
        }  # fmt: skip
        return "-".join(f"{kind}{rank}of{size}" for kind, (rank, size) in parts.items())

    # -- pages of the pool kv ------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many of the first pages there are."""
        return _leading(self._find(PoolName.KV, keys))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Write pages to tensors of the size of a page. Returns those that came, and None for others."""
        targets = list(target_locations or ())
        pool = self._pools.get(PoolName.KV.value)
        if pool is None or len(targets) != len(keys) or not all(_fits(tensor, pool) for tensor in targets):
            return [None] * len(keys)

        def put(place: int, row: Bytes) -> None:
            np.copyto(_bytes(targets[place]).reshape(-1), row)

        came = self._timed("prefetch", pool, lambda: pool.blocks.load(_names(keys), put))
        return [target if ok else None for target, ok in zip(targets, came, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Save tensors of the size of a page. Returns whether the store has all of them."""
        pages = list(values or ())
        pool = self._pools.get(PoolName.KV.value)
        if pool is None or len(pages) != len(keys) or not all(_fits(page, pool) for page in pages):
            return False

        def fill(place: int, row: Bytes) -> None:
            np.copyto(row, _bytes(pages[place]).reshape(-1))

        return all(self._timed("backup", pool, lambda: pool.blocks.save(_names(keys), fill)))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages to the places of the pool that ``host_indices`` names, an index for each token."""
        return self._load(PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Save pages of the pool."""
        return self._save(PoolTransfer(PoolName.KV, host_indices=host_indices, keys=keys))

    # -- pages of several pools ----------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """How many of the first pages can be restored, given what the other pools need beside ``kv``."""
        there = _leading(self._find(PoolName.KV, keys))
        hits: dict[str, int] = {PoolName.KV: there} if there else {}
        lengths = list(range(1, there + 1))
        for transfer in pool_transfers or ():
            # Groups of pages gate no hit, and a pool that is not reported has no verdict.
            if not lengths or transfer.hit_policy not in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                continue
            trailing = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
            needed = max(1, len(transfer.keys or ())) if trailing else there
            able = _restorable(self._find(transfer.name, keys[:there]), needed)
            if able:
                hits[transfer.name] = able[-1]
            lengths = sorted(set(lengths).intersection(able))
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._load(transfer) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {transfer.name: self._save(transfer) for transfer in transfers}

    # -- the rest ------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Find no page any more that was saved until now. The store drops them, so that a process that opens it later
        does not find them either. Pages that this process saves from now on are found by no other."""
        confirmed = [pool.blocks.clear() for pool in self._pools.values()]
        if not all(confirmed):
            log.warning("clear: the store has not dropped the old pages yet. If this process ends before it does, the "
                        "next one finds them, unless it has another revision")  # fmt: skip
        if self._options.kind in SHARED:
            log.warning("clear: until it is started again with another revision, this process shares no pages")
        return True

    def get_stats(self) -> Any:
        """Pages and GB/s of the calls since the last time, in SGLang's own form. None if nobody asked for metrics."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        found = StorageMetrics()
        for kind, reports in self._reports.items():
            for pages, speed in _drained(reports):
                getattr(found, f"{kind}_pgs").append(pages)
                getattr(found, f"{kind}_bandwidth").append(speed)
        return found

    def close(self) -> None:
        """End all calls, and close the stores. Waits at most 10 s for each."""
        for pool in self._pools.values():
            pool.blocks.close()

    def _find(self, name: str, keys: Sequence[str]) -> list[bool]:
        pool = self._pools.get(str(name))
        return [False] * len(keys) if pool is None else pool.blocks.find(_names(keys))

    def _load(self, transfer: PoolTransfer) -> list[bool]:
        pool, pages = self._places(transfer)
        if pool is None:
            return [False] * len(transfer.keys or ())
        names, load = _names(transfer.keys or ()), pool.load
        return self._timed("prefetch", pool, lambda: pool.blocks.load(names, lambda at, row: load(pages[at], row)))

    def _save(self, transfer: PoolTransfer) -> list[bool]:
        pool, pages = self._places(transfer)
        if pool is None:
            return [False] * len(transfer.keys or ())
        names, save = _names(transfer.keys or ()), pool.save
        return self._timed("backup", pool, lambda: pool.blocks.save(names, lambda at, row: save(pages[at], row)))

    def _places(self, transfer: PoolTransfer) -> tuple[_Pool | None, list[int]]:
        """The pool of a transfer, and the first index of each page. There is no pool if they do not fit the keys."""
        pool, indices = self._pools.get(str(transfer.name)), transfer.host_indices
        if pool is None or indices is None:
            return None, []
        size = getattr(pool.host, "page_size", 1) or 1
        if indices.numel() != size * len(transfer.keys or ()):
            log.error("kvpool: %d indices for %d pages", indices.numel(), len(transfer.keys or ()))
            return None, []
        return pool, indices[::size].tolist()

    def _timed(self, kind: str, pool: _Pool, call: Callable[[], list[bool]]) -> list[bool]:
        began = time.perf_counter()
        done = call()
        spent = time.perf_counter() - began
        if self._config.enable_storage_metrics and any(done):
            self._reports[kind].append((sum(done), sum(done) * pool.blocks.block_bytes / spent / 1e9))
        return done


def _names(keys: Sequence[str]) -> list[bytes]:
    return [key.encode() for key in keys]


def _leading(found: Sequence[bool]) -> int:
    return found.index(False) if False in found else len(found)


def _restorable(found: Sequence[bool], needed: int) -> list[int]:
    """The lengths of prefixes whose last ``needed`` pages there are, or all of them where they have fewer."""
    able, run = [], 0
    for end, there in enumerate(found, 1):
        run = run + 1 if there else 0
        if run >= min(needed, end):
            able.append(end)
    return able


def _fits(tensor: Any, pool: _Pool) -> bool:
    shaped = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and tensor.is_contiguous()
    return shaped and tensor.nbytes == pool.blocks.block_bytes


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a tensor, as bytes. NumPy copies it, as PyTorch waits for threads of its own to copy a page, which
    takes long where all cores are in use."""
    found: Bytes = tensor.view(torch.uint8).numpy()
    return found


def _views(host_pool: HostKVCache) -> bool:
    """Whether a page is a view of the memory of a pool that nobody moves."""
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


def _drained(reports: deque[tuple[int, float]]) -> Iterator[tuple[int, float]]:
    while reports:
        yield reports.popleft()

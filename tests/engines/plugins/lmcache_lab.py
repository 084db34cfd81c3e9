"""LMCache's own storage manager on a CPU: what the tests of its adapter share."""

from __future__ import annotations

import argparse
import json
import select
import threading
from collections.abc import Sequence
from typing import Any

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

WAIT_S = 600
SLOW = dict.fromkeys(("find_seconds", "load_seconds", "save_seconds"), 600)
"""Deadlines against hanging."""
SMALL = MemoryLayoutDesc([torch.Size([2, 2, 16, 8])], [torch.bfloat16])
LARGE = MemoryLayoutDesc([torch.Size([2, 2, 16, 8]), torch.Size([4, 16])], [torch.bfloat16, torch.uint8])


def adapter_config(**params: Any) -> Any:
    """What ``--l2-adapter`` gives."""
    spec = {
        "type": "plugin",
        "module_path": "kvpool.integrations.lmcache",
        "class_name": "KVPoolL2Adapter",
        "adapter_params": {
            "stores": "disk:/kv/{part}",
            "weights": "1",
            "kv_dtype": "fp8_e4m3",
            **SLOW,
            **params,
        },
    }
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))


def adapter(**params: Any) -> Any:
    return create_l2_adapter(adapter_config(**params).adapters[0])


def manager(**params: Any) -> StorageManager:
    memory = L1MemoryManagerConfig(size_in_bytes=1 << 22, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), adapter_config(**params))
    )


def keys(count: int, group: int = 0, model: str = "toy", salt: str = "", first: int = 0) -> list[ObjectKey]:
    return [ObjectKey((first + number).to_bytes(32, "big"), model, 0, group, salt) for number in range(count)]


class Stored(L2AdapterListener):
    """Reports when objects are in the store."""

    def __init__(self, manager: StorageManager) -> None:
        self._seen: set[ObjectKey] = set()
        self._changed = threading.Condition()
        manager.register_l2_listener(self)

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        with self._changed:
            self._seen.update(keys)
            self._changed.notify_all()

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        pass

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        pass

    def wait(self, keys: Sequence[ObjectKey]) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._seen.issuperset(keys), WAIT_S)


def write(manager: StorageManager, keys: list[ObjectKey], layout: MemoryLayoutDesc, seed: int) -> list[torch.Tensor]:
    """Put objects of random bytes into LMCache's memory, as its server does. Returns the bytes."""
    random = torch.Generator().manual_seed(seed)
    objects = manager.reserve_write(keys, layout)
    contents = []
    for key in keys:
        content = torch.randint(0, 256, (objects[key].get_size(),), generator=random, dtype=torch.uint8)
        objects[key].raw_tensor[: len(content)] = content
        contents.append(content)
    manager.finish_write(keys)
    return contents


def fetch(manager: StorageManager, groups: dict[int, tuple[list[ObjectKey], MemoryLayoutDesc]]) -> Any:
    """Bring objects into LMCache's memory, as its server does for a request. Returns its result."""
    rows = [GroupedObjectKeys(keys, group, layout) for group, (keys, layout) in groups.items()]
    handle = manager.submit_prefetch_task(PrefetchTaskSpec(rows))
    assert manager.wait_prefetch_status(handle, WAIT_S)
    return manager.query_prefetch_status(handle)


def read(manager: StorageManager, keys: list[ObjectKey]) -> list[torch.Tensor]:
    """The bytes of objects that were fetched."""
    with manager.read_prefetched_results(keys) as objects:
        assert objects is not None
        tensors = [content.raw_tensor[: content.get_size()].clone() for content in objects]
    manager.finish_read_prefetched(keys)
    return tensors


def memory_object(nbytes: int, seed: int | None = None) -> TensorMemoryObj:
    """An object outside of LMCache's memory."""
    if seed is None:
        content = torch.zeros(nbytes, dtype=torch.uint8)
    else:
        content = torch.randint(0, 256, (nbytes,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    metadata = MemoryObjMetadata(content.shape, torch.uint8, content.data_ptr(), nbytes, 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(content, metadata, None)


def wait_for(fd: int) -> None:
    """Wait until an event file descriptor is signalled, and reset it."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    assert poll.poll(WAIT_S * 1000)
    consume_fd(fd)


def store(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> Any:
    """The call sequence of LMCache's store controller."""
    task = adapter.submit_store_task(keys, objects)
    wait_for(adapter.get_store_event_fd())
    return adapter.pop_completed_store_tasks()[task]


def look_up(adapter: Any, keys: list[ObjectKey], layouts: dict[int, MemoryLayoutDesc]) -> list[int]:
    """The call sequence of LMCache's prefetch controller, first half."""
    task = adapter.submit_lookup_and_lock_task(keys, layouts)
    wait_for(adapter.get_lookup_and_lock_event_fd())
    pages = adapter.query_lookup_and_lock_result(task)
    assert adapter.query_lookup_and_lock_result(task) is None
    return pages.get_indices_list()


def load(adapter: Any, keys: list[ObjectKey], objects: list[Any]) -> list[int]:
    """Its second half."""
    task = adapter.submit_load_task(keys, objects)
    wait_for(adapter.get_load_event_fd())
    pages = adapter.query_load_result(task)
    assert adapter.query_load_result(task) is None
    adapter.submit_unlock(keys)
    return pages.get_indices_list()

"""Stores keep blocks beyond the host tier, by key; storage managers save blocks of a host tier there and load them
again.

Every block that a store returns is verified before use."""

from kvpool.storage.backends.memory import MemoryStore
from kvpool.storage.choice import LoadOrCompute, LoadPolicy
from kvpool.storage.circuit_breaker import BreakerStats, CircuitBreaker
from kvpool.storage.forgotten import Forgotten
from kvpool.storage.host_storage_manager import HostStorageManager, HostStorageManagerStats
from kvpool.storage.mac import BlockNames
from kvpool.storage.prefetches import Prefetch
from kvpool.storage.staging_rows import staging_rows
from kvpool.storage.storage_manager import StorageManager, StorageManagerStats
from kvpool.storage.store import ABSENT, CANCELLED, DAMAGED, FAILED, LATE, OK, REFUSED, Space, Store
from kvpool.storage.store_requests import StoreRequest
from kvpool.storage.store_stats import StoreStats
from kvpool.storage.store_worker import StoreWorker

__all__ = [
    "ABSENT",
    "BlockNames",
    "BreakerStats",
    "CANCELLED",
    "CircuitBreaker",
    "DAMAGED",
    "FAILED",
    "Forgotten",
    "HostStorageManager",
    "HostStorageManagerStats",
    "LATE",
    "LoadOrCompute",
    "LoadPolicy",
    "MemoryStore",
    "OK",
    "Prefetch",
    "REFUSED",
    "Space",
    "StorageManager",
    "StorageManagerStats",
    "Store",
    "StoreRequest",
    "StoreStats",
    "StoreWorker",
    "staging_rows",
]

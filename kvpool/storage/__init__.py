"""Stores keep blocks beyond the host tier, by key; storage managers save blocks of a host tier there and load them
again.

Every block that a store returns is verified before use."""

from kvpool.storage.backends.memory import MemoryStore as MemoryStore
from kvpool.storage.choice import LoadOrCompute as LoadOrCompute
from kvpool.storage.choice import LoadPolicy as LoadPolicy
from kvpool.storage.circuit_breaker import BreakerStats as BreakerStats
from kvpool.storage.circuit_breaker import CircuitBreaker as CircuitBreaker
from kvpool.storage.forgotten import Forgotten as Forgotten
from kvpool.storage.host_storage_manager import HostStorageManager as HostStorageManager
from kvpool.storage.host_storage_manager import HostStorageManagerStats as HostStorageManagerStats
from kvpool.storage.mac import BlockNames as BlockNames
from kvpool.storage.prefetches import Prefetch as Prefetch
from kvpool.storage.staging_rows import staging_rows as staging_rows
from kvpool.storage.storage_manager import StorageManager as StorageManager
from kvpool.storage.storage_manager import StorageManagerStats as StorageManagerStats
from kvpool.storage.store import ABSENT as ABSENT
from kvpool.storage.store import CANCELLED as CANCELLED
from kvpool.storage.store import DAMAGED as DAMAGED
from kvpool.storage.store import FAILED as FAILED
from kvpool.storage.store import LATE as LATE
from kvpool.storage.store import OK as OK
from kvpool.storage.store import REFUSED as REFUSED
from kvpool.storage.store import Space as Space
from kvpool.storage.store import Store as Store
from kvpool.storage.store_requests import StoreRequest as StoreRequest
from kvpool.storage.store_stats import StoreStats as StoreStats
from kvpool.storage.store_worker import StoreWorker as StoreWorker

"""Stores keep blocks beyond the host tier, by key; keepers save blocks of a host tier there and load them again.

Every block that a store returns is verified before use."""

from kvpool.storage.backends.memory import MemoryStore as MemoryStore
from kvpool.storage.choice import LoadOrCompute as LoadOrCompute
from kvpool.storage.choice import LoadPolicy as LoadPolicy
from kvpool.storage.hostkeeper import HostKeeper as HostKeeper
from kvpool.storage.hostkeeper import HostKeeperStats as HostKeeperStats
from kvpool.storage.jobs import Job as Job
from kvpool.storage.keeper import Forgotten as Forgotten
from kvpool.storage.keeper import Keeper as Keeper
from kvpool.storage.keeper import KeeperStats as KeeperStats
from kvpool.storage.prefetches import Prefetch as Prefetch
from kvpool.storage.queue import StoreQueue as StoreQueue
from kvpool.storage.queue import StoreStats as StoreStats
from kvpool.storage.seals import BlockNames as BlockNames
from kvpool.storage.store import ABSENT as ABSENT
from kvpool.storage.store import CANCELLED as CANCELLED
from kvpool.storage.store import DAMAGED as DAMAGED
from kvpool.storage.store import FAILED as FAILED
from kvpool.storage.store import LATE as LATE
from kvpool.storage.store import OK as OK
from kvpool.storage.store import REFUSED as REFUSED
from kvpool.storage.store import Space as Space
from kvpool.storage.store import Store as Store
from kvpool.storage.store_client import HealthStats as HealthStats
from kvpool.storage.store_client import StoreClient as StoreClient
from kvpool.storage.store_client import StoreHealth as StoreHealth
from kvpool.storage.store_client import staging_rows as staging_rows

"""Stores: what keeps blocks behind the host tier, asynchronous and by key. Nothing that they give is believed before it
was checked."""

from kvpool.stores.jobs import Job as Job
from kvpool.stores.memory import MemoryStore as MemoryStore
from kvpool.stores.queue import StoreQueue as StoreQueue
from kvpool.stores.queue import StoreStats as StoreStats
from kvpool.stores.seals import BlockNames as BlockNames
from kvpool.stores.store import ABSENT as ABSENT
from kvpool.stores.store import CANCELLED as CANCELLED
from kvpool.stores.store import DAMAGED as DAMAGED
from kvpool.stores.store import FAILED as FAILED
from kvpool.stores.store import LATE as LATE
from kvpool.stores.store import OK as OK
from kvpool.stores.store import REFUSED as REFUSED
from kvpool.stores.store import Space as Space
from kvpool.stores.store import Store as Store
from kvpool.stores.store_client import StoreClient as StoreClient
from kvpool.stores.store_client import staging_rows as staging_rows

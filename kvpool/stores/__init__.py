"""Stores: what keeps blocks behind the host tier, asynchronous and by key. Nothing that they give is believed before it
was checked."""

from kvpool.stores.base import ABSENT as ABSENT
from kvpool.stores.base import CANCELLED as CANCELLED
from kvpool.stores.base import DAMAGED as DAMAGED
from kvpool.stores.base import FAILED as FAILED
from kvpool.stores.base import LATE as LATE
from kvpool.stores.base import OK as OK
from kvpool.stores.base import REFUSED as REFUSED
from kvpool.stores.base import Space as Space
from kvpool.stores.base import Store as Store
from kvpool.stores.jobs import Job as Job
from kvpool.stores.memory import MemoryStore as MemoryStore
from kvpool.stores.queue import StoreQueue as StoreQueue
from kvpool.stores.queue import StoreStats as StoreStats
from kvpool.stores.seals import BlockNames as BlockNames

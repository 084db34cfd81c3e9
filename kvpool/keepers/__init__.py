"""Keepers: what stands between blocks on the host and stores. They save, bring back, and drop what would take too
long."""

from kvpool.keepers.choice import LoadOrCompute as LoadOrCompute
from kvpool.keepers.choice import LoadPolicy as LoadPolicy
from kvpool.keepers.hostkeeper import HostKeeper as HostKeeper
from kvpool.keepers.hostkeeper import HostKeeperStats as HostKeeperStats
from kvpool.keepers.keeper import Forgotten as Forgotten
from kvpool.keepers.keeper import Keeper as Keeper
from kvpool.keepers.keeper import KeeperStats as KeeperStats
from kvpool.keepers.prefetches import Prefetch as Prefetch
from kvpool.stores.store_client import HealthStats as HealthStats
from kvpool.stores.store_client import StoreHealth as StoreHealth

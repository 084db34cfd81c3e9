"""StoreHealth, under the name by which keepers import it."""

from kvpool.stores.store_health import HealthStats as HealthStats
from kvpool.stores.store_health import StoreHealth as StoreHealth
from kvpool.stores.store_health import seconds_argument as seconds_argument

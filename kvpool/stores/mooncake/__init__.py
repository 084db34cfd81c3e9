"""MooncakeStore: blocks in a Mooncake cluster, in the memory of many machines."""

from kvpool.stores.mooncake.store import MooncakeStore as MooncakeStore
from kvpool.stores.mooncake.store import Transform as Transform

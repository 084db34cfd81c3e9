"""MooncakeStore: blocks in a Mooncake cluster, in the memory of many machines."""

from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore as MooncakeStore
from kvpool.storage.backends.mooncake.mooncake_store import Transform as Transform

"""PeerStore and StoreServer: blocks in a store of another process."""

from kvpool.stores.peer.calls import ServedStats as ServedStats
from kvpool.stores.peer.server import StoreServer as StoreServer
from kvpool.stores.peer.store import PeerStore as PeerStore

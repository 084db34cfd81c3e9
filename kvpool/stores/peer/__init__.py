"""PeerStore and StoreServer: blocks in a store of another process."""

from kvpool.stores.peer.peer_store import PeerStore as PeerStore
from kvpool.stores.peer.store_server import ServedStats as ServedStats
from kvpool.stores.peer.store_server import StoreServer as StoreServer

"""PeerStore and StoreServer: blocks in a store of another process."""

from kvpool.storage.backends.peer.peer_store import PeerStore as PeerStore
from kvpool.storage.backends.peer.store_server import ServedStats as ServedStats
from kvpool.storage.backends.peer.store_server import StoreServer as StoreServer

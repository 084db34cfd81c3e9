"""One worker's host tier serves another worker: a server thread, a client, and the transports between them."""

try:
    from kvpool.remote.block_client import BlockClient
    from kvpool.remote.block_server import BlockServer, Limits, ServerStats
    from kvpool.remote.connection import RemoteError, RemoteTimeout
    from kvpool.remote.listener import ClientKeys, ServerKeys
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "zmq":
        raise
    raise ImportError('kvpool.remote needs pyzmq: pip install ".[remote]"') from error

__all__ = [
    "BlockClient",
    "BlockServer",
    "ClientKeys",
    "Limits",
    "RemoteError",
    "RemoteTimeout",
    "ServerKeys",
    "ServerStats",
]

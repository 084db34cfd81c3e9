"""One worker's host tier serves another worker: a server thread, a client, and the transports between them."""

try:
    from kvpool.remote.block_client import BlockClient as BlockClient
    from kvpool.remote.block_server import BlockServer as BlockServer
    from kvpool.remote.block_server import Limits as Limits
    from kvpool.remote.block_server import ServerStats as ServerStats
    from kvpool.remote.connection import RemoteError as RemoteError
    from kvpool.remote.connection import RemoteTimeout as RemoteTimeout
    from kvpool.remote.listener import ClientKeys as ClientKeys
    from kvpool.remote.listener import ServerKeys as ServerKeys
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "zmq":
        raise
    raise ImportError('kvpool.remote needs pyzmq: pip install ".[remote]"') from error

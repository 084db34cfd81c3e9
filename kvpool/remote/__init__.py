"""One worker's host tier serves another worker: a server thread, a client, and the transports between them."""

try:
    from kvpool.remote.client import BlockClient as BlockClient
    from kvpool.remote.endpoints import ClientKeys as ClientKeys
    from kvpool.remote.endpoints import ServerKeys as ServerKeys
    from kvpool.remote.errors import RemoteError as RemoteError
    from kvpool.remote.errors import RemoteTimeout as RemoteTimeout
    from kvpool.remote.limits import Limits as Limits
    from kvpool.remote.limits import ServerStats as ServerStats
    from kvpool.remote.server import BlockServer as BlockServer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "zmq":
        raise
    raise ImportError("kvpool.remote needs pyzmq: pip install 'kvpool[remote]'") from error

"""KV events on ZeroMQ, as cache-aware routers read them: a publisher thread with a replay socket."""

try:
    from kvpool.integrations.kv_events.publisher import KVEventPublisher, PublisherLimits, PublisherStats
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("msgspec", "zmq"):
        raise
    raise ImportError('kvpool.integrations.kv_events needs pyzmq and msgspec: pip install ".[events]"') from error

__all__ = ["KVEventPublisher", "PublisherLimits", "PublisherStats"]

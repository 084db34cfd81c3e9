"""What a user does with other workers, routers and metrics, right and wrong."""

import kvpool
from kvpool.integrations.kv_events import KVEventPublisher, PublisherLimits, PublisherStats
from kvpool.integrations.metrics import PoolMetrics, served
from kvpool.remote import BlockClient, BlockServer, Limits, ServerStats

layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
cache = kvpool.KVCacheManager(layout, device_blocks=8, host_blocks=8, event_capacity=64, device="cpu")
with BlockServer(cache, limits=Limits(connections=4), stall_seconds=1.5) as server:
    figures: ServerStats = server.stats()
    with BlockClient(server.endpoint, cache, timeout=2.0) as client:
        entered: int = client.fetch([1, 2, 3, 4, 5], priority=50)
        blocks: list[memoryview | None] = client.fetch_blocks(cache.block_keys(range(8)))
    server.close(timeout=0.5)
with KVEventPublisher(cache, limits=PublisherLimits(hwm=100), block_hashes="bytes") as publisher:
    published: PublisherStats = publisher.stats()
with served(0) as (metrics, address):
    metrics.add("pool", cache)
    url: str = address

BlockServer(cache, limits={"connections": 4})  # wrong
BlockServer(cache, stall_ms=1500)  # wrong
BlockClient(server.endpoint, cache, timeout="2s")  # wrong
client.fetch("text")  # wrong
server.close("soon")  # wrong
KVEventPublisher(cache, block_hashes="hex")  # wrong
KVEventPublisher(cache, hwm=100)  # wrong
PoolMetrics().add("pool", layout)  # wrong
figures.no_such_figure + 1  # wrong

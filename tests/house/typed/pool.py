"""What a user does with a pool, right and wrong."""

import numpy as np

import kvpool

layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4)
group = kvpool.LayerGroup(layout, window=8)
whole = kvpool.KVCacheManager(groups=[group], device_blocks=[8], device="cpu")
with kvpool.KVCacheManager(layout, device_blocks=8, device="cpu") as cache:
    keys: kvpool.BlockKeys = cache.block_keys(range(9), salt="tenant")
    one: int = cache.add_sequence(keys, stream=0)
    ids = cache.add_sequence_batch([keys, [1, 2, 3], np.arange(5)]).ids
    cache.append_tokens(one, [1, 2])
    cache.append_tokens(ids, np.arange(3, dtype=np.int64), [1, 1, 1])
    length: int = cache.sequence_length(one)
    lengths: list[int] = cache.sequence_length(ids).tolist()
    again: kvpool.BlockKeys = cache.keys_of(one)
    several: list[kvpool.BlockKeys] = cache.keys_of(ids)
    shape: tuple[int, ...] = cache.memory.device_pool.shape
    cache.memory.device_pool[0] = 0
    parts: int = cache.groups[0].device_blocks
    with cache.pin(keys) as lease:
        owner: str = lease.owner
    cache.content.forget(namespace=("tenant", None))
    with cache.exclusive():
        cache.commit(one, stream=0)
    cache.release([one, *ids.tolist()])

cache.append_tokens("x", [1])  # wrong
cache.append_tokens(one, "text")  # wrong
cache.add_sequence("text")  # wrong
cache.commit(one, counts="all")  # wrong
cache.release(1.5)  # wrong
cache.block_keys(range(9), salt=3)  # wrong
cache.add_sequence([1], stream="s")  # wrong
cache.pin("key")  # wrong
cache.keys_of(one).append(1)  # wrong
cache.sequence_length(ids) + "x"  # wrong
print(cache.memory.device_pool.no_such_name)  # wrong
cache.groups.append(group)  # wrong
kvpool.KVCacheManager(groups=layout, device_blocks=8)  # wrong
kvpool.KVCacheManager(layout, device_blocks="8")  # wrong
cache.exclusive(1)  # wrong
kvpool.no_such_name()  # wrong

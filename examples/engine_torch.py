"""Twenty lines of PyTorch: the pool as a tensor, no copy in between, K and V written and read through the block
table."""

import kvpool

try:
    import torch
except ImportError as error:
    raise SystemExit(f"engine_torch.py needs PyTorch (pip install torch): {error}") from None

layout = kvpool.BlockLayout(layers=2, kv_heads=2, head_dim=8, tokens_per_block=4, dtype="float32")
with kvpool.KVCacheManager(layout, device_blocks=16, host_blocks=16) as cache:
    # [layers, K and V, blocks, tokens, kv_heads, head_dim]
    pool = torch.from_dlpack(cache.memory.device_pool)
    tokens = list(range(10))
    seq = cache.add_sequence(tokens)
    slots = torch.arange(cache.cached_tokens(seq), len(tokens))  # what is not cached yet
    blocks = torch.from_numpy(cache.block_table(seq).dense()[0]).long().to(pool.device)
    new = torch.randn(2, 2, len(slots), 2, 8, device=pool.device)  # what a model computes for them
    pool[:, :, blocks[slots // 4], slots % 4] = new
    cache.commit(seq)
    cache.release(seq)

    again = cache.add_sequence(tokens)  # all but the last token is there
    blocks = torch.from_numpy(cache.block_table(again).dense()[0]).long().to(pool.device)
    paged = pool[:, :, blocks].flatten(2, 3)  # [layers, K and V, tokens, kv_heads, head_dim]
    cached = cache.cached_tokens(again)
    assert torch.equal(paged[:, :, :cached], new[:, :, :cached])
    print(f"{cached} of {len(tokens)} tokens reused, byte for byte")
    cache.release(again)
    del pool

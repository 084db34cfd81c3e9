"""What a user does with layouts and arrays, right and wrong."""

import numpy as np

import kvpool
from kvpool.common.arrays.layout import BlockStrides
from kvpool.common.arrays.strided import StridedArray, as_strided

layout = kvpool.BlockLayout(2, 2, 8, 4, dtype=np.float32, order="block_first", tokens="HND")
other = kvpool.BlockLayout.for_model("llama-3-8b", tokens_per_block=16, dtype=np.dtype("float16"))
shape: tuple[int, ...] = layout.tier_shape("host", 8)
strides: BlockStrides = layout.device_strides(8)
arrays = [np.zeros((2, 8, 4, 2, 16), np.float16) for _ in range(3)]
cache: kvpool.PagedKV = kvpool.PagedKV.of(arrays, "L | P B T H D")
pool = kvpool.PagedKV.of_pool(layout, np.zeros(layout.device_shape(4), np.float32), "device")
place: StridedArray = as_strided("array", arrays[0])
address: int = int(cache.bases[0, 0])
ranges = [kvpool.RetentionRange(0, 16, 80), kvpool.RetentionRange(16, None, 20, ttl_ms=1000)]

kvpool.BlockLayout(2, 2, 8, 4, order="blocks_first")  # wrong
kvpool.BlockLayout(2, 2, 8, 4, tokens="nhd")  # wrong
kvpool.BlockLayout(2, 2, 8)  # wrong
layout.tier_shape("gpu", 8)  # wrong
layout.device_shape("8")  # wrong
kvpool.PagedKV.of("arrays", "L | P B T H D")  # wrong
kvpool.PagedKV.of_pool(layout, 3)  # wrong
kvpool.RetentionRange(0, 16)  # wrong
print(strides.head_stride)  # wrong

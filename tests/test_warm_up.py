"""Warming up: afterwards, no call of an engine compiles or loads anything."""

from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import json, sys
import numpy as np
from numba.core.dispatcher import Dispatcher
import kvpool
from kvpool.__main__ import main

def ready():
    return {
        f"{name}.{key}": len(value.overloads)
        for name, module in list(sys.modules.items()) if name.startswith("kvpool") and "replay" not in name
        for key, value in vars(module).items() if isinstance(value, Dispatcher) and value.__module__ == name
    }

kvpool.warm_up()
before = ready()
for device in ("cpu", "sim"):
    main(["replay", "--limit", "12", "--device-blocks", "40", "--host-blocks", "40", "--device", device, "--json"])
with kvpool.KVCacheManager(kvpool.BlockLayout(1, 1, 1, 4), device_blocks=8, host_blocks=4, device="sim") as cache:
    a = cache.add_sequence(list(range(9)), retention=[(0, 4, 80, None)])
    cache.commit(a)
    b = cache.add_sequence([*range(8), 7, 7])
    cache.rewind([a, b], [1, 2])
    c = cache.fork(a)
    cache.append_tokens([a, *c], [1, 2, 3, 4], [2, 2])
    cache.keep([a, *c], [2, 2], [1, 0], [1, 1])
    cache.reorder([a, *c], [1, 1])
    cache.release([a, b, *c], store=False)
    cache.offload(list(range(9)))
    cache.reset()
block = lambda **options: kvpool.BlockLayout(1, 1, 1, **options)
groups = [
    kvpool.LayerGroup([block(tokens_per_block=4), block(tokens_per_block=4)]),
    kvpool.LayerGroup(block(tokens_per_block=4), window=6, sinks=4),
    kvpool.LayerGroup(block(tokens_per_block=1), kind="recurrent", snapshot_tokens=8),
    kvpool.LayerGroup(block(tokens_per_block=4), kind="cross"),
]
for device in ("cpu", "sim"):
    with kvpool.KVCacheManager(groups=groups, device_blocks=[12] * 4, host_blocks=[6] * 4, device=device, max_sequence_tokens=48) as cache:
        keys = cache.block_keys(list(range(9)))
        a = cache.add_sequence(keys, encoder_tokens=5)
        cache.commit(a)
        for g in range(4):
            cache.copy_batch_block_offsets(np.zeros((1, 12), np.int32), a, group=g)
            cache.blocks_needed(sequences=a, new_tokens=1, group=g)
        cache.state_blocks(a, group=2)
        both = [a, *cache.fork(a)]
        cache.append_tokens(both, [1, 2, 3, 4], [2, 2])
        cache.keep(both, [2, 2], [1, 0], [1, 1])
        cache.append_tokens(both, [1, 2, 3, 4], [2, 2])
        cache.rewind(both, [1, 1])
        cache.reorder(both, [1, 1])
        cache.release(both)
        cache.offload(keys)
        for first in (100, 200, 300):
            cache.release(cache.add_sequence(list(range(first, first + 20)), encoder_tokens=5))
        cache.prefetch(keys)
        cache.stats()
        with cache.reserve(keys, encoder_tokens=5) as reservation:
            reservation.commit()
        cache.reserve(list(range(500, 509)), encoder_tokens=5).abort()
        cache.pin(keys.keys).close()
        cache.import_blocks(cache.block_keys(list(range(900, 904))), [bytes(cache.groups[0].block_bytes)], group=0)
        cache.reset()
after = ready()
print(json.dumps({name: after[name] for name in after if after[name] != before.get(name)}))
"""


def test_after_a_warm_up_nothing_is_compiled_or_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}

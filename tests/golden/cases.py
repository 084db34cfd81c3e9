"""The cases, and the file that has their digests."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvpool import BlockLayout, KVCacheManager
from kvpool.state.arrays import POLICIES
from tests.golden import policies, pools, stores
from tests.golden.recorder import Recorder

FILE = Path(__file__).with_name("digests.json")
SEEDS, STORE_SEEDS = range(10), range(3)
DRIVES: dict[str, Callable[[int], Recorder]] = {
    "host cache": stores.drive_host_cache,
    "store queue": stores.drive_queue,
    **{f"keeper, save on {save}": partial(stores.drive_manager, save) for save in ("commit", "evict", "reuse")},
    **{f"host keeper, save on {save}": partial(stores.drive_host_manager, save) for save in stores.HOST_SAVES},
    **{f"policy {policy}": partial(policies.drive_pool, policy) for policy in POLICIES},
    **{f"host policy {policy}": partial(policies.drive_host, policy) for policy in POLICIES},
}
"""Cases beside those of pools, by name without seed."""


def block_keys() -> Recorder:
    """The bytes of keys under the fixed secret: they change with the hash, and nothing else here does."""
    recorder = Recorder()
    layout = BlockLayout(layers=1, kv_heads=1, head_dim=1, tokens_per_block=5, dtype="uint8")
    with KVCacheManager(layout, device_blocks=4, device="cpu", secret=pools.SECRET) as cache:
        for names in ({}, {"salt": "s"}, {"salt": b"s", "adapter_id": 1}, {"extra_ids": [3] + [0] * 20 + [-(2**63)]}):
            keys = cache.block_keys([2**31 - 1, 0, *range(20)], **names)
            recorder.line("keys", keys.keys.tobytes())
    return recorder


def pool_case(kind: str, device: str, seed: int) -> str:
    return f"{kind} on {device}, seed {seed}"


CASES: dict[str, Callable[[], Recorder]] = (
    {"keys": block_keys}
    | {
        pool_case(kind, device, seed): partial(pools.drive, kind, device, seed)
        for kind in pools.KINDS
        for device in pools.DEVICES
        for seed in SEEDS
    }
    | {f"{name}, seed {seed}": partial(drive, seed) for name, drive in DRIVES.items() for seed in STORE_SEEDS}
)


def read() -> dict[str, str]:
    """The digests as they were written, by case."""
    digests: dict[str, str] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return digests


def changed(digests: dict[str, str], known: dict[str, str]) -> str:
    """Which of these digests are not as they were written, in words; "" if all are."""
    wrong = [case for case, digest in digests.items() if known.get(case) != digest]
    if not wrong:
        return ""
    return (
        f"other decisions than in {FILE.name}: {'; '.join(wrong)}. `python -m tests.golden --show CASE` prints what "
        "was decided; compare two checkouts. If the change is meant, run `python -m tests.golden --write`, and say in "
        "the commit which decision has changed, and why"
    )

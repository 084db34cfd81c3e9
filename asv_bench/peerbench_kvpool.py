"""kvpool as an adapter of the peer benchmark harness: same trace, same window, same phases as the peers.

Run it from anywhere with the path of the harness, followed by the harness's own options::

    python asv_bench/peerbench_kvpool.py --harness PATH --limit 1000 --capacity 50000 --reps 3 --micro

or copy it to ``adapters/kvpool.py`` of a copy of the harness and pass ``--adapter kvpool[:VARIANT]``. A variant is
a comma-separated list of ``partial`` (reuse parts of blocks, off by default), ``host=N`` (N host blocks) and
``policy=NAME``.
Blocks are a few bytes, as the harness moves no KV.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MAX_TOKENS = 1 << 18


def _parse(variant: str) -> tuple[bool, int, str]:
    partial, host_blocks, policy = False, 0, "lru"
    for part in filter(None, variant.split(",")):
        name, _, value = part.partition("=")
        if name == "partial" and not value:
            partial = True
        elif name == "host" and value.isdecimal():
            host_blocks = int(value)
        elif name == "policy":
            policy = value
        else:
            raise ValueError(f"variant {variant!r}: {part!r} is neither partial nor host=N nor policy=NAME")
    return partial, host_blocks, policy


class KVPoolAdapter:
    """Everything that the harness calls; its own base class lives in whatever module the harness was started from."""

    kind = "manager"

    def __init__(self, variant: str) -> None:
        self.name = f"kvpool:{variant}" if variant else "kvpool"
        self.partial, self.host_blocks, self.policy = _parse(variant)

    def _manager(self, device_blocks: int, host_blocks: int, max_active: int) -> Any:
        # Not at the top: `main` may first have to put the package on the path.
        import kvpool

        layout = kvpool.BlockLayout(1, 1, 1, self.block_size, dtype="uint8", planes=1)
        return kvpool.KVCacheManager(
            layout,
            device_blocks=device_blocks,
            host_blocks=host_blocks,
            device="cpu",
            max_sequences=max_active,
            max_sequence_tokens=MAX_TOKENS,
            partial_reuse=self.partial,
            policy=self.policy,
        )

    def start(self, capacity_blocks: int, block_size: int, max_active: int) -> None:
        import kvpool  # see _manager

        self.block_size = block_size
        kvpool.warm_up()
        self.cache = self._manager(capacity_blocks, self.host_blocks, max_active)

    def prepare(self, req: Any) -> None:
        req.native = req.tokens.astype(np.int32)
        req.native_out = req.out_tokens.astype(np.int32)

    def ingest(self, req: Any) -> None:
        req.h = self.cache.block_keys(req.native)

    def admit(self, req: Any) -> int:
        admission = self.cache.add_sequence_batch([req.h])
        req.h = int(admission.ids[0])
        self.cache.commit(req.h)
        return int(admission.cached_tokens[0])

    def append_batch(self, items: list[tuple[Any, int, int]]) -> None:
        if len(items) == 1:
            req, start, n = items[0]
            self.cache.append_tokens(req.h, req.native_out[start : start + n])
            self.cache.commit(req.h)
            return
        ids = np.array([req.h for req, _, _ in items])
        tokens = np.concatenate([req.native_out[start : start + n] for req, start, n in items])
        self.cache.append_tokens(ids, tokens, np.array([n for _, _, n in items]))
        self.cache.commit(ids)

    def finish(self, req: Any) -> None:
        self.cache.release(req.h)

    def stats(self) -> dict[str, int]:
        stats = self.cache.stats()
        return {
            "evicted_blocks": stats.forgotten_device_blocks + stats.offloaded_blocks + stats.offloads_saved,
            "cached_blocks": stats.device.free - stats.device.empty,
            "offloaded_blocks": stats.offloaded_blocks,
            "onboarded_blocks": stats.onboarded_blocks,
        }

    def check(self) -> None:
        assert self.cache.stats().device.used == 0
        self.cache.verify()

    def micro(self, n_blocks: int) -> dict[str, Callable[[], Any]]:
        return _micro(self.cache, n_blocks, self.block_size)

    def stop(self) -> None:
        self.cache.close()


def make(variant: str = "") -> KVPoolAdapter:
    """Return an adapter; what the harness looks for."""
    return KVPoolAdapter(variant)


def _micro(cache: Any, n_blocks: int, block_size: int) -> dict[str, Callable[[], Any]]:
    random = np.random.default_rng(0)
    prompts = []
    for _ in range(64):
        tokens = random.integers(0, 128_000, n_blocks * block_size + 1, dtype=np.int32)
        sequence = cache.add_sequence(tokens)
        cache.commit(sequence)
        cache.release(sequence)
        prompts.append(tokens)
    keys = [cache.block_keys(tokens) for tokens in prompts]
    assert cache.match_prefix(keys[0]).tokens == n_blocks * block_size
    fresh = random.integers(0, 128_000, 64 * block_size, dtype=np.int32)
    few, many = cache.block_keys(fresh[:block_size]), cache.block_keys(fresh)

    def match_64() -> None:
        for key in keys:
            cache.match_prefix(key)

    def claim() -> None:
        cache.release(cache.add_sequence(keys[0]))

    return {
        f"match_{n_blocks}": lambda: cache.match_prefix(keys[0]),
        f"match_{n_blocks}_with_hashing": lambda: cache.match_prefix(cache.block_keys(prompts[0])),
        f"match_{n_blocks}_x64": match_64,
        f"claim_release_{n_blocks}": claim,
        "alloc_free_1": lambda: cache.release(cache.add_sequence(few), store=False),
        "alloc_free_64": lambda: cache.release(cache.add_sequence(many), store=False),
    }


def main() -> None:
    """Run the harness found under ``--harness PATH`` with this file as its adapter."""
    arguments = sys.argv[1:]
    if arguments in (["--help"], ["-h"]):
        print(__doc__)
        return
    if "--harness" not in arguments[:-1]:
        sys.exit("usage: peerbench_kvpool.py --harness PATH [--adapter kvpool:VARIANT] [options of the harness]")
    at = arguments.index("--harness")
    harness = Path(arguments[at + 1]).resolve()
    if not (harness / "replay.py").is_file():
        sys.exit(f"{harness} holds no replay.py")
    arguments[at : at + 2] = []
    if not any(argument.partition("=")[0] == "--adapter" for argument in arguments):
        arguments = ["--adapter", "kvpool:policy=lru", *arguments]
    checkout = Path(__file__).resolve().parents[1]
    sys.path[0:1] = [str(harness), str(checkout)] if (checkout / "kvpool").is_dir() else [str(harness)]
    sys.modules["adapters.kvpool"] = sys.modules[__name__]
    sys.argv[1:] = arguments
    import replay

    replay.main()


if __name__ == "__main__":
    main()

"""The engine of engine_numpy.py with sliding windows and sinks: chats give blocks back while they run, and every logit
is right.

    python examples/windows_numpy.py                 # chats on a pool that the window alone keeps from overflowing
    python examples/windows_numpy.py --device sim    # the same on a stream that runs late

The engine makes the same calls as before: `commit` moves the window. Two things differ: the mask, and the block table,
which has -1 where the window has passed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from engine_numpy import (
    HEAD_DIM,
    KV_HEADS,
    LAYOUT,
    Batch,
    Engine,
    Floats,
    Ints,
    attention,
    compare,
    counted,
    forward,
    make_chats,
    make_weights,
    options,
    report,
)

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice

WINDOW, SINKS = 19, 3


def in_window(positions: Ints, places: Ints, window: int = WINDOW, sinks: int = SINKS) -> npt.NDArray[np.bool_]:
    """Which tokens [n, m] at ``places`` those at ``positions`` see."""
    distance = positions[:, None] - places  # how many tokens before the one that attends
    return (distance >= 0) & ((distance < window) | (places < sinks))


def uncached(weights: dict[str, Any], tokens: list[int]) -> Floats:
    """The same model without any cache: all logits of a whole conversation at once."""
    positions = np.arange(len(tokens))
    seen = in_window(positions, positions)
    return np.asarray(forward(weights, np.array(tokens), positions, lambda layer, q, k, v: attention(q, k, v, seen)))


class WindowedModel:
    """``forward`` with an attention that reads what the block table still has."""

    def __init__(self, weights: dict[str, Any], cache: kvpool.KVCacheManager) -> None:
        self.weights, self.cache = weights, cache
        self.passed = 0
        """Blocks that were not there when a step began."""

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        pool = self.cache.memory.device_pool  # [layers, K and V, blocks, tokens, kv_heads, head_dim]
        size = LAYOUT.tokens_per_block
        blocks, tokens = np.divmod(batch.slots, size)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            pool[layer, 0, blocks, tokens], pool[layer, 1, blocks, tokens] = k, v
            out = np.empty_like(q)
            for row, table in enumerate(batch.table):
                mine = batch.owner == row
                kept = np.flatnonzero(table >= 0)
                places = (kept[:, None] * size + np.arange(size)).reshape(-1)
                keys, values = pool[layer][:, table[kept]].reshape(2, -1, KV_HEADS, HEAD_DIM)
                out[mine] = attention(q[mine], keys, values, in_window(batch.positions[mine], places))
                self.passed += 0 if layer else int(kept[-1]) + 1 - len(kept)
            return out

        return np.asarray(forward(self.weights, batch.tokens, batch.positions, attend))


def serve(device: Device, *, chats: int, seed: int, check: bool = False) -> int:
    """Chat, compare, and close everything; the exit code: 1 if a logit is wrong, or if something that had to be shown
    did not happen."""
    weights, talks = make_weights(seed), make_chats(chats, seed)
    with kvpool.KVCacheManager(
        LAYOUT,
        device_blocks=20,
        host_blocks=30,
        device=device,
        max_sequences=Engine.running_max,
        window=WINDOW,
        sinks=SINKS,
        max_sequence_tokens=256,
    ) as cache:
        model = WindowedModel(weights, cache)
        engine = Engine(cache, device, device.create_stream("engine"), model, talks)
        engine.run(check)
        passed = {
            "blocks that the window had passed went back": cache.stats().passed_blocks,
            "blocks less were read": model.passed,
        }
        code = report(
            passed | counted(cache.stats()) | dict(sorted(engine.happened.items())), compare(weights, talks, uncached)
        )
    device.close()
    return code


def main(arguments: list[str] | None = None) -> int:
    parsed = options(("cpu", "sim")).parse_args(arguments)
    device = SimDevice(parsed.seed) if parsed.device == "sim" else get_device("cpu")
    return serve(device, chats=parsed.chats, seed=parsed.seed, check=parsed.check)


if __name__ == "__main__":
    sys.exit(main())

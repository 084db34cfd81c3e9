"""The engine of engine_numpy.py with sliding windows and sinks: blocks go back while chats go on, and the logits are those without a cache.

    python examples/windows_numpy.py                 # chats on a pool that the window alone keeps from overflowing
    python examples/windows_numpy.py --device sim    # the same on a stream that really runs behind

The engine is the same: all it says to the pool is `commit`, as before. Other are the mask, and the block table: -1 is where the window
has passed.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from engine_numpy import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYOUT,
    TOLERANCE,
    Batch,
    Chat,
    Engine,
    Floats,
    Ints,
    forward,
    make_chats,
    make_weights,
    options,
)

import kvpool
from kvpool.device import get_device
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice

WINDOW, SINKS = 19, 3


def attention(q: Floats, k: Floats, v: Floats, positions: Ints, places: Ints) -> Floats:
    """Grouped-query attention within one sequence: q [n, heads, d] at ``positions``, k and v [m, kv_heads, d] at ``places``."""
    q = q.reshape(len(q), KV_HEADS, HEADS // KV_HEADS, HEAD_DIM)
    scores = np.einsum("nkgd,mkd->nkgm", q, k) / np.sqrt(HEAD_DIM)
    behind = positions[:, None] - places  # how many tokens before the query
    seen = (behind >= 0) & ((behind < WINDOW) | (places < SINKS))
    scores[np.broadcast_to(~seen[:, None, None], scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nkgm,mkd->nkgd", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), HEADS, HEAD_DIM)


def uncached(weights: dict[str, Any], tokens: list[int]) -> Floats:
    """The same model without any cache: all logits of a whole conversation at once."""
    positions = np.arange(len(tokens))
    attend = lambda layer, q, k, v: attention(q, k, v, positions, positions)  # noqa: E731
    return np.asarray(forward(weights, np.array(tokens), positions, attend))


class WindowedModel:
    """``forward`` with an attention that reads what the block table still has."""

    def __init__(self, weights: dict[str, Any], cache: kvpool.KVCacheManager) -> None:
        self.weights, self.cache = weights, cache
        self.passed = 0
        """Blocks that were not there when a step began."""

    def run(self, batch: Batch) -> Floats:
        """Logits [n, vocabulary]."""
        pool = self.cache.device_pool  # [layers, K and V, blocks, tokens, kv_heads, head_dim]
        size = LAYOUT.tokens_per_block
        blocks, tokens = np.divmod(batch.slots, size)

        def attend(layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
            pool[layer, 0, blocks, tokens], pool[layer, 1, blocks, tokens] = k, v
            out = np.empty_like(q)
            for row, table in enumerate(batch.table):
                mine = batch.owner == row
                here = np.flatnonzero(table >= 0)
                places = (here[:, None] * size + np.arange(size)).reshape(-1)
                keys, values = pool[layer][:, table[here]].reshape(2, -1, KV_HEADS, HEAD_DIM)
                out[mine] = attention(q[mine], keys, values, batch.positions[mine], places)
                self.passed += 0 if layer else int(here[-1]) + 1 - len(here)
            return out

        return np.asarray(forward(self.weights, batch.tokens, batch.positions, attend))


def compare(weights: dict[str, Any], chats: list[Chat]) -> tuple[int, float]:
    """Every logit that was computed against the model without a cache: tokens compared, and the largest difference."""
    differences = []
    for chat in chats:
        expected = uncached(weights, chat.tokens)
        differences += [np.abs(logits - expected[position]).max() for position, logits in chat.logits]
    return len(differences), float(np.max(differences))


def serve(device: Device, *, chats: int, seed: int, check: bool = False) -> int:
    """Chat, compare, and close everything; the exit code: 1 if a logit is wrong, or if something that had to be shown did not happen."""
    weights, talks = make_weights(seed), make_chats(chats, seed)
    with kvpool.KVCacheManager(
        LAYOUT, device_blocks=20, host_blocks=30, device=device, max_sequences=Engine.running_max, window=WINDOW, sinks=SINKS,
        max_sequence_tokens=256,
    ) as cache:  # fmt: skip
        model = WindowedModel(weights, cache)
        engine = Engine(cache, device, device.create_stream("engine"), model, talks)
        while engine.running or engine.waiting:
            engine.step()
            if check:
                cache.verify()
        stats, (tokens, worst) = cache.stats(), compare(weights, talks)
    device.close()
    counts = {
        "blocks that the window had passed went back": stats.passed_blocks, "blocks less were read": model.passed,
        "blocks reused on the device": stats.reused_device_blocks, "blocks onboarded": stats.onboarded_blocks,
        **dict(sorted(engine.happened.items())),
    }  # fmt: skip
    for name, count in counts.items():
        print(f"{count:7,} {name}")
    print(f"{tokens:7,} tokens compared with the model without a cache, largest difference of a logit {worst:.1e}")
    missing = [name for name, count in counts.items() if not count]
    if missing:
        print("did not happen: " + ", ".join(missing))
    if not worst <= TOLERANCE:
        print(f"the logits differ by more than {TOLERANCE}")
    return 1 if missing or not worst <= TOLERANCE else 0


def main(arguments: list[str] | None = None) -> int:
    given = options(("cpu", "sim")).parse_args(arguments)
    device = SimDevice(given.seed) if given.device == "sim" else get_device("cpu")
    return serve(device, chats=given.chats, seed=given.seed, check=given.check)


if __name__ == "__main__":
    sys.exit(main())

"""What workers do with a host tier: each function is the whole of one process."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import numpy as np

import kvpool

BLOCKS, TOKENS, LAYERS = 6, 4, 2


def cache_of(value: int, share: int) -> tuple[list[np.ndarray], kvpool.PagedKV]:
    """The pages of a worker: block b is full of ``value + b``."""
    page = share // LAYERS
    pages = [np.repeat(np.arange(value, value + BLOCKS, dtype=np.uint8)[:, None], page, axis=1) for _ in range(LAYERS)]
    return pages, kvpool.PagedKV.of(pages, "L | B D")


def work(pipe: Connection) -> None:
    """A worker: it receives the tier and its rank, then copies slots in and out until it receives "stop"."""
    description, rank, share = pipe.recv()
    with kvpool.HostTier.attach(description) as tier:
        pages, cache = cache_of(100 * rank, share)
        with kvpool.hostcache.HostCopies(tier, cache, first_byte=rank * share) as copies:
            pipe.send((tier.identity, tier.fingerprint))
            while True:
                direction, blocks, slots = pipe.recv()
                if direction == "stop":
                    break
                call = copies.copy_in if direction == "in" else copies.copy_out
                call(blocks, slots).wait()
                pipe.send([int(pages[-1][block, 0]) for block in blocks])


def die_in_a_copy(pipe: Connection) -> None:
    """A worker that ends, without any cleaning up, when half of what it has to write is written."""
    description, slots = pipe.recv()
    tier = kvpool.HostTier.attach(description)
    for block in slots.blocks[: len(slots) // 2]:
        tier.blocks[block] = 255
    pipe.send("half")
    pipe.recv()
    os._exit(1)

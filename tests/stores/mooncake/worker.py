"""A process with a MooncakeStore that saves and loads blocks of known content, as orders on its standard input say.

Each order is a line of JSON, and gets one line as its answer. The first is the secret.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np

from kvpool.storage import OK, StoreWorker
from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from tests.stores.lab import IDENTITY, content, fill, keys_of, memory

SLOTS = 64


def save(queue: StoreWorker, first: int, count: int, shift: int = 0, seconds: float = 600.0) -> dict[str, Any]:
    """Save blocks whose bytes are those of the numbers ``shift`` further on."""
    fill(queue.memory, count, first + shift)
    job = queue.save(keys_of(queue, count, first), np.arange(count), deadline=queue.now() + seconds)
    job.wait()
    return {"codes": job.codes.tolist(), "error": job.error}


def load(queue: StoreWorker, first: int, count: int, shifts: tuple[int, ...] = (0,), seconds: float = 600.0) -> Any:
    """``wrong``: how many blocks were OK with bytes of none of these shifts."""
    queue.memory[:count] = 0
    job = queue.load(keys_of(queue, count, first), np.arange(count), deadline=queue.now() + seconds)
    job.wait(returned=True)
    blocks = [queue.memory[place] for place in np.flatnonzero(job.codes == OK).tolist()]
    numbers = (first + np.flatnonzero(job.codes == OK)).tolist()
    right = [
        any(np.array_equal(block, content(number + shift, queue.block_bytes)) for shift in shifts)
        for block, number in zip(blocks, numbers, strict=True)
    ]
    return {"codes": job.codes.tolist(), "wrong": right.count(False), "error": job.error}


def main(master: str, segment: int, block_bytes: int) -> None:
    # Only answers go to standard output; the library may print.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    secret = bytes.fromhex(json.loads(sys.stdin.readline())["secret"])
    store = MooncakeStore(master, segment=segment, secret=secret)
    with StoreWorker(store, memory(SLOTS, block_bytes), IDENTITY) as queue:
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            do = {"save": save, "load": load}[order.pop("do")]
            print(json.dumps(do(queue, **order)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

"""What other processes do with a pool's memory: each function is the whole of one process."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

import kvpool

NOBODY = 65534


def on_device(content: np.ndarray, pool: Any) -> Any:
    """The content where ``pool`` is."""
    if isinstance(pool, np.ndarray):
        return content
    import cupy

    copied = cupy.asarray(content)
    cupy.cuda.Device().synchronize()
    return copied


def load(pipe: Connection) -> None:
    """A loader: it receives the memory, the slots and what goes there. It brings half of it each time that it is asked
    to go on."""
    description, slots, content, skip = pipe.recv()
    with kvpool.attach(description) as attached:
        pipe.send("attached")
        paged = kvpool.PagedKV.of_pool(attached.layouts[0][0], attached.pool)
        for some in (slice(0, len(slots) // 2), slice(len(slots) // 2, None)):
            pipe.recv()
            mine, skipped = content[:, :, some].copy(), max(0, skip - (some.start or 0))
            source = on_device(mine, attached.pool)
            kvpool.scatter_kv(paged, slots[some].copy(), source, skip_prefix_n_tokens=skipped)
            if source is not mine:
                import cupy

                cupy.cuda.Device().synchronize()
            pipe.send("written")


def fill_and_close(pipe: Connection) -> None:
    """Enqueues a write of the whole memory of a GPU, and closes at once."""
    import cupy

    with kvpool.attach(pipe.recv()) as attached:
        for stream in [cupy.cuda.Stream(non_blocking=True) for _ in range(8)]:
            with stream:
                attached.pool.fill(5)
    del attached
    cupy.cuda.Device().synchronize()
    pipe.send("closed")


def drop_while_capturing(pipe: Connection) -> None:
    """Lets the collector find an attachment while a stream is captured. Sends whether the capture became a graph."""
    import gc

    import cupy

    description = pipe.recv()
    attached, stream, out = kvpool.attach(description), cupy.cuda.Stream(non_blocking=True), cupy.zeros(4, np.uint8)
    attached.pool.fill(6)
    cupy.cuda.Device().synchronize()
    gc.collect()
    stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
    cupy.cuda.runtime.memsetAsync(out.data.ptr, 1, 4, stream.ptr)
    del attached
    gc.collect()
    stream.end_capture().launch(stream)
    stream.synchronize()
    pipe.send(out.get().tolist())
    kvpool.attach(description).close()  # which also closes the first one
    pipe.send("closed")


def hold(pipe: Connection) -> None:
    """Attaches, and writes one number everywhere in these blocks, over and over, until it is killed or asked to end."""
    description, blocks, value = pipe.recv()
    attached = kvpool.attach(description)
    pipe.send(attached.alive)
    pool = attached.pool
    while not pipe.poll():
        pool[:, :, blocks] = value
    pipe.recv()


def own_pool(pipe: Connection) -> None:
    """Has a pool, shares it, and lives until it is killed."""
    layout = kvpool.BlockLayout(2, 2, 8, 4, dtype="uint16")
    cache = kvpool.KVCacheManager(layout, device_blocks=4, device="cpu", memory=kvpool.MemoryOptions(shared=True))
    cache.memory.device_pool[...] = 7
    pipe.send(cache.memory.share())
    time.sleep(600)


def attach_as_nobody(pipe: Connection) -> None:
    """Becomes another user, and says what attaching gave."""
    description = pipe.recv()
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    try:
        kvpool.attach(description)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
    else:
        pipe.send("attached")
    with suppress(EOFError):
        pipe.recv()

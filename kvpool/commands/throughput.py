"""Measures how fast blocks come from another process, compared with a bare ZeroMQ socket that sends the same bytes from
the same memory, in alternation in one run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import truediv
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import zmq

from kvpool.arrays.layout import BlockLayout
from kvpool.pool.manager import KVCacheManager
from kvpool.remote.block_client import BlockClient
from kvpool.remote.block_server import BlockServer, Limits

_SECRET = bytes(32)
"""Only made-up content is ever stored under it."""
_WIDTH, _IN_FLIGHT = 16, 16


class Throughput(NamedTuple):
    """Bytes per second, as medians over the rounds.

    ``fetch`` ends with the blocks in the pool, and ``fetch_blocks`` with the blocks in buffers. ``bare_copied`` is a
    bare transfer into an array, and ``bare`` one that stays in the buffers in which it came. ``ratio`` is ``fetch`` to
    ``bare_copied``, and ``ratio_in_buffers`` is ``fetch_blocks`` to ``bare``; each is the median of the ratios of the
    rounds.
    """

    block_bytes: int
    blocks_per_message: int
    round_bytes: int
    rounds: int
    fetch: float
    fetch_blocks: float
    bare_copied: float
    bare: float
    ratio: float
    ratio_in_buffers: float


def measure(
    block_bytes: int, *, blocks_per_message: int = 16, round_bytes: int = 1 << 27, rounds: int = 7
) -> Throughput:
    """Fetch ``round_bytes`` from the host tier of a pool in another process, in so many rounds, each way in turn.

    Raises ValueError for sizes that make no message, RemoteError if the other process fails.
    """
    blocks = round_bytes // block_bytes // blocks_per_message * blocks_per_message
    if blocks == 0 or rounds < 1:
        raise ValueError(f"round_bytes={round_bytes}, rounds={rounds}: accepted is at least one message, once")
    with (
        _other_process(block_bytes, blocks, blocks_per_message) as (endpoint, bare_endpoint),
        _pool(block_bytes, blocks) as cache,
        BlockClient(endpoint, cache, blocks_per_message=blocks_per_message, messages_in_flight=_IN_FLIGHT) as client,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as socket,
    ):
        socket.linger = 0
        socket.connect(bare_endpoint)
        prompt, copied = cache.block_keys(_tokens(blocks)), np.zeros((blocks, block_bytes), np.uint8)
        firsts = range(0, blocks, blocks_per_message)

        def fetch() -> int:
            cache.reset()
            return client.fetch(prompt)

        ways: dict[str, Callable[[], int]] = {
            "fetch": fetch,
            "bare_copied": lambda: _fetch_bare(socket, firsts, copied),
            "fetch_blocks": lambda: sum(block is not None for block in client.fetch_blocks(prompt)),
            "bare": lambda: _fetch_bare(socket, firsts),
        }
        seconds = _in_turns(ways, blocks, rounds)
    nbytes = blocks * block_bytes
    return Throughput(
        block_bytes,
        blocks_per_message,
        nbytes,
        rounds,
        **{name: nbytes / median(times) for name, times in seconds.items()},
        ratio=median(map(truediv, seconds["bare_copied"], seconds["fetch"])),
        ratio_in_buffers=median(map(truediv, seconds["bare"], seconds["fetch_blocks"])),
    )


def _in_turns(ways: dict[str, Callable[[], int]], blocks: int, rounds: int) -> dict[str, list[float]]:
    """The seconds of each way in each round. A first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begin = perf_counter()
            came = way()
            seconds[name].append(perf_counter() - begin)
            if came != blocks:
                raise AssertionError(f"{name}: {came} of {blocks} blocks came")
    return {name: times[1:] for name, times in seconds.items()}


def _fetch_bare(socket: Any, firsts: range, into: Any = None) -> int:
    """Ask a bare socket for a message of blocks each, as many at a time as the client does. How many blocks came; with
    an array uint8[blocks, block_bytes], they are copied into it."""
    sent = came = 0
    for received in range(len(firsts)):
        while sent < min(len(firsts), received + _IN_FLIGHT):
            socket.send(b"%d" % firsts[sent])
            sent += 1
        frames = socket.recv_multipart(copy=False)
        if into is not None:
            for place, frame in enumerate(frames):
                into[came + place] = np.frombuffer(frame.buffer, np.uint8)
        came += len(frames)
    return came


def _pool(block_bytes: int, blocks: int) -> KVCacheManager:
    layout = BlockLayout.of_block_bytes(block_bytes, _WIDTH)
    return KVCacheManager(layout, device_blocks=1, host_blocks=blocks, device="cpu", secret=_SECRET)


def _tokens(blocks: int) -> Any:
    # One token more, since the last token of a prompt is never reused.
    return np.arange(blocks * _WIDTH + 1, dtype=np.int32)


@contextmanager
def _other_process(*size: int) -> Iterator[tuple[str, str]]:
    """The endpoints of a block server and of a bare server of the same memory. Their process ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, *size), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve(connection: Any, block_bytes: int, blocks: int, blocks_per_message: int) -> None:
    """What the other process does until the pipe is closed."""
    limits = Limits(blocks_per_message, _IN_FLIGHT, 1 << 40, 1 << 40)
    with _pool(block_bytes, blocks) as cache, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        content = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), np.uint8)
        cache.import_blocks(cache.block_keys(_tokens(blocks)), list(content))
        del content
        rows = cache.host_pool.reshape(blocks, -1).view(np.uint8)
        router.linger = 0
        router.bind("tcp://127.0.0.1:*")
        with BlockServer(cache, limits=limits) as server:
            connection.send((server.endpoint, router.getsockopt_string(zmq.LAST_ENDPOINT)))
            # Nobody asks both servers at a time, so this thread does not disturb the other. The pipe can be read when
            # its other end is closed.
            while not connection.poll(0):
                if router.poll(50):
                    client, first = router.recv_multipart()
                    router.send_multipart([client, *rows[int(first) : int(first) + blocks_per_message]], copy=False)

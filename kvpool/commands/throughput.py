"""Measures how fast blocks come from another process, compared with a bare ZeroMQ socket that sends the same bytes from
the same memory, in alternation in one run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
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


class _Size(NamedTuple):
    block_bytes: int
    blocks: int
    blocks_per_message: int


@dataclass(frozen=True)
class Throughput:
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    block_bytes: int,
    *,
    blocks_per_message: int = 16,
    round_bytes: int = 1 << 27,
    rounds: int = 7,
) -> Throughput:
    """Fetch ``round_bytes`` from the host tier of a pool in another process, in so many rounds, each way in turn.

    Raises ValueError for sizes that make no message, RemoteError if the other process fails.
    """
    blocks = round_bytes // block_bytes // blocks_per_message * blocks_per_message
    if blocks == 0 or rounds < 1:
        raise ValueError(f"round_bytes={round_bytes}, rounds={rounds}: accepted is at least one message, once")
    size = _Size(block_bytes, blocks, blocks_per_message)
    with ExitStack() as stack:
        endpoint, bare_endpoint = stack.enter_context(_other_process(size))
        cache = stack.enter_context(_pool(size))
        prompt, copied = cache.block_keys(_tokens(blocks)), np.zeros((blocks, block_bytes), np.uint8)
        client = stack.enter_context(
            BlockClient(
                endpoint,
                cache,
                blocks_per_message=blocks_per_message,
                messages_in_flight=_IN_FLIGHT,
            )
        )
        bare = stack.enter_context(_BareSocket(bare_endpoint, size))

        def fetch() -> int:
            cache.reset()
            return client.fetch(prompt)

        ways: dict[str, Callable[[], int]] = {
            "fetch": fetch,
            "bare_copied": lambda: bare.fetch(copied),
            "fetch_blocks": lambda: sum(block is not None for block in client.fetch_blocks(prompt)),
            "bare": bare.fetch,
        }
        seconds = _in_turns(ways, blocks, rounds)
    nbytes = blocks * block_bytes
    return Throughput(
        block_bytes, blocks_per_message, nbytes, rounds,
        **{name: nbytes / median(times) for name, times in seconds.items()},
        ratio=median(map(truediv, seconds["bare_copied"], seconds["fetch"])),
        ratio_in_buffers=median(map(truediv, seconds["bare"], seconds["fetch_blocks"])),
    )  # fmt: skip


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


def _pool(size: _Size) -> KVCacheManager:
    layout = BlockLayout.of_block_bytes(size.block_bytes, _WIDTH)
    return KVCacheManager(layout, device_blocks=1, host_blocks=size.blocks, device="cpu", secret=_SECRET)


def _tokens(blocks: int) -> Any:
    # One token more, since the last token of a prompt is never reused.
    return np.arange(blocks * _WIDTH + 1, dtype=np.int32)


class _BareSocket:
    """Requests messages of blocks from a bare socket, as many at a time as the client does. A context manager."""

    def __init__(self, endpoint: Any, size: _Size) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._firsts = range(0, size.blocks, size.blocks_per_message)

    def fetch(self, into: Any = None) -> int:
        """How many blocks came. With an array uint8[blocks, block_bytes], they are copied into it."""
        waiting = came = 0
        for first in self._firsts:
            if waiting == _IN_FLIGHT:
                came += self._receive(into, came)
                waiting -= 1
            self._socket.send(b"%d" % first)
            waiting += 1
        for _ in range(waiting):
            came += self._receive(into, came)
        return came

    def _receive(self, into: Any, at: int) -> int:
        frames = self._socket.recv_multipart(copy=False)
        if into is not None:
            for place, frame in enumerate(frames):
                into[at + place] = np.frombuffer(frame.buffer, np.uint8)
        return len(frames)

    def __enter__(self) -> _BareSocket:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)


@contextmanager
def _other_process(size: _Size) -> Iterator[tuple[str, Any]]:
    """The endpoints of a block server and of a bare server of the same memory. Their process ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, size), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve(connection: Any, size: _Size) -> None:
    """What the other process does until the pipe is closed."""
    with _pool(size) as cache:
        content = np.random.default_rng(0).integers(0, 256, (size.blocks, size.block_bytes), np.uint8)
        cache.import_blocks(cache.block_keys(_tokens(size.blocks)), list(content))
        del content
        rows = cache.host_pool.reshape(size.blocks, -1).view(np.uint8)
        limits = Limits(size.blocks_per_message, _IN_FLIGHT, 1 << 40, 1 << 40)
        with BlockServer(cache, limits=limits) as server:
            _serve_bare_socket(connection, server.endpoint, rows, size.blocks_per_message)


def _serve_bare_socket(connection: Any, endpoint: str, rows: Any, blocks_per_message: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind("tcp://127.0.0.1:*")
        connection.send((endpoint, router.getsockopt_string(zmq.LAST_ENDPOINT)))
        # Nobody asks both servers at a time, so this thread does not disturb the other.
        while not _closed(connection):
            if router.poll(50):
                client, first = router.recv_multipart()
                router.send_multipart([client, *rows[int(first) : int(first) + blocks_per_message]], copy=False)


def _closed(connection: Any, seconds: float = 0.0) -> bool:
    try:
        return bool(connection.poll(seconds)) and connection.recv() is None
    except EOFError:
        return True

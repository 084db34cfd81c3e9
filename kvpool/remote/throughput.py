"""How fast blocks come from another process, beside the same bytes from the same memory over a bare socket, in turns in one run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import zmq

from kvpool.layout import BlockLayout
from kvpool.manager import KVCacheManager
from kvpool.remote.client import BlockClient
from kvpool.remote.limits import Limits
from kvpool.remote.server import BlockServer

_SECRET = bytes(32)
"""Nothing but made-up content is ever stored under it."""
_WIDTH, _IN_FLIGHT = 16, 8


@dataclass(frozen=True)
class Throughput:
    """Medians over the rounds, bytes per second: of ``fetch``, whose blocks are in the pool then, and of ``fetch_blocks``, whose blocks are
    in the buffers in which they came; and of the bare transfer, copied into an array, and in the buffers in which it came."""

    transport: str
    block_bytes: int
    blocks_per_message: int
    round_bytes: int
    rounds: int
    fetch: float
    fetch_blocks: float
    bare_copied: float
    bare: float

    @property
    def ratio(self) -> float:
        """Of blocks that have come to stay: ``fetch`` to ``bare_copied``."""
        return self.fetch / self.bare_copied

    @property
    def ratio_in_buffers(self) -> float:
        """Of blocks in the buffers in which they came: ``fetch_blocks`` to ``bare``."""
        return self.fetch_blocks / self.bare

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "ratio_in_buffers": self.ratio_in_buffers}


def measure(block_bytes: int, *, blocks_per_message: int = 16, round_bytes: int = 1 << 28, rounds: int = 5) -> Throughput:
    """Fetch ``round_bytes`` from the host tier of a pool in a process of its own, as often as there are rounds, each way in turn.

    Raises ValueError for sizes that make no message, RemoteError where the other process fails.
    """
    blocks = round_bytes // block_bytes // blocks_per_message * blocks_per_message
    if blocks == 0 or rounds < 1:
        raise ValueError(f"round_bytes={round_bytes}, rounds={rounds}: accepted is at least one message, once")
    with _other_process(block_bytes, blocks, blocks_per_message) as (endpoint, bare_endpoint):
        layout = BlockLayout.of_block_bytes(block_bytes, _WIDTH)
        with KVCacheManager(layout, device_blocks=1, host_blocks=blocks, device="cpu", secret=_SECRET) as cache:
            prompt = cache.block_keys(_tokens(blocks))
            with BlockClient(endpoint, cache, blocks_per_message=blocks_per_message, messages_in_flight=_IN_FLIGHT) as client:
                with _Bare(bare_endpoint, blocks, blocks_per_message) as bare:
                    copied = np.zeros((blocks, block_bytes), np.uint8)

                    def fetch() -> int:
                        cache.reset()
                        return client.fetch(prompt)

                    ways: dict[str, Callable[[], int]] = {
                        "fetch": fetch,
                        "fetch_blocks": lambda: sum(block is not None for block in client.fetch_blocks(prompt)),
                        "bare_copied": lambda: bare.fetch(copied),
                        "bare": bare.fetch,
                    }
                    speeds = _in_turns(ways, blocks, blocks * block_bytes, rounds)
    return Throughput("inline", block_bytes, blocks_per_message, blocks * block_bytes, rounds, **speeds)


def _in_turns(ways: dict[str, Callable[[], int]], blocks: int, nbytes: int, rounds: int) -> dict[str, float]:
    """Median bytes per second of each way; a first round of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            begin = perf_counter()
            came = way()
            seconds[name].append(perf_counter() - begin)
            if came != blocks:
                raise AssertionError(f"{name}: {came} of {blocks} blocks came")
    return {name: nbytes / median(times[1:]) for name, times in seconds.items()}


def _tokens(blocks: int) -> Any:
    # One more, since the last token of a prompt is never reused.
    return np.arange(blocks * _WIDTH + 1, dtype=np.int32)


class _Bare:
    """Asks a bare socket for messages of blocks, as many in flight as the client has. A context manager."""

    def __init__(self, endpoint: str, blocks: int, blocks_per_message: int) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(endpoint)
        self._firsts = range(0, blocks, blocks_per_message)

    def fetch(self, into: Any = None) -> int:
        """How many blocks came; with an array uint8[blocks, block_bytes], they are copied there."""
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

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.destroy(linger=0)


@contextmanager
def _other_process(block_bytes: int, blocks: int, blocks_per_message: int) -> Iterator[tuple[str, str]]:
    """The endpoints of a block server and of a bare socket in front of the same memory, in a process that ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, block_bytes, blocks, blocks_per_message), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve(connection: Any, block_bytes: int, blocks: int, blocks_per_message: int) -> None:
    """What the other process does until the pipe is closed."""
    layout = BlockLayout.of_block_bytes(block_bytes, _WIDTH)
    with KVCacheManager(layout, device_blocks=1, host_blocks=blocks, device="cpu", secret=_SECRET) as cache:
        content = np.random.default_rng(0).integers(0, 256, (blocks, block_bytes), np.uint8)
        cache.import_blocks(cache.block_keys(_tokens(blocks)), list(content))
        del content
        rows = cache.host_pool.reshape(blocks, -1).view(np.uint8)
        limits = Limits(blocks_per_message, _IN_FLIGHT, 1 << 40, 1 << 40)
        with BlockServer(cache, limits=limits) as server, zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind("tcp://127.0.0.1:*")
            connection.send((server.endpoint, router.getsockopt_string(zmq.LAST_ENDPOINT)))
            # Nobody asks both at a time, so that this thread does not disturb the server's.
            while not _closed(connection):
                if router.poll(50):
                    client, first = router.recv_multipart()
                    router.send_multipart([client, *rows[int(first) : int(first) + blocks_per_message]], copy=False)


def _closed(connection: Any) -> bool:
    try:
        return bool(connection.poll()) and connection.recv() is None
    except EOFError:
        return True

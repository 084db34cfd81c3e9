"""Measures how fast blocks come from another process, compared with a bare transfer of the same bytes from the same
memory, in alternation in one run."""

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
import numpy.typing as npt
import zmq

from kvpool.arrays.layout import BlockLayout
from kvpool.pool.manager import KVCacheManager
from kvpool.remote import nixl
from kvpool.remote.block_client import BlockClient
from kvpool.remote.block_server import BlockServer
from kvpool.remote.limits import Limits
from kvpool.remote.transport import InlineClient, InlineServer

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

    transport: str
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
    transport: str = "inline",
) -> Throughput:
    """Fetch ``round_bytes`` from the host tier of a pool in another process, in so many rounds, each way in turn.

    ``transport`` is "inline", compared with a bare ZeroMQ socket, or "nixl", compared with bare NIXL reads. Raises
    ValueError for sizes that make no message, ImportError without NIXL, RemoteError if the other process fails.
    """
    blocks = round_bytes // block_bytes // blocks_per_message * blocks_per_message
    if blocks == 0 or rounds < 1:
        raise ValueError(f"round_bytes={round_bytes}, rounds={rounds}: accepted is at least one message, once")
    if transport not in _TRANSPORTS:
        raise ValueError(f"transport={transport!r:.40}: accepted are {', '.join(_TRANSPORTS)}")
    _, make_client, make_bare = _TRANSPORTS[transport]
    size = _Size(block_bytes, blocks, blocks_per_message)
    with ExitStack() as stack:
        endpoint, bare_endpoint = stack.enter_context(_other_process(size, transport))
        cache = stack.enter_context(_pool(size))
        prompt, copied = cache.block_keys(_tokens(blocks)), np.zeros((blocks, block_bytes), np.uint8)
        client = stack.enter_context(
            BlockClient(
                endpoint,
                cache,
                transport=make_client(),
                blocks_per_message=blocks_per_message,
                messages_in_flight=_IN_FLIGHT,
            )
        )
        bare = stack.enter_context(make_bare(bare_endpoint, size))

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
        transport, block_bytes, blocks_per_message, nbytes, rounds,
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


class _BareReads:
    """Reads messages of blocks with NIXL, as many at a time as the client does. A context manager."""

    def __init__(self, endpoint: Any, size: _Size) -> None:
        metadata, self._base = endpoint
        self._agent, self._size = nixl.new_agent(), size
        self._slots = np.zeros((_IN_FLIGHT, size.blocks_per_message, size.block_bytes), np.uint8)
        self._memory = self._agent.register_memory(
            nixl.regions([nixl.address(self._slots)], self._slots.nbytes), nixl.MEMORY
        )
        self._server = self._agent.add_remote_agent(metadata)

    def fetch(self, into: Any = None) -> int:
        """How many blocks came. With an array uint8[blocks, block_bytes], they are copied into it."""
        size, reads = self._size, dict[int, Any]()
        for first in range(0, size.blocks, size.blocks_per_message):
            if len(reads) == _IN_FLIGHT:
                self._finish(next(iter(reads)), reads, into)
            reads[first] = self._begin(first)
        for first in list(reads):
            self._finish(first, reads, into)
        return size.blocks

    def _begin(self, first: int) -> Any:
        size, place = self._size, np.arange(self._size.blocks_per_message) * self._size.block_bytes
        here = nixl.regions(nixl.address(self._slot(first)) + place, size.block_bytes)
        there = nixl.regions(self._base + first * size.block_bytes + place, size.block_bytes)
        descriptors = (self._agent.get_xfer_descs(rows, nixl.MEMORY) for rows in (here, there))
        handle = self._agent.initialize_xfer("READ", *descriptors, self._server)
        self._agent.transfer(handle)
        return handle

    def _finish(self, first: int, reads: dict[int, Any], into: Any) -> None:
        handle = reads.pop(first)
        while (state := self._agent.check_xfer_state(handle)) != "DONE":
            if state == "ERR":
                raise AssertionError("a bare NIXL read failed")
        self._agent.release_xfer_handle(handle)
        if into is not None:
            into[first : first + self._size.blocks_per_message] = self._slot(first)

    def _slot(self, first: int) -> npt.NDArray[np.uint8]:
        return self._slots[first // self._size.blocks_per_message % _IN_FLIGHT]

    def __enter__(self) -> _BareReads:
        return self

    def __exit__(self, *exception: object) -> None:
        self._agent.deregister_memory(self._memory)


_TRANSPORTS: dict[str, tuple[Any, Any, Any]] = {
    "inline": (InlineServer, InlineClient, _BareSocket),
    "nixl": (nixl.NixlServer, nixl.NixlClient, _BareReads),
}


@contextmanager
def _other_process(size: _Size, transport: str) -> Iterator[tuple[str, Any]]:
    """The endpoints of a block server and of a bare server of the same memory. Their process ends with the context."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, size, transport), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _serve(connection: Any, size: _Size, transport: str) -> None:
    """What the other process does until the pipe is closed."""
    with _pool(size) as cache:
        content = np.random.default_rng(0).integers(0, 256, (size.blocks, size.block_bytes), np.uint8)
        cache.import_blocks(cache.block_keys(_tokens(size.blocks)), list(content))
        del content
        rows = cache.host_pool.reshape(size.blocks, -1).view(np.uint8)
        limits = Limits(size.blocks_per_message, _IN_FLIGHT, 1 << 40, 1 << 40)
        with BlockServer(cache, transport=_TRANSPORTS[transport][0](), limits=limits) as server:
            serve_bare = _serve_bare_reads if transport == "nixl" else _serve_bare_socket
            serve_bare(connection, server.endpoint, rows, size.blocks_per_message)


def _serve_bare_reads(connection: Any, endpoint: str, rows: Any, blocks_per_message: int) -> None:
    agent = nixl.new_agent()
    memory = agent.register_memory(nixl.regions([nixl.address(rows)], rows.nbytes), nixl.MEMORY)
    connection.send((endpoint, (agent.get_agent_metadata(), nixl.address(rows))))
    while not _closed(connection, 1.0):
        pass
    agent.deregister_memory(memory)


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

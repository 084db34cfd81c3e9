"""Workers that give each other blocks: one serves its host tier while it replays, one fetches from it and compares
every byte with what the tokens alone say. And how fast blocks come from another process, compared with a bare ZeroMQ
socket that sends the same bytes from the same memory, in alternation in one run."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from operator import truediv
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.errors import BlockNotFound
from kvpool.common.process import Closing
from kvpool.pool.keys import BlockKeys
from kvpool.pool.manager import KVCacheManager
from kvpool.remote import BlockClient, BlockServer, Limits
from kvpool.remote.transport import neighbours
from kvpool.tools.replay.content import KVBytes, Request, States, token_states
from kvpool.tools.replay.engine import Figure, ReplayConfig, Report, Rounds, at_least, equal
from kvpool.tools.replay.traces import Trace

_PREFIX_EVERY = 8
"""Of this many calls, one fetches a prefix into the pool as an engine would. The others fetch any blocks of a prompt
that the server still has."""
_STALL_AFTER = 5_000
"""The run ends after so many calls in a row that fetch nothing."""


class Fetching(Closing):
    """One run against one server: fetches ``blocks`` blocks of ``layout`` into a pool of ``host_blocks``, with keys
    under ``secret``. A context manager: leaving it closes client and pool. Errors of the pool and the client
    propagate."""

    def __init__(
        self,
        trace: Trace,
        layout: BlockLayout,
        endpoint: str,
        *,
        blocks: int,
        host_blocks: int,
        secret: bytes,
        seed: int = 0,
        progress: Callable[[int], Any] = lambda count: None,
    ) -> None:
        self._trace = trace
        self._layout = layout
        self._blocks = blocks
        self._random = Random(seed)
        self._progress = progress
        self._width = layout.tokens_per_block
        self.cache = KVCacheManager(layout, device_blocks=1, host_blocks=host_blocks, device="cpu", secret=secret)
        self._client = BlockClient(endpoint, self.cache, name="fetch", timeout_ms=30_000, blocks_per_message=64)
        self._host = self._reader(self.cache.host_pool, host_blocks)
        self._prompt = lru_cache(maxsize=1024)(self._read_prompt)
        self.calls = self.fetched = self.entered = self.compared = self.missing = self.wrong = 0
        self.first_wrong = ""
        self.seconds = 0.0

    def close(self) -> None:
        self._client.close()
        self.cache.close()

    def run(self) -> list[Figure]:
        """Fetch until there are enough blocks, and return the figures. Raises RemoteError."""
        begin = perf_counter()
        wanted = self._blocks
        idle = 0
        while self.fetched < wanted and idle < _STALL_AFTER:
            before = self.fetched
            self._fetch(self._random.randrange(len(self._trace.requests)))
            self.calls += 1
            idle = 0 if self.fetched > before else idle + 1
            self._progress(min(self.fetched, wanted) - min(before, wanted))
        self.seconds = perf_counter() - begin
        self.cache.verify()
        stats = self.cache.stats()
        return [
            at_least("blocks fetched", self.fetched, wanted),
            equal("blocks with wrong bytes", self.wrong),
            at_least("blocks that entered the pool", self.entered, 1),
            at_least("... compared there again", self.compared, 1),
            Figure("blocks that were not there", self.missing),
            Figure("calls", self.calls),
            equal("leases left", stats.leases),
            equal("blocks left pinned", stats.host.pinned),
        ]

    def _read_prompt(self, index: int) -> tuple[BlockKeys, States]:
        """A request's keys, and the token states of its full blocks, uint64[blocks, tokens_per_block]."""
        request = self._trace.requests[index]
        tokens = request.prompt()
        keys = self.cache.block_keys(tokens, salt=request.salt, adapter_id=request.adapter_id)
        states = token_states(tokens, self._width, salt=request.salt, adapter_id=request.adapter_id)
        return keys, states[: len(keys.keys) * self._width].reshape(-1, self._width)

    def _fetch(self, index: int) -> None:
        prompt, grid = self._prompt(index)
        if self.calls % _PREFIX_EVERY == 0:
            entered = self._client.fetch(prompt)
            self.fetched += entered
            self.entered += entered
            places = np.arange(self.cache.match_prefix(prompt).full_tokens // self._width)
        else:
            places = self._fetch_any(index, prompt, grid)
        try:
            lease = self.cache.pin(prompt.keys[places], owner="fetch", tier="host")
        except BlockNotFound:  # some have been evicted
            return
        with lease:
            difference = self._host.check(grid[places], lease.blocks - self.cache.device_blocks)
            self._note(difference, f"request {index}, in the pool")
            self.compared += len(places)

    def _fetch_any(self, index: int, prompt: BlockKeys, grid: States) -> Int64s:
        """Fetch what the server has of a prompt, compare it as it came, and import it. Which blocks these are."""
        found = dict(enumerate(self._client.fetch_blocks(prompt)))
        buffers = {place: block for place, block in found.items() if block is not None}
        places = np.array([*buffers], np.int64)
        self.missing += len(found) - len(places)
        self.fetched += len(places)
        page = np.frombuffer(b"".join(buffers.values()), np.uint8)
        self._note(
            self._reader(page, len(places)).check(grid[places], np.arange(len(places))), f"request {index}, as it came"
        )
        for run in neighbours(places):
            own = [buffers[place] for place in run.tolist()]
            self.entered += self.cache.import_blocks(prompt, own, first=int(run[0]))
        return places

    def _note(self, difference: Any, where: str) -> None:
        if difference is not None:
            self.wrong += 1
            self.first_wrong = self.first_wrong or f"{where}: {difference}"

    def _reader(self, pool: Array, blocks: int) -> KVBytes:
        return KVBytes(self._layout, pool, self._layout.host_strides(blocks), blocks)


class Serving(Closing):
    """Replays a trace again and again until it is stopped, and serves meanwhile. A context manager: leaving it closes
    server and pool.

    After each request its prompt is offloaded, so that other workers find it on the host until it is evicted.
    ``config`` needs ``secret``. It needs ``verify`` too if the bytes are to be compared, since only then are they
    written. Errors of ``Replay`` and ``BlockServer`` propagate.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, endpoint: str) -> None:
        self._rounds = Rounds(trace, config, self._admitted)
        self.replay = self._rounds.replay
        try:
            self.server = BlockServer(self.replay.cache, endpoint, limits=Limits(requests_per_client=16))
        except BaseException:
            self.replay.close()
            raise

    def close(self) -> None:
        self.server.close()
        self.replay.close()

    def stop(self) -> None:
        """Have ``run`` end after the current request. Thread-safe."""
        self._rounds.stop.set()

    def run(self) -> Report:
        """Replay until ``stop`` or KeyboardInterrupt, close the server, and return the figures."""
        try:
            failure = self._rounds.run()
        finally:
            self.server.close()
        failure = failure or self._rounds.verify()
        stats, served = self.replay.cache.stats(), self.server.stats()
        evicted = stats.forgotten_host_blocks + stats.redundant_dropped
        figures = [
            at_least("requests that the scheduler admitted meanwhile", self._rounds.done, 1),
            Figure("host blocks evicted meanwhile", evicted),
            Figure("blocks served", served.blocks),
            Figure("blocks asked for that were not there", served.missing_blocks),
            Figure("requests refused", served.refused),
            equal("answers dropped", served.dropped),
            equal("transfers left", served.transfers),
            equal("leases left", stats.leases),
            equal("blocks left pinned", stats.device.pinned + stats.host.pinned),
            equal("blocks lost", stats.lost_blocks),
        ]
        return Report("serve", figures, failure, self._rounds.interrupted)

    def _admitted(self, request: Request | None) -> None:
        """Called after every request, on the scheduler's thread."""
        if request is not None:
            cache = self.replay.cache
            cache.offload(cache.block_keys(request.prompt(), salt=request.salt, adapter_id=request.adapter_id))


# -- how fast blocks come ------------------------------------------------------------------------

_MADE_UP = bytes(32)
"""A secret under which only made-up content is ever stored."""
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
    import zmq

    blocks = round_bytes // block_bytes // blocks_per_message * blocks_per_message
    if blocks == 0 or rounds < 1:
        raise ValueError(f"round_bytes: expected at least one message, once, got {round_bytes}, rounds={rounds}")
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
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in [*ways.items()] * (rounds + 1):
            begin = perf_counter()
            came = way()
            seconds[name].append(perf_counter() - begin)
            if came != blocks:
                raise AssertionError(f"{name}: {came} of {blocks} blocks came")
    nbytes = blocks * block_bytes
    # The first round is not counted.
    counted = {name: times[1:] for name, times in seconds.items()}
    speeds = {name: nbytes / median(times) for name, times in counted.items()}
    ratio = median(map(truediv, counted["bare_copied"], counted["fetch"]))
    in_buffers = median(map(truediv, counted["bare"], counted["fetch_blocks"]))
    return Throughput(
        block_bytes, blocks_per_message, nbytes, rounds, **speeds, ratio=ratio, ratio_in_buffers=in_buffers
    )


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
    return KVCacheManager(layout, device_blocks=1, host_blocks=blocks, device="cpu", secret=_MADE_UP)


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
    import zmq

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

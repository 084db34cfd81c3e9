"""Measure copies on a GPU, timed by its own events, beside plain copies of as many bytes: the cases of ``gpu``.

Every figure is smaller where the GPU is faster, as asv expects: time per byte and not bytes per second.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays.layout import BlockLayout, PoolIds
from kvpool.common.arrays.paged import PagedKV
from kvpool.common.arrays.strided import as_strided
from kvpool.device.base import Stream
from kvpool.device.cuda.calibration import OFFLOAD, ONBOARD, always
from kvpool.device.cuda.cuda_device import CudaDevice, describe_gpus, unusable
from kvpool.device.cuda.cuda_memory import CHUNK_BYTES
from kvpool.device.memory.kv_copy import gather_kv, scatter_kv
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import Region
from kvpool.device.work import Fragments

from .pools import TOKENS_PER_BLOCK, make_pool, make_prompts

SIZES_VARIABLE = "KVPOOL_GPU_SIZES"
"""Environment variable: ``full`` (default), or ``quick``, which shows that everything runs and measures nothing."""
EMULATED = "(not a GPU)"
"""The end of the name of every GPU of the emulated driver."""

Figures = dict[str, float]


class Sizes(NamedTuple):
    """How much the cases measure."""

    rounds: int
    tier_bytes: int
    fragment_bytes: tuple[int, ...]
    fragments: tuple[int, ...]
    runs: int
    run_bytes: tuple[int, ...]
    batch_bytes: int
    batches: int
    matrix: int
    element: str
    products: int
    peer_bytes: tuple[int, ...]
    shape: dict[str, int]
    pool_blocks: int
    tokens: int
    sequences: int
    columns: tuple[int, int]
    busy_bytes: int


FULL = Sizes(
    rounds=9,
    tier_bytes=1 << 30,
    fragment_bytes=(4 << 10, 8 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20),
    fragments=(16, 256, 4096),
    runs=64,
    run_bytes=(1 << 10, 4 << 10, 32 << 10),
    batch_bytes=16 << 20,
    batches=200,
    matrix=8192,
    element="float16",
    products=4,
    peer_bytes=(4 << 10, 16 << 10, 64 << 10),
    shape={"layers": 32, "kv_heads": 8, "head_dim": 128},
    pool_blocks=512,
    tokens=4096,
    sequences=256,
    columns=(64, 1024),
    busy_bytes=128 << 20,
)
QUICK = Sizes(
    rounds=2,
    tier_bytes=256 << 10,
    fragment_bytes=(4 << 10, 32 << 10),
    fragments=(8,),
    runs=4,
    run_bytes=(256,),
    batch_bytes=16 << 10,
    batches=3,
    matrix=16,
    element="float32",
    products=1,
    peer_bytes=(4 << 10,),
    shape={"layers": 2, "kv_heads": 2, "head_dim": 16},
    pool_blocks=8,
    tokens=50,
    sequences=4,
    columns=(2, 8),
    busy_bytes=4 << 10,
)


def sizes(name: str) -> Sizes:
    """Return the sizes of this name. Raises ValueError."""
    if name not in ("full", "quick"):
        raise ValueError(f"{SIZES_VARIABLE}: expected 'full' or 'quick', got {name!r}")
    return QUICK if name == "quick" else FULL


SIZES = sizes(os.environ.get(SIZES_VARIABLE, "full"))


BUSY_COPIES = 8
"""How many copies keep a stream busy while a call is enqueued whose time on the GPU is measured."""


class Tiers:
    """A device and both tiers, pinned once for all cases of a process. Each layout is a region over all of them."""

    def __init__(self) -> None:
        self.nbytes, self.device = SIZES.tier_bytes, CudaDevice()
        self.memory = [self.device.allocate(self.nbytes, tier) for tier in ("device", "host")]
        self.bases = [as_strided("memory", memory).address for memory in self.memory]
        layouts = {
            (size, 1): BlockLayout(1, 1, size, 1, "uint8", planes=1, order="block_first")
            for size in SIZES.fragment_bytes
        }
        layouts |= {(size, SIZES.runs): BlockLayout(SIZES.runs // 2, 1, size, 1, "uint8") for size in SIZES.run_bytes}
        blocks = {name: self.nbytes // layout.block_bytes for name, layout in layouts.items()}
        self.device.bind([Region.of(layouts[name], *self.memory, blocks[name], blocks[name]) for name in layouts])
        ids = PoolIds(list(blocks.values()), list(blocks.values()))
        self.first = {name: ids.first(place) for place, name in enumerate(layouts)}
        """By the bytes and number of its runs: the first device block and the first host block of a layout."""


_tiers: list[Tiers] = []


def shared_tiers() -> Tiers:
    """Return the tiers of this process. Pinning a gigabyte takes longer than measuring with it."""
    if not _tiers:
        _tiers.append(Tiers())
    return _tiers[0]


def close_tiers() -> None:
    while _tiers:
        _tiers.pop().device.close()


class Case:
    """Base: a device, the CUDA runtime and a stream. ``closing`` releases what ``setup`` acquires."""

    device: CudaDevice
    stream: Stream

    def __init__(self) -> None:
        self.closing = ExitStack()

    def setup(self, *parameters: Any) -> None:
        """Prepare one case. Raises NotImplementedError where it cannot run."""
        raise NotImplementedError

    def figures(self) -> Figures:
        """Measure it."""
        raise NotImplementedError

    def open(self) -> None:
        """Open a device of this case's own."""
        self.use(CudaDevice())
        self.closing.callback(self.device.close)

    def open_tiers(self, path: str) -> None:
        """Use the device of the shared tiers, which then copies by ``path``."""
        self.tiers = shared_tiers()
        self.use(self.tiers.device)
        self.device.calibration = always(path)
        if path not in self.device.paths:
            raise NotImplementedError(f"this GPU has no path {path!r}")

    def use(self, device: CudaDevice) -> None:
        import cupy

        self.runtime: Any = cupy.cuda.runtime
        self.device, self.stream = device, device.create_stream("measured")
        self.begin, self.end = self.runtime.eventCreate(), self.runtime.eventCreate()
        for event in (self.begin, self.end):
            self.closing.callback(self.runtime.eventDestroy, event)

    def allocate(self, nbytes: int, tier: str) -> Any:
        """Allocate memory for this case."""
        memory = self.device.allocate(nbytes, tier)
        self.closing.callback(self.device.free, memory)
        return memory

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue one plain copy between addresses."""
        self.runtime.memcpyAsync(target, source, nbytes, self.runtime.memcpyDefault, self.stream.handle)

    def elapsed(self) -> float:
        """Return the seconds between the two events: at least a nanosecond, which is below their resolution."""
        self.runtime.eventSynchronize(self.end)
        return max(self.runtime.eventElapsedTime(self.begin, self.end) / 1e3, 1e-9)

    def seconds(self, enqueue: Callable[[], object], busy: Callable[[], object] | None = None) -> float:
        """Return the median time on the GPU of the work that ``enqueue`` enqueues. See ``seconds_and_call``."""
        return self.seconds_and_call(enqueue, busy)[0]

    def seconds_and_call(
        self, enqueue: Callable[[], object], busy: Callable[[], object] | None = None
    ) -> tuple[float, float]:
        """Return the median time on the GPU, and that of the call on the CPU. The first round warms up.

        The time on the GPU includes the call, unless ``busy`` enqueues work that keeps the stream busy during it.
        """
        times, calls = list[float](), list[float]()
        for _ in range(SIZES.rounds + 1):
            if busy is not None:
                busy()
            self.runtime.eventRecord(self.begin, self.stream.handle)
            start = perf_counter()
            enqueue()
            calls.append(perf_counter() - start)
            self.runtime.eventRecord(self.end, self.stream.handle)
            times.append(self.elapsed())
        return median(times[1:]), median(calls[1:])


def measure(case: type[Case], parameters: tuple[Any, ...]) -> Figures:
    """Return the figures of one case. Raises NotImplementedError where it cannot run."""
    made = case()
    with made.closing:
        made.setup(*parameters)
        try:
            return made.figures()
        finally:
            made.device.synchronize()


def measure_all(
    case: type[Case], params: Sequence[Sequence[Any]]
) -> dict[tuple[Any, ...], Figures | NotImplementedError | RuntimeError]:
    """Measure a case with each combination of parameters in this process; an error takes the place of its figures."""
    results: dict[tuple[Any, ...], Figures | NotImplementedError | RuntimeError] = {}
    missing = unusable()
    try:
        for parameters in product(*params):
            try:
                if missing is not None:
                    raise NotImplementedError(missing)
                results[parameters] = measure(case, parameters)
            except NotImplementedError as error:
                results[parameters] = error
            except Exception:
                results[parameters] = RuntimeError(traceback.format_exc())
    finally:
        close_tiers()
    return results


class Conditions(Case):
    """What makes figures unfit for a baseline: each of these is 0 on a GPU, in full size, at a commit."""

    def setup(self) -> None:
        self.open()

    def figures(self) -> Figures:
        folder = Path(__file__).parent
        command = ["git", "status", "--porcelain", "--untracked-files=no"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return {
            "emulated": float(describe_gpus()[0].name.endswith(EMULATED)),
            "quick": float(SIZES is not FULL),
            "changed_files": float(len(done.stdout.splitlines())) if done.returncode == 0 else float("nan"),
        }


class BlockCopies(Case):
    """A batch of blocks of one contiguous fragment each, by one path, beside one large copy in the same direction.

    "apart": no two are neighbours; "neighbours": they follow each other on both sides. Every batch takes other blocks,
    of tiers far larger than the GPU's cache. The time of the call is part of the time, but not of the GPU's: that is
    taken while copies inside the GPU keep the stream busy, for longer than most calls take.
    """

    def setup(self, direction: str, placement: str, path: str, count: int, nbytes: int) -> None:
        blocks = SIZES.tier_bytes // nbytes
        if 4 * count > blocks:
            raise NotImplementedError(
                f"{count} fragments of {nbytes} bytes are too much for tiers of {SIZES.tier_bytes}"
            )
        self.open_tiers(path)
        first_device, first_host = self.tiers.first[nbytes, 1]
        self.batch_bytes = nbytes * count
        random = np.random.default_rng(0)
        half = blocks // 2
        if placement == "apart":
            # Source and target of a copy inside the device are the even and the odd half.
            places = 2 * random.permutation(half)[: half // count * count].reshape(-1, count)
        else:
            places = random.permutation(half // count)[:, None] * count + np.arange(count)
        firsts = [
            first_host if direction == ONBOARD else first_device,
            first_host if direction == OFFLOAD else first_device,
        ]
        apart = 0 if firsts[0] != firsts[1] else 1 if placement == "apart" else half
        self.batches = [
            np.stack([ids + firsts[0], ids + apart + firsts[1], np.ones_like(ids), np.zeros_like(ids)], axis=1)
            for ids in places[: 2 * SIZES.rounds]
        ]
        self.large_bytes = min(half * nbytes, CHUNK_BYTES)
        bases = self.tiers.bases
        self.source = bases[direction == ONBOARD]
        self.target = bases[direction == OFFLOAD] + (half * nbytes if firsts[0] == firsts[1] else 0)
        self.next = 0

    def occupy(self) -> None:
        """Keep the stream busy while a call is enqueued."""
        tier = self.tiers.bases[0]
        for _ in range(BUSY_COPIES):
            self.copy(tier + self.tiers.nbytes // 2, tier, self.tiers.nbytes // 2)

    def copy_batch(self) -> None:
        self.device.copy_blocks(self.batches[self.next % len(self.batches)], self.stream)
        self.next += 1

    def figures(self) -> Figures:
        seconds, call = self.seconds_and_call(self.copy_batch)
        large = self.seconds(lambda: self.copy(self.target, self.source, self.large_bytes))
        per_byte = seconds / self.batch_bytes
        return {
            "time_per_byte": 1e12 * per_byte,
            "gpu_time_per_byte": 1e12 * self.seconds(self.copy_batch, self.occupy) / self.batch_bytes,
            "call": 1e6 * call,
            "times_large_copy": per_byte / (large / self.large_bytes),
        }


LOAD, SAVE = 0, 1


class Scenes(Case):
    """What a server does: blocks of many runs, the fragments of an engine with a HostCache, and loads beside saves.

    The time of a batch is the clock's, from the call until all of it is done. ``matmul_time`` is the time of matrix
    products, by the GPU's events, while such batches are copied all the time, divided by their time alone.
    """

    least_batches, most_seconds = 5, 0.5

    def setup(self, scene: str, run_bytes: int, path: str) -> None:
        self.open_tiers(path)
        tiers, random = self.tiers, np.random.default_rng(0)
        self.streams = [self.stream, self.device.create_stream("saves")]
        self.ways = [SAVE] if "save" in scene else [LOAD, SAVE] if "both" in scene else [LOAD]
        if scene.startswith("layers"):
            block_bytes = SIZES.runs * run_bytes
            firsts, blocks = tiers.first[run_bytes, SIZES.runs], SIZES.tier_bytes // block_bytes
            count = SIZES.batch_bytes // block_bytes
            ids = [first + random.permutation(blocks)[:count] for first in firsts]
            rest = np.ones(count, np.int64), np.zeros(count, np.int64)
            self.work: list[Any] = [np.stack([*pair, *rest], axis=1) for pair in (ids[::-1], ids)]
            self.enqueue: Callable[..., object] = self.device.copy_blocks
        else:
            # Loads and saves are of the two halves of each tier. No two fragments are neighbours.
            count, half = SIZES.batch_bytes // run_bytes, SIZES.tier_bytes // run_bytes // 2
            places = run_bytes * np.array(
                [[random.permutation(half)[:count] + way * half for _ in "dh"] for way in (0, 1)]
            )
            gpu, host = tiers.bases[0] + places[:, 0], tiers.bases[1] + places[:, 1]
            lengths = np.full(count, run_bytes)
            loads = np.stack([host[LOAD], gpu[LOAD], lengths], axis=1)
            saves = np.stack([gpu[SAVE], host[SAVE], lengths], axis=1)
            self.work = [Fragments(loads), Fragments(saves)]
            self.enqueue = self.device.enqueue
        self.copied_bytes = SIZES.batch_bytes * len(self.ways)

    def enqueue_all(self) -> None:
        for way in self.ways:
            self.enqueue(self.work[way], self.streams[way])

    def batch(self) -> tuple[float, float]:
        """Return the seconds until a batch is done, and those of its calls."""
        begin = perf_counter()
        self.enqueue_all()
        call = perf_counter() - begin
        for way in self.ways:
            self.device.synchronize(self.device.record(self.streams[way]))
        return perf_counter() - begin, call

    def figures(self) -> Figures:
        times, end = list[tuple[float, float]](), perf_counter() + self.most_seconds
        while len(times) <= self.least_batches or (len(times) <= SIZES.batches and perf_counter() < end):
            times.append(self.batch())
        seconds, calls = np.array(times[1:]).T  # the first one warms up
        return {
            "time_per_byte": 1e12 * float(np.median(seconds)) / self.copied_bytes,
            "p99": 1e3 * float(np.quantile(seconds, 0.99)),
            "call": 1e6 * float(np.median(calls)),
            "matmul_time": self.matmul_time(),
        }

    def matmul_time(self) -> float:
        import cupy

        a, stream = cupy.ones((SIZES.matrix, SIZES.matrix), SIZES.element), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        over, errors = threading.Event(), list[BaseException]()

        def copy() -> None:
            try:
                while not over.is_set():
                    self.batch()
            except BaseException as error:
                errors.append(error)

        def product_seconds() -> float:
            """Time products that are enqueued while earlier ones keep the stream busy."""
            times = []
            for _ in range(SIZES.rounds + 1):
                with stream:
                    for number in range(3 * SIZES.products):
                        if number == SIZES.products:
                            self.runtime.eventRecord(self.begin, stream.ptr)
                        cupy.matmul(a, a)
                self.runtime.eventRecord(self.end, stream.ptr)
                times.append(self.elapsed())
            return median(times[1:])

        alone, copies = product_seconds(), threading.Thread(target=copy)
        copies.start()
        try:
            beside = product_seconds()
        finally:
            over.set()
            copies.join()
        if errors:
            raise errors[0]
        return beside / alone


class KvCopies(Case):
    """Tokens at random places between the device tier and contiguous staging, beside one plain copy of as many bytes.

    As for blocks, the time has that of the call in it, and the GPU's time has not.
    """

    def setup(self, direction: str, staging: str, order: str) -> None:
        self.open()
        layout = BlockLayout(**SIZES.shape, tokens_per_block=TOKENS_PER_BLOCK, dtype="float16", order=order)
        self.nbytes = SIZES.tokens * layout.token_bytes
        pools = MemoryPools(self.device, layout, SIZES.pool_blocks)
        self.closing.callback(pools.close)
        self.cache = PagedKV.of_pool(layout, pools.device_pool)
        rows = layout.planes, layout.layers, SIZES.tokens, layout.kv_heads * layout.head_dim
        memory = [self.allocate(self.nbytes, staging), self.allocate(self.nbytes, "device")]
        self.staging = memory[0].view(np.float16).reshape(rows)
        slots = np.random.default_rng(0).permutation(self.cache.slots)[: SIZES.tokens]
        self.slots = self.allocate(slots.nbytes, "device").view(np.int64)
        self.slots.set(slots)
        addresses = [as_strided("memory", each).address for each in memory]
        self.target, self.source = addresses if direction == "gather" else addresses[::-1]
        self.kernel = gather_kv if direction == "gather" else scatter_kv
        self.device.synchronize()

    def occupy(self) -> None:
        """Keep the stream busy while a call is enqueued."""
        for _ in range(BUSY_COPIES):
            self.copy(self.target, self.source, self.nbytes)

    def copy_tokens(self) -> None:
        self.kernel(self.cache, self.slots, self.staging, stream=self.stream)

    def figures(self) -> Figures:
        seconds, call = self.seconds_and_call(self.copy_tokens)
        plain = self.seconds(lambda: self.copy(self.target, self.source, self.nbytes))
        return {
            "time_per_byte": 1e12 * seconds / self.nbytes,
            "gpu_time_per_byte": 1e12 * self.seconds(self.copy_tokens, self.occupy) / self.nbytes,
            "call": 1e6 * call,
            "times_plain_copy": seconds / plain,
        }


class StagedTables(Case):
    """Block tables of many sequences, written into a target on the device.

    Times on the GPU are taken while other work keeps the stream busy, so they include no time of the CPU. The plain
    copies are of the columns in use.
    """

    def setup(self, used_columns: int) -> None:
        self.open()
        all_columns = SIZES.columns[-1]
        cache = make_pool(SIZES.sequences * used_columns, device=self.device)
        self.closing.callback(cache.close)
        prompts = make_prompts(SIZES.sequences, (used_columns - 1) * TOKENS_PER_BLOCK)
        ids = cache.add_sequence_batch(prompts, stream=self.stream).ids
        self.nbytes = 4 * SIZES.sequences * used_columns
        self.plain_target, self.plain_source = np.ones((2, self.nbytes), np.uint8)
        memory = [
            self.allocate(4 * SIZES.sequences * all_columns, "device"),
            self.allocate(self.nbytes, "host"),
            self.allocate(2 * SIZES.busy_bytes, "device"),
        ]
        target = memory[0].view(np.int32).reshape(SIZES.sequences, all_columns)
        self.addresses = [as_strided("memory", each).address for each in memory]
        self.stage = lambda: cache.tables.copy_batch_block_offsets(target, ids, stream=self.stream)

    def occupy(self) -> None:
        """Keep the stream busy while a short call is enqueued."""
        for _ in range(BUSY_COPIES):
            self.copy(self.addresses[2] + SIZES.busy_bytes, self.addresses[2], SIZES.busy_bytes)

    def cpu_seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(SIZES.rounds + 1):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
            self.device.synchronize()
        return median(times[1:])

    def figures(self) -> Figures:
        def memcpy() -> None:
            ctypes.memmove(self.plain_target.ctypes.data, self.plain_source.ctypes.data, self.nbytes)

        def memcpy_async() -> None:
            self.copy(self.addresses[0], self.addresses[1], self.nbytes)

        return {
            "cpu_time": 1e6 * self.cpu_seconds(self.stage),
            "cpu_time_of_memcpy": 1e6 * self.cpu_seconds(memcpy),
            "gpu_time": 1e6 * self.seconds(self.stage, self.occupy),
            "gpu_time_of_memcpy_async": 1e6 * self.seconds(memcpy_async, self.occupy),
        }

"""Copies on a GPU, timed by its own events: blocks by size, number, direction and path; tokens; block tables. Beside
plain copies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import cached_property
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvpool.common.arrays.layout import BlockLayout, PoolIds
from kvpool.common.arrays.paged import PagedKV
from kvpool.common.arrays.strided import as_strided
from kvpool.device.base import Stream
from kvpool.device.cuda.calibration import DIRECTIONS, KERNELS, OFFLOAD, ONBOARD, PATHS, always
from kvpool.device.cuda.cuda_device import CudaDevice, unusable
from kvpool.device.cuda.cuda_memory import CHUNK_BYTES
from kvpool.device.memory.kv_copy import gather_kv, scatter_kv
from kvpool.device.memory.pools import MemoryPools
from kvpool.device.regions import Region
from kvpool.device.work import Fragments

from .pools import TOKENS_PER_BLOCK, make_pool, make_prompts
from .staging import COLUMNS, SEQUENCES

REPEATS = 9


class Tiers:
    """A device and two tiers of so many bytes, pinned once for all cases. Each layout is a region over all of them."""

    sizes = [1 << shift for shift in range(12, 22)]
    runs, run_sizes = 64, (1 << 10, 4 << 10, 32 << 10)

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.device = nbytes, CudaDevice()
        # All that there is: this is what asks for the kernels that nothing has proven yet.
        self.device.kernels = set(KERNELS)
        self.memory = [self.device.allocate(nbytes, tier) for tier in ("device", "host")]
        self.bases = [as_strided("memory", memory).address for memory in self.memory]
        layouts = {(size, 1): BlockLayout(1, 1, size, 1, "uint8", planes=1, order="block_first") for size in self.sizes}
        layouts |= {(size, self.runs): BlockLayout(self.runs // 2, 1, size, 1, "uint8") for size in self.run_sizes}
        blocks = {name: nbytes // layout.block_bytes for name, layout in layouts.items()}
        used = [name for name, count in blocks.items() if count]
        self.device.bind([Region.of(layouts[name], *self.memory, blocks[name], blocks[name]) for name in used])
        ids = PoolIds([blocks[name] for name in used], [blocks[name] for name in used])
        self.first = {name: ids.first(place) for place, name in enumerate(used)}
        """By the bytes and number of its runs: the first device block and the first host block of a layout."""


_tiers: list[Tiers] = []


def shared_tiers(nbytes: int) -> Tiers:
    """The tiers of this process. To pin a gigabyte takes longer than to measure."""
    if not _tiers or _tiers[0].nbytes != nbytes:
        close_tiers()
        _tiers.append(Tiers(nbytes))
    return _tiers[0]


def close_tiers() -> None:
    while _tiers:
        _tiers.pop().device.close()


class OnGpu:
    """Base: a device, its driver and a stream; skipped where there is no GPU. Benchmarks give what they take in
    ``release``."""

    device: CudaDevice
    stream: Stream
    tiers: Tiers | None = None
    # What keeps the stream busy while a short call is enqueued behind it: so many copies of so many bytes.
    busy_copies, busy_bytes = 8, 128 << 20

    def open(self, path: str | None = None, tier_bytes: int = 0) -> None:
        """A device of its own, or, with ``tier_bytes``, that of the shared tiers, which copies by ``path``."""
        missing = unusable()
        if missing is not None:
            raise NotImplementedError(missing)
        import cupy

        self.runtime: Any = cupy.cuda.runtime
        if tier_bytes:
            self.tiers = shared_tiers(tier_bytes)
        self.device = self.tiers.device if self.tiers else CudaDevice(calibration=path)
        if path is not None:
            self.device.calibration = always(path)
        self.stream = self.device.create_stream("measured")
        self.begin, self.end = self.runtime.eventCreate(), self.runtime.eventCreate()
        if path is not None and path not in self.device._paths(self.stream.handle):
            self.teardown()
            raise NotImplementedError(f"this GPU has no path {path!r}")

    def release(self) -> None:
        """What a benchmark has made on the device."""

    def teardown(self, *parameters: Any) -> None:
        """What was skipped is torn down too, by asv, and what was refused half-way twice."""
        if not hasattr(self, "end"):
            return
        self.device.synchronize()
        self.release()
        if self.tiers is None:
            self.device.close()
        for event in (self.begin, self.end):
            self.runtime.eventDestroy(event)
        del self.begin, self.end

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue one plain copy between addresses."""
        self.runtime.memcpyAsync(target, source, nbytes, self.runtime.memcpyDefault, self.stream.handle)

    def seconds(self, enqueue: Callable[[], object], *, behind: Callable[[], object] | None = None) -> float:
        """Return the median time by the GPU's events for what a call enqueues. See ``seconds_and_call``."""
        return self.seconds_and_call(enqueue, behind=behind)[0]

    def seconds_and_call(
        self, enqueue: Callable[[], object], *, behind: Callable[[], object] | None = None
    ) -> tuple[float, float]:
        """Return the median time by the GPU's events, and of the call on the CPU; the first one warms up.

        The first figure includes the call, unless the stream is kept busy by what ``behind`` enqueues before.
        """
        times, calls = list[float](), list[float]()
        for _ in range(REPEATS + 1):
            if behind is not None:
                behind()
            self.runtime.eventRecord(self.begin, self.stream.handle)
            start = perf_counter()
            enqueue()
            calls.append(perf_counter() - start)
            self.runtime.eventRecord(self.end, self.stream.handle)
            self.runtime.eventSynchronize(self.end)
            times.append(self.runtime.eventElapsedTime(self.begin, self.end) / 1e3)
        return median(times[1:]), median(calls[1:])


class BlockCopies(OnGpu):
    """A batch of blocks of one contiguous fragment each, by each path; the peak is one large copy in the same
    direction, in the same run.

    "apart": no two are neighbours; "neighbours": they follow each other on both sides. Every batch takes other blocks,
    of tiers far larger than the GPU's cache. What the call costs the CPU is in the time.
    """

    params = (list(DIRECTIONS), list(PATHS), [8 << 10, 64 << 10])
    param_names = ("direction", "path", "fragment_bytes")
    timeout = 600
    tier_bytes = 1 << 30

    def setup(self, direction: str, path: str, nbytes: int, count: int = 1024, placement: str = "apart") -> None:
        blocks = self.tier_bytes // nbytes
        if 4 * count > blocks:
            raise NotImplementedError(
                f"{count} fragments of {nbytes} bytes are too much for tiers of {self.tier_bytes}"
            )
        self.open(path, self.tier_bytes)
        assert self.tiers is not None
        first_device, first_host = self.tiers.first[nbytes, 1]
        self.batch_bytes = nbytes * count
        random = np.random.default_rng(0)
        half = blocks // 2
        if placement == "apart":
            # Source and target of a copy inside the device are the even and the odd half.
            places = 2 * random.permutation(half)[: half // count * count].reshape(-1, count)
        else:
            places = random.permutation(half // count)[:, None] * count + np.arange(count)
        ends = [
            first_host if direction == ONBOARD else first_device,
            first_host if direction == OFFLOAD else first_device,
        ]
        apart = 0 if ends[0] != ends[1] else 1 if placement == "apart" else half
        self.batches = [
            np.stack([ids + ends[0], ids + apart + ends[1], np.ones_like(ids), np.zeros_like(ids)], axis=1)
            for ids in places[: 2 * REPEATS]
        ]
        self.large_bytes = min(half * nbytes, CHUNK_BYTES)
        bases = self.tiers.bases
        self.source = bases[direction == ONBOARD]
        self.target = bases[direction == OFFLOAD] + (half * nbytes if ends[0] == ends[1] else 0)
        self.next = 0

    def _copy_batch(self) -> None:
        self.device.copy_blocks(self.batches[self.next % len(self.batches)], self.stream)
        self.next += 1

    def _copy_large(self) -> None:
        self.copy(self.target, self.source, self.large_bytes)

    @cached_property
    def _times(self) -> tuple[float, float]:
        return self.seconds_and_call(self._copy_batch)

    def track_speed(self, *parameters: Any) -> float:
        return self.batch_bytes / self._times[0] / 1e9

    def track_call(self, *parameters: Any) -> float:
        return 1e6 * self._times[1]

    def track_share_of_peak(self, *parameters: Any) -> float:
        peak = self.large_bytes / self.seconds(self._copy_large)
        return 100 * self.batch_bytes / self._times[0] / peak

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]
    track_call.unit = "us"  # type: ignore[attr-defined]
    track_share_of_peak.unit = "% of one large copy"  # type: ignore[attr-defined]


LOAD, SAVE = 0, 1


class Scenes(OnGpu):
    """What a server does: blocks of many runs, the fragments of an engine with a HostCache, and loads beside saves.

    The time of a batch is the clock's, from the call until all of it is done. ``slowdown_of_matmul`` is how much longer
    matrix products take, by the GPU's events, while such batches are copied all the time.
    """

    params = (["layers, load", "layers, save", "engine, load", "engine, save", "engine, both ways"], list(PATHS))
    param_names = ("scene", "path")
    timeout = 600
    tier_bytes, batch_bytes = BlockCopies.tier_bytes, 16 << 20
    repeats_least, repeats, seconds_most = 5, 200, 0.5
    matrix, element = 8192, "float16"
    products = 4
    """Matrix products that keep the stream busy while twice as many are enqueued behind them, which are timed."""

    def setup(self, scene: str, path: str, run_bytes: int = 1 << 10) -> None:
        self.open(path, self.tier_bytes)
        assert self.tiers is not None
        self.streams = [self.stream, self.device.create_stream("saves")]
        self.ways = [SAVE] if "save" in scene else [LOAD, SAVE] if "both" in scene else [LOAD]
        random, tiers = np.random.default_rng(0), self.tiers
        if scene.startswith("layers"):
            firsts, blocks = tiers.first[run_bytes, tiers.runs], self.tier_bytes // (tiers.runs * run_bytes)
            count = self.batch_bytes // (tiers.runs * run_bytes)
            ids = [first + random.permutation(blocks)[:count] for first in firsts]
            rest = np.ones(count, np.int64), np.zeros(count, np.int64)
            self.work = [np.stack([*pair, *rest], axis=1) for pair in (ids[::-1], ids)]
            self.enqueue = self.device.copy_blocks
        else:
            # Loads and saves are of the two halves of each tier. No two fragments are neighbours.
            count, half = self.batch_bytes // run_bytes, self.tier_bytes // run_bytes // 2
            places = run_bytes * np.array(
                [[random.permutation(half)[:count] + way * half for _ in "dh"] for way in (0, 1)]
            )
            gpu, host = tiers.bases[0] + places[:, 0], tiers.bases[1] + places[:, 1]
            sizes = np.full(count, run_bytes)
            rows = np.stack([host[LOAD], gpu[LOAD], sizes], axis=1), np.stack([gpu[SAVE], host[SAVE], sizes], axis=1)
            self.work = [Fragments(one) for one in rows]
            self.enqueue = self.device.enqueue
        self.copied_bytes = self.batch_bytes * len(self.ways)

    def enqueue_all(self) -> None:
        for way in self.ways:
            self.enqueue(self.work[way], self.streams[way])

    def _batch(self) -> tuple[float, float]:
        """Seconds until a batch is done, and of its calls."""
        begin = perf_counter()
        self.enqueue_all()
        called = perf_counter() - begin
        for way in self.ways:
            self.device.synchronize(self.device.record(self.streams[way]))
        return perf_counter() - begin, called

    @cached_property
    def _times(self) -> np.ndarray:
        """Of each batch, seconds until it was done, and of its calls. The first one warms up."""
        found, end = list[tuple[float, float]](), perf_counter() + self.seconds_most
        while len(found) <= self.repeats_least or (len(found) <= self.repeats and perf_counter() < end):
            found.append(self._batch())
        return np.array(found[1:])

    def track_speed(self, *parameters: Any) -> float:
        return self.copied_bytes / float(np.median(self._times[:, 0])) / 1e9

    def track_p99(self, *parameters: Any) -> float:
        return 1e3 * float(np.quantile(self._times[:, 0], 0.99))

    def track_call(self, *parameters: Any) -> float:
        return 1e6 * float(np.median(self._times[:, 1]))

    def track_slowdown_of_matmul(self, *parameters: Any) -> float:
        import cupy

        a, stream = cupy.ones((self.matrix, self.matrix), self.element), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        over, errors = threading.Event(), list[BaseException]()

        def copy() -> None:
            try:
                while not over.is_set():
                    self._batch()
            except BaseException as error:
                errors.append(error)

        def product() -> float:
            times = []
            for _ in range(REPEATS + 1):
                with stream:
                    for number in range(3 * self.products):
                        if number == self.products:
                            self.runtime.eventRecord(self.begin, stream.ptr)
                        cupy.matmul(a, a)
                self.runtime.eventRecord(self.end, stream.ptr)
                self.runtime.eventSynchronize(self.end)
                times.append(self.runtime.eventElapsedTime(self.begin, self.end))
            return median(times[1:])

        alone, copies = product(), threading.Thread(target=copy)
        copies.start()
        beside = product()
        over.set()
        copies.join()
        if errors:
            raise errors[0]
        return 100 * (beside / alone - 1)

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]
    track_p99.unit = "ms"  # type: ignore[attr-defined]
    track_call.unit = "us"  # type: ignore[attr-defined]
    track_slowdown_of_matmul.unit = "% more time"  # type: ignore[attr-defined]


class KvCopies(OnGpu):
    """Tokens at random places between the device tier and contiguous staging; as a share of one plain copy of as many
    bytes."""

    params = (["gather", "scatter"], ["device", "host"])
    param_names = ("direction", "staging")
    timeout = 600
    blocks, tokens = 512, 4_096
    shape = {"layers": 32, "kv_heads": 8, "head_dim": 128}

    def setup(self, direction: str, staging: str, order: str = "layer_first") -> None:
        self.open()
        layout = BlockLayout(**self.shape, tokens_per_block=TOKENS_PER_BLOCK, dtype="float16", order=order)
        self.nbytes = self.tokens * layout.token_bytes
        self.pools = MemoryPools(self.device, layout, self.blocks)
        self.cache = PagedKV.of_pool(layout, self.pools.device_pool)
        rows = layout.planes, layout.layers, self.tokens, layout.kv_heads * layout.head_dim
        self.memory = [self.device.allocate(self.nbytes, staging), self.device.allocate(self.nbytes, "device")]
        self.staging = self.memory[0].view(np.float16).reshape(rows)
        slots = np.random.default_rng(0).permutation(self.cache.slots)[: self.tokens]
        self.memory.append(self.device.allocate(slots.nbytes, "device"))
        self.slots = self.memory[-1].view(np.int64)
        self.slots.set(slots)
        addresses = [as_strided("memory", memory).address for memory in self.memory]
        self.target, self.source = addresses[:2] if direction == "gather" else addresses[1::-1]
        self.kernel = gather_kv if direction == "gather" else scatter_kv
        self.device.synchronize()

    def release(self) -> None:
        self.pools.close()
        for memory in self.memory:
            self.device.free(memory)

    def _copy_tokens(self) -> None:
        self.kernel(self.cache, self.slots, self.staging, stream=self.stream)

    @cached_property
    def _times(self) -> tuple[float, float]:
        return self.seconds_and_call(self._copy_tokens)

    def track_speed(self, *parameters: Any) -> float:
        return self.nbytes / self._times[0] / 1e9

    def track_call(self, *parameters: Any) -> float:
        return 1e6 * self._times[1]

    def track_share_of_plain_copy(self, *parameters: Any) -> float:
        plain = self.seconds(lambda: self.copy(self.target, self.source, self.nbytes))
        return 100 * plain / self._times[0]

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]
    track_call.unit = "us"  # type: ignore[attr-defined]
    track_share_of_plain_copy.unit = "% of a plain copy"  # type: ignore[attr-defined]


class StagedTables(OnGpu):
    """Block tables of 256 sequences, written into a target of 1,024 columns on the device.

    GPU times are taken behind other work on the stream, so that the CPU's are not in them. The plain copies are of the
    columns in use.
    """

    params = [64, COLUMNS]
    param_names = ["used_columns"]

    def setup(self, used_columns: int) -> None:
        self.open()
        self.cache = make_pool(SEQUENCES * used_columns, device=self.device)
        prompts = make_prompts(SEQUENCES, (used_columns - 1) * TOKENS_PER_BLOCK)
        self.ids = self.cache.add_sequence_batch(prompts, stream=self.stream).ids
        self.nbytes = 4 * SEQUENCES * used_columns
        self.here, self.there = np.ones((2, self.nbytes), np.uint8)
        self.memory = [
            self.device.allocate(4 * SEQUENCES * COLUMNS, "device"),
            self.device.allocate(self.nbytes, "host"),
            self.device.allocate(2 * self.busy_bytes, "device"),
        ]
        self.target = self.memory[0].view(np.int32).reshape(SEQUENCES, COLUMNS)
        self.addresses = [as_strided("memory", memory).address for memory in self.memory]

    def release(self) -> None:
        self.cache.close()
        for memory in self.memory:
            self.device.free(memory)

    def _occupy(self) -> None:
        for _ in range(self.busy_copies):
            self.copy(self.addresses[2] + self.busy_bytes, self.addresses[2], self.busy_bytes)

    def _stage(self) -> None:
        self.cache.copy_batch_block_offsets(self.target, self.ids, stream=self.stream)

    def track_gpu_time(self, used_columns: int) -> float:
        return 1e6 * self.seconds(self._stage, behind=self._occupy)

    def track_gpu_time_of_memcpy_async(self, used_columns: int) -> float:
        return 1e6 * self.seconds(
            lambda: self.copy(self.addresses[0], self.addresses[1], self.nbytes), behind=self._occupy
        )

    def track_cpu_time(self, used_columns: int) -> float:
        return 1e6 * self._cpu_seconds(self._stage)

    def track_cpu_time_of_memcpy(self, used_columns: int) -> float:
        return 1e6 * self._cpu_seconds(
            lambda: ctypes.memmove(self.there.ctypes.data, self.here.ctypes.data, self.nbytes)
        )

    def _cpu_seconds(self, call: Callable[[], object]) -> float:
        times = []
        for _ in range(REPEATS + 1):
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
            self.device.synchronize()
        return median(times[1:])

    for track in (track_gpu_time, track_gpu_time_of_memcpy_async, track_cpu_time, track_cpu_time_of_memcpy):
        track.unit = "us"  # type: ignore[attr-defined]
    del track

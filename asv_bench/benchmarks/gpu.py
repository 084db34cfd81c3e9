"""Copies on a GPU, timed by its own events: blocks by size, number, direction and path; tokens; block tables. Beside
plain copies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from kvpool.arrays.layout import BlockLayout
from kvpool.arrays.paged import PagedKV
from kvpool.arrays.strided import as_strided
from kvpool.device.base import Stream
from kvpool.device.cuda.calibration import DIRECTIONS, OFFLOAD, ONBOARD, PATHS
from kvpool.device.cuda.cuda_device import CudaDevice, unusable
from kvpool.device.cuda.cuda_memory import CHUNK_BYTES
from kvpool.memory.kv_copy import gather_kv, scatter_kv
from kvpool.memory.pools import MemoryPools

from .pools import TOKENS_PER_BLOCK, make_pool, make_prompts
from .staging import COLUMNS, SEQUENCES

REPEATS = 9


class OnGpu:
    """Base: a device, its driver and a stream; skipped where there is no GPU. Benchmarks give what they take in
    ``release``."""

    device: CudaDevice
    stream: Stream
    # What keeps the stream busy while a short call is enqueued behind it: so many copies of so many bytes.
    busy_copies, busy_bytes = 8, 128 << 20

    def open(self, path: str | None = None) -> None:
        missing = unusable()
        if missing is not None:
            raise NotImplementedError(missing)
        import cupy

        self.runtime: Any = cupy.cuda.runtime
        self.device = CudaDevice(calibration=path)
        self.stream = self.device.create_stream("measured")
        self.begin, self.end = self.runtime.eventCreate(), self.runtime.eventCreate()

    def release(self) -> None:
        """What a benchmark has made on the device."""

    def teardown(self, *parameters: Any) -> None:
        """What was skipped is torn down too, by asv, and what was refused half-way twice."""
        if not hasattr(self, "end"):
            return
        self.release()
        self.device.close()
        for event in (self.begin, self.end):
            self.runtime.eventDestroy(event)
        del self.begin, self.end

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Enqueue one plain copy between addresses."""
        self.runtime.memcpyAsync(target, source, nbytes, self.runtime.memcpyDefault, self.stream.handle)

    def seconds(self, enqueue: Callable[[], object], *, behind: Callable[[], object] | None = None) -> float:
        """Median time of the GPU for what a call enqueues; the first one warms up.

        The time that the call itself takes is in it, unless the stream is kept busy by what ``behind`` enqueues before.
        """
        times = []
        for _ in range(REPEATS + 1):
            if behind is not None:
                behind()
            self.runtime.eventRecord(self.begin, self.stream.handle)
            enqueue()
            self.runtime.eventRecord(self.end, self.stream.handle)
            self.runtime.eventSynchronize(self.end)
            times.append(self.runtime.eventElapsedTime(self.begin, self.end) / 1e3)
        return median(times[1:])


class BlockCopies(OnGpu):
    """A batch of blocks of one contiguous fragment each, by each path; the peak is one large copy in the same
    direction, in the same run.

    "apart": no two are neighbours; "neighbours": they follow each other on both sides. Every batch takes other blocks,
    of tiers far larger than the GPU's cache. What the call costs the CPU is in the time.
    """

    params = (list(DIRECTIONS), list(PATHS), [8 << 10, 64 << 10])
    param_names = ("direction", "path", "fragment_bytes")
    timeout = 300
    tier_bytes = 1 << 30

    def setup(self, direction: str, path: str, nbytes: int, count: int = 1024, placement: str = "apart") -> None:
        blocks = self.tier_bytes // nbytes
        if 4 * count > blocks:
            raise NotImplementedError(
                f"{count} fragments of {nbytes} bytes are too much for tiers of {self.tier_bytes}"
            )
        self.open(path)
        layout = BlockLayout(1, 1, nbytes, 1, "uint8", planes=1, order="block_first")
        self.pools = MemoryPools(self.device, layout, blocks, blocks)
        if path not in self.device._paths(self.stream.handle):
            self.teardown()
            raise NotImplementedError(f"this GPU has no path {path!r}")
        self.batch_bytes = nbytes * count
        random = np.random.default_rng(0)
        half = blocks // 2
        if placement == "apart":
            # Source and target of a copy inside the device are the even and the odd half.
            places = 2 * random.permutation(half)[: half // count * count].reshape(-1, count)
        else:
            places = random.permutation(half // count)[:, None] * count + np.arange(count)
        from_host, to_host = blocks * (direction == ONBOARD), blocks * (direction == OFFLOAD)
        apart = 0 if from_host or to_host else 1 if placement == "apart" else half
        self.batches = [
            np.stack([ids + from_host, ids + apart + to_host, np.ones_like(ids), np.zeros_like(ids)], axis=1)
            for ids in places[: 2 * REPEATS]
        ]  # fmt: skip
        self.large_bytes = min(half * nbytes, CHUNK_BYTES)
        ends = np.array([from_host, half * (direction not in (ONBOARD, OFFLOAD)) + to_host])
        self.source, self.target = (int(address) for address in self.pools.addresses(ends))
        self.next = 0

    def release(self) -> None:
        self.pools.close()

    def _copy_batch(self) -> None:
        self.device.copy_blocks(self.batches[self.next % len(self.batches)], self.stream)
        self.next += 1

    def _copy_large(self) -> None:
        self.copy(self.target, self.source, self.large_bytes)

    def track_speed(self, *parameters: Any) -> float:
        return self.batch_bytes / self.seconds(self._copy_batch) / 1e9

    def track_share_of_peak(self, *parameters: Any) -> float:
        peak = self.large_bytes / self.seconds(self._copy_large)
        return 100 * self.batch_bytes / self.seconds(self._copy_batch) / peak

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]
    track_share_of_peak.unit = "% of one large copy"  # type: ignore[attr-defined]


class KvCopies(OnGpu):
    """Tokens at random places between the device tier and contiguous staging; as a share of one plain copy of as many
    bytes."""

    params = (["gather", "scatter"], ["device", "host"])
    param_names = ("direction", "staging")
    timeout = 300
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

    def track_speed(self, *parameters: Any) -> float:
        return self.nbytes / self.seconds(self._copy_tokens) / 1e9

    def track_share_of_plain_copy(self, *parameters: Any) -> float:
        plain = self.seconds(lambda: self.copy(self.target, self.source, self.nbytes))
        return 100 * plain / self.seconds(self._copy_tokens)

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]
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

"""Trials of the ways to copy on a device: whether they copy the right bytes, and how fast they are."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from time import perf_counter
from typing import cast

import numpy as np

from kvpool.common.arrays import Array, Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.arrays.strided import as_strided
from kvpool.common.jit import cache
from kvpool.device.base import Device, Stream
from kvpool.device.cuda.calibration import PLAIN, Measurement, always, conditions
from kvpool.device.cuda.runtime import Gpu
from kvpool.device.fragments import OFFLOAD, ONBOARD, WITHIN
from kvpool.device.regions import BYTES, FROM, TO, Region
from kvpool.device.work import Fragments
from kvpool.errors import DeviceError

FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
FRAGMENTS = (4, 64, 1024)
BATCH_BYTES_MAX = 256 << 20
_SECONDS, _REPEATS_MIN = 0.01, 3


def measure(
    device: Device,
    paths: Iterable[str],
    sizes: Iterable[int] = FRAGMENT_BYTES,
    counts: Iterable[int] = FRAGMENTS,
    batch_bytes_max: int = BATCH_BYTES_MAX,
    share: Callable[[str, str], float] = lambda path, direction: 0.0,
) -> list[Measurement]:
    """Measure copies between blocks of ``sizes`` bytes, no two of which are neighbours, in every direction.

    ``device`` is bound to nothing, and goes by its attribute ``calibration``, which this sets. Before a path is
    measured, its bytes are compared with those of plain copies. A path that differs or fails is left out, with a
    warning. ``share(path, direction)`` is the share of the multiprocessors that it takes. Batches of more than
    ``batch_bytes_max`` are left out. A tier takes twice as much memory as the largest batch. Raises MemoryError, and
    DeviceError for a device that has failed for good.
    """
    measurements, stream = list[Measurement](), device.create_stream("measured")
    fitting = {nbytes: [count for count in counts if count * nbytes <= batch_bytes_max] for nbytes in sizes}
    for path in paths:
        try:
            wrong = difference(device, path)
            if not wrong:
                device.calibration = always(path)  # type: ignore[attr-defined]
                measurements += [
                    m._replace(path=path, multiprocessors=share(path, m.direction))
                    for nbytes, some in fitting.items()
                    for m in _measure_size(device, stream, nbytes, some)
                ]
        except DeviceError as error:
            if error.sticky:
                raise
            wrong = str(error)
        if wrong:
            warnings.warn(f"no copy is made by the path {path!r}: {wrong}", stacklevel=3)
    return measurements


def _record(gpu: Gpu, path: str) -> str:
    """The name of the file which says that a kernel has passed its test. All is in it that the result depends on."""
    trial = [cache.bytecode_of(part.__code__) for part in (_difference, _copy_ops, _fragments)]
    about = gpu.name, gpu.driver, conditions(gpu), path, trial
    return f"self-test-{cache.digest(repr(about).encode())}"


def has_passed(gpu: Gpu, path: str) -> bool:
    """Whether a process of this machine has kept that a kernel copies the right bytes on such a GPU. A file that is
    damaged, or that others could write, does not count."""
    return cache.read(_record(gpu, path)) is not None


def keep_pass(gpu: Gpu, path: str) -> None:
    """Keep that a kernel has passed, beside compiled code, for other processes. Where nothing can be written, each of
    them tests it again."""
    cache.write(_record(gpu, path), b"")


_LAYOUTS = BlockLayout(3, 1, 40, 8, "uint8"), BlockLayout(3, 1, 48, 8, "uint8")
"""Of tokens that are whole words of 8 bytes, and of 16: only those go by ``BULK``."""
_BLOCKS = 400
_PARTS = 4, 60
"""Where batches are cut, so that their rows go into the argument of a launch of each size, and into a table."""
_CHECKED_BYTES = (1, 15, 16, 17, 48, 250, 4096, 4099, 9001)
_CROOKED = ((0, 0), (1, 1), (4, 0), (3, 10))
_LOADS, _LOAD_BYTES, _LOAD_PIECE = 4, 1 << 20, 4096


def difference(device: Device, path: str) -> str | None:
    """What is wrong with copies by a path, if anything: blocks, parts of blocks, fragments in whole words, and
    fragments of odd sizes at odd places, in every direction. All bytes of both tiers are compared with those after
    plain copies. Then the same on a second stream, while the first one copies other memory. ``device`` as in
    ``measure``. Raises DeviceError, MemoryError."""
    first, second = (device.create_stream(name) for name in ("first", "second"))
    runs = product(_LAYOUTS, ((first, None), (second, first)))
    return next(filter(None, (_difference(device, path, layout, *streams) for layout, streams in runs)), None)


def _difference(device: Device, path: str, layout: BlockLayout, stream: Stream, loaded: Stream | None) -> str | None:
    nbytes, random = _BLOCKS * layout.block_bytes, np.random.default_rng(0)
    pools = [device.allocate(nbytes, "device"), device.allocate(2 * nbytes, "host")]
    load = _Load(device, path, loaded) if loaded is not None else None
    host = cast(Array, pools[1])
    near, far = (as_strided("pool", pool).address for pool in pools)
    # The device tier is written from the second half of the host tier, and read to there, by plain copies.
    whole_tier = np.array([[far + nbytes, near, nbytes]])

    def copied(copies: Int64s, by: str, beside: _Load | None = None) -> Array:
        """The bytes of both tiers after these copies, made beside others."""
        host[:] = content
        _by(PLAIN, device, stream, whole_tier)
        if beside is not None:
            beside.enqueue()
        for some in np.split(copies, _PARTS):
            _by(by, device, stream, some)
        _by(PLAIN, device, stream, whole_tier[:, [TO, FROM, BYTES]])
        return host.copy()

    try:
        device.bind([Region.of(layout, pools[0], host, _BLOCKS, 2 * _BLOCKS)])
        for direction, (source, target) in {OFFLOAD: (0, 1), ONBOARD: (1, 0), WITHIN: (0, 0)}.items():
            ends = np.array([(near, far)[source], (near, far)[target], 0])
            for what, copies in {
                "blocks": _copy_ops(random, source, target, layout),
                "fragments": _fragments(nbytes, layout is _LAYOUTS[1]) + ends,
            }.items():
                content = random.integers(0, 256, 2 * nbytes, np.uint8)
                if not np.array_equal(copied(copies, PLAIN), copied(copies, path, load)):
                    return f"{direction} of {what} gave other bytes"
                if load is not None and not load.is_right():
                    return f"copies beside {direction} of {what} gave other bytes"
    finally:
        if load is not None:
            load.close()
        for pool in pools:
            device.free(pool)
    return None


class _Load:
    """Copies of memory of their own that keep a stream busy: from the first half of a host memory to the device, and
    from there to the second half, several times."""

    def __init__(self, device: Device, path: str, stream: Stream) -> None:
        self._device, self._path, self._stream = device, path, stream
        self._memory = [device.allocate(_LOAD_BYTES, tier) for tier in ("device", "host")]
        self._halves = cast(Array, self._memory[1]).reshape(2, -1)
        self._halves[0] = np.random.default_rng(1).integers(0, 256, self._halves.shape[1])

    def enqueue(self) -> None:
        """Enqueue the copies, by the path, and wait for nothing."""
        self._halves[1] = 0
        near, far = (as_strided("memory", memory).address for memory in self._memory)
        places = np.arange(0, self._halves.shape[1], _LOAD_PIECE)
        self._device.calibration = always(self._path)  # type: ignore[attr-defined]
        for source, target in ((far, near), (near, far + self._halves.shape[1])) * _LOADS:
            rows = np.stack([source + places, target + places, np.full_like(places, _LOAD_PIECE)], axis=1)
            self._device.enqueue(Fragments(rows), self._stream)

    def is_right(self) -> bool:
        """Wait for the copies, and compare their bytes."""
        self._device.synchronize(self._device.record(self._stream))
        return np.array_equal(*self._halves)

    def close(self) -> None:
        self.is_right()
        for memory in self._memory:
            self._device.free(memory)


def _by(path: str, device: Device, stream: Stream, rows: Int64s) -> None:
    """Make copy ops, or copy fragments, by a path, and wait until they are done."""
    device.calibration = always(path)  # type: ignore[attr-defined]
    if rows.shape[1] == 4:
        device.copy_blocks(rows, stream)
    else:
        device.enqueue(Fragments(rows), stream)
    device.synchronize(device.record(stream))


def _copy_ops(random: np.random.Generator, source: int, target: int, layout: BlockLayout) -> Int64s:
    """From a half of the blocks of a tier to the other half of one, every third of a few tokens only."""
    ids, half = np.arange(_BLOCKS // 2), _BLOCKS // 2
    tokens = np.where(ids % 3, layout.tokens_per_block, 3)
    return np.stack([source * _BLOCKS + random.permutation(ids), target * _BLOCKS + half + ids, tokens, ids], axis=1)


def _fragments(nbytes: int, in_words: bool) -> Int64s:
    """Fragments of each size at each pair of odd places, from the first half of ``nbytes`` to the second, or whole
    words instead."""
    rows, at = [], 64
    for size, (source, target) in product(2 * _CHECKED_BYTES, _CROOKED):
        rows.append((at + source, nbytes // 2 + at + target, size))
        at += -(-size // 16) * 16 + 32
    return np.maximum(np.array(rows, np.int64) // 16 * 16, 16) if in_words else np.array(rows, np.int64)


def _measure_size(device: Device, stream: Stream, nbytes: int, counts: list[int]) -> Iterator[Measurement]:
    blocks = 2 * max(counts, default=0)
    if not blocks:
        return
    layout = BlockLayout(1, 1, nbytes, 1, "uint8", planes=1, order="block_first")
    pools = [device.allocate(blocks * nbytes, tier) for tier in ("device", "host")]
    try:
        device.bind([Region.of(layout, pools[0], pools[1], blocks, blocks)])
        for count in counts:
            # Every other block, in random order, so that nothing can be merged.
            even = 2 * np.random.default_rng(count).permutation(blocks // 2)[:count]
            for direction, source, target in ((OFFLOAD, 0, blocks), (ONBOARD, blocks, 0), (WITHIN, 0, 1)):
                copy_ops = np.stack([even + source, even + target, np.ones_like(even), np.arange(count)], axis=1)
                seconds, call = _seconds(device, stream, copy_ops)
                yield Measurement(direction, nbytes, count, "", count * nbytes / seconds / 1e9, call * 1e6)
    finally:
        for pool in pools:
            device.free(pool)


def _seconds(device: Device, stream: Stream, copy_ops: Int64s) -> tuple[float, float]:
    """The median times of a batch: from the call until it is done, and of the call. The first run warms up."""
    times: list[tuple[float, float]] = []
    while len(times) <= _REPEATS_MIN or sum(seconds for seconds, _ in times) < _SECONDS:
        begin = perf_counter()
        device.copy_blocks(copy_ops, stream)
        enqueued = perf_counter()
        device.synchronize(device.record(stream))
        times.append((perf_counter() - begin, enqueued - begin))
    seconds, call = np.median(times[1:], axis=0).tolist()
    return seconds, call

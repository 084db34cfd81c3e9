"""Measures how fast a device copies fragments of some sizes and numbers, by each of its paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from kvpool.arrays.layout import BlockLayout
from kvpool.device.base import Device, Region, Stream
from kvpool.device.cuda.calibration import OFFLOAD, ONBOARD, WITHIN, Measurement

FRAGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20)
FRAGMENTS = (4, 64, 1024)
BATCH_BYTES_MAX = 256 << 20
_SECONDS, _REPEATS_MIN = 0.01, 3


def measure(
    make: Callable[[str], Device],
    paths: Iterable[str],
    sizes: Iterable[int] = FRAGMENT_BYTES,
    counts: Iterable[int] = FRAGMENTS,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> list[Measurement]:
    """Measure copies between blocks of ``sizes`` bytes, no two of which are neighbours, in every direction.

    ``make(path)`` returns a device that copies by one path; this function closes it. Batches of more than
    ``batch_bytes_max`` are left out. A tier takes twice as much memory as the largest batch. Raises DeviceError,
    MemoryError.
    """
    found = []
    for path in paths:
        device = make(path)
        try:
            stream = device.create_stream("measured")
            for nbytes in sizes:
                fitting = [count for count in counts if count * nbytes <= batch_bytes_max]
                found += [m._replace(path=path) for m in _measure_size(device, stream, nbytes, fitting)]
        finally:
            device.close()
    return found


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
                moves = np.stack([even + source, even + target, np.ones_like(even), np.arange(count)], axis=1)
                yield Measurement(direction, nbytes, count, "", count * nbytes / _seconds(device, stream, moves) / 1e9)
    finally:
        for pool in pools:
            device.free(pool)


def _seconds(device: Device, stream: Stream, moves: NDArray[np.int64]) -> float:
    """The median time of a batch, from the call until it is done. The first run warms up."""
    times: list[float] = []
    while len(times) <= _REPEATS_MIN or sum(times) < _SECONDS:
        begin = perf_counter()
        device.copy_blocks(moves, stream)
        device.synchronize(device.record(stream))
        times.append(perf_counter() - begin)
    return float(np.median(times[1:]))

"""What a call that enqueues on a GPU takes of its caller, on a driver that does nothing (``gpu_null``). Needs no GPU.

``python -m asv_bench.benchmarks.gpu_calls`` prints the table of all cases. Microseconds on one core of an AMD EPYC, the
faster of two runs of each commit, in alternation, while other processes shared the machine. On 16aa112c, CuPy made each
launch:

======================= ======== =========== ======= =========== =======
case                    commit   GPU 0: wall     cpu GPU 1: wall     cpu
======================= ======== =========== ======= =========== =======
8 blocks                16aa112c        33.3    39.2        35.0    39.2
1024 blocks             16aa112c        78.9    91.3        82.6   101.6
4096 blocks             16aa112c       260.1   273.1       256.1   272.2
tables of 256 x 64 ids  16aa112c        65.8    68.7        74.5    77.3
8 blocks                8b5effb2         4.2     4.3         4.2     4.3
1024 blocks             8b5effb2        16.5    17.3        16.5    17.6
4096 blocks             8b5effb2        49.3    51.7        49.1    50.5
tables of 256 x 64 ids  8b5effb2        21.9    22.7        21.9    23.0
======================= ======== =========== ======= =========== =======

A kernel of Numba's costs nothing here, so the tables do not show what its launch takes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from time import perf_counter, process_time

import numpy as np

from kvpool import KVCacheManager
from kvpool.common.arrays import Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.device.cuda import CudaDevice
from kvpool.device.memory.pools import MemoryPools

from .gpu_null import NullTable, null_cuda

SEQUENCES, COLUMNS = 256, 64
LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=128, tokens_per_block=16, dtype="uint8", order="block_first")
CALLS, ROUNDS = 200, 12


def _load(opened: ExitStack, gpu: int, blocks: int) -> Callable[[], object]:
    """Scattered blocks of one contiguous piece each, from the host, by the kernel, on a stream of the pool's."""
    device = CudaDevice(gpu, calibration="kernel")
    opened.callback(device.close)
    opened.callback(MemoryPools(device, LAYOUT, 8192, 8192).close)
    random, stream = np.random.default_rng(0), device.create_stream("loads")
    copy_ops: Int64s = np.zeros((blocks, 4), np.int64)
    copy_ops[:, 0] = 8192 + random.permutation(8192)[:blocks]
    copy_ops[:, 1] = random.permutation(8192)[:blocks]
    copy_ops[:, 2] = LAYOUT.tokens_per_block
    return lambda: device.copy_blocks(copy_ops, stream)


def _upload(opened: ExitStack, gpu: int, columns: int) -> Callable[[], object]:
    """The block tables of many sequences, on the stream of an engine."""
    device = CudaDevice(gpu, calibration="kernel")
    opened.callback(device.close)
    cache = KVCacheManager(
        LAYOUT, device_blocks=SEQUENCES * columns, device=device, max_sequences=SEQUENCES, max_sequence_tokens=2048
    )
    opened.callback(cache.close)
    prompts = np.arange(SEQUENCES * columns * LAYOUT.tokens_per_block).reshape(SEQUENCES, -1)
    ids = cache.add_sequence_batch(list(prompts), stream=0x77770).ids
    target = NullTable(SEQUENCES, COLUMNS)
    opened.callback(cache.release, ids)
    return lambda: cache.tables.copy_batch_block_offsets(target, ids, stream=0x77770)


CASES = {
    "8 blocks": (_load, 8),
    "1024 blocks": (_load, 1024),
    "4096 blocks": (_load, 4096),
    f"tables of {SEQUENCES} x {COLUMNS} ids": (_upload, COLUMNS),
}


def measure(case: str, gpu: int, rounds: int = ROUNDS) -> tuple[float, float]:
    """Microseconds of a call, in the fastest of some rounds: the median by the clock, and the mean of the processor
    time of all threads."""
    make, size = CASES[case]
    walls, cpus = [], []
    with ExitStack() as opened:
        opened.enter_context(null_cuda())
        call = make(opened, gpu, size)
        for _ in range(rounds + 1):
            times, used = [], process_time()
            for _ in range(CALLS):
                begun = perf_counter()
                call()
                times.append(perf_counter() - begun)
            cpus.append((process_time() - used) / CALLS)
            walls.append(median(times))
    return 1e6 * min(walls[1:]), 1e6 * min(cpus[1:])


class NullDriver:
    params: list[list[object]] = [list(CASES), [0, 1]]
    param_names = ["call", "gpu"]
    timeout = 600

    def track_wall(self, case: str, gpu: int) -> float:
        return measure(case, gpu)[0]

    def track_cpu(self, case: str, gpu: int) -> float:
        return measure(case, gpu)[1]

    track_wall.unit = track_cpu.unit = "us"  # type: ignore[attr-defined]


def main() -> None:
    """Print microseconds of each case. GPU 0 is current in the calling thread, GPU 1 is not."""
    print(f"{'':24} {'GPU 0: wall':>12} {'cpu':>7} {'GPU 1: wall':>12} {'cpu':>7}")
    for case in CASES:
        (wall, cpu), (other_wall, other_cpu) = (measure(case, gpu) for gpu in (0, 1))
        print(f"{case:24} {wall:12.1f} {cpu:7.1f} {other_wall:12.1f} {other_cpu:7.1f}", flush=True)


if __name__ == "__main__":
    main()

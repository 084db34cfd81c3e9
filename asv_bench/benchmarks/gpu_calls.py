"""What a call that enqueues on a GPU takes of its caller, on a driver that does nothing (``gpu_null``). Needs no GPU.

``python -m asv_bench.benchmarks.gpu_calls`` prints the table of all cases. Microseconds on two cores of an AMD EPYC
that seven other processes shared:

======================= ======== =========== ======= =========== =======
case                    commit   GPU 0: wall     cpu GPU 1: wall     cpu
======================= ======== =========== ======= =========== =======
8 blocks                16aa112c        85.1   113.7        89.5   121.2
1024 blocks             16aa112c       162.4   217.5       170.1   227.1
4096 blocks             16aa112c       447.0   529.0       402.0   454.1
tables of 256 x 64 ids  16aa112c       226.8   259.1       167.6   217.1
8 blocks                6f819917        10.3    19.5        10.2    21.6
1024 blocks             6f819917        25.1    36.3        25.5    38.4
4096 blocks             6f819917        70.2    88.0        70.9    92.1
tables of 256 x 64 ids  6f819917       154.1   193.3       173.3   219.8
8 blocks                74dd5e6e         6.1     6.3         6.0     6.2
1024 blocks             74dd5e6e        22.5    24.5        23.1    25.1
4096 blocks             74dd5e6e        65.9    69.5        66.8    70.5
tables of 256 x 64 ids  74dd5e6e        51.1    54.4        49.2    52.7
======================= ======== =========== ======= =========== =======

The last four are the fastest of three runs on a core of their own. In runs that alternated with them, 8f714b0e took 14,
25, 67 and 153 us on GPU 0.

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

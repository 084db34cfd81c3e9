"""The Numba kernel that writes the tables of a step. Import this only to launch it: it needs the extra ``cuda12`` or
``cuda13``."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

from numba import cuda
from numba.cuda import types

from kvpool.device.cuda.runtime import LEGACY_STREAM, RuntimeCalls
from kvpool.device.work import NAMES, StagedStep, numbers_bytes
from kvpool.errors import DeviceError

THREADS, _WARP = 128, 32
_FEWEST, _THREAD_BLOCKS = 128, 1024
"""Numbers of thread blocks. Numba warns of fewer than the first. Beyond the second, thread blocks loop over
sequences."""


def step_tables(
    numbers: Any,
    ids: Any,
    sequences: Any,
    chunks: Any,
    width: Any,
    sinks: Any,
    wanted: Any,
    slot_mapping: Any,
    seq_lens: Any,
    query_start_loc: Any,
    last_page_len: Any,
    table: Any,
    indptr: Any,
    indices: Any,
    row_stride: Any,
    columns: Any,
) -> None:
    """``device.work.write_step`` in parallel. A thread has a column of a sequence, so that each block id is read once.

    ``numbers`` int64[sequences + 1, 4] and ``ids`` int32 are as in ``StagedStep``. They may lie in pinned memory.
    ``chunks`` thread blocks share a sequence. Bit k of ``wanted`` says whether the k-th target of ``NAMES`` is wanted.
    ``row_stride`` is in entries.
    """
    unit = cuda.blockIdx.x
    if unit == 0 and cuda.threadIdx.x == 0:
        if wanted & 4:
            query_start_loc[sequences] = numbers[4 * sequences + 3]
        if wanted & 32:
            indptr[sequences] = numbers[4 * sequences]
    while unit < sequences * chunks:
        i, chunk = unit // chunks, unit % chunks
        stored, holes = numbers[4 * i], numbers[4 * i + 1]
        length, query = numbers[4 * i + 2], numbers[4 * i + 3]
        first, used = length - (numbers[4 * i + 7] - query), (length + width - 1) // width
        if chunk == 0 and cuda.threadIdx.x == 0:
            if wanted & 2:
                seq_lens[i] = length
            if wanted & 4:
                query_start_loc[i] = query
            if wanted & 8:
                last_page_len[i] = length - (used - 1) * width if length else 0
            if wanted & 32:
                indptr[i] = stored
        c = chunk * cuda.blockDim.x + cuda.threadIdx.x
        while c < max(used, columns if wanted & 16 else 0):
            block = -1
            if c < used and not sinks <= c < sinks + holes:
                place = stored + (c if c < sinks else c - holes)
                block = ids[place]
                if wanted & 64:
                    indices[place] = block
                if wanted & 1:
                    for token in range(max(first, c * width), min(length, (c + 1) * width)):
                        slot_mapping[query + token - first] = block * width + token - c * width
            if wanted & 16 and c < columns:
                table[i * row_stride + c] = block
            c += chunks * cuda.blockDim.x
        unit += cuda.gridDim.x


def signature() -> Any:
    """The signature of ``step_tables``: pointers and numbers, so that a launch makes no arrays."""
    longs, ints, number = types.CPointer(types.int64), types.CPointer(types.int32), types.int64
    return types.void(longs, ints, *[number] * 5, longs, *[ints] * 6, number, number)


def compile_for(capability: tuple[int, int]) -> str:
    """The kernel in PTX, for a compute capability. Needs no GPU. Raises what Numba raises."""
    ptx, _ = cuda.compile_ptx(step_tables, signature(), cc=capability)
    return str(ptx)


@cache
def step_kernel(capability: tuple[int, int]) -> Any:
    """The kernel, compiled for the current device, which has this compute capability."""
    return cuda.jit(signature())(step_tables)


def step_arguments(staged: StagedStep, address: int) -> tuple[int, int, list[int]]:
    """Thread blocks, threads and arguments of the launch that writes a staged step. ``address`` is that of the buffer,
    for kernels."""
    *addresses, row_stride, columns = staged.targets.places.tolist()
    wanted = sum(1 << k for k, name in enumerate(NAMES) if name in staged.targets.tables)
    most = max(staged.columns, columns, 1)
    threads = min(THREADS, -(-most // _WARP) * _WARP)
    chunks = -(-most // threads)
    read = address, address + int(numbers_bytes(staged.sequences)), staged.sequences
    shape = chunks, staged.tokens_per_block, staged.sinks
    thread_blocks = min(_THREAD_BLOCKS, max(_FEWEST, staged.sequences * chunks))
    return thread_blocks, threads, [*read, *shape, wanted, *addresses, row_stride // 4, columns]


class StepKernel:
    """The kernel on the GPU of ``calls``, compiled and loaded completely. Raises DeviceError."""

    def __init__(self, calls: RuntimeCalls) -> None:
        self._calls = calls
        with calls("step_tables", unsafe=True):
            try:
                self._kernel = step_kernel(tuple(cuda.get_current_device().compute_capability))
            except Exception as error:  # Numba, its compiler and the driver have own errors.
                raise DeviceError(f"step_tables cannot be compiled: {type(error).__name__}: {error}") from error

    def launch(self, staged: StagedStep, address: int, stream: int) -> None:
        """Enqueue the kernel. ``address`` is that of the buffer, for kernels. Raises DeviceError. If the error is
        permanent, the next call finds out."""
        thread_blocks, threads, arguments = step_arguments(staged, address)
        with self._calls("step_tables"):
            try:
                self._kernel[thread_blocks, threads, _stream(stream)](*arguments)
            except Exception as error:
                raise DeviceError(f"step_tables: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    """A stream for Numba, made of its number only. What 0 means to Numba depends on its settings, and 1 is always the
    legacy default stream."""
    return cuda.external_stream(handle or LEGACY_STREAM)

"""The Numba kernels that gather staged block ids into tables on a GPU: rows of block offsets, and the tables of a step.
Import this only to launch or compile them: it needs the extra ``cuda12`` or ``cuda13``."""

from __future__ import annotations

from functools import cache, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda import types

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.device.cuda import native
from kvpool.device.cuda.runtime import LEGACY_STREAM, RuntimeCalls
from kvpool.device.work import NAMES, StagedRows, StagedStep, ids_bytes, numbers_bytes
from kvpool.errors import DeviceError

THREADS, ROW_THREADS, _WARP = 128, 512, 32
"""The most threads of a thread block, for the tables of a step and for rows."""
PLANES = 128
"""How many planes a thread block keeps in shared memory at a time: 3 KiB."""
_SHARED = 3 * PLANES + 1
_FEWEST, _THREAD_BLOCKS = 128, 1024
"""Numbers of thread blocks. Numba warns of fewer than the first. Beyond the second, thread blocks loop over
sequences, or rows."""


def stage_rows(
    ids: Any,
    numbers: Any,
    plane_count: Any,
    rows: Any,
    width: Any,
    columns: Any,
    table: Any,
    row_stride: Any,
) -> None:
    """``device.work.write_rows`` in parallel. A thread has a column of a row, and writes it in all planes.

    ``ids`` int32[rows, width] and ``numbers``, the rows and then the planes int64[planes, 3], are as in ``StagedRows``.
    They may lie in pinned memory, so each is read once: an id by its thread; the planes, and after them the number of
    the row, by some threads of a thread block for all of them. No read waits for another one. ``row_stride`` is in
    entries.
    """
    shared = cuda.shared.array(_SHARED, types.int64)
    column = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    i = cuda.blockIdx.y
    while i < rows:
        # Of 32 bits, as loaded: to widen it, threads would wait for it here.
        block = np.int32(-1)
        if column < width:
            block = ids[i * width + column]
        first = 0
        while first < plane_count:
            count = min(PLANES, plane_count - first)
            cuda.syncthreads()  # The planes before are not needed any more.
            k = cuda.threadIdx.x
            while k <= 3 * count:
                shared[k] = numbers[i if k == 3 * count else rows + 3 * first + k]
                k += cuda.blockDim.x
            cuda.syncthreads()
            if column < columns:
                place = shared[3 * count] * row_stride + column
                for p in range(count):
                    value = np.int32(-1)
                    if block >= np.int32(0):
                        value = np.int32(block * shared[3 * p + 1] + shared[3 * p + 2])
                    table[(shared[3 * p] >> 2) + place] = value
            first += count
        i += cuda.gridDim.y


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
    ``chunks`` thread blocks share a sequence. Bit k of ``wanted`` is whether the k-th target of ``NAMES`` is wanted.
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
        first, filled = length - (numbers[4 * i + 7] - query), (length + width - 1) // width
        if chunk == 0 and cuda.threadIdx.x == 0:
            if wanted & 2:
                seq_lens[i] = length
            if wanted & 4:
                query_start_loc[i] = query
            if wanted & 8:
                last_page_len[i] = length - (filled - 1) * width if length else 0
            if wanted & 32:
                indptr[i] = stored
        c = chunk * cuda.blockDim.x + cuda.threadIdx.x
        while c < max(filled, columns if wanted & 16 else 0):
            block = -1
            if c < filled and not sinks <= c < sinks + holes:
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


_long, _longs, _ints = types.int64, types.CPointer(types.int64), types.CPointer(types.int32)
KERNELS = {
    "stage_rows": (stage_rows, types.void(_ints, _longs, *[_long] * 4, _ints, _long)),
    "step_tables": (step_tables, types.void(_longs, _ints, *[_long] * 5, _longs, *[_ints] * 6, _long, _long)),
}
"""Each with its signature, of pointers and numbers, so that a launch makes no arrays."""


def compile_for(name: str, capability: tuple[int, int]) -> str:
    """A kernel of ``KERNELS`` in PTX, for a compute capability. Needs no GPU. Raises what Numba raises."""
    ptx, _ = cuda.compile_ptx(*KERNELS[name], cc=capability)
    return str(ptx)


@cache
def compiled(name: str, index: int) -> Any:
    """A kernel, compiled for the current GPU, whose number is ``index``, and loaded there: another one of the same kind
    would load it at its first launch."""
    function, signature = KERNELS[name]
    return cuda.jit(signature)(function)


@jit
def _fill_rows(
    launch: Int64s, address: int, planes: int, rows: int, width: int, columns: int, table: int, stride: int
) -> None:
    threads = min(ROW_THREADS, -(-columns // _WARP) * _WARP)
    chunks = -(-columns // threads)
    # The grid has chunks of columns by rows, so that no thread divides.
    launch[0], launch[2] = chunks, threads
    launch[1] = min(max(1, _THREAD_BLOCKS // chunks), max(-(-_FEWEST // chunks), rows))
    launch[3], launch[4] = address, address + ids_bytes(rows, width)
    launch[5], launch[6], launch[7], launch[8] = planes, rows, width, columns
    launch[9], launch[10] = table, stride // 4


def rows_launch(staged: StagedRows) -> Int64s:
    """The launch that writes staged rows, as ``native.launch_numbers`` takes it."""
    table, launch = staged.table, np.empty(11, np.int64)
    _fill_rows(launch, *staged[2:], table.address, table.strides[-2])
    return launch


def step_launch(staged: StagedStep) -> Int64s:
    """The launch that writes a staged step, likewise."""
    *addresses, row_stride, columns = staged.targets.places.tolist()
    wanted = sum(1 << k for k, name in enumerate(NAMES) if name in staged.targets.tables)
    most = max(staged.columns, columns, 1)
    threads = min(THREADS, -(-most // _WARP) * _WARP)
    chunks = -(-most // threads)
    grid = min(_THREAD_BLOCKS, max(_FEWEST, staged.sequences * chunks)), 1, threads
    read = staged.address, staged.address + int(numbers_bytes(staged.sequences)), staged.sequences
    shape = chunks, staged.tokens_per_block, staged.sinks
    return np.array([*grid, *read, *shape, wanted, *addresses, row_stride // 4, columns], np.int64)


class TableKernel:
    """A kernel of ``KERNELS`` on the GPU of ``calls``, compiled and loaded completely. Raises DeviceError."""

    def __init__(self, name: str, calls: RuntimeCalls) -> None:
        self._name, self._calls = name, calls
        with calls(name, unsafe=True):
            try:
                self._kernel = compiled(name, calls.index)
                self._handle = _handle_of(self._kernel)
            except Exception as error:  # Numba, its compiler and the driver have own errors.
                raise DeviceError(f"{name} cannot be compiled: {type(error).__name__}: {error}") from error

    def launch(self, launch: Int64s, stream: int, event: int = 0) -> bool:
        """Enqueue the kernel: by ``native`` where its handle is known, since Numba takes tens of microseconds. Returns
        whether ``event``, if it is not 0, was recorded behind it. Raises DeviceError."""
        if self._handle:
            result = native.launch_numbers(self._calls.functions, self._handle, launch, stream, event)
            if result:
                try:
                    native.check(self._calls, result)
                except (DeviceError, MemoryError) as error:
                    raise DeviceError(f"{self._name}: {error}", sticky=getattr(error, "sticky", False)) from error
            return True
        x, y, threads, *arguments = launch.tolist()
        with self._calls(self._name):
            try:
                self._kernel[(x, y), threads, _stream(stream)](*arguments)
            except Exception as error:
                raise DeviceError(f"{self._name}: {type(error).__name__}: {error}") from error
        return False


def _handle_of(kernel: Any) -> int:
    """The driver's handle of a kernel on the current GPU; 0 in a release of Numba that keeps it elsewhere."""
    try:
        (overload,) = kernel.overloads.values()
        # It is no part of Numba's interface.
        return int(attrgetter("_codelibrary.get_cufunc")(overload)().handle)
    except (AttributeError, TypeError, ValueError):
        return 0


@lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    """A stream for Numba, made of its number only. What 0 means to Numba depends on its settings, and 1 is always the
    legacy default stream."""
    return cuda.external_stream(handle or LEGACY_STREAM)

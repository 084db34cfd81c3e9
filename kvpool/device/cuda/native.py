"""Launches by machine code: rows, launch and event in one jitted call that needs no interpreter.

It calls the driver's functions by their addresses, and takes microseconds. CuPy compiles and owns the kernels and the
events; here they are handles.

Numba calls pointers of ctypes too, but keeps no such function on disk. ``call_c`` takes the address as a number.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kvpool.common.arrays import Int64s
from kvpool.common.jit import jit
from kvpool.common.jit.intrinsics import Code, address_of, array_at, primitive
from kvpool.device.fragments import UNIT, tabulate_blocks, tabulate_fragments
from kvpool.device.launches import COUNT_MAX, FEW_ROWS, HEADER_BYTES, PIECE_WORDS, ROW_BYTES, WARP
from kvpool.errors import DeviceError

FUNCTIONS = (
    "cuLaunchKernel",
    "cuEventRecord",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuEventQuery",
    "cuStreamIsCapturing",
    "cuThreadExchangeStreamCaptureMode",
)
LAUNCH, RECORD, CURRENT, PUSH, POP, QUERY, CAPTURING, EXCHANGE, CONTEXT = range(9)
"""The entries of ``driver``: the addresses of ``FUNCTIONS``, and the context of the GPU."""
ROWS, ROOM, STREAM, EVENT, MOST, RECORDED = range(6)
"""The entries of ``to``: where the rows go, and how many fit; the handles of stream and event; the most thread blocks;
the last one is an answer. Without an event (0), the rows are at most ``SOME_ROWS``, and go into the argument of the
launch: there is room for the rest of it before them."""
CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""
_FUNCTION_BITS = 3
_FRAME_WORDS = 16


def _plain_call(address: int, arguments: tuple[int, ...]) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * len(arguments))(address)(*map(int, arguments)))


@primitive(_plain_call, lambda address, arguments: types.int64)
def call_c(code: Code) -> Any:
    """Call a function of C, by its address, with a tuple of integers. Returns its int.

    Each argument is passed as 64 bits. The calling conventions of 64-bit systems leave the upper half of a narrower
    integer open.
    """
    word, kinds = ir.IntType(64), tuple(code.kinds[1])
    values = zip(cgutils.unpack_tuple(code.builder, code.values[1]), kinds, strict=True)
    words = [code.context.cast(code.builder, value, kind, types.int64) for value, kind in values]
    kind = ir.FunctionType(ir.IntType(32), [word] * len(words)).as_pointer()
    return code.builder.sext(code.builder.call(code.builder.inttoptr(code.word(0), kind), words), word)


_frames: deque[Any] = deque(maxlen=64)
"""Those of the interpreter."""


def _plain_frame() -> int:
    _frames.append((ctypes.c_int64 * _FRAME_WORDS)())
    return ctypes.addressof(_frames[-1])


@primitive(_plain_frame, lambda: types.int64)
def frame(code: Code) -> Any:
    """The address of some words of the calling function's frame, for what functions of C read and write."""
    words = cgutils.alloca_once(code.builder, ir.IntType(64), size=_FRAME_WORDS)
    return code.builder.ptrtoint(words, ir.IntType(64))


@jit
def _failed(status: int, function: int) -> int:
    """What a function of this module returns if a function of the driver has failed; 0 if it has not."""
    return status << _FUNCTION_BITS | function if status else 0


@jit
def _enter(driver: Int64s) -> tuple[int, bool]:
    """Make the context current, unless it is. Returns 0 or what has failed, and whether ``_leave`` has to undo it."""
    place = frame()
    current = array_at(place, (1,), np.int64)
    current[0] = 0
    status = call_c(driver[CURRENT], (place,))
    if status:
        return _failed(status, CURRENT), False
    if current[0] == driver[CONTEXT]:
        return 0, False
    status = call_c(driver[PUSH], (driver[CONTEXT],))
    return _failed(status, PUSH), status == 0


@jit
def _leave(driver: Int64s, pushed: bool) -> None:
    if pushed:
        call_c(driver[POP], (frame(),))


@jit
def _launch(driver: Int64s, function: int, x: int, y: int, threads: int, arguments: int, stream: int) -> int:
    """Launch a kernel on ``x * y`` thread blocks. The addresses of its arguments are at ``arguments``."""
    one, none = np.int64(1), np.int64(0)
    status = call_c(driver[LAUNCH], (function, x, y, one, threads, one, one, none, stream, arguments, none))
    return _failed(status, LAUNCH)


@jit
def launch(driver: Int64s, function: int, thread_blocks: int, threads: int, record: Int64s, stream: int) -> int:
    """Launch a kernel whose one argument is ``record``, by value."""
    place = frame()
    array_at(place, (1,), np.int64)[0] = address_of(record)
    failed, pushed = _enter(driver)
    if not failed:
        failed = _launch(driver, function, thread_blocks, 1, threads, place, stream)
    _leave(driver, pushed)
    return failed


@jit
def launch_numbers(driver: Int64s, function: int, numbers: Int64s, stream: int, event: int) -> int:
    """Launch a kernel whose arguments are all of 64 bits, and record the event behind it; none if ``event`` is 0.

    ``numbers`` has the thread blocks in two dimensions, the threads of one, and the arguments, ``_FRAME_WORDS`` at
    most."""
    first, place = address_of(numbers) + 24, frame()
    addresses = array_at(place, (_FRAME_WORDS,), np.int64)
    for i in range(numbers.shape[0] - 3):
        addresses[i] = first + 8 * i
    failed, pushed = _enter(driver)
    if not failed:
        failed = _launch(driver, function, numbers[0], numbers[1], numbers[2], place, stream)
        if event and not failed:
            failed = _failed(call_c(driver[RECORD], (event, stream)), RECORD)
    _leave(driver, pushed)
    return failed


@jit
def record(driver: Int64s, event: int, stream: int) -> int:
    """Record an event. Returns 0 or what has failed."""
    failed, pushed = _enter(driver)
    if not failed:
        failed = _failed(call_c(driver[RECORD], (event, stream)), RECORD)
    _leave(driver, pushed)
    return failed


@jit
def query(driver: Int64s, event: int) -> int:
    """Query an event, also while this thread or another one captures. Returns 0 if it is complete, or what has failed:
    "not ready" is a failure too."""
    mode = frame()
    array_at(mode, (1,), np.int64)[0] = CAPTURE_RELAXED
    call_c(driver[EXCHANGE], (mode,))
    failed, pushed = _enter(driver)
    if not failed:
        failed = _failed(call_c(driver[QUERY], (event,)), QUERY)
    _leave(driver, pushed)
    call_c(driver[EXCHANGE], (mode,))
    return failed


@jit
def is_capturing(driver: Int64s, stream: int) -> int:
    """Whether a stream is being captured: 0, or -1 if it is. Else what has failed."""
    place = frame()
    state = array_at(place, (1,), np.int64)
    state[0] = 0
    failed, pushed = _enter(driver)
    if not failed:
        failed = _failed(call_c(driver[CAPTURING], (stream, place)), CAPTURING)
    _leave(driver, pushed)
    return failed if failed else -1 if state[0] else 0


@jit
def _copy_rows(driver: Int64s, to: Int64s, kernels: Int64s, count: int, words: int) -> int:
    """Launch the copies of ``count`` rows, the longest of ``words``, and record the event behind them, if there is one.
    ``kernels`` are those of ``SIZES``, and the threads of a block. Returns 0 or what has failed."""
    arguments = frame()
    table_at = arguments + 8 if to[EVENT] else to[ROWS] - HEADER_BYTES
    array_at(arguments, (1,), np.int64)[0] = table_at
    table = array_at(table_at, (3,), np.int64)
    function, threads = kernels[0 if to[EVENT] else 1 if count <= FEW_ROWS else 2], kernels[3]
    failed, pushed = _enter(driver)
    if not failed:
        pieces = (words + PIECE_WORDS - 1) // PIECE_WORDS
        each = max(1, COUNT_MAX // max(1, pieces))
        first = 0
        while first < count and not failed:
            rows = min(each, count - first)
            table[0], table[1] = rows, pieces
            if to[EVENT]:
                table[2] = to[ROWS] + first * ROW_BYTES
            blocks = max(1, min((rows * pieces * WARP + threads - 1) // threads, to[MOST]))
            failed = _launch(driver, function, blocks, 1, threads, arguments, to[STREAM])
            first += each
        # Of several launches, some may have been made before one failed.
        status = call_c(driver[RECORD], (to[EVENT], to[STREAM])) if to[EVENT] else 0
        to[RECORDED] = status == 0
        failed = failed if failed else _failed(status, RECORD)
    _leave(driver, pushed)
    return failed


@jit
def copy_blocks(driver: Int64s, to: Int64s, kernels: Int64s, copy_ops: Int64s, vector: Int64s) -> int:
    """Write the rows of copy ops whose bytes are whole words, by the vector of a plan, and launch their copies.
    ``kernels`` int64[2, 4] has, for whole words and for other bytes, those of ``SIZES`` and the threads of a block.
    Returns 0 or what has failed."""
    count, words = tabulate_blocks(copy_ops, vector, array_at(to[ROWS], (to[ROOM], 4), np.int64))
    return _copy_rows(driver, to, kernels[0], count, words)


@jit
def copy_fragments(driver: Int64s, to: Int64s, kernels: Int64s, fragments: Int64s, words_max: int) -> int:
    """``copy_blocks`` for fragments, in rows of at most ``words_max`` words."""
    rows = array_at(to[ROWS], (to[ROOM], 4), np.int64)
    count, words, bits = tabulate_fragments(fragments, words_max, rows)
    return _copy_rows(driver, to, kernels[1 if bits % UNIT else 0], count, words)


def load() -> None:
    """Compile the calls that copy, or load them, so that the first copy does not."""
    numbers, rows = types.int64[::1], types.int64[:, ::1]
    calls: Any = (copy_fragments, types.int64), (copy_blocks, numbers)
    for call, kind in calls:
        if hasattr(call, "compile"):  # not in the interpreter
            call.compile((numbers, numbers, rows, rows, kind))


def find_functions(library: object, context: int | None) -> Int64s:
    """What the functions of this module take as ``driver``, from its library. Raises DeviceError if that lacks one."""
    functions: list[Any] = [getattr(library, name, None) for name in FUNCTIONS]
    if None in functions or context is None:
        raise DeviceError(f"CUDA driver: expected one that has {', '.join(FUNCTIONS)}, got one that lacks some")
    return np.array([*(ctypes.cast(f, ctypes.c_void_p).value for f in functions), context], np.int64)


def check(calls: Callable[[str], AbstractContextManager[Any]], result: int) -> None:
    """Raise what a result means: DeviceError, MemoryError."""
    if result:
        function, status = failure(result)
        with calls(function) as runtime:
            runtime.check_status(status)


def failure(result: int) -> tuple[str, int]:
    """The function of the driver that a result other than 0 is of, and its CUresult."""
    return FUNCTIONS[result & (1 << _FUNCTION_BITS) - 1], result >> _FUNCTION_BITS

"""Runs a Numba kernel on the CPU when the emulated driver launches it: its Python function, thread after thread.

It can do what needs no other thread: grid and block indices, arrays, pointers and numbers. Shared memory and
``cuda.syncthreads()``, as a statement of the kernel itself, are possible: each thread runs up to the barrier before any
goes on. Anything else fails the launch.
"""

from __future__ import annotations

import ast
import ctypes
import gc
import inspect
import itertools
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from tests.emulated.twins import driver

# Addresses are numbers here: to make objects of them would begin a collection before the function can forbid it.
_RUN = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_uint] * 3)
_ADDRESSES, _NUMBERS = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_uint)


class _Twin(ctypes.Structure):
    _fields_ = [("run", _RUN), ("sizes", ctypes.POINTER(ctypes.c_size_t)), ("parameters", ctypes.c_int)]


class _Dim3(NamedTuple):
    x: int
    y: int
    z: int


class _Shared:
    """The shared memory of a thread block: the same array for all of its threads. A kernel has one at most."""

    made: Any = None

    def array(self, size: int, kind: Any) -> Any:
        if self.made is None:
            self.made = (np.ctypeslib.as_ctypes_type(np.dtype(str(kind))) * size)()
            ctypes.memset(self.made, 0xA5, ctypes.sizeof(self.made))  # nothing says what it holds
        return self.made


class _Cuda:
    """As much of ``numba.cuda`` as a thread sees."""

    threadIdx = blockIdx = blockDim = gridDim = _Dim3(0, 0, 0)

    def __init__(self) -> None:
        self.shared = _Shared()

    def grid(self, dimensions: int) -> Any:
        places = tuple(self.blockIdx[i] * self.blockDim[i] + self.threadIdx[i] for i in range(dimensions))
        return places[0] if dimensions == 1 else places

    def gridsize(self, dimensions: int) -> Any:
        sizes = tuple(self.gridDim[i] * self.blockDim[i] for i in range(dimensions))
        return sizes[0] if dimensions == 1 else sizes


def _place(index: int, extent: _Dim3) -> _Dim3:
    return _Dim3(index % extent.x, index // extent.x % extent.y, index // extent.x // extent.y)


def _sizes(kind: Any) -> list[int]:
    """Bytes of the parameters that Numba makes of an argument: an array is five and two for each dimension."""
    if _is_pointer(kind):
        return [8]
    return [8] * (5 + 2 * kind.ndim) if hasattr(kind, "ndim") else [np.dtype(str(kind)).itemsize]


def _is_pointer(kind: Any) -> bool:
    return type(kind).__name__ == "CPointer"


def _pointer(kind: Any, parameter: int) -> Any:
    """What can be indexed as far as memory goes, and is false where it points nowhere."""
    return ctypes.cast(
        ctypes.c_void_p.from_address(parameter), ctypes.POINTER(np.ctypeslib.as_ctypes_type(np.dtype(str(kind.dtype))))
    )


def _array(kind: Any, parameters: list[int]) -> np.ndarray:
    dtype = np.dtype(str(kind.dtype))
    numbers = [ctypes.c_int64.from_address(address).value for address in parameters]
    shape, strides = numbers[5 : 5 + kind.ndim], numbers[5 + kind.ndim :]
    span = (
        sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + dtype.itemsize
        if all(shape)
        else 0
    )
    memory = (ctypes.c_uint8 * span).from_address(numbers[4]) if span else b""
    return np.ndarray(shape, dtype, memory, strides=strides) if span else np.zeros(shape, dtype)


def _number(kind: Any, parameter: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * _sizes(kind)[0]).from_address(parameter), str(kind))[0].item()


class _Barriers(ast.NodeTransformer):
    """Makes a generator of a kernel, which yields at each barrier."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        barrier = ast.unparse(node) == "cuda.syncthreads()"
        return ast.copy_location(ast.Expr(ast.Yield()), node) if barrier else self.generic_visit(node)


def _thread_of(kernel: Any, cuda: _Cuda) -> Callable[..., Iterator[None]]:
    """What one thread does: a generator that yields at each barrier."""
    names, scope = {**kernel.py_func.__globals__, "cuda": cuda}, dict[str, Any]()
    if "syncthreads" not in kernel.py_func.__code__.co_names:
        function = types.FunctionType(kernel.py_func.__code__, names)

        def whole(*values: Any) -> Iterator[None]:
            function(*values)
            yield from ()

        return whole
    tree = _Barriers().visit(ast.parse(textwrap.dedent(inspect.getsource(kernel.py_func))))
    tree.body[0].decorator_list = []
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(kernel.py_func), "exec"), names, scope)
    made: Callable[..., Iterator[None]] = scope[kernel.py_func.__name__]
    return made


_ENDED = object()


def _run_block(cuda: _Cuda, thread_of: Callable[..., Iterator[None]], count: int, values: list[Any]) -> None:
    """All threads of a block, each up to the next barrier. Either all of them reach it, or none."""
    cuda.shared = _Shared()
    threads = [thread_of(*values) for _ in range(count)]
    running = list(range(count))
    while running:
        waiting = []
        for thread in running:
            cuda.threadIdx = _place(thread, cuda.blockDim)
            if next(threads[thread], _ENDED) is not _ENDED:
                waiting.append(thread)
        if waiting and len(waiting) < count:
            raise RuntimeError(f"{len(waiting)} of {count} threads wait at a barrier, and the others have ended")
        running = waiting


_kept: dict[str, Any] = {}


def register(kernel: Any) -> None:
    """Have the emulated driver run this compiled kernel, a ``_Kernel`` of numba-cuda, by its Python function.

    From now on nothing is collected by itself, and never while the function runs, whoever has enabled the collector:
    the driver's thread runs that function, and a finalizer that freed GPU memory there would wait for its own thread.
    """
    if kernel.entry_name in _kept:
        return
    gc.disable()
    kinds = kernel.argument_types
    sizes = [size for kind in kinds for size in _sizes(kind)]
    cuda = _Cuda()
    thread_of = _thread_of(kernel, cuda)

    def arguments(addresses: Any) -> list[Any]:
        rest, converted = iter([addresses[i] for i in range(len(sizes))]), []
        for kind in kinds:
            mine = list(itertools.islice(rest, len(_sizes(kind))))
            converted.append(
                _pointer(kind, mine[0])
                if _is_pointer(kind)
                else _array(kind, mine)
                if hasattr(kind, "ndim")
                else _number(kind, mine[0])
            )
        return converted

    def run(addresses_at: int, grid_at: int, block_at: int, shared: int, first: int, count: int) -> None:
        collects = gc.isenabled()
        gc.disable()
        try:
            grid, block = ctypes.cast(grid_at, _NUMBERS)[:3], ctypes.cast(block_at, _NUMBERS)[:3]
            cuda.gridDim, cuda.blockDim = _Dim3(*grid), _Dim3(*block)
            values = arguments(ctypes.cast(addresses_at, _ADDRESSES))
            for i in range(first, first + count):
                cuda.blockIdx = _place(i, cuda.gridDim)
                _run_block(cuda, thread_of, block[0] * block[1] * block[2], values)
        except BaseException:
            traceback.print_exc()
            driver().emu_launch_failed()
        finally:
            if collects:
                gc.enable()

    twin = _Twin(_RUN(run), (ctypes.c_size_t * (len(sizes) + 1))(*sizes), len(sizes))
    _kept[kernel.entry_name] = twin
    driver().emu_twin(kernel.entry_name.encode(), ctypes.byref(twin))

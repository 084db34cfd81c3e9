"""What Numba lacks, as intrinsics: atomic operations on array elements, views of raw addresses, copies between them,
loads ahead of time, bit lengths.

The atomics are sequentially consistent, except ``store``. All work in nogil functions that are cached on disk. Each has
a twin for the interpreter, under NUMBA_DISABLE_JIT, which does the same for one thread at a time, slowly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Context, Signature
from numba.np.arrayobj import populate_array

from kvpool.jit import intrinsic


class _Record:
    """One element of a structured array. Fields are read as int64, as machine code widens them, and written in
    place."""

    __slots__ = ("_fields", "_place")
    _fields: dict[str, Any]
    _place: int

    def __init__(self, fields: dict[str, Any], place: int) -> None:
        object.__setattr__(self, "_fields", fields)
        object.__setattr__(self, "_place", place)

    def __getattr__(self, name: str) -> np.int64:
        return np.int64(self._fields[name][self._place])

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name][self._place] = value


class _Records:
    """A structured array as jitted code sees it: ``[i]`` is a reference to an element, ``["name"]`` the array of one
    field."""

    __slots__ = ("_fields", "shape")

    def __init__(self, array: Any) -> None:
        self.shape, self._fields = array.shape, {name: array[name] for name in array.dtype.names}

    def __getitem__(self, place: Any) -> Any:
        return self._fields[place] if isinstance(place, str) else _Record(self._fields, place)

    def __setitem__(self, place: int, record: Any) -> None:
        for name, values in self._fields.items():
            values[place] = getattr(record, name)


def _plain_record_at(address: int, dtype: Any) -> Any:
    return _plain_array_at(int(address), (1,), dtype)[0]


@functools.lru_cache(maxsize=256)
def _plain_array_at(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    found = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * found.itemsize
    memory = (ctypes.c_char * nbytes).from_address(int(address)) if nbytes else b""
    array: Any = np.ndarray(shape, found, memory)
    return array if found.names is None else _Records(array)


def _plain_load(array: Any, index: int) -> np.int64:
    return np.int64(array[index])


def _plain_store(array: Any, index: int, value: int) -> None:
    array[index] = value


def _plain_compare_exchange(array: Any, index: int, expected: int, desired: int) -> bool:
    same = bool(array[index] == expected)
    if same:
        array[index] = desired
    return same


def _plain_address_of(array: Any) -> int:
    return int(array.ctypes.data)


_functions: dict[int, Callable[..., Any]] = {}
"""What ``call`` calls in the interpreter."""


def _plain_call(entry: int, *args: int) -> np.int64:
    return np.int64(_functions[int(entry)](*map(np.int64, args)))


def _plain_prefetch(array: Any, index: int) -> None:
    pass


def _plain_bit_length(value: Any) -> int:
    return int(value).bit_length()


def _pointer(context: BaseContext, builder: ir.IRBuilder, array_type: types.Type, array: Any, index: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, struct, [index])


def _valid(array: types.Type, index: types.Type) -> bool:
    whole = isinstance(array, types.Array) and array.ndim == 1 and isinstance(array.dtype, types.Integer)
    return whole and isinstance(index, types.Integer)


@intrinsic(_plain_load)
def load(typingctx: Context, array: types.Type, index: types.Type) -> Any:
    """Atomic read of ``array[index]``."""
    if not _valid(array, index):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        return builder.load_atomic(pointer, "seq_cst", array.dtype.bitwidth // 8)

    return array.dtype(array, index), codegen


@intrinsic(_plain_store)
def store(typingctx: Context, array: types.Type, index: types.Type, value: types.Type) -> Any:
    """Atomic write of ``array[index]``, ordered after all earlier writes of this thread."""
    if not _valid(array, index):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        new = context.cast(builder, args[2], signature.args[2], array.dtype)
        builder.store_atomic(new, pointer, "release", array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.none(array, index, value), codegen


@intrinsic(_plain_compare_exchange)
def compare_exchange(
    typingctx: Context, array: types.Type, index: types.Type, expected: types.Type, desired: types.Type
) -> Any:
    """Store ``desired`` if ``array[index] == expected``. Returns whether it did."""
    if not _valid(array, index):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        old = context.cast(builder, args[2], signature.args[2], array.dtype)
        new = context.cast(builder, args[3], signature.args[3], array.dtype)
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "seq_cst", "seq_cst"), 1)

    return types.boolean(array, index, expected, desired), codegen


@intrinsic(_plain_array_at)
def array_at(typingctx: Context, address: types.Type, shape: types.Type, dtype: types.Type) -> Any:
    """The memory at the integer ``address`` as a C-ordered array of ``shape`` (a tuple) and ``dtype``. The caller keeps
    it alive.

    It does what ``numba.carray`` does, without the reference count of its result.
    """
    if not isinstance(address, types.Integer) or not isinstance(shape, types.UniTuple):
        return None
    array_type = types.Array(dtype.dtype, shape.count, "C")

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        array = context.make_array(array_type)(context, builder)
        dims = [
            context.cast(builder, dim, shape.dtype, types.intp)
            for dim in cgutils.unpack_tuple(builder, args[1], shape.count)
        ]
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        strides = [itemsize]
        for dim in reversed(dims[1:]):
            strides.insert(0, builder.mul(strides[0], dim))
        data = builder.inttoptr(context.cast(builder, args[0], signature.args[0], types.intp), array.data.type)
        populate_array(array, data=data, shape=dims, strides=strides, itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return array_type(address, shape, dtype), codegen


@intrinsic(_plain_record_at)
def record_at(typingctx: Context, address: types.Type, dtype: types.Type) -> Any:
    """The memory at the integer ``address`` as a reference to one record of ``dtype``. The caller keeps it alive."""
    if not isinstance(address, types.Integer):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        place = context.cast(builder, args[0], signature.args[0], types.intp)
        return builder.inttoptr(place, context.get_value_type(signature.return_type))

    return dtype.dtype(address, dtype), codegen


@intrinsic(_plain_address_of)
def address_of(typingctx: Context, array: types.Type) -> Any:
    """The address of the first element as an int64. Whoever keeps the address keeps the array alive."""
    if not isinstance(array, types.Array):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        return builder.ptrtoint(context.make_array(signature.args[0])(context, builder, args[0]).data, ir.IntType(64))

    return types.int64(array), codegen


def entry_of(function: Any) -> int:
    """The number by which ``call`` calls a jitted function of three int64 that returns an int64. It is compiled now."""
    if not hasattr(function, "overloads"):
        _functions[id(function)] = function
        return id(function)
    kinds = (types.int64,) * 3
    function.compile(kinds)
    compiled = function.overloads[kinds]
    return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


@intrinsic(_plain_call)
def call(typingctx: Context, entry: types.Type, first: types.Type, second: types.Type, third: types.Type) -> Any:
    """Call a jitted function by the number that ``entry_of`` has given. It must not raise.

    What is called by its number is compiled only where somebody asks for the number.
    """
    kinds = (types.int64,) * 3

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        kind = context.call_conv.get_function_type(types.int64, kinds)
        places = [cgutils.alloca_once(builder, pointer.pointee) for pointer in kind.args[:2]]
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [*places, *args[1:]])
        return builder.load(places[0])

    return types.int64(types.int64, *kinds), codegen


@intrinsic(lambda target, source, nbytes: ctypes.memmove(int(target), int(source), int(nbytes)))
def memcpy(typingctx: Context, target: types.Type, source: types.Type, nbytes: types.Type) -> Any:
    """libc's memcpy between two addresses."""

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        pointers = [builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2]]
        cgutils.raw_memcpy(builder, *pointers, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic(_plain_bit_length)
def bit_length(typingctx: Context, value: types.Type) -> Any:
    """The number of bits of a non-negative int64, without leading zeros."""
    if not isinstance(value, types.Integer):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        word = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.sub(ir.IntType(64)(64), builder.ctlz(word, ir.IntType(1)(0)))

    return types.int64(value), codegen


@intrinsic(_plain_prefetch)
def prefetch(typingctx: Context, array: types.Type, index: types.Type) -> Any:
    """Begin to load the cache line of ``array[index]``. The index may be any integer: a prefetch cannot fault."""
    if not isinstance(array, types.Array) or array.ndim != 1 or not isinstance(index, types.Integer):
        return None

    def codegen(context: BaseContext, builder: ir.IRBuilder, signature: Signature, args: Sequence[ir.Value]) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        struct = context.make_array(signature.args[0])(context, builder, args[0])
        place = builder.bitcast(builder.gep(struct.data, [i]), cgutils.voidptr_t)
        word = ir.IntType(32)
        declared = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], declared)
        builder.call(function, [place, word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.none(array, index), codegen

"""Atomic operations on array elements, views of raw addresses and bit lengths, as Numba intrinsics.

The atomics are sequentially consistent. All work in nogil functions that are cached on disk.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


def _pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    struct = context.make_array(array_type)(context, builder, array)
    return cgutils.get_item_pointer(context, builder, array_type, struct, [index])


def _valid(array: Any, index: Any) -> bool:
    whole = isinstance(array, types.Array) and array.ndim == 1 and isinstance(array.dtype, types.Integer)
    return whole and isinstance(index, types.Integer)


@intrinsic
def load(typingctx: Any, array: Any, index: Any) -> Any:
    """Atomic read of ``array[index]``."""
    if not _valid(array, index):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        return builder.load_atomic(pointer, "seq_cst", array.dtype.bitwidth // 8)

    return array.dtype(array, index), codegen


@intrinsic
def compare_exchange(typingctx: Any, array: Any, index: Any, expected: Any, desired: Any) -> Any:
    """Store ``desired`` if ``array[index] == expected``; returns whether it did."""
    if not _valid(array, index):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        old = context.cast(builder, args[2], signature.args[2], array.dtype)
        new = context.cast(builder, args[3], signature.args[3], array.dtype)
        return builder.extract_value(builder.cmpxchg(pointer, old, new, "seq_cst", "seq_cst"), 1)

    return types.boolean(array, index, expected, desired), codegen


@intrinsic
def array_at(typingctx: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """The memory at the integer ``address`` as a C-ordered array of ``shape`` (a tuple) and ``dtype``; the caller keeps it alive.

    What ``numba.carray`` does, without the reference count that it gives its result.
    """
    if not isinstance(address, types.Integer) or not isinstance(shape, types.UniTuple):
        return None
    array_type = types.Array(dtype.dtype, shape.count, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(array_type)(context, builder)
        dims = [context.cast(builder, dim, shape.dtype, types.intp) for dim in cgutils.unpack_tuple(builder, args[1], shape.count)]
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
        strides = [itemsize]
        for dim in reversed(dims[1:]):
            strides.insert(0, builder.mul(strides[0], dim))
        data = builder.inttoptr(context.cast(builder, args[0], signature.args[0], types.intp), array.data.type)
        populate_array(array, data=data, shape=dims, strides=strides, itemsize=itemsize, meminfo=None)
        return array._getvalue()

    return array_type(address, shape, dtype), codegen


@intrinsic
def bit_length(typingctx: Any, value: Any) -> Any:
    """Bits of a non-negative int64 up to its highest one."""
    if not isinstance(value, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = context.cast(builder, args[0], signature.args[0], types.int64)
        return builder.sub(ir.IntType(64)(64), builder.ctlz(word, ir.IntType(1)(0)))

    return types.int64(value), codegen

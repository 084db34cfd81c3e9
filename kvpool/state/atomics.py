"""Atomic operations on array elements and views of raw addresses, as Numba intrinsics.

All of them are sequentially consistent and work in nogil functions that are cached on disk.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


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
def fetch_add(typingctx: Any, array: Any, index: Any, delta: Any) -> Any:
    """``array[index] += delta``; returns what was there before."""
    if not _valid(array, index) or not isinstance(delta, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = _pointer(context, builder, signature.args[0], args[0], i)
        value = context.cast(builder, args[2], signature.args[2], array.dtype)
        return builder.atomic_rmw("add", pointer, value, "seq_cst")

    return array.dtype(array, index, delta), codegen


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
def as_pointer(typingctx: Any, address: Any) -> Any:
    """The integer ``address`` as a void pointer, for ``numba.carray``. Whoever passes it keeps the memory alive."""
    if not isinstance(address, types.Integer):
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.cast(builder, args[0], signature.args[0], types.intp)
        return builder.inttoptr(value, cgutils.voidptr_t)

    return types.voidptr(address), codegen

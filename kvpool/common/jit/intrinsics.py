"""What Numba lacks, as intrinsics: atomic operations on array elements, views of raw addresses, copies between them,
loads ahead of time, bit lengths.

The atomics are sequentially consistent, except ``store``. All work in nogil functions that are cached on disk. Each has
a twin for the interpreter, under NUMBA_DISABLE_JIT, which does the same for one thread at a time, slowly.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import from_dtype, typeof, types
from numba.core import cgutils
from numba.np.arrayobj import populate_array

from kvpool.common.jit import intrinsic


class _Record(np.void):  # type: ignore[misc]  # final for type checkers only
    """One element of a structured array as jitted code sees it: its attributes are its fields, which are read as int64,
    as machine code widens them, and written in place."""

    def __getattribute__(self, name: str) -> Any:
        return np.int64(self[name])

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_NARROW = frozenset({np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32})


class _Array(np.ndarray[Any, Any]):
    """An array, or its view, as jitted code sees it: no index counts from its end, and an integer is read as int64, as
    machine code widens it."""

    def __getitem__(self, index: Any) -> Any:
        value = super().__getitem__(_counted(index))
        return np.int64(value) if type(value) in _NARROW else value

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_counted(index), value)


def _counted(index: Any) -> Any:
    places = index if isinstance(index, tuple) else (index,)
    for place in places:
        if isinstance(place, (int, np.integer)) and place < 0:
            raise IndexError(f"{place} is below 0")
    return index


class Code(NamedTuple):
    """Where the code of an intrinsic goes, and the types and values of its arguments."""

    context: Any
    builder: Any
    kinds: tuple[Any, ...]
    values: Sequence[Any]

    def word(self, i: int) -> Any:
        """An argument, which is an integer of any kind, as int64."""
        return self.context.cast(self.builder, self.values[i], self.kinds[i], types.int64)

    def array(self) -> Any:
        """The first argument, which is an array, as the structure that it is."""
        return self.context.make_array(self.kinds[0])(self.context, self.builder, self.values[0])

    def element(self) -> Any:
        """Where ``array[index]`` is, of the first two arguments."""
        return cgutils.get_item_pointer(self.context, self.builder, self.kinds[0], self.array(), [self.word(1)])


def primitive(plain: Callable[..., Any], result: Callable[..., Any]) -> Callable[[Callable[[Code], Any]], Any]:
    """Decorator: an intrinsic that does what ``plain`` does in the interpreter.

    ``result`` gives its type from the types of the arguments. The decorated function emits its code.
    """

    def decorate(emit: Callable[[Code], Any]) -> Any:
        def definition(typingctx: Any, *kinds: types.Type) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                made = emit(Code(context, builder, signature.args, args))
                return context.get_dummy_value() if made is None else made

            return result(*kinds)(*kinds), codegen

        first = inspect.Parameter("typingctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = [first, *inspect.signature(plain).parameters.values()]
        definition.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        definition.__name__, definition.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(plain)(definition)

    return decorate


@primitive(lambda array, index: np.int64(array[index]), lambda array, index: array.dtype)
def load(code: Code) -> Any:
    """Atomic read of ``array[index]``, an array of integers."""
    return code.builder.load_atomic(code.element(), "seq_cst", code.kinds[0].dtype.bitwidth // 8)


@primitive(lambda array, index, value: array.__setitem__(index, value), lambda array, index, value: types.none)
def store(code: Code) -> None:
    """Atomic write of ``array[index]``, ordered after all earlier writes of this thread."""
    pointer, value = code.element(), code.word(2)
    code.builder.store_atomic(value, pointer, "release", code.kinds[0].dtype.bitwidth // 8)


def _plain_compare_exchange(array: Any, index: int, expected: int, desired: int) -> bool:
    same = bool(array[index] == expected)
    if same:
        array[index] = desired
    return same


@primitive(_plain_compare_exchange, lambda array, index, expected, desired: types.boolean)
def compare_exchange(code: Code) -> Any:
    """Store ``desired`` if ``array[index] == expected``. Returns whether it did."""
    pointer = code.element()
    old, new = map(code.word, (2, 3))
    return code.builder.extract_value(code.builder.cmpxchg(pointer, old, new, "seq_cst", "seq_cst"), 1)


@functools.lru_cache(maxsize=256)
def _plain_array_at(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    element_type = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * element_type.itemsize
    memory = (ctypes.c_char * nbytes).from_address(int(address)) if nbytes else bytearray()
    return _Array(shape, element_type if element_type.names is None else np.dtype((_Record, element_type)), memory)


@primitive(_plain_array_at, lambda address, shape, dtype: types.Array(dtype.dtype, shape.count, "C"))
def array_at(code: Code) -> Any:
    """The memory at the integer ``address`` as a C-ordered array of ``shape`` (a tuple) and ``dtype``. The caller keeps
    it alive.

    It does what ``numba.carray`` does, without the reference count of its result.
    """
    _, shape, dtype = code.kinds
    array = code.context.make_array(types.Array(dtype.dtype, shape.count, "C"))(code.context, code.builder)
    dims = cgutils.unpack_tuple(code.builder, code.values[1], shape.count)
    dims = [code.context.cast(code.builder, dim, shape.dtype, types.intp) for dim in dims]
    itemsize = code.context.get_constant(
        types.intp, code.context.get_abi_sizeof(code.context.get_data_type(dtype.dtype))
    )
    strides = [itemsize]
    for dim in reversed(dims[1:]):
        strides.insert(0, code.builder.mul(strides[0], dim))
    data = code.builder.inttoptr(code.word(0), array.data.type)
    populate_array(array, data=data, shape=dims, strides=strides, itemsize=itemsize, meminfo=None)
    return array._getvalue()


@primitive(lambda address, dtype: _plain_array_at(int(address), (1,), dtype)[0], lambda address, dtype: dtype.dtype)
def record_at(code: Code) -> Any:
    """The memory at the integer ``address`` as a reference to one record of ``dtype``. The caller keeps it alive."""
    return code.builder.inttoptr(code.word(0), code.context.get_value_type(code.kinds[1].dtype))


@primitive(lambda array: int(array.ctypes.data), lambda array: types.int64)
def address_of(code: Code) -> Any:
    """The address of the first element as an int64. Whoever keeps the address keeps the array alive."""
    return code.builder.ptrtoint(code.array().data, ir.IntType(64))


_functions: dict[int, Callable[..., Any]] = {}
"""What ``call`` calls in the interpreter."""


def type_of(argument: Any) -> Any:
    """The type of an argument in jitted code. A record has no attributes but its fields; its dtype can stand for it."""
    if isinstance(argument, np.void):
        argument = np.void.dtype.__get__(argument)
    if isinstance(argument, np.dtype):
        return _type_of_record(argument)
    return typeof(argument)


_type_of_record = functools.cache(from_dtype)


def entry_of(function: Any, *arguments: Any) -> int:
    """The number by which ``call`` calls a jitted function that returns an int64, or nothing. It is compiled now, for
    arguments like these, by ``type_of``."""
    if hasattr(function, "overloads"):
        kinds = tuple(map(type_of, arguments))
        function.compile(kinds)
        compiled = function.overloads[kinds]
        result = compiled.signature.return_type
        assert result in (types.int64, types.none), f"{function.__name__}: expected int64 or nothing, got {result}"
        return int(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))
    _functions[id(function)] = function
    return id(function)


def _plain_call(entry: int, args: Sequence[Any]) -> Any:
    passed = [value if isinstance(value, (np.void, np.ndarray)) else np.int64(value) for value in args]
    return np.int64(_functions[int(entry)](*passed) or 0)


@primitive(_plain_call, lambda entry, args: types.int64)
def call(code: Code) -> Any:
    """Call a jitted function with a tuple of arguments, by the number that ``entry_of`` has given. Integers and flags
    are passed as int64. Arrays must be contiguous.

    What is called by its number is compiled only where somebody asks for the number.
    """
    convention, builder, given = code.context.call_conv, code.builder, tuple(code.kinds[1])
    assert all(kind.layout == "C" for kind in given if isinstance(kind, types.Array)), given
    kinds = tuple(types.int64 if isinstance(kind, (types.Integer, types.Boolean)) else kind for kind in given)
    words = zip(cgutils.unpack_tuple(builder, code.values[1]), given, kinds, strict=True)
    values = [code.context.cast(builder, *word) for word in words]
    pointer = convention.get_function_type(types.int64, kinds).as_pointer()
    called = builder.inttoptr(code.word(0), pointer)
    status, answer = convention.call_function(builder, called, types.int64, kinds, values)
    with cgutils.if_unlikely(builder, status.is_error):
        convention.return_status_propagate(builder, status)
    return answer


@primitive(
    lambda target, source, nbytes: ctypes.memmove(*map(int, (target, source, nbytes))),
    lambda target, source, nbytes: types.void,
)
def memcpy(code: Code) -> None:
    """libc's memcpy between two addresses."""
    target, source, nbytes = map(code.word, range(3))
    pointers = [code.builder.inttoptr(address, cgutils.voidptr_t) for address in (target, source)]
    cgutils.raw_memcpy(code.builder, *pointers, nbytes, 1)


@primitive(lambda value: int(value).bit_length(), lambda value: types.int64)
def bit_length(code: Code) -> Any:
    """The number of bits of a non-negative int64, without leading zeros."""
    return code.builder.sub(ir.IntType(64)(64), code.builder.ctlz(code.word(0), ir.IntType(1)(0)))


def prefetch_at(code: Code, place: Any, level: int) -> None:
    """Emit a load of the cache line at a pointer, for reading, into the caches from ``level`` on: 3 is the nearest."""
    word = ir.IntType(32)
    declared = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    function = code.builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], declared)
    code.builder.call(function, [place, word(0), word(level), word(1)])


@primitive(lambda array, index: None, lambda array, index: types.none)
def prefetch(code: Code) -> None:
    """Begin to load the cache line of ``array[index]``. The index may be any integer: a prefetch cannot fault."""
    prefetch_at(code, code.builder.bitcast(code.element(), cgutils.voidptr_t), 3)

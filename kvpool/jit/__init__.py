"""The `jit` decorator: nogil Numba functions with an on-disk cache that notices edits in every file they depend on.

Numba's own ``cache=True`` stamps a cached function with the file that defines it. The stamp does not cover code that
the function inlines or calls from other files. So after an edit there, the old machine code would still run. Also, two
processes that compile at once can leave the index of the cache pointing at each other's code.

Here the functions of a module share one directory. Its name has a digest of that module and of every module of the
package that it names, directly or through others. Each signature has a file of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numba
import numpy as np
from numba import extending
from numba.core import config

from kvpool.jit.folders import cache_root

try:
    from kvpool.jit.compiler import Dispatcher
except (ImportError, AttributeError, TypeError):  # a release of Numba that has not what the compiler builds on
    Dispatcher = None  # type: ignore[assignment,misc]

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS = {"nopython": True, "nogil": True, "_nrt": False, "no_cfunc_wrapper": True, "forceinline": False}
"""Numba hands ``forceinline`` down: without a value of its own, whatever is first compiled for a function that asks for
it would be inlined everywhere."""


@overload
def jit(function: F, /) -> F: ...
@overload
def jit(**options: Any) -> Callable[[F], F]: ...


def jit(function: Any = None, /, **options: Any) -> Any:
    """Compile a function of this package as ``numba.njit(nogil=True, **options)`` does, and cache it on disk.

    When jitted code calls the function, constants are passed as variables and signed integers as int64. Only functions
    that Python calls become machine code; other functions become parts of their callers. The garbage collector is off
    during a compilation.

    Reference counting is off (``_nrt=False``), since counts are atomic and cost more than most of these functions. So a
    jitted function can neither create nor return an array, and the owner of the memory keeps it alive during the call.

    The cache depends on the sources, closure cells, options and argument types. It does not depend on globals that are
    set at run time, nor on modules that are imported by a computed name. So constants belong in the source or in a
    closure. Functions defined outside this package are compiled in each process. Thread-safe where Numba is.

    Under NUMBA_DISABLE_JIT the function runs in the interpreter; integers wrap as silently as they do in machine code.
    """
    if function is None:
        return functools.partial(jit, **options)
    if config.DISABLE_JIT:
        return np.errstate(over="ignore")(function)
    if Dispatcher is None:
        return numba.njit(**{"nogil": True, "forceinline": False, **options})(function)
    return Dispatcher(function, {**_OPTIONS, **options})


def keeps(function: Any) -> bool:
    """Whether the machine code of a jitted function is kept on disk."""
    return Dispatcher is not None and isinstance(function, Dispatcher) and cache_root() is not None


def intrinsic(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a Numba intrinsic, or under NUMBA_DISABLE_JIT the function ``plain``, which does the same in the
    interpreter."""
    return lambda definition: plain if config.DISABLE_JIT else extending.intrinsic(definition)

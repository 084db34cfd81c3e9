"""The `jit` decorator: nogil Numba functions that are compiled once, and kept on disk until what they see changes.

Numba's own ``cache=True`` stamps a function with the file that defines it, not with the code that it calls from other
files, and it compiles a function once more for each of its callers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, overload

import numba
import numpy as np
from numba import extending
from numba.core import config

from kvpool.common.jit.cache import cache_root

try:
    from kvpool.common.jit.compiler import LOCK, Dispatcher
except (ImportError, AttributeError, TypeError):  # a release of Numba that has not what the compiler builds on
    Dispatcher = LOCK = None  # type: ignore[assignment,misc]

if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("Python: expected the GIL, got a free-threaded build without it; PYTHON_GIL=1 enables it")

F = TypeVar("F", bound=Callable[..., Any])

interpreted: Callable[[Any], Any] = np.errstate(over="ignore")
"""What a function becomes under NUMBA_DISABLE_JIT: integers wrap as silently as they do in machine code."""


@overload
def jit(function: F, /) -> F: ...
@overload
def jit(*, forceinline: bool = False, nogil: bool = True) -> Callable[[F], F]: ...


def jit(function: Any = None, /, *, forceinline: bool = False, nogil: bool = True) -> Any:
    """Compile a function as ``numba.njit(nogil=nogil, forceinline=forceinline)`` does, and keep it on disk.

    When jitted code calls the function, constants are passed as variables, and integers but uint64 as int64. The
    garbage collector is off during a compilation. With ``nogil=False`` a call from Python keeps the interpreter's lock:
    for calls of some microseconds, in which another thread would take the lock, and keep it for milliseconds.

    Reference counting is off, since counts are atomic and cost more than most of these functions. So a jitted function
    can neither create nor return an array, and the owner of the memory keeps it alive during the call.

    What is kept is used for the same bytecode of the function and of what it calls, the same constants, globals and
    closure cells, as they are when it is compiled. Thread-safe where Numba is.

    Under NUMBA_DISABLE_JIT the function is ``interpreted``.
    """
    if function is None:
        return functools.partial(jit, forceinline=forceinline, nogil=nogil)
    if config.DISABLE_JIT:
        return interpreted(function)
    if Dispatcher is None:
        return numba.njit(nogil=nogil, forceinline=forceinline)(function)
    return Dispatcher(function, forceinline, nogil)


def inline(function: F, /) -> F:
    """``jit`` a function, and inline it into each jitted caller."""
    return jit(forceinline=True)(function)


def keeps() -> bool:
    """Whether the machine code of jitted functions is kept on disk."""
    return Dispatcher is not None and not config.DISABLE_JIT and cache_root() is not None


def intrinsic(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a Numba intrinsic, or under NUMBA_DISABLE_JIT the function ``plain``, which does the same in the
    interpreter."""
    return lambda definition: plain if config.DISABLE_JIT else extending.intrinsic(definition)

"""Dispatchers: a jitted function as Python calls it, and as jitted code calls it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core import compiler, registry
from numba.core.compiler_lock import global_compiler_lock

from kvpool.errors import ForkedProcess
from kvpool.jit.announcer import announcer
from kvpool.jit.cache import FunctionCache
from kvpool.jit.folders import cache_directory
from kvpool.jit.libraries import EntryLibrary, Unplaced


class _InnerCompiler(compiler.Compiler):
    def compile_extra(self, function: Any) -> Any:
        self.state.library = Unplaced(self.state.targetctx.codegen()).create_library(function.__qualname__)
        with announcer.compiling():
            return super().compile_extra(function)


class _EntryCompiler(compiler.Compiler):
    def compile_extra(self, function: Any) -> Any:
        self.state.library = EntryLibrary(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        with announcer.compiling():
            return super().compile_extra(function)


class _CachedDispatcher(registry.CPUDispatcher):
    """A Numba dispatcher that uses the cache of this module."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], pipeline: Any) -> None:
        super().__init__(py_func=function, locals={}, targetoptions=options, pipeline_class=pipeline)
        directory = cache_directory(function.__module__ or "")
        if directory is not None:
            self._cache = FunctionCache(function, options, directory, placed=pipeline is _EntryCompiler)

    def compile(self, sig: Any) -> Any:
        """Compile one signature with the garbage collector off: it would find nothing, and take a tenth of the time."""
        if _lost_compiler:
            whose = f"another thread was compiling when process {os.getppid()} forked this one"
            raise ForkedProcess(f"{whose}: compile first (kvpool.warm_up()), or fork before")
        if not gc.isenabled():
            return super().compile(sig)
        gc.disable()
        try:
            return super().compile(sig)
        finally:
            gc.enable()


class Dispatcher(_CachedDispatcher):
    """A function as Python calls it. ``_inner`` is the same function as jitted code calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        announcer.known += 1
        super().__init__(function, options, _EntryCompiler)
        self._inner = _CachedDispatcher(function, {**options, "no_cpython_wrapper": True}, _InnerCompiler)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The template that type inference needs for a call by jitted code."""
        return self._inner.get_call_template(
            [_passed(kind) for kind in args], {name: _passed(kind) for name, kind in kws.items()}
        )

    def get_overload(self, sig: Any) -> Any:
        """The compiled signature that lowering needs for such a call."""
        return self._inner.get_overload(sig)


_lost_compiler = False
"""Whether another thread was compiling when this process was forked. A compilation would wait for it for ever."""


def _after_fork() -> None:
    global _lost_compiler
    # A private name. If a release moves it, a child waits, as it does for all other users of Numba.
    lock = getattr(global_compiler_lock, "_lock", None)
    _lost_compiler = lock is not None and not lock.acquire(False)
    if lock is not None and not _lost_compiler:
        lock.release()


os.register_at_fork(after_in_child=_after_fork)


def _passed(kind: Any) -> Any:
    """The type of an argument in a call between jitted functions. A signed integer is passed as int64 and a constant as
    a variable, so a function is compiled once and not for each kind of integer."""
    if isinstance(kind, (types.IntegerLiteral, types.BooleanLiteral)):
        kind = types.unliteral(kind)
    return types.int64 if kind in (types.int8, types.int16, types.int32) else kind

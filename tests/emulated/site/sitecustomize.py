"""Imported by every process of an emulated run: what CuPy and numba-cuda compile for a GPU gets a twin."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys


def watch_cupy(compiler):
    compile_ = compiler._compile_module_with_cache

    def compile_and_announce(source, options=(), **others):
        from tests.emulated import twins

        twins.announce(source, tuple(options))
        return compile_(source, options, **others)

    compiler._compile_module_with_cache = compile_and_announce


def watch_numba(dispatcher):
    bind = dispatcher._Kernel.bind

    def register_and_bind(kernel):
        from tests.emulated import numba_twins

        numba_twins.register(kernel)
        bind(kernel)

    dispatcher._Kernel.bind = register_and_bind


WATCHED = {"cupy.cuda.compiler": watch_cupy, "numba.cuda.dispatcher": watch_numba}


class Watcher(importlib.abc.MetaPathFinder):
    """Lets a module be loaded as ever, and then looks at it."""

    def find_spec(self, name, path=None, target=None):
        if name not in WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module):
                execute(module)
                WATCHED[name](module)

            spec.loader.exec_module = execute_and_watch
        return spec


sys.meta_path.insert(0, Watcher())

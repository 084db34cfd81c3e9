"""How functions are linked: one that jitted code calls becomes a part of its callers, one that Python calls becomes
machine code.

Numba optimises a function together with its callees, and makes machine code of them. It does so again for each of
the function's callers. Here a function that jitted code calls stays as Numba's front end made it, and is linked into
its callers. A function that Python calls is compiled to machine code once, together with its callees.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from numba.core import codegen, config
from numba.core.environment import lookup_environment


class Unplaced:
    """Numba's code generator, except that its libraries are only linked into others, and are not loaded into memory."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def create_library(self, name: str) -> Any:
        return _InnerLibrary(self, name)

    def unserialize_library(self, stored: Any) -> Any:
        return _InnerLibrary._unserialize(self, stored)

    def set_env(self, name: str, environment: Any) -> None:
        """Nothing to do: there is no address to write to. ``EntryLibrary`` does this for all linked functions."""

    def _add_module(self, module: Any) -> None:
        """Nothing to do: no module is loaded."""


class _InnerLibrary(codegen.CPUCodeLibrary):
    """A function that jitted code calls. It is linked into its callers, and optimised together with them."""

    def get_pointer_to_function(self, name: str) -> int:
        return 0

    def serialize_using_object_code(self) -> Any:
        """Serialize bitcode, since there is no object code."""
        return self.serialize_using_bitcode()

    def _optimize_final_module(self) -> None:
        _drop_unused(self._final_module, self._codegen)

    def _finalize_specific(self) -> None:
        pass


class EntryLibrary(codegen.JITCodeLibrary):
    """A function that Python calls: machine code of the function and of its callees."""

    def _optimize_final_module(self) -> None:
        super()._optimize_final_module()
        _drop_unused(self._final_module, self._codegen)

    def _finalize_specific(self) -> None:
        super()._finalize_specific()
        for variable in self._final_module.global_variables:
            found = lookup_environment(variable.name)
            if found is not None:
                self._codegen.set_env(variable.name, found)


def _drop_unused(module: Any, generator: Any) -> None:
    """Under NUMBA_OPT=0, drop the addresses of called functions. Nothing reads them, and they are valid in this process
    only, so code that has them cannot be kept on disk."""
    if config.OPT == 0:
        passes = llvmlite.binding.create_new_module_pass_manager()
        passes.add_sroa_pass()
        passes.add_dead_code_elimination_pass()
        passes.add_global_dead_code_eliminate_pass()
        passes.run(module, generator._pass_builder())

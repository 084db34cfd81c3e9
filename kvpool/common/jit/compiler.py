"""Compiles functions with Numba's front end and LLVM. All private names of Numba that this package uses are here.

Numba optimises a function together with its callees and makes machine code of them, once more for each caller. Here a
function is compiled once for the same types, to one of two things:

- A *part* is small. It stays as Numba's front end made it, and is linked into whatever machine code calls it.
- A *routine* is large. It has machine code of its own, which all of its callers share.

A function that Python calls has an *entry* too: machine code that takes Python's objects and calls the function.

What only serves things that this package does not use (reference counts, closures, generators, parallel loops) is left
out. Functions cannot be recursive.

A negative index does not count from the end of an array: it is an error that nothing notices, like one behind the end.
With ``NUMBA_BOUNDSCHECK=1`` the compiled functions raise IndexError for both.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from pickle import loads
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from numba import types
from numba.core import bytecode, compiler, config, interpreter, ir, itanium_mangler, lowering, registry, typing
from numba.core.analysis import dead_branch_prune, rewrite_semantic_constants
from numba.core.callconv import create_error_model
from numba.core.cgutils import normalize_ir_text
from numba.core.compiler_lock import global_compiler_lock
from numba.core.funcdesc import PythonFunctionDescriptor
from numba.core.rewrites import rewrite_registry
from numba.core.serialize import dumps
from numba.core.targetconfig import ConfigStack
from numba.core.typed_passes import PreLowerStripPhis, type_inference_stage
from numba.core.untyped_passes import ReconstructSSA

from kvpool.common.jit import cache
from kvpool.common.jit.cache import announcer

_ROUTINE_LINES = 250
"""From this many lines of LLVM's text on, a function is a routine. LLVM would not inline it anyway."""
_target, _typing = registry.cpu_target.target_context, registry.cpu_target.typing_context
_CODE = sys._getframe().f_code
_context = _target.subtarget(
    error_model=create_error_model("python", _target),
    get_abi_sizeof=functools.cache(_target.get_abi_sizeof),
    enable_boundscheck=bool(config.BOUNDSCHECK),
)
_codegen = _target.codegen()
# What is no part of Numba's interface is looked for now. Without it, this package uses Numba's own compiler.
attrgetter("_create_empty_module", "_data_layout", "_engine._ee", "_module_pass_manager", "_pass_builder")(_codegen)
attrgetter("_tm.emit_object", "magic_tuple", "set_env")(_codegen)
attrgetter("call_conv", "create_cpython_wrapper", "get_executable", "insert_user_function", "subtarget")(_target)
attrgetter("_lock.acquire")(global_compiler_lock)
LOCK = global_compiler_lock, "_lock"
"""What has the lock of all compilations, and its name there."""
attrgetter("from_specialized_function", "llvm_cpython_wrapper_name")(PythonFunctionDescriptor)


class _Flags(compiler.Flags):
    """Numba's flags. It compares them whenever it types a call; here there is one instance, for all functions."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


_flags = _Flags()
_flags.nrt, _flags.forceinline = False, False


class Library:
    """The code of one function, as Numba's lowering sees it: a module for the linker, or machine code."""

    def __init__(self, name: str) -> None:
        self.name, self.codegen = name, _codegen
        self.called: dict[Any, None] = {}
        self.environments: list[Any] = []
        self.description: Any = None
        self.signature: Any = None
        self.module = llvm.parse_assembly("")
        self.lines = 0
        self.machine_code = b""
        self._placed = False

    def create_ir_module(self, name: str) -> Any:
        return _codegen._create_empty_module(name)

    def add_linking_library(self, library: Any) -> None:
        self.called[library] = None

    def add_ir_module(self, module: Any) -> None:
        text = normalize_ir_text(str(module))
        self.module.link_in(llvm.parse_assembly(text))
        self.lines += text.count("\n")

    def finish(self, machine_code: bool) -> None:
        """Become machine code or a part, when all modules are here."""
        self.module.data_layout = _codegen._data_layout
        for library in [other for other in self.called if not isinstance(other, Library)]:
            del self.called[library]
            self.module.link_in(library._get_module_for_linking(), preserve=True)  # of Numba's own functions
        if machine_code:
            reached = [*self.called]
            for library in reached:
                reached += [] if library.machine_code else [other for other in library.called if other not in reached]
            for part in [library for library in reached if not library.machine_code]:
                self.module.link_in(part.module, preserve=True)
                self.environments += part.environments
            self.called = dict.fromkeys(library for library in reached if library.machine_code)
            passes, builder = _codegen._module_pass_manager()
            passes.run(self.module, builder)
        _simplify(self.module)
        if machine_code:
            self.module.verify()
            self.machine_code = _codegen._tm.emit_object(self.module)
        for function in [] if machine_code else self.module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"

    def __reduce__(self) -> Any:
        return Library.stored, (self.name,)

    def keep(self) -> None:
        """Write the library for other processes, unless it, or one that it calls, has addresses of this one."""
        dynamic = any("numba.dynamic.globals" in variable.name for variable in self.module.global_variables)
        if not dynamic and all(library.name for library in (self, *self.called)):
            _libraries[self.name] = self
            code = self.machine_code, b"" if self.machine_code else self.module.as_bitcode()
            content = [*self.called], self.description, self.signature, self.environments, *code
            cache.write(self.name, dumps(content))

    @staticmethod
    def stored(name: str) -> Library | None:
        """The library with this name, of this process or from disk. None if it, or one that it calls, is missing."""
        content = None if name in _libraries else cache.read(name)
        if content is not None:
            self = Library(name)
            called, self.description, self.signature, self.environments, self.machine_code, module = loads(content)
            if None not in called:
                self.called = dict.fromkeys(called)
                self.module = llvm.parse_bitcode(module) if module else self.module
                _libraries[name] = self
        return _libraries.get(name)

    def place(self) -> None:
        """Load the machine code, after that of the routines that it calls."""
        if self._placed:
            return
        for needed in self.called:
            needed.place()
        _codegen._engine._ee.add_object_file(llvm.ObjectFileRef.from_data(self.machine_code))
        _codegen._engine.finalize_object()
        for environment in self.environments:
            _codegen.set_env(environment.env_name, environment)
        self._placed = True

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function, after the machine code was loaded."""
        self.place()
        return int(_codegen._engine.get_function_address(name))


_libraries: dict[str, Library] = {}
"""All code of this process that has a name on disk."""


def _simplify(module: Any) -> None:
    """Drop what nothing uses, among it the addresses of called functions, which are valid in this process only."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_dead_code_elimination_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, _codegen._pass_builder())


def _made(name: str, build: Callable[[Library], None]) -> Library:
    """The library with this name: of this process, from disk, or built now."""
    with nullcontext() if Library.stored(name) else cache.claimed(name):
        library = Library.stored(name)
        if library is None:
            library = Library(name)
            with announcer.compiling(_stems), ConfigStack().enter(_flags):
                build(library)
            library.keep()
    return library


@functools.cache
def _compiler() -> str:
    """What makes the code: versions, settings, the processor, this module."""
    names = "OPT LOOP_VECTORIZE SLP_VECTORIZE BOUNDSCHECK DEBUGINFO_DEFAULT".split()
    settings = [getattr(config, name, None) for name in names]
    versions = sys.version_info[:2], numba.__version__, np.__version__
    return f"{versions} {settings} {_codegen.magic_tuple()} {cache.digest(cache.bytecode_of(_CODE).encode())}"


class _TypedCalls:
    """Numba's typing context. A call is typed once for the same types."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(_typing, name)

    def resolve_function_type(self, function: Any, args: Any, kws: Any) -> Any:
        key = function, tuple(args), tuple(kws.items())
        if key not in self._known:
            self._known[key] = _typing.resolve_function_type(function, args, kws)
        return self._known[key]


_calls = _TypedCalls()


def _translate(library: Library, dispatcher: Dispatcher, kinds: tuple[Any, ...]) -> None:
    """Compile a function for some types, to a part or to a routine."""
    identity = bytecode.FunctionIdentity.from_function(dispatcher.py_func)
    if library.name:  # for the linker too: it is the same in each process
        identity.unique_id = cache.digest(library.name.encode())
    state = compiler.StateDict(func_id=identity, args=kinds, typemap=None, calltypes=None, flags=_flags)
    read = state.func_ir = interpreter.Interpreter(identity).interpret(bytecode.ByteCode(identity))
    rewrite_semantic_constants(read, kinds)
    dead_branch_prune(read, kinds)
    rewrite_registry.apply("before-inference", state)
    ReconstructSSA().run_pass(state)
    state.typemap, result, calls, _ = type_inference_stage(_calls, _context, read, kinds, None)
    for item in list(calls):
        if isinstance(item, ir.SetItem) or getattr(item, "op", "") == "getitem":
            calls[item] = _unsigned(calls.pop(item))
    PreLowerStripPhis().run_pass(state)
    description = PythonFunctionDescriptor.from_specialized_function(
        state.func_ir, state.typemap, result, calls, _short_name, dispatcher.inline, noalias=False, abi_tags=()
    )
    with _context.push_code_library(library):
        lower = lowering.Lower(_context, library, description, state.func_ir)
        lower.lower()
    description.typemap = description.calltypes = None
    library.description, library.signature = description, typing.signature(result, *kinds)
    library.environments = [lower.env] if lower.env.consts else []
    library.finish(machine_code=library.lines > _ROUTINE_LINES and not dispatcher.inline)


def _unsigned(call: Any) -> Any:
    """What reads or writes elements of an array, with an unsigned index: it does not count from the end."""
    array, index, *value = call.args
    several = isinstance(index, types.BaseTuple)
    if several and all(isinstance(kind, types.Integer) for kind in index):
        index = types.UniTuple(types.uint64, len(index))
    elif isinstance(index, types.Integer):
        index = types.uint64
    return call.replace(args=(array, index, *value))


def _wrap(library: Library, function: Library, nogil: bool) -> None:
    """Compile the entry of a function."""
    library.description, library.signature = function.description, function.signature
    library.environments = [lowering.Environment.from_fndesc(function.description), *function.environments]
    library.add_linking_library(function)
    _context.create_cpython_wrapper(library, function.description, library.environments[0], None, release_gil=nogil)
    library.finish(machine_code=True)


def _short_name(name: str, kinds: Any, abi_tags: Any = (), uid: Any = None) -> str:
    """The name of a function for the linker, without types: each compiled function has an identity."""
    return str(itanium_mangler.mangle(name, (), uid=uid))


class Dispatcher(registry.CPUDispatcher):
    """A jitted function, as Python and as jitted code call it."""

    def __init__(
        self, function: Callable[..., Any], inline: bool = False, nogil: bool = True, long: Dispatcher | None = None
    ) -> None:
        super().__init__(function, targetoptions={"nopython": True})
        self.inline, self.nogil, self.long = inline, nogil, long
        self.libraries: dict[tuple[Any, ...], Library] = long.libraries if long else {}

    @functools.cached_property
    def keep_gil(self) -> Dispatcher:
        """The same function, whose calls from Python keep the interpreter's lock: for those of less than a millisecond.
        Who gives the lock away may get it back milliseconds later. Both entries are made at once."""
        return Dispatcher(self.py_func, self.inline, False, self)

    def compile(self, kinds: Any) -> Any:
        """The entry for arguments of some types."""
        with _compiling():
            if self.long is not None:
                self.long.compile(kinds)
            if kinds not in self.overloads:
                function = self.library(kinds)
                name = function.name and f"{function.name}-{'entry' if self.nogil else 'locked'}"
                library = _made(name, lambda library: _wrap(library, function, self.nogil))
                point = _target.get_executable(library, library.description, library.environments[0])
                about = {"signature": library.signature, "fndesc": library.description, "library": library}
                self.add_overload(compiler.compile_result(entry_point=point, objectmode=False, **about))
        return self.overloads[kinds].entry_point

    def prepare(self, kinds: tuple[Any, ...]) -> None:
        """Compile the function for calls by jitted code with arguments of these types."""
        with _compiling():
            self.get_call_template(kinds, {})

    def library(self, kinds: tuple[Any, ...]) -> Library:
        """The function for arguments of some types."""
        if kinds not in self.libraries:
            name = self._name_of(kinds)
            library = _made(name, lambda library: _translate(library, self, kinds))
            _target.insert_user_function(library, library.description, [library])
            self.libraries[kinds] = library
        return self.libraries[kinds]

    def _name_of(self, kinds: tuple[Any, ...]) -> str:
        """A name for all that the code depends on. Empty if the code means nothing to other processes."""
        stem, shown = self.stem(), str([kind.name for kind in kinds])
        return "" if " at 0x" in stem + shown else f"{stem}-{cache.digest(shown.encode())}"

    def stem(self) -> str:
        """The beginning of these names, which is the same for all types."""
        text = f"{cache.content_of(self)} {_compiler()}"
        return text if " at 0x" in text else f"{self.__name__.strip('<>')[:80]}-{cache.digest(text.encode())}"

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """What type inference needs for a call by jitted code."""
        passed = {name: _passed(kind) for name, kind in kws.items()}
        signature, kinds = self._compiler.fold_argument_types([_passed(kind) for kind in args], passed)
        template = typing.make_concrete_template(self.__name__, self.__name__, [self.library(kinds).signature])
        return template, signature, kinds, {}

    def get_overload(self, sig: Any) -> Any:
        """The code that lowering needs for such a call."""
        return self.libraries[tuple(sig)]


def _stems() -> set[str]:
    """How the names of the code of all functions begin. A module may still be incomplete, so this is forgotten."""
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(cache.PACKAGE) and module]
    stems = {item.stem() for module in modules for item in [*vars(module).values()] if isinstance(item, Dispatcher)}
    cache.known.clear()
    return stems


@contextmanager
def _compiling() -> Iterator[None]:
    """Keep other threads from compiling, and the garbage collector off: it would find nothing, and take a tenth of the
    time."""
    with global_compiler_lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            _target.refresh()
            yield
        finally:
            if collects:
                gc.enable()


def _passed(kind: Any) -> Any:
    """The type of an argument in a call between jitted functions. An integer that fits is passed as int64 and a
    constant as a variable, so a function is compiled once and not for each kind of integer."""
    if isinstance(kind, (types.IntegerLiteral, types.BooleanLiteral)):
        kind = types.unliteral(kind)
    return types.int64 if isinstance(kind, types.Integer) and kind.bitwidth < 64 else kind

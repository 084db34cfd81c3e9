"""All private names of Numba that this package uses: how a function is compiled, linked and called.

Numba optimises a function together with its callees and makes machine code of them, once more for each caller. Here a
function is one of three things:

- An *entry* is called by Python. It has machine code.
- A *part* is small and is called by jitted code. It stays as Numba's front end made it, and becomes a part of whatever
  machine code calls it.
- A *routine* is large and is called by jitted code. It has machine code of its own, which all of its callers share.

Passes that only serve what this package does not use (reference counts, closures, generators, parallel loops) are left
out. Functions cannot be recursive.
"""

from __future__ import annotations

import functools
import gc
import os
import pickle
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from numba import _dynfunc, types
from numba.core import (
    analysis,
    bytecode,
    cgutils,
    codegen,
    compiler,
    funcdesc,
    interpreter,
    itanium_mangler,
    lowering,
    postproc,
    registry,
    rewrites,
    serialize,
    typed_passes,
    typing,
    untyped_passes,
)
from numba.core.compiler_lock import global_compiler_lock
from numba.core.targetconfig import ConfigStack

from kvpool.errors import ForkedProcess
from kvpool.jit.announcer import announcer
from kvpool.jit.cache import CodeFiles, read

_ROUTINE_LINES = 250
"""From this many lines of LLVM's text on, a function gets machine code of its own. LLVM would not inline it anyway."""
_target = registry.cpu_target.target_context


class Library(codegen.CodeLibrary):
    """The code of one function: a module for the linker, or machine code."""

    def __init__(self, name: str) -> None:
        super().__init__(_target.codegen(), name)
        self.called: dict[Any, None] = {}
        self.environments: list[Any] = []
        self.description: Any = None
        self.signature: Any = None
        self.module: Any = None
        self.lines = 0
        self.machine_code = b""
        self._placed = False

    def add_linking_library(self, library: Any) -> None:
        self.called[library] = None

    def add_ir_module(self, module: Any) -> None:
        text = cgutils.normalize_ir_text(str(module))
        parsed = llvm.parse_assembly(text)
        self.lines += text.count("\n")
        if self.module is None:
            self.module = parsed
        else:
            self.module.link_in(parsed)

    def finalize(self) -> None:
        """Take in what Numba itself compiled for this function."""
        self.module.data_layout = self._codegen._data_layout
        for library in [found for found in self.called if not isinstance(found, Library)]:
            del self.called[library]
            self.module.link_in(library._get_module_for_linking(), preserve=True)
        self._finalized = True

    def become_part(self) -> None:
        """Simplify the function once, for all that will be linked with it."""
        _simplify(self.module)
        for function in self.module.functions:
            if not function.is_declaration:
                function.linkage = "linkonce_odr"

    def become_machine_code(self) -> None:
        parts, needed = self._reach()
        for part in parts:
            self.module.link_in(part.module, preserve=True)
            self.environments += part.environments
        for manager, builder in _optimizers():
            manager.run(self.module, builder)
        _simplify(self.module)
        self.module.verify()
        self.machine_code = self._codegen._tm.emit_object(self.module)
        self.called = dict.fromkeys(needed)

    def _reach(self) -> tuple[list[Library], list[Library]]:
        """The parts that this function calls, directly or through others, and the routines that all of them call."""
        parts: list[Library] = []
        needed: list[Library] = []
        seen, pending = {self}, [*self.called]
        while pending:
            library = pending.pop()
            if library in seen:
                continue
            seen.add(library)
            (needed if library.machine_code else parts).append(library)
            pending += [] if library.machine_code else library.called
        return parts, needed

    def packed(self) -> bytes | None:
        """The library for other processes. None if it, or one that it calls, has addresses of this one."""
        names = [library.name for library in self.called]
        variables = self.module.global_variables
        if not all(names) or any(variable.name.startswith("numba.dynamic.globals") for variable in variables):
            return None
        module = b"" if self.machine_code else self.module.as_bitcode()
        found = (self.name, self.description, self.signature, names, self.environments, self.machine_code, module)
        return serialize.dumps(found)

    @classmethod
    def unpacked(cls, name: str, content: bytes) -> Library | None:
        """What ``packed`` made. None if it is another library, or one that it calls is missing."""
        stored, description, signature, names, environments, machine_code, module = pickle.loads(content)
        self = cls(name)
        called = [_stored(found) for found in names]
        if stored != name or None in called:
            return None
        self.description, self.signature, self.environments = description, signature, environments
        self.called, self.machine_code = dict.fromkeys(called), machine_code
        self.module = llvm.parse_bitcode(module) if module else None
        self._finalized = True
        return self

    def place(self) -> None:
        """Load the machine code, after that of the routines that it calls."""
        if self._placed:
            return
        for needed in self.called:
            needed.place()
        engine = self._codegen._engine
        engine._ee.add_object_file(llvm.ObjectFileRef.from_data(self.machine_code))
        engine.finalize_object()
        for environment in self.environments:
            self._codegen.set_env(environment.env_name, environment)
        self._placed = True

    def get_pointer_to_function(self, name: str) -> int:
        """The address of a function, after the machine code was loaded."""
        self.place()
        return int(self._codegen._engine.get_function_address(name))

    def get_function(self, name: str) -> Any:
        return self.module.get_function(name)

    def get_llvm_str(self) -> str:
        return str(self.module)

    def get_asm_str(self) -> str:
        return str(self._codegen._tm.emit_assembly(self.module))


_NAMES = (
    (analysis, "dead_branch_prune rewrite_semantic_constants"),
    (bytecode, "ByteCode FunctionIdentity"),
    (_dynfunc, "make_function"),
    (_target.codegen(), "_data_layout _engine _tm"),
    (_target.codegen()._engine, "_ee"),
    (codegen.CPUCodeLibrary, "_get_module_for_linking"),
    (Library(""), "_codegen _finalized"),
    (codegen.JITCPUCodegen, "_create_empty_module _module_pass_manager _pass_builder set_env"),
    (compiler, "CompilerBase compile_result"),
    (cgutils, "normalize_ir_text"),
    (funcdesc.PythonFunctionDescriptor, "from_specialized_function llvm_cpython_wrapper_name lookup_module"),
    (interpreter, "Interpreter"),
    (itanium_mangler, "mangle"),
    (lowering.Lower, "lower create_cpython_wrapper"),
    (rewrites.rewrite_registry, "apply"),
    (serialize, "dumps"),
    (typed_passes, "IRLegalization PreLowerStripPhis type_inference_stage"),
    (untyped_passes, "ReconstructSSA"),
)
"""What is used when a function is compiled, and is no part of Numba's interface."""
for _place, _names in _NAMES:
    for _name in _names.split():
        if not hasattr(_place, _name):
            raise ImportError(f"this release of Numba has no {_name} in {_place}")


def _optimizers() -> list[tuple[Any, Any]]:
    """Numba's passes: cheap ones that turn loops into the form that the others want, then all."""
    generator = _target.codegen()
    cheap = {"cost": "cheap", "opt": 0, "loop_vectorize": False, "slp_vectorize": False}
    return [generator._module_pass_manager(**cheap), generator._module_pass_manager()]


def _simplify(module: Any) -> None:
    """Drop what nothing uses, among it the addresses of called functions, which are valid in this process only."""
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_dead_code_elimination_pass()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, _target.codegen()._pass_builder())


class _Cache:
    """What Numba's dispatcher asks for compiled signatures."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], entry: bool) -> None:
        self._files = CodeFiles(function, options)
        self.cache_path = ""
        self.entry = entry

    def name_of(self, kinds: Any) -> str:
        return self._files.name_of(kinds)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        target_context.refresh()
        name = self.name_of(sig)
        library = _stored(name) if name else None
        if library is None and name and self._files.claim(name):
            library = _stored(name)
            if library is not None:
                self._files.release(name)
        return None if library is None else _result_of(library, self.entry)

    def save_overload(self, sig: Any, result: Any) -> None:
        name = result.library.name
        try:
            content = result.library.packed() if name else None
            if content is not None:
                _libraries[name] = result.library
                self._files.keep(name, content)
        finally:
            self._files.release(name)


_libraries: dict[str, Library] = {}
"""All code of this process that has a name on disk."""


def _stored(name: str) -> Library | None:
    """The code with this name: of this process, or from disk, with all that it calls. None if some is missing."""
    if name in _libraries:
        return _libraries[name]
    content = read(name)
    try:
        library = Library.unpacked(name, content) if content is not None else None
    except Exception:  # a damaged file can make pickle raise anything
        return None
    if library is not None:
        _libraries[name] = library
    return library


class _Compiler(compiler.CompilerBase):
    """Compiles one signature of a function."""

    def __init__(self, cache: _Cache, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._cache = cache

    def compile_extra(self, function: Any) -> Any:
        state = self.state
        state.func_id = bytecode.FunctionIdentity.from_function(function)
        name = self._cache.name_of(state.args)
        if name:  # for the linker too: it is the same in each process
            state.func_id.unique_id = name.rpartition("-")[2]
        state.library = Library(name)
        state.lifted, state.lifted_from = (), None
        with announcer.compiling(), ConfigStack().enter(state.flags.copy()):
            _analyze(state)
            result = _lower(state, self._cache.entry)
        _target.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result


def _analyze(state: Any) -> None:
    """From bytecode to typed statements."""
    ir = interpreter.Interpreter(state.func_id).interpret(bytecode.ByteCode(state.func_id))
    state.func_ir, state.nargs = ir, ir.arg_count
    postproc.PostProcessor(ir).run()
    analysis.rewrite_semantic_constants(ir, state.args)
    analysis.dead_branch_prune(ir, state.args)
    rewrites.rewrite_registry.apply("before-inference", state)
    untyped_passes.ReconstructSSA().run_pass(state)
    found = typed_passes.type_inference_stage(state.typingctx, state.targetctx, ir, state.args, None)
    state.typemap, state.return_type, state.calltypes, _ = found
    typed_passes.PreLowerStripPhis().run_pass(state)
    typed_passes.IRLegalization().run_pass(state)


def _lower(state: Any, entry: bool) -> Any:
    """From typed statements to a library."""
    context, flags, library = state.targetctx, state.flags, state.library
    description = funcdesc.PythonFunctionDescriptor.from_specialized_function(
        state.func_ir,
        state.typemap,
        state.return_type,
        state.calltypes,
        mangler=lambda name, argtypes, abi_tags=(), uid=None: itanium_mangler.mangle(name, (), uid=uid),
        inline=flags.forceinline,
        noalias=flags.noalias,
        abi_tags=(),
    )
    with context.push_code_library(library):
        lower = lowering.Lower(context, library, description, state.func_ir, metadata=state.metadata)
        lower.lower()
        if entry:
            lower.create_cpython_wrapper(flags.release_gil)
    library.finalize()
    if entry or lower.env.consts:
        library.environments.append(lower.env)
    description.typemap = description.calltypes = None
    library.description, library.signature = description, typing.signature(state.return_type, *state.args)
    if entry or library.lines > _ROUTINE_LINES and not flags.forceinline:
        library.become_machine_code()
    else:
        library.become_part()
    return _result_of(library, entry)


def _result_of(library: Library, entry: bool) -> Any:
    """What Numba keeps of a compiled signature. It finds the code of jitted calls by the entry point."""
    point: Any = library
    if entry:
        description, (environment, *_) = library.description, library.environments
        address = library.get_pointer_to_function(description.llvm_cpython_wrapper_name)
        short = description.qualname.rpartition(".")[2]
        point = _dynfunc.make_function(description.lookup_module(), short, "", address, environment, (library,))
    return compiler.compile_result(
        typing_context=registry.cpu_target.typing_context,
        target_context=_target,
        entry_point=point,
        library=library,
        signature=library.signature,
        fndesc=library.description,
        objectmode=False,
        lifted=(),
        metadata={},
        reload_init=[],
    )


class _CachedDispatcher(registry.CPUDispatcher):
    """A Numba dispatcher that uses the cache of this package."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], entry: bool) -> None:
        cache = _Cache(function, options, entry)
        pipeline = functools.partial(_Compiler, cache)
        super().__init__(py_func=function, locals={}, targetoptions=options, pipeline_class=pipeline)
        self._cache = cache

    def compile(self, sig: Any) -> Any:
        """Compile one signature with the garbage collector off: it would find nothing, and take a tenth of the time."""
        found = self.overloads.get(sig) if isinstance(sig, tuple) else None
        if found is not None:
            return found.entry_point
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


class _CalledByCode(_CachedDispatcher):
    def add_overload(self, result: Any) -> None:
        """Python never calls this function."""
        self.overloads[tuple(result.signature.args)] = result


class Dispatcher(_CachedDispatcher):
    """A function as Python calls it. ``_inner`` is the same function as jitted code calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        announcer.known += 1
        super().__init__(function, options, entry=True)
        self._inner = _CalledByCode(function, {**options, "no_cpython_wrapper": True}, entry=False)

    def get_call_template(self, args: Any, kws: Any) -> Any:
        """The template that type inference needs for a call by jitted code."""
        return self._inner.get_call_template(
            [_passed(kind) for kind in args], {name: _passed(kind) for name, kind in kws.items()}
        )

    def get_overload(self, sig: Any) -> Any:
        """The compiled signature that lowering needs for such a call."""
        return self._inner.get_overload(sig)


def _passed(kind: Any) -> Any:
    """The type of an argument in a call between jitted functions. A signed integer is passed as int64 and a constant as
    a variable, so a function is compiled once and not for each kind of integer."""
    if isinstance(kind, (types.IntegerLiteral, types.BooleanLiteral)):
        kind = types.unliteral(kind)
    return types.int64 if kind in (types.int8, types.int16, types.int32) else kind


_lost_compiler = False
"""Whether another thread was compiling when this process was forked. A compilation would wait for it for ever."""


def _after_fork() -> None:
    global _lost_compiler
    lock = getattr(global_compiler_lock, "_lock", None)
    _lost_compiler = lock is not None and not lock.acquire(False)
    if lock is not None and not _lost_compiler:
        lock.release()


os.register_at_fork(after_in_child=_after_fork)

"""The `jit` decorator: nogil Numba functions with an on-disk cache that notices edits in every file they depend on.

Numba's own ``cache=True`` stamps a cached function with the file that defines it. The stamp does not cover code that
the function inlines or calls from other files. So after an edit there, the old machine code would still run. Also, two
processes that compile at once can leave the index of the cache pointing at each other's code.

Here the functions of a module share one directory. Its name has a digest of that module and of every module of the
package that it names, directly or through others. Each signature has a file of its own.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import hashlib
import logging
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, overload

import llvmlite.binding
import numba
import numpy as np
from numba import extending, types
from numba.core import codegen, compiler, config, registry, serialize
from numba.core.compiler_lock import global_compiler_lock
from numba.core.environment import lookup_environment

from kvpool.errors import ForkedProcess

_FOLDER = Path(__file__).resolve().parent
_NAME = __name__.partition(".")[0]
_VERSIONS = (
    f"{sys.version_info[:2]} {getattr(sys, 'abiflags', '')} {numba.__version__} {np.__version__} {llvmlite.__version__}"
)
_CODEGEN_OPTIONS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_KEPT_PER_MODULE = 8
"""How many versions of a module's sources are kept. Several checkouts share a folder; the last used are kept."""
_COMPILING_S_MAX = 120.0
"""How long a process waits for the compilation of another. Then it compiles the same function itself."""
_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])


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
    # Numba's private names are checked. If a release moves them, compilation takes longer, and all else works.
    if not _knows_numba():
        return numba.njit(**{"nogil": True, "_nrt": False, **options})(function)
    _announcer.known += 1
    return _Dispatcher(function, {"nopython": True, "nogil": True, "_nrt": False, "no_cfunc_wrapper": True, **options})


def _knows_numba() -> bool:
    """Whether Numba has the private names that the classes below build on."""
    library = ("_optimize_final_module", "_finalize_specific", "_unserialize", "serialize_using_bitcode")
    return (
        all(hasattr(codegen.JITCodeLibrary, name) for name in library)
        and all(hasattr(compiler.CompileResult, name) for name in ("_rebuild", "_reduce"))
        and all(hasattr(registry.CPUDispatcher, name) for name in ("get_call_template", "get_overload"))
    )


def keeps(function: Any) -> bool:
    """Whether the machine code of a jitted function is kept on disk."""
    return isinstance(getattr(function, "_cache", None), _FunctionCache)


def intrinsic(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a Numba intrinsic, or under NUMBA_DISABLE_JIT the function ``plain``, which does the same in the
    interpreter."""
    return lambda definition: plain if config.DISABLE_JIT else extending.intrinsic(definition)


# -- compiling ------------------------------------------------------------------------------------
#
# Numba optimises a function together with its callees, and makes machine code of them. It does so again for each of
# the function's callers. Here a function that jitted code calls stays as Numba's front end made it, and is linked into
# its callers. A function that Python calls is compiled to machine code once, together with its callees.


class _Unplaced:
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
        """Nothing to do: there is no address to write to. ``_EntryLibrary`` does this for all linked functions."""

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


class _EntryLibrary(codegen.JITCodeLibrary):
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


class _Announcer:
    """Says in a terminal that functions are being compiled, and shows how many. It has no lock, since Numba compiles
    under a lock of its own."""

    def __init__(self) -> None:
        self.known = 0
        self._compiled = self._depth = 0
        self._bar: Any = None

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """A context around the compilation of one function and of its callees."""
        if not self._depth:
            self._begin()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._compiled += 1
            if self._bar is not None:
                self._bar.update()
                if not self._depth:
                    self._bar.close()
                    self._bar = None

    def _begin(self) -> None:
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if not self._compiled:
            root = cache_root()
            kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
            print(f"{_NAME}: compiling, about 20 s, {kept}", file=sys.stderr, flush=True)
        try:
            from tqdm import tqdm
        except ImportError:
            return
        total = max(self.known, self._compiled + 1)
        self._bar = tqdm(total=total, initial=self._compiled, unit=" functions", leave=False, file=sys.stderr)


_announcer = _Announcer()


class _InnerCompiler(compiler.Compiler):
    def compile_extra(self, function: Any) -> Any:
        self.state.library = _Unplaced(self.state.targetctx.codegen()).create_library(function.__qualname__)
        with _announcer.compiling():
            return super().compile_extra(function)


class _EntryCompiler(compiler.Compiler):
    def compile_extra(self, function: Any) -> Any:
        self.state.library = _EntryLibrary(self.state.targetctx.codegen(), function.__qualname__)
        self.state.library.enable_object_caching()
        with _announcer.compiling():
            return super().compile_extra(function)


class _CachedDispatcher(registry.CPUDispatcher):
    """A Numba dispatcher that uses the cache of this module."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], pipeline: Any) -> None:
        super().__init__(py_func=function, locals={}, targetoptions=options, pipeline_class=pipeline)
        directory = cache_directory(function.__module__ or "")
        if directory is not None:
            self._cache = _FunctionCache(function, options, directory, placed=pipeline is _EntryCompiler)

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


class _Dispatcher(_CachedDispatcher):
    """A function as Python calls it. ``_inner`` is the same function as jitted code calls it."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
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


# -- keeping --------------------------------------------------------------------------------------


class _FunctionCache:
    """The cache of one function, as a Numba dispatcher uses it: one file per signature, written atomically.

    Numba's own cache raises if the disk is full or a file is truncated. This one compiles the function anew. If several
    processes miss the same file, one compiles and the others wait for it, since a function can take seconds.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], directory: Path, *, placed: bool) -> None:
        self._placed = placed
        self._directory = directory
        self._module = function.__module__
        self._name = function.__qualname__.replace("<", "").replace(">", "")[:80]
        self._identity = f"{_function_key(function)} {sorted(options.items())!r}"
        self._compiling: dict[str, int] = {}

    @property
    def cache_path(self) -> str:
        return str(self._directory)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The stored compilation result of one signature, or None."""
        target_context.refresh()
        try:
            key = self._key(sig, target_context.codegen())
        except Exception:
            return None
        found = self._stored(key, target_context)
        if found is None and self._wait_for_others(key):
            found = self._stored(key, target_context)
            if found is not None:
                self._compiled(key)
        return found

    def save_overload(self, sig: Any, result: Any) -> None:
        """Store the compilation result of one signature, if other processes can safely use it."""
        library = result.library
        key = self._key(sig, library.codegen)
        try:
            self._save(key, result)
        finally:
            self._compiled(key)

    def _save(self, key: str, result: Any) -> None:
        if result.library.has_dynamic_globals or any(not lifted.can_cache for lifted in result.lifted):
            return
        # An address means nothing in another process. Sources edited since the import may not be what was compiled.
        if " at 0x" in key or _edited(self._module):
            return
        try:
            # The annotation is text for a debugger. It is left out, since writing it takes long.
            _write(self._path(key), serialize.dumps((key, result._replace(type_annotation="")._reduce())))
        except Exception:  # caching is never worth failing a call
            return

    def _stored(self, key: str, target_context: Any) -> Any:
        try:
            stored, payload = pickle.loads(self._path(key).read_bytes())
            return self._rebuild(target_context, payload) if stored == key else None
        except Exception:  # a damaged file can make pickle raise anything
            return None

    def _rebuild(self, target_context: Any, payload: Any) -> Any:
        if self._placed:
            return compiler.CompileResult._rebuild(target_context, *payload)
        unplaced, names = _Unplaced(target_context.codegen()), ("get_executable", "typing_context")
        context = SimpleNamespace(codegen=lambda: unplaced, **{name: getattr(target_context, name) for name in names})
        return compiler.CompileResult._rebuild(context, *payload)._replace(target_context=target_context)

    def _wait_for_others(self, key: str) -> bool:
        """Take the lock of a signature. Returns whether this process has it; then it looks again, and compiles if it
        must. ``_compiled`` releases the lock.

        If a process ends or its compilation fails, nobody waits for it longer than ``_COMPILING_S_MAX``. Callees are
        compiled inside their callers, so two processes can wait for each other only if functions are recursive.
        """
        if key in self._compiling:
            return False
        end = time.monotonic() + _COMPILING_S_MAX
        try:
            lock = os.open(self._path(key).with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._compiling[key] = lock
                return True
            except OSError:
                if time.monotonic() > end:
                    os.close(lock)
                    return False
            except BaseException:
                os.close(lock)
                raise
            time.sleep(0.02)

    def _compiled(self, key: str) -> None:
        lock = self._compiling.pop(key, None)
        if lock is not None:
            self._path(key).with_suffix(".lock").unlink(missing_ok=True)
            # Closing does not release the lock if a forked child has a copy of the descriptor.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def enable(self) -> None:
        """Part of the interface; nothing to do."""

    def disable(self) -> None:
        """Part of the interface; nothing to do."""

    def flush(self) -> None:
        """Part of the interface; nothing to do: files are deleted with their directory."""

    def _key(self, sig: Any, codegen: Any) -> str:
        options = [getattr(config, name, None) for name in _CODEGEN_OPTIONS]
        return f"{self._identity} {sig} {codegen.magic_tuple()} {options}"

    def _path(self, key: str) -> Path:
        return self._directory / f"{self._name}-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.nbc"


def _function_key(function: Callable[..., Any]) -> str:
    """Text that distinguishes a function from all others of the same module and sources."""
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    # Numba gives a dispatcher another identity in each process, so the key has the function that it compiles instead.
    inner = [_function_key(cell.py_func) if hasattr(cell, "py_func") else serialize.dumps(cell).hex() for cell in cells]
    constants = [repr(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
    return (
        f"{function.__module__} {function.__qualname__} {code.co_firstlineno} {code.co_code.hex()} {constants} {inner}"
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically: other processes see all of it or nothing."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class _Source(NamedTuple):
    """A Python file of the package: the digest of its content, the dotted names of the package that it mentions, and
    its stamp, which was taken before the file was read."""

    digest: bytes
    names: frozenset[str]
    stamp: tuple[int, ...]


def _content_digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Properties of a file that change when it is written or replaced. The file is not read."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_sources() -> dict[str, _Source]:
    """All sources of the package, by their path inside it. Empty if they cannot be read, as in a zip archive."""
    # Any mention of a module counts, also one in a string. An import of the bare package or a relative import may reach
    # any module.
    mention = re.compile(rf"{_NAME}((?:\.\w+)+)")
    everything = re.compile(rf"import\s[^\n]*\b{_NAME}\b|from\s+(?:{_NAME}\s|\.)")
    sources = {}
    try:
        for path in _FOLDER.rglob("*.py"):
            stamp, content = _stamp(path), path.read_bytes()
            text = content.decode(errors="replace")
            names = {*mention.findall(text), *([""] if everything.search(text) else [])}
            sources[path.relative_to(_FOLDER).as_posix()] = _Source(_content_digest(content), frozenset(names), stamp)
    except OSError:
        return {}
    return sources


# The sources are read when this module is imported, before the modules that use it. So the digests describe the code
# that was imported and is compiled later, even if the files change in between.
_SOURCES = _read_sources()


def _named(name: str, sources: dict[str, _Source]) -> list[str]:
    """The files that a dotted name may stand for: a module, all files of a folder, or none. ``""`` is the package."""
    parts = name.split(".")[1:]
    folder = ""
    for part in parts:
        if f"{folder}{part}.py" in sources:
            return [f"{folder}{part}.py"]
        if not any(path.startswith(f"{folder}{part}/") for path in sources):
            break
        folder += f"{part}/"
    return [path for path in sources if path.startswith(folder)] if folder or not parts else []


def _visible(module: str, sources: dict[str, _Source]) -> set[str]:
    """The files that a module's code can depend on. Empty if the module does not belong to the package."""
    package, _, inner = module.partition(".")
    path = inner.replace(".", "/")
    own = {f"{path}.py", f"{path}/__init__.py".lstrip("/")} & sources.keys() if package == _NAME else set()
    found: set[str] = set()
    pending = [*own]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending.extend(file for name in sources[path].names for file in _named(name, sources))
    return found


def _digest(module: str, sources: dict[str, _Source]) -> str:
    """Hex digest of everything that determines the machine code of a module. Empty if that cannot be known."""
    visible = _visible(module, sources)
    if not visible:
        return ""
    parts = [f"{path}\0{sources[path].digest.hex()}" for path in sorted(visible)]
    return hashlib.blake2b("\0".join([_VERSIONS, *parts]).encode(), digest_size=16).hexdigest()


def _edited(module: str) -> bool:
    """Whether a file that a module's code can depend on has changed since ``kvpool.jit`` was imported."""
    for path in _visible(module, _SOURCES):
        try:
            known = _SOURCES[path]
            if _stamp(_FOLDER / path) != known.stamp and _content_digest((_FOLDER / path).read_bytes()) != known.digest:
                return True
        except OSError:
            return True
    return False


@functools.cache
def cache_directory(module: str) -> Path | None:
    """The directory with the compiled code of a module, or None if the module is compiled anew in each process.

    The first call creates it and drops the directories of older sources of that module.
    """
    digest = _digest(module, _SOURCES)
    root = cache_root() if digest else None
    if root is None:
        return None
    directory = root / f"{module}-{digest}"
    try:
        if directory.is_dir():
            os.utime(directory)
        else:
            directory.mkdir(mode=0o700)
            siblings = sorted(root.glob(f"{module}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
            for path in siblings[_KEPT_PER_MODULE:]:
                shutil.rmtree(path, ignore_errors=True)
    except OSError:  # another process may be doing the same
        pass
    return directory


@functools.cache
def cache_root() -> Path | None:
    """The first writable place for compiled code, or None.

    The places are tried in this order: below ``NUMBA_CACHE_DIR``, in the user's cache folder, in the ``__pycache__`` of
    a source checkout, in a private folder of the temporary directory. So a checkout and an installation of the same
    sources share their compiled code.

    An installed copy never writes beside its own modules. ``pip uninstall`` would leave those files, and they would
    shadow a later editable install. Compiled code is unpickled. So a place that others can write to is skipped, even if
    the user chose it, and a warning in the log names it.
    """
    for root, guarded in _places():
        try:
            _make_private(root)
            if os.name == "posix" and not (_is_ours(root) and (not guarded or _keeps_entries(root.parent))):
                _log.warning(
                    "%s is not used for compiled code: others can write or rename it, or it is somebody else's", root
                )
                continue
            tempfile.TemporaryFile(dir=root).close()
        except OSError:
            continue
        return root
    return None


def _places() -> Iterator[tuple[Path, bool]]:
    """Places for compiled code, best first, and whether the parent folder must keep other users from renaming each."""
    chosen = getattr(config, "CACHE_DIR", "")
    if chosen:
        yield Path(chosen).absolute() / _NAME, True
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
    if user_cache.is_absolute() and user_cache.parent.is_dir():
        yield user_cache / _NAME, True
    if next(_FOLDER.parent.glob(f"{_FOLDER.name}-*-info"), None) is None:
        # Not guarded: a user who can write beside the package's bytecode can run code without the cache.
        yield _FOLDER / "__pycache__" / "jit", False
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        return
    yield Path(temporary) / f"{_NAME}-{os.getuid() if hasattr(os, 'getuid') else 'cache'}", True


def _make_private(path: Path) -> None:
    """Make a folder, and its missing parents, with access for this user only, whatever the umask is."""
    if not path.parent.is_dir():
        _make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _is_ours(path: Path) -> bool:
    """Whether only this user can write to a directory. It matters because unpickling cached code can run any code."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _keeps_entries(path: Path) -> bool:
    """Whether no other user, except root, can rename the files that this user has put into a directory."""
    found = os.stat(path)
    return found.st_uid in (0, os.geteuid()) and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))

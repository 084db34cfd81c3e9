"""The `jit` decorator: nogil Numba functions with an on-disk cache that notices edits in every file they can see.

Numba's own ``cache=True`` stamps a cached function with the file that defines it. Code that it inlines or calls
from other files is not part of that stamp, so an edit there would go on running the old machine code; and two
processes that compile at once can leave its index pointing at each other's code. Here the functions of a module
share one directory, named after a digest of that module and of every module of the package that it names, directly
or through others, and each signature has a file of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import llvmlite
import numba
import numpy as np
from numba import extending
from numba.core import compiler, config, serialize

_FOLDER = Path(__file__).resolve().parent
_NAME = __name__.partition(".")[0]
_VERSIONS = f"{sys.version_info[:2]} {getattr(sys, 'abiflags', '')} {numba.__version__} {np.__version__} {llvmlite.__version__}"
_CODEGEN_OPTIONS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_KEPT_PER_MODULE = 4

F = TypeVar("F", bound=Callable[..., Any])


@overload
def jit(function: F, /) -> F: ...
@overload
def jit(**options: Any) -> Callable[[F], F]: ...


def jit(function: Any = None, /, **options: Any) -> Any:
    """Compile a function of this package with ``numba.njit(nogil=True, **options)`` and cache it on disk.

    Reference counting is off (``_nrt=False``), since counts are atomic and cost more than most of these functions: a jitted
    function can neither create nor return an array, and whoever owns the memory keeps it alive during the call.

    The cache follows the sources, closure cells, options and argument types. It does not follow globals that are
    set at run time or modules imported by a computed name, so constants belong in the source or in a closure.
    Functions defined outside this package are compiled in each process. Thread-safe where Numba is.

    Under NUMBA_DISABLE_JIT the function runs in the interpreter; integers wrap as silently as they do in machine code.
    """
    if function is None:
        return functools.partial(jit, **options)
    if config.DISABLE_JIT:
        return np.errstate(over="ignore")(function)
    dispatcher = numba.njit(**{"nogil": True, "_nrt": False, **options})(function)
    # Numba's private names are checked, so that a release that moves them costs the cache and nothing else.
    if hasattr(dispatcher, "_cache") and hasattr(compiler.CompileResult, "_rebuild"):
        directory = cache_directory(function.__module__ or "")
        if directory is not None:
            dispatcher._cache = _FunctionCache(function, options, directory)
    return dispatcher


def intrinsic(plain: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a Numba intrinsic, or under NUMBA_DISABLE_JIT the function ``plain``, which does the same in the interpreter."""
    return lambda definition: plain if config.DISABLE_JIT else extending.intrinsic(definition)


class _FunctionCache:
    """What a Numba dispatcher asks of its cache, for one function: one file per signature, written atomically.

    Where Numba's own would raise (a full disk, a truncated file) this one costs a compilation.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], directory: Path) -> None:
        self._directory = directory
        self._module = function.__module__
        self._name = function.__qualname__.replace("<", "").replace(">", "")[:80]
        self._identity = f"{_function_key(function)} {sorted(options.items())!r}"

    @property
    def cache_path(self) -> str:
        return str(self._directory)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The stored compilation result of one signature, or None."""
        target_context.refresh()
        try:
            key = self._key(sig, target_context.codegen())
            stored, payload = pickle.loads(self._path(key).read_bytes())
            return compiler.CompileResult._rebuild(target_context, *payload) if stored == key else None
        except Exception:  # whatever a damaged file makes pickle raise
            return None

    def save_overload(self, sig: Any, result: Any) -> None:
        """Store the compilation result of one signature where another process can safely use it."""
        library = result.library
        if library.has_dynamic_globals or any(not lifted.can_cache for lifted in result.lifted):
            return
        key = self._key(sig, library.codegen)
        # An address is no identity elsewhere, and sources edited since the import may not be what was compiled.
        if " at 0x" in key or _digest(self._module, _read_sources()) != _digest(self._module, _SOURCES):
            return
        try:
            _write(self._path(key), serialize.dumps((key, result._reduce())))
        except Exception:  # caching is never worth failing a call
            return

    def enable(self) -> None:
        """Part of the interface; nothing to do."""

    def disable(self) -> None:
        """Part of the interface; nothing to do."""

    def flush(self) -> None:
        """Part of the interface; files go with their directory."""

    def _key(self, sig: Any, codegen: Any) -> str:
        options = [getattr(config, name, None) for name in _CODEGEN_OPTIONS]
        return f"{self._identity} {sig} {codegen.magic_tuple()} {options}"

    def _path(self, key: str) -> Path:
        return self._directory / f"{self._name}-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}.nbc"


def _function_key(function: Callable[..., Any]) -> str:
    """Text that tells a function apart from every other one of the same module and sources."""
    code = function.__code__
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    # Numba gives a dispatcher another identity in each process; here it is known by the function it compiles.
    inner = [_function_key(cell.py_func) if hasattr(cell, "py_func") else serialize.dumps(cell).hex() for cell in cells]
    constants = [repr(constant) for constant in code.co_consts if not hasattr(constant, "co_code")]
    return f"{function.__module__} {function.__qualname__} {code.co_firstlineno} {code.co_code.hex()} {constants} {inner}"


def _write(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
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
    """A Python file of the package: the digest of its content, and the dotted names of the package it mentions."""

    digest: bytes
    names: frozenset[str]


def _read_sources() -> dict[str, _Source]:
    """All sources of the package by path relative to it; empty where there are none to read, as in a zip archive."""
    # Any mention of a module counts, also one in a string. What brings the bare package's name with it, or is
    # relative, may reach anything.
    mention = re.compile(rf"{_NAME}((?:\.\w+)+)")
    everything = re.compile(rf"import\s[^\n]*\b{_NAME}\b|from\s+(?:{_NAME}\s|\.)")
    sources = {}
    try:
        for path in _FOLDER.rglob("*.py"):
            content = path.read_bytes()
            text = content.decode(errors="replace")
            names = {*mention.findall(text), *([""] if everything.search(text) else [])}
            digest = hashlib.blake2b(content, digest_size=16).digest()
            sources[path.relative_to(_FOLDER).as_posix()] = _Source(digest, frozenset(names))
    except OSError:
        return {}
    return sources


# Read when this module is imported, before the modules that use it: what is compiled later is the code as it was
# imported, whatever happens to the files meanwhile.
_SOURCES = _read_sources()


def _named(name: str, sources: dict[str, _Source]) -> list[str]:
    """The files that a dotted name may stand for: a module, a whole folder, or nothing; ``""`` is the package."""
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
    """The files that code of a module of the package can depend on; empty where the module is not one of them."""
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
    """Hex digest of everything that decides the machine code of a module; empty where that cannot be known."""
    visible = _visible(module, sources)
    if not visible:
        return ""
    parts = [f"{path}\0{sources[path].digest.hex()}" for path in sorted(visible)]
    return hashlib.blake2b("\0".join([_VERSIONS, *parts]).encode(), digest_size=16).hexdigest()


@functools.cache
def cache_directory(module: str) -> Path | None:
    """The directory with the compiled code of a module, or None when it is compiled anew in each process.

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

    In this order: below ``NUMBA_CACHE_DIR``, in the ``__pycache__`` of a source checkout, in the user's cache
    folder, in a private folder of the temporary directory. An installed copy never writes beside its own modules:
    what ``pip uninstall`` then leaves behind would shadow a later editable install.
    """
    for root, private in _places():
        try:
            root.mkdir(mode=0o700 if private else 0o777, parents=True, exist_ok=True)
            if private and os.name == "posix" and not (_is_ours(root) and _keeps_entries(root.parent)):
                continue
            tempfile.TemporaryFile(dir=root).close()
        except OSError:
            continue
        return root
    return None


def _places() -> Iterator[tuple[Path, bool]]:
    """Where compiled code may go, best first, and whether nobody else may be able to write there."""
    chosen = getattr(config, "CACHE_DIR", "")
    if chosen:
        yield Path(chosen).absolute() / _NAME, False
    if next(_FOLDER.parent.glob(f"{_FOLDER.name}-*-info"), None) is None:
        yield _FOLDER / "__pycache__" / "jit", False
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
    if user_cache.is_absolute() and user_cache.parent.is_dir():
        yield user_cache / _NAME, True
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        return
    yield Path(temporary) / f"{_NAME}-{os.getuid() if hasattr(os, 'getuid') else 'cache'}", True


def _is_ours(path: Path) -> bool:
    """Whether only this user can write to a directory: cached code is unpickled, which runs what it says."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _keeps_entries(path: Path) -> bool:
    """Whether no other user but root can rename what this user has put into a directory."""
    found = os.stat(path)
    return found.st_uid in (0, os.geteuid()) and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))

"""The cache of one function: a file for each signature, which other processes can use."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from numba.core import compiler, config, serialize

from kvpool.jit.libraries import Unplaced
from kvpool.jit.sources import edited

_CODEGEN_OPTIONS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "BOUNDSCHECK", "DEBUGINFO_DEFAULT")
_COMPILING_S_MAX = 120.0
"""How long a process waits for the compilation of another. Then it compiles the same function itself."""


class FunctionCache:
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
        if " at 0x" in key or edited(self._module):
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
        unplaced, names = Unplaced(target_context.codegen()), ("get_executable", "typing_context")
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

"""Files of compiled code: one for each signature of a function, which other processes can use."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from numba.core import config, serialize

from kvpool.jit.folders import cache_root, module_folder, only_ours, read_folders
from kvpool.jit.sources import edited

_CODEGEN_OPTIONS = (
    "OPT LOOP_VECTORIZE SLP_VECTORIZE BOUNDSCHECK DEBUGINFO_DEFAULT CPU_NAME CPU_FEATURES ENABLE_AVX".split()
)
_DIGEST_BYTES = 16
_COMPILING_S_MAX = 120.0
"""How long a process waits for the compilation of another. Then it compiles the same function itself."""


class CodeFiles:
    """The files of one function. They are written atomically.

    A file that is damaged, or cannot be written, costs a compilation and nothing else. If several processes miss the
    same file, one compiles and the others wait for it, since a function can take seconds.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._function, self._options = function, options
        self._module = function.__module__ or ""
        self._names: dict[tuple[Any, ...], str] = {}
        self._compiling: dict[str, int] = {}

    @functools.cached_property
    def _identity(self) -> str:
        return f"{_function_key(self._function)} {sorted(self._options.items())!r}"

    def name_of(self, kinds: Sequence[Any]) -> str:
        """The name of a signature: the path of its file below the root, without the ending. It stands for all that the
        code depends on. Empty if the code means nothing to other processes."""
        kinds = tuple(kinds)
        if kinds not in self._names:
            self._names[kinds] = self._name_of(kinds)
        return self._names[kinds]

    def _name_of(self, kinds: tuple[Any, ...]) -> str:
        folder = module_folder(self._module)
        settings = [getattr(config, name, None) for name in _CODEGEN_OPTIONS]
        key = f"{folder} {self._identity} {[kind.name for kind in kinds]} {_processor()} {settings}"
        if not folder or " at 0x" in key:
            return ""
        short = self._function.__qualname__.replace("<", "").replace(">", "")[:80]
        return f"{folder}/{short}-{hashlib.blake2b(key.encode(), digest_size=12).hexdigest()}"

    def keep(self, name: str, content: bytes) -> None:
        """Write the file of a signature, unless the sources are not those that were compiled any more."""
        if edited(self._module):
            return
        try:
            _write(_path(name), _digest(content) + content)
        except Exception:  # caching is never worth failing a call
            return

    def claim(self, name: str) -> bool:
        """Take the lock of a signature. Returns whether this process has it: then it looks again, and compiles if it
        must. ``release`` gives it back.

        If a process ends or its compilation fails, nobody waits for it longer than ``_COMPILING_S_MAX``. Callees are
        compiled inside their callers, so two processes can wait for each other only if functions are recursive.
        """
        if name in self._compiling:
            return False
        end = time.monotonic() + _COMPILING_S_MAX
        try:
            path = _path(name).with_suffix(".lock")
            path.parent.mkdir(mode=0o700, exist_ok=True)
            lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._compiling[name] = lock
                return True
            except OSError:
                if time.monotonic() > end:
                    os.close(lock)
                    return False
            except BaseException:
                os.close(lock)
                raise
            time.sleep(0.02)

    def release(self, name: str) -> None:
        lock = self._compiling.pop(name, None)
        if lock is not None:
            _path(name).with_suffix(".lock").unlink(missing_ok=True)
            # Closing does not release the lock if a forked child has a copy of the descriptor.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def read(name: str) -> bytes | None:
    """The file of a signature, from the first folder that has it undamaged. A file that others could write, as long as
    its folder was theirs too, is left out."""
    for root in read_folders():
        try:
            with open(root / f"{name}.nbc", "rb") as file:
                found = file.read() if only_ours(os.fstat(file.fileno())) else b""
        except OSError:
            continue
        digest, content = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if digest == _digest(content):
            return content
    return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _path(name: str) -> Path:
    root = cache_root()
    if root is None:
        raise OSError("no folder for compiled code can be written")
    return root / f"{name}.nbc"


@functools.cache
def _processor() -> str:
    return f"{llvm.get_process_triple()} {llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


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

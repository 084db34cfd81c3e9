"""Compiled code on disk: a file for each function, in folders that only this user can write to, since it is unpickled.

The name of a file stands for all that the code depends on: the bytecode of the function and of what it calls, the
constants that they see, the types of the arguments, the processor, the settings and versions of the compiler. So no
edit is missed, and an edit of a comment compiles nothing.

At the end, ``announcer``: it reports that functions are being compiled, in the log or on standard error.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numba.core import config

from kvpool.common.progress import say, shown_progress

PACKAGE = __name__.partition(".")[0]
_VERSIONED = {"numba", "numpy", "llvmlite", *sys.stdlib_module_names}
"""Packages that code depends on by their versions. The sources of all others are looked at."""
_KEPT = 5000
"""How many files are kept: those that were used last. A pool needs about 600."""
_patience = 120.0
"""How many seconds a process waits for what another one compiles. After it has done so once, it waits no more."""
_log = logging.getLogger(__name__)


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


# -- names ---------------------------------------------------------------------------------------


known: WeakKeyDictionary[FunctionType, str] = WeakKeyDictionary()
"""What ``content_of`` has found out about functions."""


def content_of(value: Any) -> str:
    """A text for all that compiled code can depend on in a value that it sees. It has an address if that is no use to
    other processes."""
    function = inspect.unwrap(value) if callable(value) else value
    module = str(getattr(function, "__module__", ""))
    if hasattr(function, "__qualname__") and _is_versioned(module):
        return f"{module}.{function.__qualname__}"
    if isinstance(function, FunctionType):
        if function not in known:
            known[function] = "itself"
            known[function] = _content_of_function(function)
        return f"{known[function]} {getattr(value, 'inline', '')}"
    if isinstance(value, ModuleType):
        return value.__name__
    shown = value.tolist() if isinstance(value, np.ndarray) else value
    return f"{shown!r} {getattr(value, '_fields', '')}"


def _is_versioned(module: str) -> bool:
    return module.partition(".")[0] in _VERSIONED


def _content_of_function(function: FunctionType) -> str:
    codes = codes_of(function.__code__)
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    seen = [function.__globals__[name] for name in names if name in function.__globals__]
    for module in [value for value in seen if isinstance(value, ModuleType) and not _is_versioned(value.__name__)]:
        seen += [getattr(module, name) for name in names if hasattr(module, name)]
    seen += [function.__defaults__, *(cell.cell_contents for cell in function.__closure__ or ())]
    text = " ".join(
        [function.__module__, function.__qualname__, bytecode_of(function.__code__), *map(content_of, seen)]
    )
    return text if " at 0x" in text else digest(text.encode())


def codes_of(code: CodeType) -> list[CodeType]:
    """A piece of code, and those inside it."""
    codes = [code]
    for outer in codes:
        codes += [constant for constant in outer.co_consts if isinstance(constant, CodeType)]
    return codes


def bytecode_of(code: CodeType) -> str:
    """A text for what a piece of code does. Names of variables are there too: callers can give arguments by name."""
    codes = codes_of(code)
    names = [(piece.co_name, piece.co_names, piece.co_varnames, piece.co_freevars) for piece in codes]
    constants = [constant for piece in codes for constant in piece.co_consts if not isinstance(constant, CodeType)]
    return f"{[piece.co_code for piece in codes]} {names} {constants}"


# -- folders -------------------------------------------------------------------------------------


@functools.cache
def cache_root() -> Path | None:
    """The folder that compiled code is written to, or None.

    These are tried in turn: the folders of ``KVPOOL_CACHE_DIR``, below ``NUMBA_CACHE_DIR``, the user's cache folder, a
    private folder of the temporary directory. A place that others can write to is passed over, even if the user chose
    it, and a warning in the log names it.
    """
    return next((folder for folder in _places() if _can_be_written(folder)), None)


@functools.cache
def _read_folders() -> list[Path]:
    """Where compiled code is looked for: where it is written, then the other folders of ``KVPOOL_CACHE_DIR``, so that
    an image can have one that is read only."""
    root = cache_root()
    others = [folder for folder in _chosen() if folder != root and os.path.lexists(folder) and _is_trusted(folder)]
    return others if root is None else [root, *others]


def _chosen() -> list[Path]:
    """The folders of ``KVPOOL_CACHE_DIR``, a list like that of ``PATH``."""
    return [Path(name).absolute() for name in os.environ.get("KVPOOL_CACHE_DIR", "").split(os.pathsep) if name]


def _places() -> Iterator[Path]:
    """Places for compiled code, best first."""
    yield from _chosen()
    if getattr(config, "CACHE_DIR", ""):
        yield Path(config.CACHE_DIR).absolute() / PACKAGE
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if user_cache.is_absolute() and user_cache.parent.is_dir():
        yield user_cache / PACKAGE
    with suppress(OSError):
        yield Path(tempfile.gettempdir()) / f"{PACKAGE}-{os.getuid()}"


def _can_be_written(folder: Path) -> bool:
    with suppress(OSError):
        _make_private(folder)
        return os.access(folder, os.W_OK) and _is_trusted(folder)
    return False


def _make_private(folder: Path) -> None:
    """Make a folder, and its missing parents, with access for this user only, whatever the umask is."""
    if not folder.parent.is_dir():
        _make_private(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


@functools.cache
def _is_trusted(folder: Path) -> bool:
    """Whether only root and this user can write to a folder, or put another one in its place: its name is looked up
    again for each file, also behind symbolic links."""
    around = {*folder.parents, *folder.resolve().parents}
    kept = all(_only_ours(os.stat(parent), stat.S_ISVTX) and _is_ours(os.lstat(parent)) for parent in around)
    status = os.lstat(folder)
    if kept and stat.S_ISDIR(status.st_mode) and _only_ours(status):
        return True
    _log.warning("%s is not used for compiled code: others can write or rename it, or it is somebody else's", folder)
    return False


def _only_ours(status: os.stat_result, unless: int = 0) -> bool:
    """Whether only root and this user can have written to what was found, or rename what is in it."""
    return _is_ours(status) and (not status.st_mode & 0o022 or bool(status.st_mode & unless))


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


# -- files ---------------------------------------------------------------------------------------


def read(name: str) -> bytes | None:
    """What was written under a name, from the first folder that has it undamaged. A file that others could write is
    left out: they could as long as its folder was theirs too."""
    for folder in _read_folders() if name else ():
        with suppress(OSError), open(folder / f"{name}.nbc", "rb") as file:
            mark, content = file.read(32), file.read()
            if mark == digest(name.encode() + content).encode() and _only_ours(os.fstat(file.fileno())):
                with suppress(OSError):
                    os.utime(file.fileno())
                return content
    return None


def write(name: str, content: bytes) -> None:
    """Keep the code with this name. A file that is not whole yet is damaged for others. They wait for the lock then."""
    root = cache_root()
    with suppress(OSError):  # caching is never worth failing a call
        if root is not None:
            path = root / f"{name}.nbc"
            path.unlink(missing_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(digest(name.encode() + content).encode() + content)


@contextmanager
def claimed(name: str) -> Iterator[None]:
    """A context in which no other process compiles the code with this name, as far as locks work there.

    It may wait, but not for ever: a process that was stopped keeps its locks. Callees are compiled inside their
    callers, so two processes can wait for each other only if functions are recursive.
    """
    global _patience
    place, begin = int(digest(name.encode())[:15], 16), time.monotonic()
    with suppress(OSError):
        while not _locks(place) and _patience:
            waited = time.monotonic() - begin
            if waited > announcer.PATIENCE and not announcer.reported:
                announcer.report("waiting for another process, which compiles the same functions")
            if waited > _patience:
                _log.warning("stopped waiting: another process has been compiling %s for %.0f s", name, _patience)
                _patience = 0
            time.sleep(0.005)
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(_lock(), fcntl.LOCK_UN, 1, place)


def _locks(place: int) -> bool:
    """Take the lock at this place, unless another process has it. OSError where locks do not work."""
    with suppress(BlockingIOError, PermissionError):
        fcntl.lockf(_lock(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        return True
    return False


@functools.cache
def _lock() -> int:
    """The file with a lock for each name: a byte of it. Who opens it is about to write, so it drops old code first."""
    root = cache_root()
    if root is None:
        raise OSError("no folder for compiled code can be written")
    for path in _by_use(root)[:-_KEPT]:
        path.unlink(missing_ok=True)
    return os.open(root / "lock", os.O_RDWR | os.O_CREAT, 0o600)


REPLAY, WARM_UP = 270, 630
"""How many functions a first replay and a warm-up compile."""
_LOOPS = 5
"""How often the loop of ``_seconds`` runs in the time that a function takes, as measured."""


class _Announcer:
    """Reports once that functions are being compiled, and about how long that takes: for a command at once, else after
    ``PATIENCE`` seconds of compiling, or of waiting for another process that compiles one of them. A terminal also gets
    a progress bar. It has no lock, since functions are compiled under a lock."""

    PATIENCE = 2.0
    speaks = False
    """Whether this is a command, which reports at once and on standard error."""
    compiled = 0
    _expected = REPLAY
    _helpers: Callable[[], int] = staticmethod(lambda: 1)
    _total = 0
    """How many functions are compiled in all, this far and from here on; 0 before it was asked."""
    _update: Callable[[int], Any] | None = None
    """Moves the bar. Only while something is being compiled."""
    reported = False
    _spent = 0.0
    """Seconds of all earlier compilations."""
    _begin = 0.0
    """When the present one began."""

    @contextmanager
    def expecting(self, functions: int, helpers: Callable[[], int]) -> Iterator[None]:
        """A context in which about so many functions are compiled, if none is kept. ``helpers`` lets other processes
        help, when the first one is compiled, and says how many processes compile then."""
        before = self._expected, self._helpers
        self._expected, self._helpers, self._total = functions, helpers, 0
        try:
            yield
        finally:
            self._expected, self._helpers = before
            self._total = 0

    @contextmanager
    def compiling(self, stems: Callable[[], set[str]]) -> Iterator[None]:
        """A context around the compilation of one function and of its callees. ``stems``: how the names of all
        functions begin, as they are now."""
        outer = self._update
        try:
            with nullcontext(outer) if outer else self._begun(stems) as self._update:
                spent = self._spent + time.monotonic() - self._begin
                if not self.reported and (self.speaks or spent > self.PATIENCE):
                    root = cache_root()
                    kept = "in this process: no folder can keep it" if root is None else f"once; it is kept in {root}"
                    self.report(f"compiling, about {_seconds(self._total)} s, {kept}")
                yield
                self.compiled += 1
                self._update(1)
        finally:
            self._update = outer
            if outer is None:
                self._spent += time.monotonic() - self._begin

    def _begun(self, stems: Callable[[], set[str]]) -> AbstractContextManager[Callable[[int], Any]]:
        """What is shown from the first function on that is compiled for a caller, until it is ready."""
        self._begin = time.monotonic()
        missing = self._expected - _kept(self._expected, stems) if not self._total else 0
        self._total = max(self._total or self.compiled + missing // self._helpers(), self.compiled + 1)
        return shown_progress(self._total, " functions", initial=self.compiled)

    def report(self, what: str) -> None:
        """Report why the caller waits: on standard error for a command, and where no log is configured."""
        self.reported, line = True, f"{PACKAGE}: {what}"
        log = logging.getLogger("kvpool.common.jit.announcer")
        with suppress(OSError, ValueError):  # nobody listens: standard error is closed, or a pipe that has ended
            if log.hasHandlers() and not self.speaks:
                log.warning(line)
            elif sys.stderr is not None:
                say(line)


def _kept(most: int, stems: Callable[[], set[str]]) -> int:
    """How many files have code of functions as they are now, of those that were used last, at most so many."""
    root = cache_root()
    files = [] if root is None else _by_use(root)[-most:]
    current = stems() if files else set()
    return sum("-".join(file.name.split("-")[:2]) in current for file in files)


def _by_use(root: Path) -> list[Path]:
    """The files of compiled code, those that were used last at the end."""
    used_at = {}
    for path in root.glob("*.nbc"):
        with suppress(OSError):  # another process has dropped it meanwhile
            used_at[path] = path.lstat().st_mtime
    return sorted(used_at, key=used_at.__getitem__)


def _seconds(functions: int) -> int:
    """About how long this machine needs for so many functions beside its other work, from how long it needs for a short
    loop."""
    begin = time.monotonic()
    for number in range(60_000):
        hash((number, str(number)))
    return max(1, round((time.monotonic() - begin) * _LOOPS * functions))


announcer = _Announcer()

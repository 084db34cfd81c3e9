"""Where compiled code is kept: in folders that only this user can write to, since it is unpickled."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from numba.core import config

from kvpool.jit.sources import FOLDER, PACKAGE, digest_of

_KEPT_PER_MODULE = 8
"""How many versions of a module's sources are kept. Several checkouts share a folder; the last used are kept."""
_log = logging.getLogger(__name__)


@functools.cache
def module_folder(module: str) -> str:
    """The name of the folder with the compiled code of a module. Empty if the module is compiled anew in each process.

    The first call drops the folders of older sources of that module.
    """
    digest = digest_of(module)
    if not digest:
        return ""
    root = cache_root()
    if root is not None:
        try:
            os.utime(root / f"{module}-{digest}")
        except OSError:
            _drop_old(root, module)
    return f"{module}-{digest}"


def _drop_old(root: Path, module: str) -> None:
    """Drop all folders of a module but the last used, to which a new one will be added."""
    try:
        found = sorted(root.glob(f"{module}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:  # another process may be doing the same
        return
    for path in found[_KEPT_PER_MODULE - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


@functools.cache
def read_folders() -> list[Path]:
    """Where compiled code is looked for: where it is written, then each folder of ``KVPOOL_CACHE_DIR`` that nobody but
    root and this user can write to. So an image can have a folder that is read only."""
    root = cache_root()
    found = [] if root is None else [root]
    for folder in _chosen():
        if folder == root or not os.path.lexists(folder):
            continue
        if _is_trusted(folder):
            found.append(folder)
        else:
            _warn(folder)
    return found


@functools.cache
def _warn(folder: Path) -> None:
    """Tell once that a folder is passed over."""
    _log.warning("%s is not used for compiled code: others can write or rename it, or it is somebody else's", folder)


def _chosen() -> list[Path]:
    """The folders of ``KVPOOL_CACHE_DIR``, a list like that of ``PATH``."""
    return [Path(name).absolute() for name in os.environ.get("KVPOOL_CACHE_DIR", "").split(os.pathsep) if name]


@functools.cache
def cache_root() -> Path | None:
    """The first writable place for compiled code, or None.

    The places are tried in this order: the folders of ``KVPOOL_CACHE_DIR``, below ``NUMBA_CACHE_DIR``, in the user's
    cache folder, in the ``__pycache__`` of a source checkout, in a private folder of the temporary directory. So a
    checkout and an installation of the same sources share their compiled code.

    An installed copy never writes beside its own modules. ``pip uninstall`` would leave those files, and they would
    shadow a later editable install. Compiled code is unpickled. So a place that others can write to is skipped, even if
    the user chose it, and a warning in the log names it.
    """
    for root, guarded in _places():
        try:
            _make_private(root)
            if not os.access(root, os.W_OK):
                continue
            if os.name == "posix" and not (_is_ours(root) and (not guarded or _stays(root))):
                _warn(root)
                continue
            tempfile.TemporaryFile(dir=root).close()
        except OSError:
            continue
        return root
    return None


def _places() -> Iterator[tuple[Path, bool]]:
    """Places for compiled code, best first, and whether the folders around it must keep others from renaming it."""
    yield from ((folder, True) for folder in _chosen())
    chosen = getattr(config, "CACHE_DIR", "")
    if chosen:
        yield Path(chosen).absolute() / PACKAGE, True
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~")) / ".cache")
    if user_cache.is_absolute() and user_cache.parent.is_dir():
        yield user_cache / PACKAGE, True
    if next(FOLDER.parent.glob(f"{FOLDER.name}-*-info"), None) is None:
        # Not guarded: a user who can write beside the package's bytecode can run code without the cache.
        yield FOLDER / "__pycache__" / "jit", False
    try:
        temporary = tempfile.gettempdir()
    except OSError:
        return
    yield Path(temporary) / f"{PACKAGE}-{os.getuid() if hasattr(os, 'getuid') else 'cache'}", True


def _make_private(path: Path) -> None:
    """Make a folder, and its missing parents, with access for this user only, whatever the umask is."""
    if not path.parent.is_dir():
        _make_private(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _is_ours(path: Path) -> bool:
    """Whether only this user can write to a directory. It matters because unpickling cached code can run any code."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_trusted(path: Path) -> bool:
    """Whether only root and this user can write to a folder, or put another one in its place."""
    try:
        found = os.lstat(path)
        return stat.S_ISDIR(found.st_mode) and only_ours(found) and _stays(path)
    except OSError:
        return False


def only_ours(found: os.stat_result) -> bool:
    """Whether only root and this user can have written to what was found."""
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022


def _stays(path: Path) -> bool:
    """Whether no other user, except root, can rename a folder, or one that it is in, also behind symbolic links. The
    names are looked up again for each file."""
    return all(_keeps_entries(folder) for folder in {*path.parents, *path.resolve().parents})


def _keeps_entries(path: Path) -> bool:
    """Whether no other user, except root, can rename the files that this user has put into a directory, or has made the
    link that leads to it."""
    found, users = os.stat(path), (0, os.geteuid())
    kept = not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX)
    return kept and found.st_uid in users and os.lstat(path).st_uid in users

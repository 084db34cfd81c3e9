"""The sources of the package: what a module's machine code depends on, as a digest."""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

import llvmlite.binding
import numba
import numpy as np

FOLDER = Path(__file__).resolve().parents[1]
PACKAGE = __name__.partition(".")[0]
_VERSIONS = (
    f"{sys.version_info[:2]} {getattr(sys, 'abiflags', '')} {numba.__version__} {np.__version__} {llvmlite.__version__}"
)


class Source(NamedTuple):
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


def read_sources() -> dict[str, Source]:
    """All sources of the package, by their path inside it. Empty if they cannot be read, as in a zip archive."""
    # Any mention of a module counts, also one in a string. An import of the bare package or a relative import may reach
    # any module.
    mention = re.compile(rf"{PACKAGE}((?:\.\w+)+)")
    everything = re.compile(rf"import\s[^\n]*\b{PACKAGE}\b|from\s+(?:{PACKAGE}\s|\.)")
    sources = {}
    try:
        for path in FOLDER.rglob("*.py"):
            stamp, content = _stamp(path), path.read_bytes()
            text = content.decode(errors="replace")
            names = {*mention.findall(text), *([""] if everything.search(text) else [])}
            sources[path.relative_to(FOLDER).as_posix()] = Source(_content_digest(content), frozenset(names), stamp)
    except OSError:
        return {}
    return sources


# The sources are read when this module is imported, before the modules that use it. So the digests describe the code
# that was imported and is compiled later, even if the files change in between.
SOURCES = read_sources()


def _named(name: str, sources: dict[str, Source], folders: set[str]) -> list[str]:
    """The files that a dotted name may stand for: a module, all files of a folder, or none. ``""`` is the package."""
    parts = name.split(".")[1:]
    folder = ""
    for part in parts:
        if f"{folder}{part}.py" in sources:
            return [f"{folder}{part}.py"]
        if f"{folder}{part}/" not in folders:
            break
        folder += f"{part}/"
    return [path for path in sources if path.startswith(folder)] if folder or not parts else []


def visible(module: str, sources: dict[str, Source]) -> set[str]:
    """The files that a module's code can depend on. Empty if the module does not belong to the package."""
    package, _, inner = module.partition(".")
    path = inner.replace(".", "/")
    own = {f"{path}.py", f"{path}/__init__.py".lstrip("/")} & sources.keys() if package == PACKAGE else set()
    folders = {f"{parent.as_posix()}/" for path in sources for parent in Path(path).parents}
    found: set[str] = set()
    pending = [*own]
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending.extend(file for name in sources[path].names for file in _named(name, sources, folders))
    return found


def digest_of(module: str) -> str:
    """Hex digest of everything that determines the machine code of a module. Empty if that cannot be known."""
    files = _visible_now(module)
    if not files:
        return ""
    parts = [f"{path}\0{SOURCES[path].digest.hex()}" for path in sorted(files)]
    return hashlib.blake2b("\0".join([_VERSIONS, *parts]).encode(), digest_size=16).hexdigest()


@functools.cache
def _visible_now(module: str) -> set[str]:
    return visible(module, SOURCES)


def edited(module: str) -> bool:
    """Whether a file that a module's code can depend on has changed since ``kvpool.jit`` was imported."""
    for path in _visible_now(module):
        try:
            known = SOURCES[path]
            if _stamp(FOLDER / path) != known.stamp and _content_digest((FOLDER / path).read_bytes()) != known.digest:
                return True
        except OSError:
            return True
    return False

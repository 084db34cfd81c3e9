"""Builds the recorder, runs programs under it, and reads its log."""

from __future__ import annotations

import enum
import fcntl
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOURCE = HERE / "recorder.c"
CACHE = "KVPOOL_CRASH_CACHE"
"""Environment variable: where the recorder is built, instead of ``~/.cache/kvpool-crash``."""
OPTIONS = ("-std=gnu11", "-O2", "-Wall", "-fPIC", "-shared")
HEAD = struct.Struct("=IIQQqqII")


class Missing(Exception):
    """What is missing to record, in words."""


class Kind(enum.IntEnum):
    """As in ``recorder.c``."""

    CREATE = 1
    MKDIR = 2
    LINK = 3
    RENAME = 4
    UNLINK = 5
    WRITE = 6
    TRUNCATE = 7
    ALLOCATE = 8
    SYNC = 9
    SYNC_ALL = 10
    MAP = 11
    MARK = 12
    END = 13
    UNKNOWN = 14


@dataclass(frozen=True)
class Record:
    """One record of the log. ``file`` is an inode number. ``length`` of an END is the result of the call."""

    kind: Kind
    flags: int
    call: int
    file: int
    offset: int
    length: int
    path: str
    data: bytes

    def mark(self) -> dict[str, Any]:
        """What the recorded program has said."""
        note: dict[str, Any] = json.loads(self.data)
        return note


def recorder() -> Path:
    """The recorder as a library, built once for each version of its source. Raises Missing."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux" or not SOURCE.exists():
        raise Missing("system calls are recorded on Linux, by a library that needs a C compiler (cc)")
    base = Path(os.environ.get(CACHE) or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    folder = base / "kvpool-crash"
    library = folder / f"recorder-{hashlib.sha256(SOURCE.read_bytes() + repr(OPTIONS).encode()).hexdigest()[:16]}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(".part")
            command = [compiler, *OPTIONS, str(SOURCE), "-o", str(part), "-ldl", "-lpthread"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Missing(f"the recorder does not compile: {done.stderr[-2000:]}")
            part.rename(library)
    return library


def record(
    programs: Iterable[Sequence[str]], folder: Path, log: Path, pause_us: int = 0, skip: str = ""
) -> list[Record]:
    """Run Python programs, each given as arguments of the interpreter, one after the other, and record what they do to
    the folder. One that kills itself is not an error. ``skip``: syncs of files whose names end so do nothing. Raises
    Missing."""
    library = recorder()
    added = {"LD_PRELOAD": str(library), "CRASH_FOLDER": str(folder), "CRASH_LOG": str(log), "CRASH_SKIP": skip}
    environment: Mapping[str, str] = os.environ | added | {"CRASH_PAUSE_US": str(pause_us)}
    for program in programs:
        command = [sys.executable, *program]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode in (0, -9), f"{program} ended with {done.returncode}:\n{done.stderr}"
    records = read(log) if log.exists() else []
    if not any(entry.kind == Kind.WRITE for entry in records):
        raise Missing("nothing was recorded: this Python or its SQLite makes system calls without the C library")
    return records


def read(log: Path) -> list[Record]:
    data, at, records = log.read_bytes(), 0, []
    while at < len(data):
        kind, flags, call, file, offset, length, path_bytes, data_bytes = HEAD.unpack_from(data, at)
        at += HEAD.size
        path = data[at : at + path_bytes].decode()
        at += path_bytes
        records.append(Record(Kind(kind), flags, call, file, offset, length, path, data[at : at + data_bytes]))
        at += data_bytes
    return records

"""Main memory: how it is allocated, how much of it this process can still have, and how other processes attach it."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Uint8s
from kvpool.errors import PoolClosed

ALIGNMENT = 4096
"""In bytes. Every allocation starts at a multiple of it, so that a block of whole pages lies on whole pages."""


def allocate_ram(nbytes: int) -> Uint8s:
    """Allocate zeroed uint8[nbytes] that starts at a multiple of ``ALIGNMENT``. Its pages are not touched. Raises
    MemoryError."""
    try:
        raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    except ValueError:  # more than an array may have
        raise MemoryError(f"{nbytes} bytes are more than this system can address") from None
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def available_ram(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated before the system swaps or kills this process, or None if that is unknown.

    This is the smaller of ``MemAvailable`` and what the limits of all control groups (v1 or v2) above this process
    leave. Linux only. ``root`` is where ``proc`` and ``sys`` are found.
    """
    available = _number(root / "proc/meminfo", "MemAvailable:")
    return None if available is None else min([available * 1024, *_control_group_rooms(root)])


def _number(path: Path, name: str) -> int | None:
    """The number after a name in a file of the system, where a line begins with it."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return next((int(words[1]) for words in lines if words[:1] == [name]), None)
    except (OSError, ValueError, IndexError):
        return None


def _control_group_rooms(root: Path) -> Iterator[int]:
    """The bytes that each limited control group above this process has left."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if "memory" in controllers.split(","):
            yield from _rooms(
                mounts / "memory", group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )
        elif hierarchy == "0":
            for mount in (mounts, mounts / "unified"):
                yield from _rooms(mount, group, "memory.max", "memory.current", "inactive_file")


def _rooms(mount: Path, group: str, limit_file: str, usage_file: str, cache_field: str) -> Iterator[int]:
    # A container may see its group under a path of the host that does not exist in it. Then the limit is at the root of
    # its own mount.
    path = PurePosixPath(group.lstrip("/"))
    for folder in (path, *path.parents):
        directory = mount / folder
        try:
            limit = (directory / limit_file).read_text().strip()
            if limit != "max":
                # The group can drop its cached files at once.
                cached = _number(directory / "memory.stat", cache_field) or 0
                yield max(0, int(limit) - int((directory / usage_file).read_text()) + cached)
        except (OSError, ValueError):
            continue


# A process that attaches the memory cannot shrink it. A page that is gone would end every process that reads it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MainMemory(NamedTuple):
    """Where a process has shared main memory: its file descriptor there, and the name of the file, which is unique."""

    fd: int
    name: str


class GpuMemory(NamedTuple):
    """Where a process has memory of a GPU: the UUID of the GPU, CUDA's handle of the allocation, and the offset in it,
    bytes."""

    uuid: bytes
    handle: bytes
    offset: int


class SharedMemory:
    """Zeroed memory for ``array`` uint8[nbytes], at the start of a page, which other processes can open by ``handle``.

    It is a file without a path (memfd) of mode 0600. The kernel lets processes of the same user open it through /proc
    while this process lives. Nothing remains when this process ends, in whatever way. The size is sealed. A forked
    child does not inherit the mapping, because it would write into the memory of this process. Nothing else is mapped
    at that address there, so an access in the child ends the child.

    ``close`` keeps other processes from opening it from then on. The pages live until the last view in the last process
    is gone. Not thread-safe. Raises MemoryError.
    """

    def __init__(self, nbytes: int) -> None:
        name = f"kvpool-{secrets.token_hex(16)}"
        try:
            fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise MemoryError(f"the system gives no shared memory: {error}") from error
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            self.array = _map(fd, nbytes, inherited=False)
        except (OSError, OverflowError, ValueError) as error:
            os.close(fd)
            raise MemoryError(f"the system gives no {nbytes} bytes of shared memory: {error}") from error
        self.handle, self.close = MainMemory(fd, name), weakref.finalize(self.array, os.close, fd)


_given: dict[int, tuple[MainMemory, Callable[[], object]]] = {}
"""By the identity of its array: the shared memory that devices have allocated and not freed."""


def allocate_shared(nbytes: int) -> Uint8s:
    """Allocate zeroed uint8[nbytes], whose handle ``handle_of`` returns. Its pages are not touched. Raises
    MemoryError."""
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    memory = SharedMemory(nbytes)
    key = id(memory.array)
    _given[key] = memory.handle, memory.close
    weakref.finalize(memory.array, _given.pop, key, None)
    return memory.array


def handle_of(array: Uint8s) -> MainMemory:
    """Where other processes find an array of ``allocate_shared``. Raises ValueError for any other."""
    if id(array) not in _given:
        raise ValueError(
            "memory: expected what a pool with shared=True took itself, which alone can be shared, got other memory"
        )
    return _given[id(array)][0]


def free_shared(array: Any) -> None:
    """Let no process open the array from now on, if ``allocate_shared`` gave it."""
    if id(array) in _given:
        _given.pop(id(array))[1]()


def is_there(pid: int, handle: MainMemory) -> bool:
    """Whether a process lives and still has this memory. Raises PermissionError for a process of another user."""
    try:
        return os.readlink(_path(pid, handle)) == _link(handle)
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_shared(pid: int, handle: MainMemory, nbytes: int) -> Uint8s:
    """Map shared memory of a process: uint8[nbytes], which exists until the last view is gone.

    Raises PoolClosed where the memory is gone, PermissionError for a process of another user, ValueError for another
    size.
    """
    try:
        # The link is read first, since opening a file of another kind may have an effect.
        if os.readlink(_path(pid, handle)) != _link(handle):
            raise FileNotFoundError
        fd = os.open(_path(pid, handle), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, ProcessLookupError):
        raise PoolClosed(f"process {pid} has given this memory back, or has ended") from None
    try:
        if os.readlink(_path(os.getpid(), MainMemory(fd, handle.name))) != _link(handle):
            raise PoolClosed(f"process {pid} has given this memory back, or has ended")
        size = os.fstat(fd).st_size
        if size != nbytes or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError(f"description: expected exactly {nbytes} bytes in {handle.name}, and sealed, got {size}")
        return _map(fd, nbytes)
    finally:
        os.close(fd)


def _path(pid: int, handle: MainMemory) -> str:
    return f"/proc/{pid}/fd/{handle.fd}"


def _link(handle: MainMemory) -> str:
    """The target of the link that stands for a descriptor."""
    return f"/memfd:{handle.name} (deleted)"


def _map(fd: int, nbytes: int, *, inherited: bool = True) -> Uint8s:
    mapping = mmap.mmap(fd, nbytes)
    if not inherited:
        _not_inherited[mapping] = nbytes
        mapping.madvise(mmap.MADV_DONTFORK)
    return in_huge_pages(mapping)


def in_huge_pages(mapping: mmap.mmap) -> Uint8s:
    """The bytes of a mapping, which is asked to have huge pages. Some kernels have none."""
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


# The mappings that children do not inherit, with their bytes. The objects are inherited. When they are collected in a
# child, they unmap their addresses, whatever has come to be there.
_not_inherited: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
_NO_ACCESS, _PLACE = 0, 0x20 | 0x02 | 0x4000 | 0x100000
"""PROT_NONE; MAP_ANONYMOUS, MAP_PRIVATE, MAP_NORESERVE and MAP_FIXED_NOREPLACE"""
_mmap = ctypes.CDLL(None).mmap
_mmap.restype, _mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]


def _after_fork() -> None:
    """In a child: keep the addresses of the mappings reserved, without memory."""
    for mapping, nbytes in list(_not_inherited.items()):
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        if _mmap(address, nbytes, _NO_ACCESS, _PLACE, -1, 0) != address:
            # Something is there already. Then the object must never end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_after_fork)

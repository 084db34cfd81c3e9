"""PinnedMemory: a range of main memory that a driver has locked in place, so that a device can read and copy it while
the caller goes on."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.device.ram import available_ram

SYSFS = Path("/sys")
CHUNK_BYTES = 1 << 30
"""How many bytes are registered at once. Some drivers refuse more, and progress could not be shown."""
_TOUCHED_BYTES = 64 << 20
_QUIET_SECONDS = 2

Progress = Callable[[int], object]


class Registrar(Protocol):
    """The part of the CUDA runtime that pins memory. It raises its own errors."""

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin whole pages."""

    def hostUnregister(self, address: int) -> None:
        """Unpin them."""


class _Registered:
    """A mapping, and the addresses of its registered chunks. The module refers to it until no chunk is registered: if
    the system gave memory that a driver believes to be pinned to another use, copies would miss that."""

    def __init__(self, array: NDArray[np.uint8], registrar: Registrar) -> None:
        self.array, self.addresses = array, list[int]()
        self._registrar = registrar
        _registered.add(self)

    def register(self, address: int, nbytes: int) -> None:
        self._registrar.hostRegister(address, nbytes, 0)
        self.addresses.append(address)

    def unregister(self) -> None:
        """Unregister all chunks. If the driver refuses some, the others are still tried, and the first error is
        raised."""
        errors, left = [], []
        while self.addresses:
            address = self.addresses.pop()
            try:
                self._registrar.hostUnregister(address)
            except Exception as error:
                errors.append(error)
                left.append(address)
        self.addresses = left
        if errors:
            raise errors[0]
        _registered.discard(self)


_registered: set[_Registered] = set()


def _let_go(registered: _Registered) -> None:
    """Unregister memory that nobody has freed."""
    with suppress(Exception):
        registered.unregister()


class PinnedMemory:
    """Zeroed memory for ``array`` uint8[nbytes], at the start of a page. ``registrar`` has registered all of it.

    The memory is one range, but it is registered in chunks of ``chunk_bytes``, whole pages (default: ``CHUNK_BYTES``).
    A copy must not cross from one chunk into the next. ``take`` returns zeroed memory at the start of a page; without
    it the memory is private memory of the system. With ``kept``, the memory of ``take`` has a content, which stays. The
    threads that touch the pages run on ``processors``, if this process may use any of them.

    After ``free`` the memory is no longer pinned. It exists until the last view of ``array`` is gone. If nobody calls
    ``free``, it happens when nobody refers to this object any more. What a driver refuses to unregister stays mapped
    until the process ends.

    Not thread-safe. Raises MemoryError if the machine has no room or the driver refuses; nothing stays pinned then.
    """

    def __init__(
        self,
        nbytes: int,
        registrar: Registrar,
        *,
        chunk_bytes: int | None = None,
        processors: Collection[int] | None = None,
        take: Callable[[int], NDArray[np.uint8]] | None = None,
        kept: bool = False,
    ) -> None:
        self.chunk_bytes = CHUNK_BYTES if chunk_bytes is None else chunk_bytes
        # If a process touches more memory than there is, the system ends it instead of raising an error.
        room = None if kept else available_ram()
        if room is not None and nbytes > room:
            raise MemoryError(f"{nbytes} bytes of pinned memory are asked for, {room} can be taken ({limits()})")
        self.array, self._touch = (take or _map)(nbytes), _read if kept else _touch
        self._registered = _Registered(self.array, registrar)
        weakref.finalize(self, _let_go, self._registered).atexit = False
        try:
            self._pin(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, set(processors or ()) & os.sched_getaffinity(0))
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Unregister all of it. Nothing that uses it may be pending. A second call does nothing."""
        self._registered.unregister()

    def _pin(self, nbytes: int, near: set[int]) -> None:
        """Touch the pages on several threads, on the processors ``near`` if there are any. Register each chunk as soon
        as it is touched."""
        base, usable = self.array.ctypes.data, near or os.sched_getaffinity(0)
        count = max(1, min(len(usable), -(-nbytes // _TOUCHED_BYTES)))
        # This sets the affinity of the calling thread, not of the process.
        stay = partial(os.sched_setaffinity, 0, near) if near else None
        workers = ThreadPoolExecutor(count, "kvpool-touch", initializer=stay)
        with _progress(nbytes) as progress:
            try:
                touched = [workers.submit(self._touch, self.array, start) for start in range(0, nbytes, _TOUCHED_BYTES)]
                for start in range(0, nbytes, self.chunk_bytes):
                    size = min(self.chunk_bytes, nbytes - start)
                    _wait(touched[start // _TOUCHED_BYTES : -(-(start + size) // _TOUCHED_BYTES)])
                    self._register(base + start, size, nbytes)
                    progress(size)
            finally:
                workers.shutdown(cancel_futures=True)

    def _register(self, address: int, size: int, whole: int) -> None:
        try:
            self._registered.register(address, size)
        except Exception as error:
            done = len(self._registered.addresses) * self.chunk_bytes
            raise MemoryError(
                f"the driver pinned {done} of {whole} bytes and refused the next {size}: {error} ({limits()})"
            ) from error


def _map(nbytes: int) -> NDArray[np.uint8]:
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system gives no range of {nbytes} bytes: {error}") from None
    # A page that is shared with a forked process is copied when it is written. The driver would keep the other copy.
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # A kernel without huge pages.
    return np.frombuffer(mapping, np.uint8)


def _touch(array: NDArray[np.uint8], start: int) -> None:
    """Have the system allocate the pages now, by several threads here instead of one by one inside the driver."""
    array[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0


def _read(array: NDArray[np.uint8], start: int) -> None:
    """``_touch`` of memory that others may be using."""
    array[start : start + _TOUCHED_BYTES : mmap.PAGESIZE].max(initial=0)


def _wait(touched: list[Future[None]]) -> None:
    for one in touched:
        one.result()


def limits() -> str:
    """What may keep memory from being pinned here, in words."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    lockable = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes"
    room = available_ram()
    left = "unknown" if room is None else f"{room} bytes"
    return f"locked memory (ulimit -l): {lockable}; left by the system and its control groups: {left}"


def _progress(nbytes: int) -> AbstractContextManager[Progress]:
    """A function to call with the number of bytes that are pinned. It shows them if somebody watches and it takes
    long."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext(lambda count: None)
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(lambda count: None)

    @contextmanager
    def bar() -> Iterator[Progress]:
        with tqdm(
            total=nbytes,
            desc="pinning host memory",
            unit="B",
            unit_scale=True,
            delay=_QUIET_SECONDS,
            leave=False,
            file=sys.stderr,
        ) as shown:
            yield shown.update

    return bar()


def processors_near(pci: str, sysfs: Path = SYSFS) -> frozenset[int] | None:
    """The processors of the memory node of a PCI device ("0000:3B:00.0"). None if there is one node only, or if nobody
    knows."""
    nodes = sysfs / "devices/system/node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return None
        node = int((sysfs / "bus/pci/devices" / pci.lower() / "numa_node").read_text())
        found = _numbers((nodes / f"node{node}" / "cpulist").read_text())
    except (OSError, ValueError):
        return None
    return found or None


def _numbers(text: str) -> frozenset[int]:
    """The numbers that a list such as "0-3,8" means."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)

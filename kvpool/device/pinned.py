"""PinnedMemory: a range of main memory that a driver has locked in place, so that devices can copy and read it behind their callers."""

from __future__ import annotations

import mmap
import os
import resource
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvpool.device.ram import available_ram
from kvpool.layout import integer_argument

CHUNK_BYTES = 1 << 30
"""Registered at once: more is refused by some drivers, and nothing could be told about how far it is."""
_TOUCHED_BYTES = 64 << 20
_QUIET_SECONDS = 2

Progress = Callable[[int], object]


class Registrar(Protocol):
    """The part of the CUDA runtime that pins memory. Errors are its own."""

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        """Pin whole pages."""

    def hostUnregister(self, address: int) -> None:
        """Undo it."""


class PinnedMemory:
    """Zeroed memory for ``array`` uint8[nbytes], at the start of a page, of which ``registrar`` has registered all.

    The range is one, however many chunks it is registered in: a copy must not cross from one chunk into the next, at multiples of
    ``chunk_bytes`` (default: ``CHUNK_BYTES``). Memory that is given back is no longer pinned; it is there until the last view of
    ``array`` is gone.

    Not thread-safe. Raises MemoryError, with nothing left pinned, where the machine has no room or the driver refuses.
    """

    def __init__(self, nbytes: int, registrar: Registrar, *, chunk_bytes: int | None = None) -> None:
        nbytes = integer_argument("nbytes", nbytes, 0, sys.maxsize - mmap.PAGESIZE)
        self.chunk_bytes = CHUNK_BYTES if chunk_bytes is None else integer_argument("chunk_bytes", chunk_bytes, mmap.PAGESIZE, sys.maxsize)
        if self.chunk_bytes % mmap.PAGESIZE:
            raise ValueError(f"chunk_bytes={chunk_bytes}: a multiple of {mmap.PAGESIZE} is needed")
        self._registrar = registrar
        self._registered: list[int] = []
        # Touching more than there is ends the process instead of raising.
        room = available_ram()
        if room is not None and nbytes > room:
            raise MemoryError(f"{nbytes} bytes of pinned memory are asked for, {room} can be taken ({limits()})")
        self.array = _map(nbytes)
        try:
            self._pin(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        """Have the driver let go of all of it. Nothing that uses it may be under way. Freeing twice is fine."""
        errors = []
        while self._registered:
            try:
                self._registrar.hostUnregister(self._registered.pop())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _pin(self, nbytes: int) -> None:
        """Touch the pages on several threads, and register each chunk as soon as it is there."""
        base = self.array.ctypes.data
        workers = ThreadPoolExecutor(max(1, min(len(os.sched_getaffinity(0)), -(-nbytes // _TOUCHED_BYTES))), "kvpool-touch")
        with _progress(nbytes) as progress:
            try:
                touched = [workers.submit(_touch, self.array, start) for start in range(0, nbytes, _TOUCHED_BYTES)]
                for start in range(0, nbytes, self.chunk_bytes):
                    size = min(self.chunk_bytes, nbytes - start)
                    _wait(touched[start // _TOUCHED_BYTES : -(-(start + size) // _TOUCHED_BYTES)])
                    self._register(base + start, size, nbytes)
                    progress(size)
            finally:
                workers.shutdown(cancel_futures=True)

    def _register(self, address: int, size: int, whole: int) -> None:
        try:
            self._registrar.hostRegister(address, size, 0)
        except Exception as error:
            done = len(self._registered) * self.chunk_bytes
            raise MemoryError(f"the driver pinned {done} of {whole} bytes and refused the next {size}: {error} ({limits()})") from error
        self._registered.append(address)


def _map(nbytes: int) -> NDArray[np.uint8]:
    if nbytes == 0:
        return np.zeros(0, np.uint8)
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system gives no range of {nbytes} bytes: {error}") from None
    # A page that is shared with a forked process is copied when it is written, and the driver would go on with the other copy.
    mapping.madvise(mmap.MADV_DONTFORK)
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # A kernel without huge pages.
    return np.frombuffer(mapping, np.uint8)


def _touch(array: NDArray[np.uint8], start: int) -> None:
    """Have the system give the pages now: here, by several threads, and not one by one inside the driver."""
    array[start : start + _TOUCHED_BYTES : mmap.PAGESIZE] = 0


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
    """What to call with bytes that are pinned; shows them where somebody watches and it takes long."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext(lambda count: None)
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext(lambda count: None)

    @contextmanager
    def bar() -> Iterator[Progress]:
        with tqdm(
            total=nbytes, desc="pinning host memory", unit="B", unit_scale=True, delay=_QUIET_SECONDS, leave=False, file=sys.stderr
        ) as shown:
            yield shown.update

    return bar()

"""Blocks of one size that an engine keeps in a store, by calls that wait. The bytes go through rows of our own memory.

An engine may use its memory again as soon as a call has returned. A store that hangs may still write to the rows of a
load then. So a load ends in a row of ours, and is copied to the engine only after its bytes were found to be right.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.arrays.layout import integer_argument
from kvpool.entry.arguments import text_argument
from kvpool.hostcache.identity import ModelIdentity
from kvpool.stores import jobs
from kvpool.stores.jobs import Job
from kvpool.stores.queue import StoreQueue, StoreStats
from kvpool.stores.seals import BlockNames
from kvpool.stores.store import OK, Bytes, Rows, Store
from kvpool.stores.store_health import StoreHealth
from kvpool.stores.urls import bytes_argument, open_store

log = logging.getLogger("kvpool.engines")

PART = "{part}"
SHARED = ("mooncake", "peer")
"""Kinds of stores that several processes can have open at a time."""
_ALIGNMENT = 4096
_LONGEST_S = 3600.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True)
class StoreOptions:
    """The options of a store, as an engine's configuration has them."""

    store: str
    """``disk:/var/kv/{part}?capacity=100GiB`` or another text that ``open_store`` takes. ``{part}`` is the name of what
    needs a store of its own."""
    revision: str
    """The revision or a digest of the model's weights."""
    staging: int = 256 << 20
    """Bytes of memory for the rows of one part, at least two blocks."""
    deadline: float = 5.0
    """Seconds that a call may take."""
    kv_dtype: str = ""
    """The type of the elements, where that of the engine's memory does not name it."""

    @classmethod
    def of(cls, options: Mapping[str, Any], others: Collection[str] = ()) -> StoreOptions:
        """The options in a mapping, which may also have the keys ``others``. Raises TypeError or ValueError."""
        names = ("store", "revision", "kv_dtype", "staging", "deadline")
        unknown = sorted(set(options) - {*names, *others})
        if unknown:
            raise ValueError(f"unknown options {', '.join(unknown)}: accepted are {', '.join((*names, *others))}")
        for name in ("store", "revision"):
            if not text_argument(name, options.get(name, "")):
                raise ValueError(f"{name} is missing: {_NEEDED[name]}")
        kv_dtype = text_argument("kv_dtype", options.get("kv_dtype", "")).strip()
        if kv_dtype == "auto":
            raise ValueError(f"kv_dtype='auto': {_NEEDED['kv_dtype']}")
        given = options.get("deadline", cls.deadline)
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= _LONGEST_S:
            raise ValueError(f"deadline={given!r:.80}: accepted are more than 0 and up to {_LONGEST_S:.0f} seconds")
        staging = bytes_argument("staging", options.get("staging", cls.staging))
        found = cls(options["store"], options["revision"], staging, given, kv_dtype)
        found.make("check")
        return found

    @property
    def kind(self) -> str:
        """``disk``, ``mooncake`` or another kind of store."""
        return self.store.partition(":")[0]

    def check_dtypes(self, dtypes: Iterable[Any]) -> None:
        """Raises ValueError where the types of memory do not say what its elements are, and nobody has said it.

        A floating-point type of PyTorch names the elements. Engines keep several 8-bit types as plain bytes.
        """
        plain = sorted({str(dtype) for dtype in dtypes if not dtype.is_floating_point})
        if plain and not self.kv_dtype:
            raise ValueError(f"kv_dtype is missing, and {', '.join(plain)} may be any type: {_NEEDED['kv_dtype']}")

    @property
    def separate(self) -> bool:
        """Whether several parts can have stores at a time."""
        return PART in self.store or self.kind in ("memory", *SHARED)

    def make(self, part: str) -> Store:
        """The store of a part, which is not opened yet. Raises ValueError, and ImportError, which names the extra."""
        return open_store(self.store.replace(PART, re.sub(r"[^\w.-]", "-", part)))


_NEEDED = {
    "store": "accepted is a text such as 'disk:/var/kv/{part}?capacity=100GiB'",
    "revision": "accepted is a text that tells these weights apart from all others, such as a commit or a digest",
    "kv_dtype": "accepted is a text that names the type of the KV's elements, such as 'fp8_e4m3' or 'fp8_e5m2'",
}


class StagedBlocks:
    """Blocks of one size in one store. Thread-safe.

    Parameters
    ----------
    store
        It is opened here, and closed by ``close``.
    block_bytes
        Bytes of a block.
    identity
        Whose KV this is.
    staging
        Bytes of memory for rows, at least two blocks. Loads have one half, and saves the other.
    deadline
        Seconds that a call may take. Copies to and from the engine come on top of it.

    Notes
    -----
    Calls never raise. What goes wrong is a block that was not found, loaded or saved. It is counted in ``troubles``,
    and logged once for each kind of trouble.

    A store from which nothing came in a call, because it failed or was late, is asked no more for 1 s, and then for
    twice as long each time it fails again, up to 60 s. Until then nothing is found. One call tries it then, and for
    the others it is still suspended. Saves are judged apart from the rest: a disk that is read-only still gives what it
    has. See ``StoreHealth``.

    The constructor raises what ``StoreQueue`` raises.
    """

    def __init__(self, store: Store, block_bytes: int, identity: ModelIdentity, *, staging: int, deadline: float):
        size = integer_argument("block_bytes", block_bytes, 1, 1 << 40)
        rows = max(2, staging // size)
        self._queue = StoreQueue(store, _aligned(rows, size), identity, report=False)
        self._rows = {jobs.LOAD: _Rows(range(rows // 2)), jobs.SAVE: _Rows(range(rows // 2, rows))}
        self.deadline = deadline
        """Seconds that a call may take. It may be changed."""
        self._generation = b""
        self._lock = threading.Lock()
        self._health = StoreHealth(1, _FIRST_PAUSE_S, probe_seconds_max=_LONGEST_PAUSE_S, clock=self._queue.now)
        self.troubles: Counter[tuple[str, str]] = Counter()
        """Blocks by kind of job and by what went wrong."""

    @property
    def block_bytes(self) -> int:
        return self._queue.block_bytes

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Which blocks the store says that it has."""
        found = [False] * len(names)
        with self._watched(jobs.FIND, len(names)) as usable:
            if usable:
                job = self._queue.find(self._keys(names), deadline=self._queue.now() + self.deadline)
                job.wait()
                self._judge(job)
                found[:] = (job.codes == OK).tolist()
        return found

    def load(self, names: Sequence[bytes], put: Callable[[int, Bytes], None]) -> list[bool]:
        """Load blocks. ``put(place, row)`` gets the bytes uint8[block_bytes] of each block that came, and copies them:
        the row is used again. Returns which blocks came."""
        return self._staged(jobs.LOAD, names, None, put)

    def save(self, names: Sequence[bytes], fill: Callable[[int, Bytes], None]) -> list[bool]:
        """Save blocks. ``fill(place, row)`` writes the bytes of a block to a row. Returns which blocks the store now
        has."""
        return self._staged(jobs.SAVE, names, fill, None)

    def forget(self, names: Sequence[bytes]) -> None:
        """Drop blocks. A store that is too slow does so after this has returned."""
        with self._watched(jobs.FORGET, len(names)) as usable:
            if usable:
                self._queue.forget(self._keys(names)).wait(self.deadline)

    def clear(self) -> bool:
        """Find no block any more that was saved until now, and have the store drop all blocks of this identity. Returns
        whether it has confirmed that within ``deadline``. If not, it is told again until ``close``, and saves nothing
        meanwhile. A process that opens the store later finds the blocks if it never confirms."""
        self._generation = os.urandom(16)
        try:
            job = self._queue.clear()
        except Exception as error:
            self._note(jobs.CLEAR, type(error).__name__, 1, str(error)[:200])
            return False
        job.wait(self.deadline)
        return job.ok > 0

    @property
    def suspended(self) -> bool:
        """Whether the store has failed and has not answered since, to save or for anything else."""
        return self._health.suspended() or self._health.suspended(writes=True)

    def resume(self) -> None:
        """Ask a store again that is suspended."""
        self._health.resume()

    def drain(self, timeout: float) -> bool:
        """Wait until the store does nothing more, at most ``timeout`` seconds. Returns whether that is so."""
        return self._queue.drain(timeout)

    def stats(self) -> StoreStats:
        """Figures of the queue and its store."""
        return self._queue.stats()

    def close(self) -> None:
        """End all calls, and close the store. Waits at most 10 s. Logs how much went wrong, if anything did."""
        ended = self._queue.close()
        with self._lock:
            troubles = ", ".join(f"{kind} {what} {count}" for (kind, what), count in sorted(self.troubles.items()))
        if troubles:
            log.warning("kvpool: store %s: blocks by what went wrong: %s", self._queue.name, troubles)
        if not ended:
            log.warning("kvpool: store %s: a call hangs, and keeps its memory", self._queue.name)

    # -- inside --------------------------------------------------------------------------------------

    def _keys(self, names: Sequence[bytes]) -> BlockNames:
        return BlockNames(names, self._generation)

    def _staged(
        self, kind: str, names: Sequence[bytes], fill: Callable[[int, Bytes], None] | None,
        put: Callable[[int, Bytes], None] | None,
    ) -> list[bool]:  # fmt: skip
        """Load or save, as many blocks at a time as there are rows."""
        done = [False] * len(names)
        with self._watched(kind, len(names)) as usable:
            keys = self._keys(names if usable else ())
            deadline, start = self._queue.now() + self.deadline, 0
            while start < len(keys):
                left = deadline - self._queue.now()
                if left <= 0:
                    self._note(kind, "late", len(keys) - start)
                    break
                with self._rows[kind].lent(len(keys) - start, left) as lent:
                    if not len(lent.rows):
                        self._note(kind, "without rows", len(keys) - start)
                        break
                    own = slice(start, start + len(lent.rows))
                    for place, row in enumerate(lent.rows if fill else (), start):
                        fill(place, self._queue.memory[row])  # type: ignore[misc]
                    call = self._queue.save if kind == jobs.SAVE else self._queue.load
                    lent.job = job = call(keys[own], lent.rows, deadline=deadline)
                    job.wait()
                    self._judge(job)
                    for index in np.flatnonzero(job.codes == OK).tolist():
                        if put is not None:
                            put(start + index, self._queue.memory[lent.rows[index]])
                        done[start + index] = True
                    start = own.stop
        return done

    @contextmanager
    def _watched(self, kind: str, count: int) -> Iterator[bool]:
        """Whether the store is to be asked. Nothing is raised in the thread of an engine."""
        usable = count > 0 and self._usable(kind)
        if count and not usable:
            self._note(kind, "suspended", count, quiet=True)
        try:
            yield usable
        except Exception as error:
            self._note(kind, type(error).__name__, count, str(error)[:200])

    def _usable(self, kind: str) -> bool:
        """Whether the store may be asked now. Nothing is learnt from a job that forgets, so it is no probe."""
        if kind == jobs.FORGET:
            return not self._health.suspended(writes=True)
        return self._health.usable(writes=kind == jobs.SAVE, found=kind == jobs.LOAD)

    def _judge(self, job: Job) -> None:
        """Count what went wrong, and suspend a store from which nothing came."""
        for code, count in job.counts.items():
            if code not in ("ok", "absent"):
                self._note(job.kind, code, count, job.error)
        self._health.note(job)

    def _note(self, kind: str, trouble: str, count: int, detail: str = "", quiet: bool = False) -> None:
        with self._lock:
            first = (kind, trouble) not in self.troubles
            self.troubles[kind, trouble] += count
        if first and not quiet:
            text = "kvpool: store %s: %s of %d blocks: %s. More of this is counted, and not logged."
            log.warning(text, self._queue.name, kind, count, f"{trouble} {detail}".strip())


@dataclass(eq=False)
class _Lent:
    """Rows that a call uses. ``job`` may use them for longer."""

    rows: Rows
    job: Job | None = None

    @property
    def over(self) -> bool:
        return self.job is None or self.job.returned


class _Rows:
    """Rows that are free, lent to a call, or held by a job that has not returned."""

    def __init__(self, rows: Iterable[int]) -> None:
        self._free, self._lent = list(rows), 0
        self._held: list[_Lent] = []
        self._changed = threading.Condition()

    @contextmanager
    def lent(self, most: int, timeout: float) -> Iterator[_Lent]:
        """Up to ``most`` rows. There are none if all are held by jobs that hang, or lent to others for too long."""
        with self._changed:
            self._reclaim()
            self._changed.wait_for(lambda: self._free or not self._lent, timeout)
            own = _Lent(np.array(self._free[:most], np.int64))
            del self._free[:most]
            self._lent += 1
        try:
            yield own
        finally:
            with self._changed:
                self._lent -= 1
                self._held.append(own)
                self._reclaim()
                self._changed.notify_all()

    def _reclaim(self) -> None:
        """Take back the rows of jobs that have returned. The lock is held."""
        back, self._held = [one for one in self._held if one.over], [one for one in self._held if not one.over]
        self._free.extend(row for one in back for row in one.rows.tolist())


def _aligned(rows: int, size: int) -> Bytes:
    """Memory for rows, which begins at a page: direct I/O wants that."""
    raw = np.empty(rows * size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + rows * size].reshape(rows, size)

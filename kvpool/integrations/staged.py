"""Blocks of one size that an engine keeps in a store, by calls that wait. The bytes go through rows of our own memory.

An engine may use its memory again as soon as a call has returned. A store that hangs may still write to the rows of a
load then. So a load ends in a row of ours, and is copied to the engine only after its bytes were found to be right.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kvpool.common.arrays.layout import integer_argument
from kvpool.errors import PoolClosed, StoreBusy
from kvpool.hostcache.identity import ModelIdentity
from kvpool.integrations.options import EngineOptions, EnginePlugin
from kvpool.storage import store_requests as jobs
from kvpool.storage.choice import LoadAttempt, LoadOrCompute, LoadPolicy
from kvpool.storage.circuit_breaker import CircuitBreaker, TroubleLog
from kvpool.storage.mac import BlockNames
from kvpool.storage.staging_rows import row_padding_of, staging_rows
from kvpool.storage.store import OK, Bytes, Rows, Store
from kvpool.storage.store_requests import RequestKind, StoreRequest
from kvpool.storage.store_worker import StoreWorker
from kvpool.storage.urls import open_store

log = logging.getLogger("kvpool.integrations")

_NO_ROWS: Rows = np.empty(0, np.int64)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
Copy = Callable[[int, Bytes], None]


def check_store(options: EngineOptions, **names: str | int | None) -> None:
    """Raises what ``open_store`` raises for the store that the options name."""
    open_store(options.stores[0], part="check", **names)


def leading(present: Sequence[bool]) -> int:
    """Return how many elements before the first False are True."""
    return present.index(False) if False in present else len(present)


@dataclass(eq=False)
class _Hit:
    """Blocks that were found together. A hit that has lapsed delays no other, and its load returns nothing."""

    attempt: LoadAttempt
    loading: bool = False
    lapsed: bool = False

    def lapse(self, now: float, measured: bool = False) -> None:
        """End the attempt, once."""
        if not self.lapsed:
            self.attempt.end(now, measured=measured)
        self.lapsed = True


class _Hits:
    """Blocks that were found and are worth a load, until they have been loaded or are no longer wanted.

    A load may lose only what the policy allows it, so that a hit is not slower than the engine. Not all engines report
    that a hit is no longer wanted (``leave``), as when a request was aborted. So a hit whose load has not begun lapses
    when its load would be given up. Its names stay, with the deadline of a load. Thread-safe.
    """

    def __init__(self, policy: LoadPolicy, block_bytes: int, seconds: float) -> None:
        self._policy, self._block_bytes, self._seconds = policy, block_bytes, seconds
        self._open: dict[bytes, _Hit] = {}
        self._lock = threading.Lock()

    def worth(self, names: Sequence[bytes], now: float) -> int:
        """How many of these blocks, which a store has, are to be loaded."""
        with self._lock:
            again = self._of(names)
            for hit in {*self._open.values()}:
                if hit in again or hit.attempt.at + self._seconds < now:
                    self._end(hit, now)
                elif not hit.loading and hit.attempt.until < now:
                    hit.lapse(now)
            live = [hit.attempt.at for hit in self._open.values() if not hit.lapsed]
            waited = max(0.0, now - min(live, default=now))
            load = self._policy.choose(len(names), len(live) * self._block_bytes, 0.0, waited)
            found = _Hit(LoadAttempt(self._policy, load, max(1, load.blocks), now))
            self._open.update(dict.fromkeys(names[: load.blocks], found))
            return load.blocks

    def until(self, names: Sequence[bytes]) -> float:
        """When a load of these blocks, which begins now, is given up."""
        with self._lock:
            hits = self._of(names)
            for hit in hits:
                hit.loading = True
            return min([hit.attempt.until for hit in hits], default=math.inf)

    def loaded(self, came: Mapping[bytes, bool], began: float, now: float) -> None:
        """Which blocks have come, by a load that began then."""
        with self._lock:
            for hit in self._of(came):
                mine = [ok for name, ok in came.items() if self._open.get(name) is hit]
                if not hit.lapsed:
                    hit.attempt.note(sum(mine), began, now)
                if hit.lapsed or not all(mine) or hit.attempt.came == hit.attempt.items:
                    self._end(hit, now, measured=True)

    def leave(self, names: Sequence[bytes], now: float) -> None:
        """These blocks are no longer wanted. A hit of which nothing is wanted ends, and does not count for the
        store."""
        with self._lock:
            left = {hit for name in names if (hit := self._open.pop(name, None)) is not None}
            for hit in left - {*self._open.values()}:
                hit.lapse(now)

    def _of(self, names: Iterable[bytes]) -> set[_Hit]:
        return {self._open[name] for name in names if name in self._open}

    def _end(self, hit: _Hit, now: float, measured: bool = False) -> None:
        hit.lapse(now, measured)
        self._open = {name: other for name, other in self._open.items() if other is not hit}


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
    options
        ``staging_bytes``: memory for rows, at least two blocks. Half of them are kept for loads. ``find_seconds``,
        ``load_seconds`` and ``save_seconds``: how long such a call may take, and a drop as long as a save. Copies to
        and from the engine come on top of it. ``load``, ``compute_seconds``: whether hits are weighed against the
        engine, see ``find_hit``.

    Notes
    -----
    Calls never raise. What goes wrong is a block that was not found, loaded or saved. It is counted in ``troubles``,
    and logged by ``TroubleLog``.

    A store that returned nothing in a call, because it failed or was late, is suspended for 1 s, and then for twice as
    long each time it fails again, up to 60 s. Until then nothing is found. One call tries it then, and for the others
    it is still suspended. Saves have a state of their own: a disk that is read-only still returns what it has. See
    ``CircuitBreaker``.

    The constructor raises what ``StoreWorker`` raises.
    """

    def __init__(self, store: Store, block_bytes: int, identity: ModelIdentity, options: EngineOptions):
        size = integer_argument("block_bytes", block_bytes, 1, 1 << 40)
        row_padding = row_padding_of(store)
        rows = max(2, options.staging_bytes // (size + row_padding))
        whole = rows * (size + row_padding)
        memory = staging_rows(1, whole)[0, :whole].reshape(rows, size + row_padding)
        health = CircuitBreaker(1, _FIRST_PAUSE_S, probe_seconds_max=_LONGEST_PAUSE_S)
        weighs = options.load == "faster"
        # A load that the engine overtakes says nothing against its store.
        patience = options.load_seconds if weighs else 0.0
        self.worker = StoreWorker(
            store, memory, identity, health=health, patience=patience, staging=True, row_padding=row_padding
        )
        """Whether the store is asked, and its figures: ``worker.suspended``, ``worker.stats()``."""
        self.block_bytes = size
        self.seconds = {
            jobs.FIND: options.find_seconds,
            jobs.LOAD: options.load_seconds,
            jobs.SAVE: options.save_seconds,
        }
        """How long a call may take, by kind. It may be changed."""
        policy = LoadOrCompute(1 / options.compute_seconds, size, 1) if weighs else None
        self._hits = None if policy is None else _Hits(policy, size, options.load_seconds)
        self.declined = 0
        """Blocks that ``find_hit`` found and did not report, since the engine computes them sooner."""
        self._resets, self._lock = 0, threading.Lock()
        self._troubles = TroubleLog(store.name, log=log)
        self.troubles = self._troubles.counts
        """Blocks by kind of job and by what went wrong."""

    @classmethod
    def open(
        cls,
        plugin: EnginePlugin,
        options: EngineOptions,
        part: str,
        block_bytes: int,
        *,
        model: str,
        elements: str,
        layout: str,
        **names: str | int | None,
    ) -> StagedBlocks:
        """The blocks of one part of an engine's KV, in the store that the options have for it. ``elements`` is the type
        of the elements by the engine's word; ``names`` are for ``open_store``. Raises what that and the constructor
        raise."""
        identity = ModelIdentity(
            model=model,
            revision=str(options.weights),
            kv_dtype=f"{elements} {options.kv_dtype}".rstrip(),
            layout=layout,
            hash_version=f"{plugin.packages[0]} {plugin.version()}",
        )
        store = open_store(options.stores[0], part=part, **names)
        plugin.show_warnings()
        plugin.log.info("kvpool: %s: blocks of %d bytes are kept in the store %s", part, block_bytes, store.name)
        return cls(store, block_bytes, identity, options)

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Which blocks the store says that it has."""
        stored = [False] * len(names)
        with self._watched(jobs.FIND, len(names)) as usable:
            if usable:
                job = self.worker.find(BlockNames(names), deadline=self._deadline(jobs.FIND))
                stored[:] = (self._codes(job) == OK).tolist()
        return stored

    def find_hit(self, names: Sequence[bytes]) -> list[bool]:
        """Which blocks of a prompt, in its order, are there and worth a load: with ``load="faster"``, those of its
        beginning that are expected sooner than the engine computes them."""
        stored = self.find(names)
        if self._hits is None or not any(stored):
            return stored
        found = leading(stored)
        worth = self._hits.worth(names[:found], self.worker.now())
        self.declined += found - worth
        return stored if worth == found else [True] * worth + [False] * (len(names) - worth)

    def load(self, names: Sequence[bytes], put: Copy) -> list[bool]:
        """Load blocks. ``put(place, row)`` gets the bytes uint8[block_bytes] of each block that came, and copies them:
        the row is used again. Returns which blocks came."""
        hits, began = self._hits, self.worker.now()
        if hits is None:
            return self._staged(jobs.LOAD, names, put)
        done = self._staged(jobs.LOAD, names, put, hits.until(names))
        hits.loaded(dict(zip(names, done, strict=True)), began, self.worker.now())
        return done

    def leave(self, names: Sequence[bytes]) -> None:
        """Report that these blocks, which ``find_hit`` has found, are no longer wanted.

        Those that were not loaded no longer delay other hits. Takes no I/O.
        """
        if self._hits is not None:
            self._hits.leave(names, self.worker.now())

    def save(self, names: Sequence[bytes], fill: Copy) -> list[bool]:
        """Save blocks. ``fill(place, row)`` writes the bytes of a block to a row. Returns which blocks the store now
        has."""
        return self._staged(jobs.SAVE, names, fill)

    def forget(self, names: Sequence[bytes]) -> None:
        """Drop blocks. A store that is too slow does so after this has returned."""
        with self._watched(jobs.FORGET, len(names)) as usable:
            if usable:
                self._wait(self.worker.forget(BlockNames(names)), self.seconds[jobs.SAVE])

    def clear(self) -> bool:
        """Find no block any more that was saved until now, and have the store drop all blocks of this identity. Returns
        whether it has confirmed that within ``save_seconds``. If not, the drop is repeated until ``close``, and
        nothing is saved meanwhile. A process that opens the store later finds the blocks if it never confirms."""
        try:
            with self._lock:
                self._resets += 1
                job = self.worker.reset()
        except Exception as error:
            self._troubles.note(jobs.CLEAR, type(error).__name__, 1, str(error)[:200])
            return False
        self._wait(job, self.seconds[jobs.SAVE])
        if not self.worker.clears_prefix:
            self._troubles.note(jobs.CLEAR, "not supported", 1, "the store keeps the blocks, and they are not found")
            return False
        return job.ok > 0

    def close(self) -> None:
        """End all calls, and close the store. Waits at most 10 s. Logs how much went wrong, if anything did."""
        ended = self.worker.close()
        counts = sorted(dict(self.troubles).items())
        troubles = ", ".join(f"{kind} {what} {count}" for (kind, what), count in counts)
        if troubles:
            log.warning("kvpool: store %s: blocks by what went wrong: %s", self.worker.name, troubles)
        if not ended:
            log.warning("kvpool: store %s: a call hangs, and keeps its memory", self.worker.name)

    # -- inside --------------------------------------------------------------------------------------

    def _deadline(self, kind: RequestKind) -> float:
        return self.worker.now() + self.seconds[kind]

    def _staged(self, kind: RequestKind, names: Sequence[bytes], copy: Copy, until: float = math.inf) -> list[bool]:
        """Load or save, as many blocks at a time as there are rows. What has not come ``until`` then does not."""
        done, start = [False] * len(names), 0
        with self._watched(kind, len(names)) as usable:
            keys, deadline = BlockNames(names if usable else ()), min(self._deadline(kind), until)
            while start < len(keys):
                left = deadline - self.worker.now()
                rows = self.worker.take(kind, len(keys) - start, left) if left > 0 else _NO_ROWS
                if not len(rows):
                    self._troubles.note(kind, "late" if left <= 0 else "without rows", len(keys) - start)
                    break
                job = self._begin(kind, keys[start : start + len(rows)], rows, deadline, copy, start)
                try:
                    for index in np.flatnonzero(self._codes(job) == OK).tolist() if job is not None else ():
                        if kind == jobs.LOAD:
                            copy(start + index, self.worker.memory[rows[index]])
                        done[start + index] = True
                finally:
                    if job is not None:
                        self.worker.release(job)
                start += len(rows)
        return done

    def _begin(
        self, kind: RequestKind, keys: BlockNames, rows: Rows, deadline: float, copy: Copy, start: int
    ) -> StoreRequest | None:
        """Begin to load or save blocks through these rows. None if they have what was there before a reset. The rows
        are given back where no request has got them, and only there."""
        worker, resets = self.worker, self._resets
        try:
            for place, row in enumerate(rows if kind == jobs.SAVE else (), start):
                copy(place, worker.memory[row])
        except BaseException:
            worker.give_back(rows)
            raise
        with self._lock:
            if resets == self._resets:
                try:
                    if kind == jobs.SAVE:
                        return worker.save(keys, rows, deadline=deadline)
                    return worker.load(keys, rows, deadline=deadline, hold=True)
                except (PoolClosed, StoreBusy):
                    worker.give_back(rows)
                    raise
        worker.give_back(rows)
        return None

    @contextmanager
    def _watched(self, kind: RequestKind, count: int) -> Iterator[bool]:
        """Whether the store is to be asked. Nothing is raised in the thread of an engine."""
        usable = count > 0 and self.worker.usable(kind)
        if count and not usable:
            self._troubles.note(kind, "suspended", count, quiet=True)
        try:
            yield usable
        except Exception as error:
            self._troubles.note(kind, type(error).__name__, count, str(error)[:200])

    def _wait(self, job: StoreRequest, timeout: float | None = None) -> None:
        job.wait(timeout)
        self.worker.poll()

    def _codes(self, job: StoreRequest) -> Bytes:
        """What became of the blocks of a job, once it is done. Counts what went wrong."""
        self._wait(job)
        for code, count in job.counts.items():
            if code not in ("ok", "absent"):
                self._troubles.note(job.kind, code, count, job.error)
        return job.codes

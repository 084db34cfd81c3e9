"""A secondary tier for vLLM's own tiered offloading, over any store of kvpool. Only vLLM imports this module."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvpool.engines.stores import lasting_identity, store_options
from kvpool.engines.vllm import identity, version
from kvpool.errors import StoreBusy

try:
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
except ImportError as error:
    raise ImportError(f"this vLLM has no secondary tiers that kvpool.engines.vllm_tier knows: {error}") from error

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvpool.stores.jobs import Job
    from kvpool.stores.seals import BlockNames

log = logging.getLogger("vllm.kvpool")

CLEAR_SECONDS = 1.0
"""How long a reset waits for the store to drop what it has."""
KNOWN_MAX = 65_536
"""Keys that are asked for at once, and answers that are remembered."""


class KVPoolSecondaryTier(SecondaryTierManager):
    """Keeps chunks of vLLM's CPU tier in a store. All calls come from the scheduler's thread; none waits for the store,
    except ``drain_jobs`` and ``shutdown``.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        vLLM's. Blocks are saved from and loaded into the rows of ``primary_kv_view``, in place.
    store
        As a text, such as ``"disk:/path?capacity=100GiB"``.
    weights
        A text that tells the weights, and what else the model computes with, from others. Stores that outlive the
        process need it.
    find_seconds, load_seconds, save_seconds
        Deadlines.
    remember_seconds
        For so long the answer to a lookup is used again.

    Raises
    ------
    ValueError, OSError
        For options that cannot work, and what opening the store raises.

    Notes
    -----
    A load whose call hangs is reported when the call returns, and no sooner: until then it may write to its rows. Its
    request waits. ``drain_jobs``, with which vLLM resets its caches, has nothing found any more that was saved before
    it, since the weights may be others.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        *,
        store: str = "",
        weights: str | None = None,
        find_seconds: float = 1.0,
        load_seconds: float = 10.0,
        save_seconds: float = 60.0,
        remember_seconds: float = 1.0,
    ) -> None:
        from kvpool.stores.queue import StoreQueue
        from kvpool.stores.store import OK
        from kvpool.stores.store_health import StoreHealth
        from kvpool.stores.urls import open_store

        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = store_options({"stores": [store] if store else [], "weights": weights})
        if not options:
            raise ValueError("store is missing in the secondary tier: a text is needed, such as 'disk:/path'")
        if options.lasting and weights is None:
            raise ValueError(f'store={store!r:.80}: name the model\'s weights, such as "weights": "revision 1a2b3c"')
        passing = identity(offloading_spec.config, version())
        own = lasting_identity(passing, weights, "of the weights", "vLLM's") if weights is not None else passing
        self._seconds = {"find": find_seconds, "load": load_seconds, "save": save_seconds, "known": remember_seconds}
        self._ok, self._health = OK, StoreHealth()
        self._queue = StoreQueue(open_store(store), _rows(primary_kv_view), own)
        self._jobs: dict[Job, TransferJob | list[OffloadKey]] = {}
        # Jobs that are done, and whose call hangs.
        self._hung: set[Job] = set()
        # Keys that the store is asked for, those of them that it will be asked for, and what it has said, until when.
        self._asked: set[OffloadKey] = set()
        self._new: list[OffloadKey] = []
        self._known: dict[OffloadKey, tuple[bool, float]] = {}
        self._results: list[JobResult] = []
        self._generation = b""

    # -- keys ----------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        there, until = self._known.get(key, (False, -math.inf))
        if until > self._queue.now():
            return LookupResult.HIT if there else LookupResult.MISS
        if key not in self._asked:
            if len(self._asked) >= KNOWN_MAX:
                return LookupResult.MISS
            self._asked.add(key)
            self._new.append(key)
        return LookupResult.RETRY

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the store for what this step has looked up."""
        if not self._new:
            return
        keys, self._new = self._new, []
        if self._health.usable():
            try:
                job = self._queue.find(self._names(keys), deadline=self._deadline("find"))
            except StoreBusy:
                self._answer(keys, [False] * len(keys))
            else:
                self._jobs[job] = keys
        else:
            self._answer(keys, [False] * len(keys))

    def has_pending_work(self) -> bool:
        """Whether requests wait for answers of the store."""
        return bool(self._asked)

    # -- blocks --------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        for key in job_metadata.keys:
            self._known.pop(key, None)
        self._submit("save", job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit("load", job_metadata)

    def _submit(self, kind: str, asked: TransferJob) -> None:
        if self._health.usable(writes=kind == "save", found=kind == "load"):
            begin = self._queue.save if kind == "save" else self._queue.load
            keys, rows = self._names(asked.keys), np.asarray(asked.chunk_ids, np.int64)
            try:
                self._jobs[begin(keys, rows, deadline=self._deadline(kind))] = asked
                return
            except StoreBusy:
                pass
        self._results.append(JobResult(job_id=asked.job_id, success=False))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended. Nothing reads or writes their rows any more."""
        for job in self._queue.finished():
            asked = self._jobs.get(job)
            if asked is None:
                continue
            if job not in self._hung:
                self._health.note(job)
            if isinstance(asked, list):
                self._answer(asked, (job.codes == self._ok).tolist())
            elif not job.returned:
                self._hung.add(job)
                continue
            else:
                self._results.append(self._result(asked, job))
            self._hung.discard(job)
            del self._jobs[job]
        results, self._results = self._results, []
        return results

    def _result(self, asked: TransferJob, job: Job) -> JobResult:
        ok = (job.codes == self._ok).tolist()
        came = [key for key, good in zip(asked.keys, ok, strict=True) if good]
        if asked.is_promotion and len(came) < len(ok):
            log.warning("kvpool: %d of %d chunks did not come from the store: %s", len(ok) - len(came), len(ok), job)
            gone = [key for key, good in zip(asked.keys, ok, strict=True) if not good]
            self._answer(gone, [False] * len(gone))
        return JobResult(
            job_id=asked.job_id,
            success=all(ok),
            successful_keys=came if asked.is_promotion else None,
            transfer_time=job.seconds,
            transfer_bytes=len(came) * self._queue.block_bytes,
        )

    def drain_jobs(self) -> None:
        """Wait until the store reads and writes no row any more. What was saved before is not found from now on, and
        the store drops it."""
        while not self._queue.drain(10.0):
            log.warning("kvpool: a reset waits for the store %r", self._queue.name)
        self._generation = os.urandom(16)
        if self._queue.clears and not self._queue.clear().wait(CLEAR_SECONDS):
            log.warning("kvpool: the store %r has not dropped what was saved before, and saves nothing until it has",
                        self._queue.name)  # fmt: skip
        self._known.clear()

    def shutdown(self) -> None:
        """Finish what runs, and close the store. Raises TimeoutError if a call of the store hangs; vLLM then keeps the
        memory."""
        self._queue.drain(5.0)
        if not self._queue.close():
            raise TimeoutError(f"the store {self._queue.name!r} hangs, and may still write to vLLM's host memory")
        self._jobs.clear()
        # vLLM unmaps the memory, to which the queue and the store refer.
        del self._queue

    # -- what they share -----------------------------------------------------------------------------

    def _answer(self, keys: Iterable[OffloadKey], there: Iterable[bool]) -> None:
        """Remember what the store has said."""
        until = self._queue.now() + self._seconds["known"]
        for key, here in zip(keys, there, strict=True):
            self._asked.discard(key)
            self._known.pop(key, None)
            self._known[key] = here, until
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _names(self, keys: Iterable[OffloadKey]) -> BlockNames:
        from kvpool.stores.seals import BlockNames

        return BlockNames(keys, self._generation)

    def _deadline(self, kind: str) -> float:
        return self._queue.now() + self._seconds[kind]


def _rows(view: memoryview) -> npt.NDArray[Any]:
    """The rows of vLLM's host memory uint8[chunks, bytes], in place. They hold its array and not the view, which vLLM
    releases."""
    rows = np.asarray(view.obj if isinstance(view.obj, np.ndarray) and view.obj.shape == view.shape else view)
    return rows.view(np.uint8)

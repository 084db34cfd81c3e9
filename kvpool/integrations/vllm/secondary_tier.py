"""A secondary tier for vLLM's own tiered offloading, over any store of kvpool. Only vLLM imports this module."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import numpy as np

from kvpool.common.arrays import Uint8s
from kvpool.errors import StoreBusy
from kvpool.integrations.options import SEED, VLLM_TIER, SecondaryTierOptions, lasting_identity
from kvpool.integrations.vllm.spec import identity

with VLLM_TIER.imports():
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED, get_none_hash_seed
    from vllm.v1.kv_offload.base import LookupResult, Medium, OffloadKey, ReqContext, RequestOffloadingContext
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec, ScheduleEndContext
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from kvpool.storage.store_requests import RequestKind, StoreRequest

log = VLLM_TIER.log

CLEAR_SECONDS = 1.0
"""How long a reset waits for the store to drop what it has."""
KNOWN_MAX = 65_536
"""Keys that are asked for at once, and answers that are remembered."""


class KVPoolSecondaryTier(SecondaryTierManager):
    """Keeps chunks of vLLM's CPU tier in a store. All calls come from the scheduler's thread; none waits for the store,
    except ``drain_jobs`` and ``shutdown``.

    Parameters
    ----------
    offloading_spec : OffloadingSpec
        vLLM's.
    primary_kv_view : memoryview
        Memory of shape (rows, row bytes). Blocks are saved from and loaded into its rows, in place.
    tier_type : str
        vLLM's name of the tier.
    backpressure_detector : BackpressureDetector or None, default None
        vLLM's.
    **given : SecondaryTierOptions
        ``stores``, and optionally others.

    Raises
    ------
    TypeError, ValueError, OSError
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
        **given: Unpack[SecondaryTierOptions],
    ) -> None:
        from kvpool.storage.store import OK
        from kvpool.storage.store_worker import StoreWorker
        from kvpool.storage.urls import open_store

        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._options = options = VLLM_TIER.read(given)
        if options.persistent and options.weights is None:
            raise ValueError(
                f'stores={options.persistent!r:.80}: name the model\'s weights, such as "weights": "revision 1a2b3c"'
            )
        model_identity = identity(offloading_spec.config, VLLM_TIER.version())
        if options.weights is not None:
            model_identity = lasting_identity(model_identity, options.weights, "of the weights", "vLLM's")
        self._ok = OK
        store = open_store(options.stores[0], dp_rank=offloading_spec.config.parallel.data_parallel_index)
        self._worker = StoreWorker(store, _rows(primary_kv_view), model_identity, patience=0.0, warns=True)
        VLLM_TIER.show_warnings()
        # Keys that the store is asked for, those of them that it will be asked for, and what it has said, until when.
        self._asked: set[OffloadKey] = set()
        self._new: list[OffloadKey] = []
        self._known: OrderedDict[OffloadKey, tuple[bool, float]] = OrderedDict()
        self._results: list[JobResult] = []
        self._seed_to_check = bool(options.persistent)

    # -- keys ----------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        is_stored, until = self._known.get(key, (False, -math.inf))
        if until > self._now():
            return LookupResult.HIT if is_stored else LookupResult.MISS
        if key not in self._asked:
            if len(self._asked) >= KNOWN_MAX:
                return LookupResult.MISS
            self._asked.add(key)
            self._new.append(key)
        return LookupResult.RETRY

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._seed_to_check:
            # vLLM draws the seed after it has made its tiers, and does not pass them its hash function.
            self._seed_to_check = False
            if get_none_hash_seed() not in (DEFAULT_NONE_HASH_SEED, os.environ.get(SEED)):
                log.warning(
                    "kvpool: the keys of vLLM's blocks begin with a random seed, so that nothing will be found in %s "
                    "after a restart. Take prefix_caching_hash_algo='sha256', or set the environment variable %s",
                    self._worker.name,
                    SEED,
                )
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask the store for what this step has looked up."""
        keys, self._new = self._new, []

        def answer(job: StoreRequest) -> None:
            self._answer(keys, (job.codes == self._ok).tolist())

        if keys and not self._begin("find", keys, answer, seconds=self._options.find_seconds):
            self._answer(keys, [False] * len(keys))

    def has_pending_work(self) -> bool:
        """Whether requests wait for answers of the store."""
        return bool(self._asked)

    # -- blocks --------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        for key in job_metadata.keys:
            self._known.pop(key, None)
        self._submit("save", job_metadata, self._options.save_seconds)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit("load", job_metadata, self._options.load_seconds)

    def _submit(self, kind: RequestKind, asked: TransferJob, seconds: float) -> None:
        """Begin a job. Its end is reported to vLLM when nothing reads or writes its rows any more."""
        rows = np.asarray(asked.chunk_ids, np.int64)
        if not self._begin(kind, asked.keys, rows, seconds=seconds, returned=lambda job: self._end(asked, job)):
            self._results.append(JobResult(job_id=asked.job_id, success=False))

    def _begin(self, kind: RequestKind, keys: Iterable[OffloadKey], *given: Any, seconds: float, **more: Any) -> bool:
        """Have the store find, save or load. Returns False if it takes nothing now."""
        from kvpool.storage.mac import BlockNames

        with suppress(StoreBusy):
            if self._worker.usable(kind):
                getattr(self._worker, kind)(BlockNames(keys), *given, deadline=self._now() + seconds, **more)
                return True
        return False

    def _end(self, asked: TransferJob, job: StoreRequest) -> None:
        ok = (job.codes == self._ok).tolist()
        came = [key for key, good in zip(asked.keys, ok, strict=True) if good]
        if asked.is_promotion and len(came) < len(ok):
            gone = [key for key, good in zip(asked.keys, ok, strict=True) if not good]
            self._answer(gone, [False] * len(gone))
        result = JobResult(
            job_id=asked.job_id,
            success=all(ok),
            successful_keys=came if asked.is_promotion else None,
            transfer_time=job.seconds,
            transfer_bytes=len(came) * self._worker.block_bytes,
        )
        self._results.append(result)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended. Nothing reads or writes their rows any more."""
        self._worker.poll()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        """Wait until the store reads and writes no row any more. What was saved before is not found from now on, and
        the store drops it. What is saved later is found after a restart, too, if the store has ``Store.epoch``."""
        worker = self._worker
        while not worker.drain(10.0):
            log.warning("kvpool: a reset waits for the store %r", worker.name)
        worker.poll()
        if not worker.reset().wait(CLEAR_SECONDS):
            log.warning(
                "kvpool: the store %r has not dropped what was saved before, and saves nothing until it has",
                worker.name,
            )
        self._known.clear()

    def shutdown(self) -> None:
        """Finish what runs, and close the store. Raises TimeoutError if a call of the store hangs; vLLM then keeps the
        memory."""
        self._worker.drain(5.0)
        if not self._worker.close():
            raise TimeoutError(f"the store {self._worker.name!r} hangs, and may still write to vLLM's host memory")
        # vLLM unmaps the memory, to which the worker and the store refer.
        del self._worker

    # -- what they share -----------------------------------------------------------------------------

    def _answer(self, keys: Iterable[OffloadKey], stored: Iterable[bool]) -> None:
        """Remember what the store has said."""
        until = self._now() + self._options.remember_seconds
        for key, is_stored in zip(keys, stored, strict=True):
            self._asked.discard(key)
            self._known.pop(key, None)
            self._known[key] = is_stored, until
        while len(self._known) > KNOWN_MAX:
            del self._known[next(iter(self._known))]

    def _now(self) -> float:
        return self._worker.now()


def _rows(view: memoryview) -> Uint8s:
    """The rows of vLLM's host memory uint8[chunks, bytes], in place. They hold its array and not the view, which vLLM
    releases."""
    rows = np.asarray(view.obj if isinstance(view.obj, np.ndarray) and view.obj.shape == view.shape else view)
    return rows.view(np.uint8)

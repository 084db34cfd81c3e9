"""The scheduler's side of the host tier for vLLM: which chunk is in which host block, and what the scheduler and the
workers send to each other. Only vLLM imports this module."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import kvpool
from kvpool.integrations.options import VLLM, EngineOptions
from kvpool.integrations.vllm.host_tier_metrics import (
    EVICTED,
    FAILED_LOADS,
    FAILED_STORES,
    LOADED,
    REFUSED,
    STORED,
    HostTierMetrics,
)

with VLLM.imports():
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload import base
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from kvpool.pool.explain import Missed
    from kvpool.pool.hints import Action
    from kvpool.storage.choice import LoadOrCompute
    from kvpool.storage.host_storage_manager import HostStorageManager

log = VLLM.log

_NONE = -1
_DRAIN_SECONDS = 5.0
"""How long an engine that is shut down saves what it has begun to save."""
_STORE_SECONDS = 60.0
"""How long a copy to host memory may take. A chunk that takes longer is not waited for any more."""
_PREFILL_TOKENS = 64
"""Steps with fewer tokens are not measured."""
_UNKNOWN = 1e9
"""Tokens a second of an engine whose speed is not measured yet."""
_SOURCES = {
    "disk": CacheHitSource.DISK,
    "memory": CacheHitSource.HOST,
    "mooncake": CacheHitSource.P2P,
    "peer": CacheHitSource.P2P,
}
"""Where vLLM counts what came from a kind of store."""


class HostBlocks(base.LoadStoreSpec):
    """The host blocks of a job, one for each key, group after group. It is pickled and sent to the workers.

    ``partial``: where workers share the memory, those of a load that are filled in part only. None elsewhere.
    """

    def __init__(self, blocks: tuple[int, ...], partial: tuple[int, ...] | None = None) -> None:
        self.blocks = blocks
        self.partial = partial


@dataclass
class WorkerReport(OffloadingWorkerMetadata):
    """What a worker reports to the scheduler's process in a step: vLLM's jobs that have ended, the host blocks whose
    copy failed, and those that are filled in part only."""

    failed_blocks: set[int] = field(default_factory=set)
    partial_blocks: set[int] = field(default_factory=set)

    def aggregate(self, other: Any) -> WorkerReport:
        both = super().aggregate(other)
        failed = self.failed_blocks | getattr(other, "failed_blocks", set())
        partial = self.partial_blocks | getattr(other, "partial_blocks", set())
        return WorkerReport(both.completed_jobs, both.transfer_stats, failed, partial)


@dataclass(slots=True)
class _KnownChunk:
    """What is known of a chunk, beside its state in the cache."""

    block: int
    """the host block to which it is being copied, or ``_NONE``"""
    lost: bool = False
    """A copy of it has failed."""
    partial: bool = False
    """It leaves out a part of the host block. A worker has a record of it, and a store does not: what comes from
    there is whole."""


@dataclass(slots=True)
class _KnownRequest:
    """What a request has loaded and stored."""

    keys: dict[bytes, None] = field(default_factory=dict)
    """its chunks"""
    lease: kvpool.hostcache.HostLease | None = None
    """of its load; vLLM gives it one at a time"""
    brought: dict[bytes, int] = field(default_factory=dict)
    """chunks of its load that came from a store and were not loaded before, with the number of the store"""
    failed: bool = False
    """The load has failed."""
    stores: int = 0
    """in flight"""
    pieces: int = 0
    """how many loads and stores have come since its chunks were last put in order"""
    ordered: int = 0
    """how many of its chunks were put in order"""
    finished: bool = False
    hints: list[Action] = field(default_factory=list)
    """the hints of its client for its chunks"""
    namespace: int = 0
    """whose budget pays for that"""


@dataclass(slots=True)
class _Story:
    """What is logged of a request when it has finished."""

    came: Counter[str] = field(default_factory=Counter)
    """tokens, by where they came from"""
    missed: dict[bytes, Missed] = field(default_factory=dict)
    """of chunks that were looked for, and were not there the last time"""


class _Prefill:
    """Measures how long the engine computes a prompt token, for the policies that weigh loads against it. Steps end in
    the order in which they begin, and may overlap."""

    def __init__(self, clock: Callable[[], float]) -> None:
        from kvpool.storage.choice import Speed

        self._clock, self._speed = clock, Speed()
        self._in_flight: deque[tuple[float, int]] = deque(maxlen=64)
        self._ended, self._most = -math.inf, 0
        self.policies: list[LoadOrCompute] = []
        self.tokens_per_block = 1

    def spare(self) -> float:
        """For how many seconds the engine is busy with the steps that it has begun, as far as its speed is known."""
        if not (self._in_flight and self._speed.loads):
            return 0.0
        began = max(self._in_flight[0][0], self._ended)
        return max(0.0, began + sum(self._speed.seconds(tokens) for _, tokens in self._in_flight) - self._clock())

    def begin(self, tokens: int) -> None:
        """The engine begins a step with this many tokens."""
        if tokens and self.policies:
            self._in_flight.append((self._clock(), tokens))

    def end(self) -> None:
        """The step has ended that began first."""
        if not self._in_flight:
            return
        began, tokens = self._in_flight.popleft()
        began, self._ended = max(began, self._ended), self._clock()
        if tokens < _PREFILL_TOKENS:
            return
        if not self._speed.loads:
            log.info("kvpool: the engine's speed is known: %d tokens in %.3f s", tokens, self._ended - began)
        self._speed.observe(tokens, self._ended - began)
        self._most = max(self._most, tokens)
        for policy in self.policies:
            policy.block_seconds = self._speed.seconds(self._most) / self._most * self.tokens_per_block


class KVPoolOffloadingManager(base.OffloadingManager):
    """The index of the host tier, for vLLM's scheduler. All calls come from the scheduler's thread.

    Parameters
    ----------
    cache
        The index. ``shutdown`` closes it.
    options
        ``stores`` are opened below it by ``open_stores``.
    events
        Whether vLLM takes the events of the cache.
    clock
        () -> float, monotonic seconds.
    tokens_per_block
        Of a host block, for ``load="faster"``. ``prefill`` then needs the engine's steps.
    dp_rank
        Which of the engine's replicas this is, for ``{dp_rank}`` in ``stores``.
    shared
        Whether the workers have one host memory, as they have with stores.

    Notes
    -----
    vLLM names the chunks of a store group after group, completes it with a set, and stores one prompt in several. So
    that the end of a prompt is evicted before its beginning, in all groups, chunks are reserved in the order of the
    prompt, which is also that in which the cache publishes them. And all that a request has brought in pieces is put in
    order when no store of it is in flight.
    """

    def __init__(
        self,
        cache: kvpool.HostCache,
        options: EngineOptions | None = None,
        *,
        events: bool = True,
        clock: Callable[[], float] = time.monotonic,
        tokens_per_block: int = 1,
        dp_rank: int = 0,
        shared: bool = False,
    ) -> None:
        from kvpool.pool.hints import Budget

        self._cache, self._events, self._clock, self._dp_rank = cache, events, clock, dp_rank
        self._shared = shared or bool(options and options.stores)
        self.prefill = _Prefill(clock)
        self.prefill.tokens_per_block = tokens_per_block
        self.options = options or EngineOptions()
        self._tier: kvpool.HostTier | None = None
        self._storage: HostStorageManager | None = None
        # What has the verbs that stores take part in.
        self._front: kvpool.HostCache | HostStorageManager = cache
        # Where vLLM counts what a store has brought, by the number of the store.
        self._sources: list[CacheHitSource] = []
        self._names: list[str] = []
        self._requests: dict[str, _KnownRequest] = {}
        self._chunks: dict[bytes, _KnownChunk] = {}
        # By request, while the log is read.
        self._stories: dict[str, _Story] = {}
        self._metrics = HostTierMetrics(cache, clock)
        self._budget = Budget(cache.host_blocks)
        self.salt = ""
        """of the request that vLLM begins next: the namespace whose budget pays for its hints"""
        self._counts = self._metrics.counts
        # The host blocks that were reported to vLLM, and up to which event.
        self._reported, self._event = set[bytes](), 0

    def open_stores(self, description: kvpool.hostcache.HostTierDescription, identity: kvpool.ModelIdentity) -> None:
        """Attach the workers' memory, and open the stores. Raises what a store raises that cannot be opened."""
        from kvpool.storage.choice import LoadOrCompute
        from kvpool.storage.host_storage_manager import HostStorageManager
        from kvpool.storage.urls import open_store

        options, prefill = self.options, self.prefill
        stores = [open_store(text, dp_rank=self._dp_rank) for text in options.stores]
        if options.load == "faster":
            # Until the first prompt was computed, the engine seems so fast that no load is waited for.
            size = self._cache.block_bytes
            prefill.policies = [LoadOrCompute(_UNKNOWN, size, prefill.tokens_per_block) for _ in stores]
        self._tier = kvpool.HostTier.attach(description)
        policies = prefill.policies or None
        self._storage = self._front = HostStorageManager(
            self._cache,
            self._tier,
            stores,
            identity=identity,
            clock=self._clock,
            policies=policies,
            spare=prefill.spare,
            **options.keeping,
        )
        kinds = (text.partition(":")[0] for text in options.stores)
        self._names = [store.name for store in stores]
        self._sources = [_SOURCES.get(kind, CacheHitSource.EXTERNAL_UNSPECIFIED) for kind in kinds]
        log.info("kvpool: stores %s, for KV of %s", ", ".join(store.name for store in stores), identity)

    # -- requests ------------------------------------------------------------------------------------

    def on_new_request(self, req_context: base.ReqContext) -> base.RequestOffloadingContext:
        if self.options.stores and self._storage is None:
            raise RuntimeError("kvpool's stores were not opened: vLLM has not said where the workers' memory is")
        if VLLM.logs_requests():
            self._stories[req_context.req_id] = _Story()
        message = req_context.kv_hints or (req_context.kv_transfer_params or {}).get("kv_hints")
        if message is not None:
            self._read_hints(message, req_context)
        return base.RequestOffloadingContext()

    def on_request_finished(self, req_context: base.ReqContext) -> None:
        if (story := self._stories.pop(req_context.req_id, None)) is not None:
            VLLM.log_request(story.came, story.missed.values(), req_context.req_id)
        if self._storage is not None:
            self._storage.finish(req_context.req_id)
        request = self._requests.get(req_context.req_id)
        if request is not None:
            request.finished = True
            self._settle(req_context, request)

    def on_schedule_end(self, context: base.ScheduleEndContext) -> None:
        if self._storage is not None:
            self._storage.poll()

    def has_pending_work(self) -> bool:
        """Whether the engine must make steps for the stores though it has no request."""
        return self._storage is not None and self._storage.pending

    def _request(self, context: base.ReqContext, keys: Iterable[bytes]) -> _KnownRequest:
        """The request, which has these chunks too."""
        request = self._requests.get(context.req_id)
        if request is None:
            request = self._requests[context.req_id] = _KnownRequest()
        request.keys.update(dict.fromkeys(keys))
        return request

    def _settle(self, context: base.ReqContext, request: _KnownRequest) -> None:
        """Put the chunks of a request in order, unless that was done and few have come since."""
        if request.stores or request.lease is not None:
            return
        new = len(request.keys) - request.ordered
        turn = request.finished and self._cache.policy != "lru"
        if turn or (request.pieces > 1 and (request.finished or 8 * new >= request.ordered)):
            self._front.touch(_in_order(request.keys, context), turn=turn)
            request.pieces, request.ordered = 1, len(request.keys)
        if request.finished:
            del self._requests[context.req_id]
            for action in request.hints:
                self._metrics.hint(*self._do(action, request))

    # -- hints ---------------------------------------------------------------------------------------

    def _read_hints(self, message: object, context: base.ReqContext) -> None:
        """Remember the hints of a request's client. A malformed hint is counted, and the request goes on."""
        from kvpool.pool.hints import actions_of

        try:
            actions = actions_of(msgspec.to_builtins(message))
        except (TypeError, ValueError, RecursionError) as error:
            self._metrics.hint("none", "refused")
            log.debug("kvpool: hints of request %s: %s", context.req_id, error)
            return
        request = self._request(context, ())
        request.hints = actions
        salt = self.salt.encode("utf-8", "surrogatepass")
        request.namespace = int.from_bytes(hashlib.blake2b(salt, digest_size=8).digest(), "big")

    def _do(self, action: Action, request: _KnownRequest) -> tuple[str, str]:
        """Apply a client's hint to the chunks of its finished request, within the budget. Returns the type of the
        action, and its outcome."""
        from kvpool.pool.hints import outcome

        try:
            kind, _, lease, priority = action.read(set())
        except (TypeError, ValueError) as error:
            log.debug("kvpool: action %s of a hint: %s", action.action_id, error)
            return "none", "refused"
        keys = [key for key in request.keys if self._cache.find(key) == self._cache.HERE]
        done = 0
        if kind == "drop":
            done = self._front.forget(keys)
        elif kind != "prefetch":
            retained = keys[: self._budget.take(request.namespace, len(keys), int(self._clock() * 1e3), lease)]
            done = self._cache.set_priority(retained, priority, ttl_ms=lease)
        return kind, outcome(done, len(request.keys)) if done else "refused"

    # -- loads ---------------------------------------------------------------------------------------

    def lookup(self, key: base.OffloadKey, req_context: base.ReqContext) -> base.LookupResult:
        storage = self._storage
        state = self._cache.find(key) if storage is None else storage.find(key, req_context.req_id)
        if self._stories:
            self._note(key, state, req_context)
        if state == self._cache.HERE:
            return base.LookupResult.HIT
        chunk = self._chunks.get(key)
        if chunk is not None and chunk.block == _NONE:
            # It has left the cache. A store may bring it whole.
            del self._chunks[key]
        return base.LookupResult.MISS if state == self._cache.ABSENT else base.LookupResult.HIT_PENDING

    def _note(self, key: bytes, state: int, context: base.ReqContext) -> None:
        """Remember for the log what was found of a chunk. The first that vLLM looks for follows what it has itself."""
        story = self._stories.get(context.req_id)
        if story is None:
            return
        width = self.prefill.tokens_per_block
        if "device" not in story.came:
            end = context.get_offload_key_position(key)
            story.came["device"] = 0 if end is None else max(0, end - width)
        if state == self._cache.ABSENT:
            story.missed[key] = self._front.explain(key, width)
        else:
            story.missed.pop(key, None)

    def get_load_source(self, key: base.OffloadKey, req_context: base.ReqContext) -> CacheHitSource:
        request = self._requests.get(req_context.req_id)
        store = None if request is None else request.brought.get(key)
        return CacheHitSource.HOST if store is None else self._sources[store]

    def touch(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> None:
        self._front.touch(keys)

    def prepare_load(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> HostBlocks:
        """Pin the chunks until ``complete_load``. A request has one load at a time, and no other job during it."""
        storage, request = self._storage, self._request(req_context, keys)
        if storage is not None:
            origins = ((key, storage.origin(key)) for key in keys)
            request.brought = {key: store for key, store in origins if store is not None}
        request.lease = lease = self._front.pin(keys, owner=req_context.req_id)
        blocks = lease.slots.blocks
        if not self._shared:
            return HostBlocks(blocks)
        known = map(self._chunks.get, lease.keys)
        pinned = zip(known, blocks, strict=True)
        return HostBlocks(blocks, tuple(block for chunk, block in pinned if chunk is not None and chunk.partial))

    def complete_load(self, keys: Collection[base.OffloadKey], req_context: base.ReqContext) -> None:
        request = self._requests[req_context.req_id]
        lease, failed = request.lease, request.failed
        assert lease is not None
        request.lease, request.failed = None, False
        request.pieces += 1
        lease.close()
        if failed:
            self._counts[FAILED_LOADS] += 1
        else:
            self._counts[LOADED] += len(keys)
        if (story := self._stories.get(req_context.req_id)) is not None:
            width = self.prefill.tokens_per_block
            for key in keys:
                store = request.brought.get(key)
                if failed:
                    story.missed[key] = self._front.explain(key, width)._replace(reason="lost")
                else:
                    story.came["host" if store is None else self._names[store]] += width
        self._settle(req_context, request)

    def load_failed(self, req_id: str) -> None:
        """Forget the chunks that a request failed to load, so it computes them and does not try again. vLLM then calls
        ``complete_load``."""
        request = self._requests.get(req_id)
        if request is not None and request.lease is not None:
            self._front.forget(request.lease.keys)
            request.failed = True

    # -- stores --------------------------------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext
    ) -> base.PrepareStoreOutput | None:
        """Reserve a host block for each chunk that has none. Returns None if too few host blocks can be evicted; then
        vLLM tries again in the next step.

        Notes
        -----
        A chunk whose store is not complete after ``_STORE_SECONDS`` is a miss from then on. Since a worker may still
        write its host block, the block stays out of use, and the chunk is not stored again, until vLLM completes the
        store.
        """
        request = self._request(req_context, keys)
        try:
            reserved = self._cache.reserve(_in_order(keys, req_context), deadline_seconds=_STORE_SECONDS)
        except kvpool.OutOfBlocks:
            self._counts[REFUSED] += 1
            return None
        block_of = dict(zip(reserved.keys, reserved.blocks.tolist(), strict=True))
        new = [key for key in keys if key in block_of]
        self._chunks.update({key: _KnownChunk(block) for key, block in block_of.items()})
        if new:
            request.stores += 1
        if len(new) < len(keys):
            request.pieces += 1
        self._counts[EVICTED] += len(reserved.evicted)
        return base.PrepareStoreOutput(new, HostBlocks(tuple(map(block_of.__getitem__, new))), reserved.evicted)

    def complete_store(
        self, keys: Collection[base.OffloadKey], req_context: base.ReqContext, success: bool = True
    ) -> None:
        """End the stores of these chunks. A chunk that is not being stored stays as it is. A chunk whose store took too
        long is dropped."""
        ended, lost, partial = list[bytes](), list[bytes](), list[bytes]()
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None or chunk.block == _NONE:
                continue
            chunk.block = _NONE
            if chunk.lost or not success:
                lost.append(key)
            else:
                ended.append(key)
            if chunk.partial and self._shared and not chunk.lost and success:
                partial.append(key)
            else:
                del self._chunks[key]
        if lost:
            self._cache.abort(lost)
            self._counts[FAILED_STORES] += len(lost)
        self._publish(ended, partial)
        if partial:
            self._tidy()
        request = self._requests.get(req_context.req_id)
        if request is not None and (ended or lost):
            request.stores -= 1
            request.pieces += 1
            self._settle(req_context, request)

    def _publish(self, keys: list[bytes], partial: list[bytes]) -> None:
        """Publish chunks whose stores have ended, and give back the blocks of those that ended too late."""
        while keys:
            overdue = set(self._cache.overdue())
            late = [key for key in keys if key in overdue]
            keys = [key for key in keys if key not in overdue]
            if late:
                self._cache.abort(late)
                for key in late:
                    self._chunks.pop(key, None)
            try:
                if keys and self._storage is not None:
                    self._counts[STORED] += self._storage.publish(keys, unsaved=partial)
                elif keys:
                    self._counts[STORED] += self._cache.publish(keys)
                return
            except kvpool.errors.ReservationExpired:
                # A deadline has passed since ``overdue`` was called.
                continue

    def report(self, report: WorkerReport) -> None:
        """Take what workers report of the host blocks of stores. vLLM then calls ``complete_store`` as if all had
        succeeded."""
        if report.failed_blocks or report.partial_blocks:
            for chunk in self._chunks.values():
                chunk.lost |= chunk.block in report.failed_blocks
                chunk.partial |= chunk.block in report.partial_blocks

    def _tidy(self) -> None:
        """Forget chunks that have left the cache, once there are many."""
        if len(self._chunks) > 3 * self._cache.host_blocks:
            absent = self._cache.ABSENT
            chunks = self._chunks.items()
            self._chunks = {key: chunk for key, chunk in chunks if self._cache.find(key) != absent}

    # -- the cache as a whole ------------------------------------------------------------------------

    def take_events(self) -> Iterable[base.OffloadingEvent]:
        """What the host tier has, and what stores have, by their kind and place in ``stores``. After a reset, all that
        was reported before is removed: vLLM clears nothing by itself while its own blocks are in use."""
        for event in self._cache.events() if self._events else ():
            if event.number != self._event:
                yield from self._removed([key for key in self._reported if self._cache.find(key) != self._cache.HERE])
            self._event = event.next
            if event.kind == "stored":
                self._reported.update(event.keys)
                yield base.OffloadingEvent(list(event.keys), base.Medium.CPU, removed=False)
            elif event.kind in ("removed", "cleared"):
                yield from self._removed(list(event.keys if event.kind == "removed" else self._reported))
        for number, keys, stored in self._storage.changes() if self._events and self._storage is not None else ():
            local = self._sources[number] in (CacheHitSource.DISK, CacheHitSource.HOST)
            yield base.OffloadingEvent(
                list(keys),
                base.Medium.STORAGE,
                removed=not stored,
                ownership=f"{VLLM.module} {number}",
                locality=base.Locality.LOCAL if local else base.Locality.REMOTE,
            )

    def _removed(self, keys: Sequence[bytes]) -> Iterator[base.OffloadingEvent]:
        """Report keys as gone from the host tier, those of lost events too, which vLLM ignores."""
        self._reported.difference_update(keys)
        if keys:
            yield base.OffloadingEvent(list(keys), base.Medium.CPU, removed=True)

    def reset_cache(self) -> None:
        """Drop everything. vLLM's workers wait for all copies before they begin new ones, and vLLM reports nothing more
        about the old ones. No store writes to their host blocks meanwhile: from now on it has nothing for this engine,
        until chunks that are stored later have been saved."""
        for request in self._requests.values():
            if request.lease is not None:
                request.lease.close()
        self._cache.abort([key for key, chunk in self._chunks.items() if chunk.block != _NONE])
        self._requests.clear()
        self._stories.clear()
        self._chunks.clear()
        self._front.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """The counts since the last call and the gauges now, or None if nothing was counted."""
        return self._metrics.take(self._storage)

    def shutdown(self) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            if not storage.drain(_DRAIN_SECONDS):
                log.warning("kvpool: not all chunks could be saved in %s s", _DRAIN_SECONDS)
            storage.close()
        self._cache.close()
        if self._tier is not None:
            self._tier.close()


def _in_order(keys: Collection[bytes], context: base.ReqContext) -> list[bytes]:
    """Chunks in the order of the prompt, as far as vLLM says it."""
    places = [*map(context.get_offload_key_position, keys)]
    return list(keys) if None in places else [key for _, key in sorted(zip(places, keys, strict=True))]

"""The replay loop: drives a pool with a trace as an engine would, measures the time of its calls, and has the bytes
verified."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter, perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from kvpool.common.arrays import Int32s, Int64s
from kvpool.common.arrays.layout import BlockLayout
from kvpool.common.process import Closing
from kvpool.device import get_device
from kvpool.device.base import Stream
from kvpool.device.sim import SimDevice
from kvpool.pool.manager import KVCacheManager
from kvpool.state.arrays import PolicyName
from kvpool.storage import Store
from kvpool.tools.replay.content import Progress, Request, States, token_states
from kvpool.tools.replay.storing import Storing
from kvpool.tools.replay.summary import PHASES, CopiedBytes, Hits, MovedBlocks, Summary, peak_memory_bytes
from kvpool.tools.replay.traces import Trace
from kvpool.tools.replay.verifier import Verifier, WatchedDevice

# -- the order of a replay: only lengths decide it, so it is the same for all pools ----------------


class Skip(NamedTuple):
    """Skip the request. It never fits, since it alone needs more blocks than the device tier has."""

    request: Request
    blocks: int


class Admit(NamedTuple):
    """Admit the request."""

    request: Request


class Append(NamedTuple):
    """Append output tokens ``[start, start + count)`` to each request, in one batch."""

    items: list[tuple[Request, int, int]]


class Finish(NamedTuple):
    """Release the request."""

    request: Request


Step = Skip | Admit | Append | Finish


def worst_blocks(request: Request, tokens_per_block: int) -> int:
    """Return the number of blocks that `request` holds at its end if it shares none."""
    return -(-request.length // tokens_per_block)


def schedule(requests: Iterable[Request], *, device_blocks: int, active: int, tokens_per_block: int) -> Iterator[Step]:
    """Yield the steps of a replay in file order.

    A request is admitted if fewer than `active` others run, and if its worst case and theirs, with nothing shared, fit
    the device tier together. Until then the oldest requests finish. So no pool ever has to preempt. Those that say how
    long they run finish before the first arrival after that.

    With each arrival, every running request that has output left appends one block's worth of tokens, all in one batch.
    The rest of its output is appended before it finishes, one block's worth at a time.
    """
    running: list[Request] = []
    done: dict[int, int] = {}
    held = 0
    for request in requests:
        need = worst_blocks(request, tokens_per_block)
        if need > device_blocks:
            yield Skip(request, need)
            continue
        ended = sorted((earlier for earlier in running if _end(earlier) <= _begin(request)), key=_end)
        while ended or running and (len(running) >= active or held + need > device_blocks):
            first = ended.pop(0) if ended else running[0]
            running.remove(first)
            held -= worst_blocks(first, tokens_per_block)
            yield from _drain(first, done, tokens_per_block)
        yield Admit(request)
        running.append(request)
        done[request.index] = 0
        held += need
        if items := _grow(running, done, tokens_per_block):
            yield Append(items)
    for oldest in running:
        yield from _drain(oldest, done, tokens_per_block)


def _begin(request: Request) -> float:
    return 0.0 if request.timestamp is None else request.timestamp


def _end(request: Request) -> float:
    return inf if request.seconds is None else _begin(request) + request.seconds


def _grow(requests: Iterable[Request], done: dict[int, int], tokens_per_block: int) -> list[tuple[Request, int, int]]:
    """Give each request that has output left a block's worth of it. ``done`` are the tokens so far, by index."""
    items = []
    for request in requests:
        start = done[request.index]
        count = min(tokens_per_block, request.output_length - start)
        if count > 0:
            items.append((request, start, count))
            done[request.index] = start + count
    return items


def _drain(request: Request, done: dict[int, int], tokens_per_block: int) -> Iterator[Step]:
    while items := _grow([request], done, tokens_per_block):
        yield Append(items)
    del done[request.index]
    yield Finish(request)


# -- the replay ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReplayConfig:
    """How a trace is replayed.

    Parameters
    ----------
    layout : BlockLayout
        A block.
    device_blocks : int
        Blocks of the device tier, at least 1.
    host_blocks : int, default 0
        Blocks of the host tier.
    active : int, default 64
        The most requests that run at the same time.
    partial : bool, default True
        Reuse parts of blocks.
    device : {"auto", "cpu", "cuda", "sim"}, default "auto"
        What holds and copies the blocks.
    policy : {"lru", "reuse", "agent", "adaptive"}, default "lru"
        Which cached block goes next, as `KVCacheManager` takes it.
    verify : bool, default False
        Write the KV bytes of every token, and compare them at every reuse, copy and release.
    seed : int, default 0
        The seed of the sim device's schedule.
    progress : float, default 0.5
        How early the sim device works, from 0 (as late as it may) to 1 (at once).
    events : int, default 0
        The number of events that the pool keeps for its readers.
    store : Store or None, default None
        Where blocks are saved, and loaded from before each admission. The replay opens and closes it.
    store_wait : float, default 10.0
        How many seconds the replay waits for saves, and for loads, before each admission and at the end.

    Raises
    ------
    ValueError
        For an argument out of range, and for a store without a host tier or with the sim device.
    """

    layout: BlockLayout
    device_blocks: int
    host_blocks: int = 0
    active: int = 64
    partial: bool = True
    device: str = "auto"
    policy: PolicyName = "lru"
    verify: bool = False
    seed: int = 0
    progress: float = 0.5
    events: int = 0
    store: Store | None = None
    store_wait: float = 10.0

    def __post_init__(self) -> None:
        if self.store is not None and self.device == "sim":
            raise ValueError("store: the sim device has none, since its copies are made by one thread")
        if self.store is not None and not self.host_blocks:
            raise ValueError("store: it stands behind the host tier, and there is none (host_blocks 0)")
        if not 0 < self.store_wait <= 3600:
            raise ValueError(f"store_wait {self.store_wait} is not more than 0, up to 3600 seconds")
        for name, lowest in (("device_blocks", 1), ("host_blocks", 0), ("active", 1), ("events", 0)):
            value = getattr(self, name)
            if value < lowest:
                raise ValueError(f"{name} {value} is not at least {lowest}")


_STORE_EVENTS = 1 << 18
"""What a store's storage manager may be behind."""


@dataclass(slots=True, eq=False)
class _Running:
    """A request between admission and release. `states` is empty where nothing is verified."""

    id: int
    length: int
    output: Int32s
    states: States
    stream: Stream


class Replay(Closing):
    """One run of a trace through a new pool.

    `run` replays everything and checks that no block is still held. `summary` gives the figures so far, at any time,
    also after `run` has raised. A context manager: leaving it closes the pool. `cache` is the pool. Its clock has the
    times of the trace.

    Parameters
    ----------
    trace
        The requests, which are admitted in this order. Each has an index of its own.
    config
        The pool and the window.
    progress
        A function that is called with 1 after every request that was admitted or skipped.

    Not thread-safe.
    """

    def __init__(self, trace: Trace, config: ReplayConfig, *, progress: Progress = lambda count: None) -> None:
        self.trace, self.config = trace, config
        self._progress = progress
        self._size = config.layout.tokens_per_block
        longest = [r.length for r in trace.requests if worst_blocks(r, self._size) <= config.device_blocks]
        sim = config.device == "sim"
        inner = SimDevice(config.seed, progress=config.progress) if sim else get_device(config.device)
        self._device = WatchedDevice(inner)
        warm_up(self._size, config)
        self._now_ms = 0
        self.cache = KVCacheManager(
            config.layout,
            device_blocks=config.device_blocks,
            host_blocks=config.host_blocks,
            device=self._device,
            max_sequences=config.active,
            max_sequence_tokens=max(longest, default=self._size),
            partial_reuse=config.partial,
            policy=config.policy,
            clock=lambda: self._now_ms,
            event_capacity=config.events if config.store is None else max(config.events, _STORE_EVENTS),
            secret=getattr(config.store, "secret", None),
        )
        self._verifier: Verifier | None = None
        if config.verify:
            pools = self._device.engine_pool(self.cache.memory.device_pool), self.cache.memory.host_pool
            enqueue = None if self._device.synchronous else self._device.launch
            self._verifier = Verifier(config.layout, *pools, config.device_blocks, config.host_blocks, enqueue)
            self._device.verifier = self._verifier
        self._storing: Storing | None = None
        if config.store is not None:
            store, wait = config.store, config.store_wait
            try:
                self._storing = Storing(store, self.cache, config.layout, written=config.verify, wait=wait)
            except BaseException:
                self.close()
                raise
        # Prompts alternate between two streams, and answers use a third, as in engines that overlap them.
        self._prefill = [self._device.create_stream("prefill a"), self._device.create_stream("prefill b")]
        self._decode = self._device.create_stream("decode")
        self._running: dict[int, _Running] = {}
        self._phase_ns = dict.fromkeys(PHASES, 0)
        self._skipped: list[str] = []
        self._admitted = self._peak_active = 0
        self._begin = self._end = perf_counter()

    def close(self) -> None:
        """Close the store, the pool and its device. A second call does nothing."""
        with ExitStack() as stack:
            stack.callback(self._device.close)
            if not self.cache.closed:
                stack.callback(self.cache.close)
            if self._storing is not None:
                stack.callback(self._storing.close)

    def run(self, requests: Iterable[Request] | None = None) -> Summary:
        """Replay all requests and return the summary. ``requests`` come instead of those of the trace, while they are
        made: the next one is asked for when the one before it is admitted or skipped.

        Raises
        ------
        VerificationError
            Bytes are wrong. The error names the first place that was found.
        IntegrityError
            With `verify`, an invariant of the pool does not hold at the end.
        KeyboardInterrupt
            The user interrupts the replay.
        """
        blocks, active = self.config.device_blocks, self.config.active
        replayed = self.trace.requests if requests is None else requests
        steps = schedule(replayed, device_blocks=blocks, active=active, tokens_per_block=self._size)
        self._begin = perf_counter()
        try:
            for step in steps:
                match step:
                    case Admit(request):
                        self._admit(request)
                    case Append(items):
                        self._append(items)
                    case Finish(request):
                        self._finish(request)
                    case Skip(request, needed):
                        self._skipped.append(f"{request.name}: {request.length:,} tokens need {needed:,} blocks")
                if isinstance(step, (Admit, Skip)):
                    self._progress(1)
            if self._storing is not None:
                self._storing.settle()
            self._check_idle()
        finally:
            self._end = perf_counter()
        return self.summary()

    def summary(self, *, interrupted: bool = False, failure: BaseException | None = None) -> Summary:
        """Return the figures of all calls so far."""
        stats, device, verifier = self.cache.stats(), self._device, self._verifier
        requests = max(self._admitted, 1)
        hits = stats.reused_device_tokens + stats.reused_host_tokens + stats.partial_tokens
        nbytes = stats.offloaded_bytes + stats.onboarded_bytes + stats.within_bytes
        return Summary(
            requests=self._admitted,
            planned=len(self.trace.requests),
            peak_active=self._peak_active,
            skipped=list(self._skipped),
            interrupted=interrupted,
            failure=None if failure is None else str(failure),
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.appended_tokens,
            hits=Hits(
                stats.reused_device_tokens,
                stats.reused_host_tokens,
                stats.partial_tokens,
                hits,
                hits / max(stats.prompt_tokens, 1),
            ),
            blocks=MovedBlocks(
                offloaded=stats.offloaded_blocks,
                onboarded=stats.onboarded_blocks,
                forgotten_device=stats.forgotten_device_blocks,
                forgotten_host=stats.forgotten_host_blocks,
                offloads_saved=stats.offloads_saved,
                partial_copies=stats.copied_blocks,
            ),
            moved=CopiedBytes(
                offloaded_bytes=stats.offloaded_bytes,
                onboarded_bytes=stats.onboarded_bytes,
                within_tier_bytes=stats.within_bytes,
                seconds=device.copy_ns / 1e9,
                gigabytes_per_second=nbytes / device.copy_ns if device.copy_ns else None,
            ),
            control_us_per_request={name: ns / requests / 1e3 for name, ns in self._phase_ns.items()},
            verified=None if verifier is None else replace(verifier.verified),
            stored=None if self._storing is None else self._storing.summary(),
            wall_seconds=self._end - self._begin,
            peak_memory_bytes=peak_memory_bytes(),
            config=self._resolved(),
        )

    def _timed(self, phase: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Make one call of the pool, and add its time to `phase`. The time of the copies that it causes is left out."""
        away, begin = self._device.away_ns, perf_counter_ns()
        result = call(*arguments, **options)
        self._phase_ns[phase] += perf_counter_ns() - begin - (self._device.away_ns - away)
        if self._verifier is not None:
            self._verifier.raise_failure()
        return result

    def _admit(self, request: Request) -> None:
        self._now_ms = max(self._now_ms, request.arrival_ms)
        prompt, output, cache = request.prompt(), request.output(), self.cache
        states, verifier, storing = np.empty(0, np.uint64), self._verifier, self._storing
        keys = self._timed("keys", cache.block_keys, prompt, salt=request.salt, adapter_id=request.adapter_id)
        if verifier is not None:
            verifier.context = request.name
            everything = np.concatenate([prompt, output])
            states = token_states(everything, self._size, salt=request.salt, adapter_id=request.adapter_id)
        if storing is not None:
            storing.settle()
            if verifier is not None:
                verifier.expect(states[: len(keys)])
            storing.bring(keys)
            if verifier is not None:
                verifier.raise_failure()
        stream = self._prefill[request.index % 2]
        admission = self._timed("match_allocate", cache.add_sequence_batch, [keys], stream=stream)
        running = _Running(int(admission.ids[0]), request.input_length, output, states, stream)
        self._running[request.index] = running
        self._admitted += 1
        self._peak_active = max(self._peak_active, len(self._running))
        if verifier is not None:
            cached, blocks = int(admission.cached_tokens[0]), self._blocks(running)
            by_kind = [int(n[0]) for n in (admission.device_tokens, admission.host_tokens, admission.partial_tokens)]
            if cached != sum(by_kind):
                raise AssertionError(f"{request.name}: {cached} cached tokens, but {by_kind} by kind")
            verifier.check(blocks, states[:cached], "was handed out as cached", stream)
            verifier.verified.reused_tokens += cached
            verifier.write(blocks, cached, states[cached : request.input_length], stream)
        self._timed("commit", cache.commit, running.id)

    def _append(self, items: list[tuple[Request, int, int]]) -> None:
        batch = [self._running[request.index] for request, _, _ in items]
        ids = np.array([running.id for running in batch], dtype=np.int64)
        counts = np.array([count for _, _, count in items], dtype=np.int64)
        tokens = np.concatenate([r.output[at : at + count] for r, (_, at, count) in zip(batch, items, strict=True)])
        self._timed("append", self.cache.append_tokens, ids, tokens, counts, stream=self._decode)
        for running, (_, _, count) in zip(batch, items, strict=True):
            start, running.length, running.stream = running.length, running.length + count, self._decode
            if self._verifier is not None:
                written = running.states[start : running.length]
                self._verifier.write(self._blocks(running), start, written, self._decode)
        self._timed("commit", self.cache.commit, ids)

    def _finish(self, request: Request) -> None:
        running = self._running[request.index]
        if self._verifier is not None:
            self._verifier.context = request.name
            self._verifier.check(self._blocks(running), running.states, "was overwritten while in use", running.stream)
            self._verifier.verified.released_tokens += len(running.states)
        if self._storing is not None:
            everything = np.concatenate([request.prompt(), running.output])
            self._storing.computed(self.cache.block_keys(everything, salt=request.salt, adapter_id=request.adapter_id))
        self._timed("release", self.cache.release, running.id)
        del self._running[request.index]
        if self._verifier is not None:
            self._device.check()

    def _blocks(self, running: _Running) -> Int64s:
        view = self.cache.block_table(running.id)
        return view.table[view.rows[0], : -(-running.length // self._size)].astype(np.int64)

    def _check_idle(self) -> None:
        if self._verifier is not None:
            self._device.synchronize()
            self._verifier.raise_failure()
        device = self.cache.stats().device
        if device.used:
            raise AssertionError(f"{device.used} device blocks are still in use after the last request")
        if self.config.verify:
            self.cache.verify()

    def _resolved(self) -> dict[str, Any]:
        config, layout = self.config, self.config.layout
        of_config, of_pool = ("device_blocks", "host_blocks"), ("active", "partial", "policy", "verify")
        shape = ("tokens_per_block", "block_bytes", "layers", "planes", "kv_heads", "head_dim")
        names = {"trace": self.trace.name, "format": self.trace.format, "device": self._device.name}
        settings = {
            **names,
            **{name: getattr(config, name) for name in of_config},
            **{name: getattr(layout, name) for name in shape},
            "dtype": layout.dtype_name,
            **{name: getattr(config, name) for name in of_pool},
        }
        if config.store is not None:
            settings |= {"store": config.store.name, "store_wait": config.store_wait}
        if config.device == "sim":
            settings |= {"seed": config.seed, "progress": config.progress}
        return settings


def warm_up(tokens_per_block: int, config: ReplayConfig) -> None:
    """Make every kind of call once on a separate tiny pool, so that no compilation or loading is timed later."""
    layout = BlockLayout.of_block_bytes(8 * tokens_per_block, tokens_per_block)
    device = WatchedDevice(get_device(config.device))
    tokens = np.arange(3 * tokens_per_block, dtype=np.int32)
    with KVCacheManager(layout, device_blocks=8, host_blocks=8, device=device, max_sequences=2) as cache:
        for shift in (0, 0, 7, 0):
            keys = cache.block_keys(tokens[: 2 * tokens_per_block + 1] + shift)
            ids = cache.add_sequence_batch([keys]).ids
            cache.commit(int(ids[0]))
            cache.append_tokens(ids, tokens[:2], np.array([2]))
            cache.commit(ids)
            cache.content.offload(keys)
            cache.release(int(ids[0]))
    device.close()

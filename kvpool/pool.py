"""The pool around its decisions: memory, locks, the hand-over to transfer, leases, and what concerns the pool as a whole."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvpool import building, guards
from kvpool import events as kv_events
from kvpool import stats as statistics
from kvpool.building import pool_groups
from kvpool.device import get_device
from kvpool.device.base import Device, tier_argument
from kvpool.errors import DeviceError, IntegrityError, KVPoolError, PoolBusy, PoolClosed
from kvpool.export import Export, Lending, Loan, Place
from kvpool.groups import Group, group_argument
from kvpool.interrupt import DeferInterrupt
from kvpool.layout import BlockLayout, integer_argument
from kvpool.leases import CloseReport
from kvpool.memory import MemoryPools
from kvpool.refusals import refusal
from kvpool.sequence import BlockKeys, bool_argument, read_only
from kvpool.staging import Staging
from kvpool.state import blocks, groups, live
from kvpool.state.hashing import remote_password
from kvpool.state.integrity import verify_states
from kvpool.transfer import NO_IDS, Ids, Transfer

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_MS = 1 << 42


class Pool:
    """What ``KVCacheManager`` is built on; use that."""

    def __init__(
        self, layout: BlockLayout | None = None, *, device_blocks: Any, host_blocks: Any = 0, groups: Any = None,
        tokens_per_block: int | None = None, device: str | Device = "auto", max_sequences: int = 256,
        max_sequence_tokens: int | None = None, partial_reuse: bool = True, offload_min_priority: int = 30, offload_min_reuse: int = 1,
        secret: bytes | None = None, event_capacity: int = 0, clock: Callable[[], int] | None = None, staging_depth: int = 8,
        device_memory: Any = None, host_memory: Any = None, table: Any = None, window: int | None = None, sinks: int = 0,
    ) -> None:  # fmt: skip
        self._groups, width = pool_groups(layout, groups, tokens_per_block, window, sinks, device_blocks, host_blocks)
        rules = building.rules(max_sequences, max_sequence_tokens, secret, event_capacity, offload_min_priority, offload_min_reuse)
        if clock is not None and not callable(clock):
            raise TypeError(f"clock={clock!r:.80}: accepted is a function that returns milliseconds")
        depth = integer_argument("staging_depth", staging_depth, 1, 1 << 16)
        # A state behind a part of a block is kept nowhere.
        recurrent = any(group.kind == "recurrent" for group in self._groups)
        self.tokens_per_block, self.partial_reuse = width, bool_argument("partial_reuse", partial_reuse) and not recurrent
        # Reentrant, so that a lease which a destructor closes while this thread is inside the pool does not wait for itself.
        self._lock = threading.RLock()
        self._device, self._owns_device = get_device(device), not isinstance(device, Device)
        try:
            layouts, device_blocks, host_blocks = zip(*((g.layouts, g.device_blocks, g.host_blocks) for g in self._groups), strict=True)
            self._pools = MemoryPools(self._device, layouts, device_blocks, host_blocks, device_memory, host_memory)
            try:
                self._states = building.build_states(self._device, self._groups, width, rules, self.partial_reuse, table)
                token_bytes = [sum(layout.token_bytes for layout in group.layouts) for group in self._groups]
                self._transfer = Transfer(self._states, self._lock, self._device, token_bytes)
            except BaseException:
                self._pools.close()
                raise
        except BaseException:
            if self._owns_device:
                self._device.close()
            raise
        self.device_blocks, self.host_blocks = self._pools.device_blocks, self._pools.host_blocks
        # Of the tokens of sequences, whose number all groups know but those for cross attention.
        self._state = next(state for state in self._states if state.header[blocks.KIND] != blocks.CROSS)
        self._columns, self._fewest = self._states.table.shape[2], building.fewest_blocks(self._groups)
        self._crosses = any(group.kind == "cross" for group in self._groups)
        # A number for each group, for a verb that is under the state lock.
        self._needs = np.empty(len(self._groups), np.int64)
        self._origin = (self._states.fingerprint, width)
        self._tables = tuple(read_only(table) for table in self._states.table)
        self._clock: Callable[[], int] = clock or _milliseconds
        self._staging = Staging(self._device, self._transfer, depth)
        self._loans: WeakSet[Loan] = WeakSet()
        self._leases: dict[int, Any] = {}
        self._lease_count = 0
        self._reservations: dict[int, Any] = {}
        # One import at a time; the memory is not given back while one writes to it.
        self._importing = threading.Lock()
        self._imported = NO_IDS
        self._report: CloseReport | None = None
        self._names = kv_events.Names(self._states)
        kv_events.announce(self._states)

    def _disable_guard(self, name: str) -> None:
        """Take one named rule out, so that a test can show that its proof fails without it. Never call it elsewhere."""
        if name == "state_lock":
            self._lock = self._transfer._state_lock = nullcontext()  # type: ignore[assignment]
        elif name in guards.GUARDS:
            self._transfer.guards &= ~guards.GUARDS[name]
        else:
            self._states.disable_guard(name)

    # -- the shape of every decision ------------------------------------------------------------

    def _decide(self, moves: int, stream: Any, verb: Callable[..., Any], *args: Any, ids: Ids = NO_IDS) -> Any:
        """Run a jitted verb under the state lock, queue its moves (at most ``moves``), and enqueue everything queued behind it.

        What other threads have decided is enqueued too: a block that this call hands out may wait for it. ``ids`` are the sequences
        whose streams the call concerns (None: all that live); ``stream`` is what the caller named.
        """
        on = None if stream is None else self._device.as_stream(stream)
        inside, heads = self._inside(), self._states.heads
        with DeferInterrupt():
            with self._lock:
                self._check_open()
                # A signal handler or destructor that decides inside another call finds that one's moves here, and keeps them in order.
                self._transfer.collect()
                self._states.reserve_moves(moves)
                if self._transfer.order is None:
                    result = verb(heads, *args)
                else:
                    result = self._transfer.decide(on, moves, ids, verb, *args)
                if result < 0:
                    raise self._error(result, args[0])
                mine = self._transfer.collect()
            if (mine or self._transfer.waiting) and not inside:
                self._transfer.drain()
        return result

    def _inside(self) -> bool:
        """Whether this thread is in a call already, and holds the state lock: then this is a destructor or a signal handler."""
        owned = getattr(self._lock, "_is_owned", None)
        return owned is not None and bool(owned())

    def _refuse_inside(self, call: str) -> None:
        """Raise inside a decision or an enqueueing of this thread: it has a lock, and others would wait for what the call waits for."""
        if self._inside() or self._transfer.enqueuing:
            raise RuntimeError(f"{call} inside another call of this pool: destructors and signal handlers may close leases and release")

    def _check_open(self) -> None:
        if self._report is not None:
            raise PoolClosed("the pool is closed")
        if self._transfer.broken is not None:
            raise PoolClosed(f"the device has failed: {self._transfer.broken}") from self._transfer.broken

    def _error(self, code: int, ids: npt.NDArray[np.int64]) -> Exception:
        return refusal(self._states.heads, code, ids)

    def _rows(self, which: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of live sequences. The state lock is held by the caller."""
        self._check_open()
        error = live.check_ids(self._states.heads, which, True)
        if error:
            raise self._error(error, which)
        return which & 0xFFFFFFFF

    def now(self) -> int:
        """Milliseconds on the pool's clock. Raises TypeError or ValueError if that gives anything else."""
        return integer_argument("clock()", self._clock(), 0, MAX_MS)

    def _own_keys(self, keys: BlockKeys) -> BlockKeys:
        """The same keys, which a pool with this secret and block length has made; else ValueError."""
        if keys.origin is not self._origin and keys.origin != self._origin:
            raise ValueError("the keys were made by a pool with another secret or another tokens_per_block")
        return keys

    def _check_columns(self, needed: int) -> None:
        """Raise ValueError for a prompt whose blocks have no place in a row of the block table."""
        if self._columns < min(needed, self._fewest):
            raise ValueError(f"a prompt of {needed} blocks passes max_sequence_tokens={self._columns * self.tokens_per_block}")

    def _enable_extra(self) -> None:
        with self._lock:
            self._states.enable_extra()

    # -- the pool as a whole ---------------------------------------------------------------------

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups of layers in the order of the argument, with their capacities and where their blocks begin; one, too, of a layout."""
        return self._groups

    def _group(self, group: Any) -> int:
        """The group that an argument means. Raises TypeError or ValueError."""
        return group_argument(group, len(self._groups))

    @property
    def layout(self) -> BlockLayout:
        """Of a pool with one group of one layout; ValueError for others, which have ``groups``."""
        return self._pools.layout

    @property
    def device_pools(self) -> tuple[tuple[Any, ...], ...]:
        """The device tier of each group, and of each of its layouts: see ``device_pool``."""
        return self._pools.device_pools

    @property
    def host_pools(self) -> tuple[tuple[npt.NDArray[Any], ...], ...]:
        """The host tier of each group, and of each of its layouts: see ``host_pool``."""
        return self._pools.host_pools

    @property
    def device_pool(self) -> Any:
        """The device tier, shaped ``layout.device_shape(device_blocks)``, in the storage dtype: a NumPy array in main memory, else an
        array of the device's own kind, with DLPack and ``__cuda_array_interface__``."""
        return self._pools.device_pool

    @property
    def host_pool(self) -> npt.NDArray[Any]:
        """The host tier, shaped ``layout.host_shape(host_blocks)``; every block is contiguous."""
        return self._pools.host_pool

    def export(self, tier: str = "device", *, writable: bool = True, raw: bool = False, group: int | None = None, part: int = 0) -> Export:
        """A tier ("device" or "host") for arrays of other packages, in place: see ``Export``. Shaped like ``device_pool`` or ``host_pool``.

        ``writable=False`` says that it is not to be written. ``raw``: types that NumPy has no name for (bfloat16, float8) go as the
        unsigned integers of the pools, for packages that do not know them either. ``group``: of layers, to be named where there are
        several, and ``part`` of its layouts: it is ``device_pools[group][part]`` or ``host_pools[group][part]`` then. Thread-safe; does not
        change the pool. Raises TypeError, ValueError, PoolClosed.
        """
        tier_argument(tier)
        g = self._group(group)
        place = Place(tier, g, integer_argument("part", part, 0, len(self._groups[g].layouts) - 1))
        self._check_open()
        # Made here, since the pool may not hold what holds it: its memory goes with the last reference to it.
        lending = Lending(self._device, self._pools, self._loans, self._opened, self._follow)
        return Export.of_place(lending, place, bool_argument("writable", writable), bool_argument("raw", raw))

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """The state lock of an open pool."""
        with self._lock:
            self._check_open()
            yield

    def _follow(self, stream: Any) -> None:
        """Have work enqueued on ``stream`` from now on wait for all copies enqueued so far."""
        on = self._device.as_stream(stream)
        self._refuse_inside("what waits for copies")
        self._check_open()
        self._transfer.drain()
        self._transfer.follow(on)

    @property
    def remote_password(self) -> str:
        """What pools of the same secret know, and nobody else; not for showing."""
        return remote_password(self._states.secret)

    @property
    def closed(self) -> bool:
        return self._report is not None

    def refresh(self, now_ms: int | None = None) -> int:
        """Let blocks whose time is over fall to the back of the default priority; returns how many. Changes the pool."""
        now = self.now() if now_ms is None else integer_argument("now_ms", now_ms, 0, MAX_MS)
        return int(self._decide(0, None, groups.refresh, now))

    def events(self, *, snapshot: bool = False) -> kv_events.Events:
        """What has changed in the cache since the last call; each event is given once.

        ``snapshot``: and behind that one "cleared" event and "stored" ones for all that is cached now, parents before their children: what
        a reader needs that starts late, or has lost some. Thread-safe; the cache stays as it is. Raises ValueError for a snapshot of a
        pool with ``event_capacity=0``, TypeError, PoolClosed.
        """
        if bool_argument("snapshot", snapshot) and not self._states.heads[0, blocks.EVENTS]:
            raise ValueError("snapshot=True: accepted by pools that record events (event_capacity of 1 and more)")
        with self._lock:
            self._check_open()
            taken = kv_events.take(self._states, self._names, snapshot)
        return kv_events.decode(taken)

    def stats(self) -> statistics.Stats:
        """A snapshot; also of a closed pool. Thread-safe; changes nothing."""
        now, hand_overs = self.now() if self._leases else 0, self._staging.under_way()
        with self._lock:
            ages = [now - held.lease.since for held in list(self._leases.values())]
            return statistics.snapshot(self._states, self._state, self._transfer, self._pinned(), ages, hand_overs)

    def verify(self) -> None:
        """Check every invariant of the state; raises IntegrityError that names the one that does not hold. Slow."""
        with self._lock:
            self._check_open()
            verify_states(self._states, self._pinned())
            for check, detail in self._staging.findings():
                raise IntegrityError(check, detail)
            if set(self._live(blocks.RESERVED).tolist()) != set(self._reservations):
                raise IntegrityError("reservations", "the rows that are reserved are not those of the open reservations")

    def _pinned(self) -> npt.NDArray[np.int64]:
        """The blocks that leases and imports hold, once for each pin. The state lock is held by the caller."""
        return np.concatenate([self._imported, *(held.ids for held in list(self._leases.values()))])

    def _live(self, kind: int = blocks.LIVE) -> npt.NDArray[np.int64]:
        sequences = self._state.sequences
        rows = np.flatnonzero(sequences["live"] == kind)
        return (sequences["generation"][rows].astype(np.int64) << 32) | rows

    def reset(self, force: bool = False) -> None:
        """Forget all content. Pinned blocks stay readable.

        Raises PoolBusy while sequences live or reservations are open, unless ``force`` releases and aborts them; then their loaders
        must not write any more.
        """
        self._decide(0, None, self._reset, bool_argument("force", force), self.now(), ids=None)

    def _reset(self, heads: npt.NDArray[np.int64], force: bool, now: int) -> int:
        ids, reserved = self._live(), self._live(blocks.RESERVED)
        if len(reserved) and not force:
            raise PoolBusy(f"{len(ids)} sequences are live and {len(reserved)} reservations open: end them, or reset(force=True)")
        if len(ids) and not force:
            raise PoolBusy(f"{len(ids)} sequences are live: release them, or reset(force=True)")
        groups.reset(heads, np.concatenate([ids, reserved]), now)
        self._reservations.clear()
        return 0

    def calibrate(self) -> Any:
        """Measure which way of copying is the fastest on this device, take it from now on, and keep it on disk for other processes.

        Returns what was measured, or None from devices that have nothing to choose. Takes seconds; the pool's blocks are not
        touched, and other calls go on. Raises DeviceError, MemoryError, PoolClosed.
        """
        self._check_open()
        return self._device.calibrate()

    def close(self, force: bool = False) -> CloseReport:
        """Give all memory back; returns what was still held. Further calls, but ``stats`` and ``close``, raise PoolClosed.

        Raises PoolBusy, with nothing changed, while arrays that were made of exports live, unless ``force``: then the memory below them
        stays until they are gone, though nobody keeps it in order.
        """
        force = bool_argument("force", force)
        self._refuse_inside("close")
        if self._loans:
            gc.collect()  # What nobody can reach is no view.
        now = self.now() if self._leases or self._reservations else 0
        with DeferInterrupt():
            with self._lock:
                if self._report is not None:
                    return self._report
                views = len(self._loans)
                if views and not force:
                    raise PoolBusy(f"views of exported memory live: {views}; delete arrays made of exports, or close(force=True)")
                owners = [(held.lease.owner, max(0, now - held.lease.since)) for held in list(self._leases.values())]
                loaders = [(one.owner, max(0, now - one.since)) for one in self._reservations.values()]
                self._report = CloseReport(self._live().tolist(), owners, loaders)
                self._leases.clear()
                self._reservations.clear()
            try:
                # Nothing is decided any more; once everything decided is enqueued, nobody is inside a copy.
                self._transfer.drain()
                self._device.synchronize()
            except DeviceError:
                if self._transfer.broken is None:
                    raise
            finally:
                self._staging.close()
                with self._importing:
                    self._pools.close()
                if self._owns_device:
                    self._device.close()
        return self._report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        report = self.close(force=True)
        views = len(self._loans)
        if kind is None and (any(report) or views):
            held = [f"{len(found)} {name}" for name, found in report._asdict().items()]
            raise KVPoolError(f"the pool was closed while {', '.join(held)} and {views} views of exported memory were held: {report}")


def _milliseconds() -> int:
    return time.monotonic_ns() // 1_000_000

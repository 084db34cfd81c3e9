"""SimDevice: a device whose streams run late, in any order that streams and events allow. It reports accesses that
nothing orders."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeAlias, cast

from kvpool.common.arrays import Array, Int64s, Uint8s
from kvpool.common.arrays.layout import integer_argument
from kvpool.common.arrays.strided import StridedArray
from kvpool.common.changes import from_handler
from kvpool.device.base import (
    BOUND_ALREADY,
    NOT_BOUND,
    NULL_EVENT,
    NULL_STREAM,
    Device,
    DeviceArray,
    DeviceEvent,
    Stream,
    StreamLike,
    stream_argument,
)
from kvpool.device.memory.main_memory import allocate_ram, allocate_shared, available_ram, free_shared
from kvpool.device.regions import ALL_LAYERS, BYTES, FROM, TO, Layers, Region, Regions
from kvpool.device.sim.order import (
    LANE_BITS,
    NO_ROWS,
    Access,
    Deadlock,
    HostAccess,
    Rows,
    Waits,
    call_site,
    host_call,
    joined,
    rows_of_copies,
)
from kvpool.device.sim.scheduler import (
    Choices,
    Queue,
    Scheduler,
    SeededChoices,
    SimEvent,
    Task,
    Wait,
    copying,
    describe,
)
from kvpool.device.sim.shadow import COMPARE, POISON, Findings, Shadow
from kvpool.device.work import Fragments, StagedRows, StagedStep, StagedVectors, TokenMoves, Work
from kvpool.errors import DeviceError, PoolClosed

_KINDS: dict[type, str] = {
    Fragments: "copy_fragments",
    TokenMoves: "move_tokens",
    StagedRows: "stage_rows",
    StagedVectors: "stage_vectors",
    StagedStep: "stage_step",
}
"""The names of work in reports."""
Memory = Sequence[Array]
RowsLike: TypeAlias = "Int64s | Sequence[Sequence[int]]"
"""Tokens of blocks: rows (block id, first token, end of the tokens)."""


class Graph(list[Callable[[Any], None]]):
    """What was captured: calls that take the stream on which it is replayed."""


# Every 16th query of an event takes a step toward it, so that a loop over ``query`` ends.
_FAIR_QUERIES = 16
# This many queries in a row, while nothing can run and nothing else is called, are a loop that cannot end.
_VAIN_QUERIES = 100_000


class _Inside:
    """A call of a device that is running. A context manager that holds nothing, entered under the device's lock.

    Notes
    -----
    What a call changes in the schedule and in the shadow takes many steps. If an exception of a signal handler ends it
    half-way, ``is_running`` stays true. Then nobody knows what the device has done, and its next call closes it.
    """

    def __init__(self) -> None:
        self.is_running = False

    def __enter__(self) -> None:
        self.is_running = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_running = error is not None and from_handler(error)


class Gate:
    """A gate that holds back the work enqueued on a stream after it. It orders no accesses.

    ``SimDevice.stall`` returns it.

    Notes
    -----
    Thread-safe.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release

    def open(self) -> None:
        """Let the stream continue. A second call does nothing."""
        self._release()


class HostSpan:
    """A context manager: from entry to exit a thread reads and writes what it declared to ``SimDevice.host_access``."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *error: object) -> None:
        self._end()


class SimDevice(Device):
    """A device for tests, in main memory, that runs work late and reports races.

    Enqueued work runs in steps inside later calls, in any order that streams and events allow.

    Parameters
    ----------
    seed : int, default 0
        Decides the schedule, and which blocks are compared. Equal seeds and equal calls give equal schedules.
    progress : float, default 0.5
        The probability that a call which forces no step takes one more step. With 0 nothing runs early, with 1
        everything runs at once.
    chunk_bytes : int, default 256
        About the most bytes of a copy op that one step copies. A copy op has at most a few steps.
    choices : Choices, optional
        Makes all decisions of the schedule, in place of ``seed`` and ``progress``.
    compare : {"auto", "all", "sample"}, default "auto"
        Which blocks are compared with their shadow after every operation: all, or a few. "auto" compares all of a small
        pool. ``check``, ``synchronize()``, ``free`` and ``close`` always compare everything.

    Raises
    ------
    TypeError, ValueError
        For a bad argument, here and in every call.

    Notes
    -----
    Accesses that no event orders, undeclared writes, and errors of launched functions are *failures*. The device keeps
    them, and ``check``, ``synchronize()`` and ``close`` raise each of them once. For this, it keeps a shadow copy of
    both tiers.

    Any thread may call anything at any time. A launched function may not call the device, which is locked while it
    runs. The waits of one thread count for all work that is enqueued later by any thread, and for its own
    ``host_access``. A ``query`` that was true for one thread counts for all threads.

    If a signal handler raises inside a call, as that of Ctrl-C does, the device closes, and all later calls except
    ``close`` raise DeviceError.
    """

    name = "sim"
    synchronous = False
    one_memory = True

    def __init__(
        self,
        seed: int = 0,
        *,
        progress: float = 0.5,
        chunk_bytes: int = 256,
        choices: Choices | None = None,
        compare: str = "auto",
    ) -> None:
        seed = integer_argument("seed", seed, 0, 2**63 - 1)
        if compare not in COMPARE:
            raise ValueError(f"compare: expected one of {', '.join(COMPARE)}, got {compare!r:.80}")
        if choices is not None and not isinstance(choices, Choices):
            raise TypeError(f"choices: expected Choices or None, got {choices!r:.80}")
        self._chunk_bytes = integer_argument("chunk_bytes", chunk_bytes, 1, 2**62)
        self._choices = choices or SeededChoices(seed, progress)
        self._compare = compare
        self._findings = Findings(compare, seed, self.__repr__)
        self.races = self._findings.races
        self._scheduler = Scheduler(self._choices, self._finished)
        self._graphs: dict[int, Graph] = {}
        self._bound: Shadow | None = None
        self._allocated: dict[int, tuple[Uint8s, bool]] = {}
        """By identity: memory, and whether it is the caller's, which keeps its content when it is freed."""
        self._accesses = self._vain = 0
        self._ended: deque[HostAccess] = deque()
        self._closed = False
        self._own_lock = threading.RLock()
        self._inside, self._in_doubt = _Inside(), False
        self._waits = Waits()

    def __repr__(self) -> str:
        return f"SimDevice({self._choices!r}, chunk_bytes={self._chunk_bytes}, compare={self._compare!r})"

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""
        return self._closed

    @property
    def _lock(self) -> AbstractContextManager[Any]:
        """The lock, a lock of C: see ``Changes``. Raises RuntimeError inside a call, which would wait for itself."""
        if self._own_lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                "this thread is inside a call of the device: a launched function may touch memory and nothing else"
            )
        return self._own_lock

    def _settled(self) -> _Inside:
        """What each call begins with, under the lock."""
        if self._inside.is_running:
            self._closed, self._in_doubt, self._bound = True, True, None
            self._findings.freed.clear()
        self._findings.settle(self._bound, self._ended)
        return self._inside

    def _entered(self, query: bool = False) -> _Inside:
        """What each call of an open device begins with, under the lock. Memory is compared first, so that what runs now
        hides no write of the host."""
        inside = self._settled()
        if self._in_doubt:
            raise DeviceError("a signal handler has raised inside a call: the schedule is in doubt", sticky=True)
        if self._closed:
            raise PoolClosed("the sim device is closed")
        self._vain = self._vain + 1 if query else 0
        self._findings.entered(self._bound)
        return inside

    # -- memory ----------------------------------------------------------------------------------

    def allocate(self, nbytes: int, tier: str, shared: bool = False) -> Uint8s:
        with self._lock, self._entered():
            array = (allocate_shared if shared else allocate_ram)(nbytes)
            self._allocated[id(array)] = array, False
            return array

    def free(self, array: DeviceArray) -> None:
        """Give memory back, and report later writes to it.

        Parameters
        ----------
        array : ndarray of uint8
            The memory. It is filled with ``POISON``, and kept until the device closes.

        Raises
        ------
        ValueError
            For memory that ``allocate`` did not return, or that was freed before.

        Notes
        -----
        Any access to a bound pool that this thread has not waited for is a race with this call.
        """
        memory = cast(Uint8s, array)
        with self._lock, self._settled():
            free_shared(memory)
            _, lent = self._allocated.pop(id(memory), (None, None))
            if self._closed:
                if not lent:
                    memory.fill(POISON)
                return
            if lent is None:
                raise ValueError("array: what allocate gave, and what was not freed before, is needed")
            access = host_call("free")
            if self._bound is not None and self._bound.regions.have(memory):
                self._unbind(self._bound, access)
            elif self._bound is not None:
                self._overwrite(self._bound, access, self._bound.rows(("", "array"), None, [memory]))
                self._bound.forget(memory)
            if not lent:
                memory.fill(POISON)
                self._findings.freed.append((memory, access))

    def adopt(self, memory: StridedArray, tier: str, pin: bool = False) -> Uint8s:
        with self._lock, self._entered():
            array = memory.host_view()
            self._allocated[id(array)] = array, True
            return array

    def available_bytes(self, tier: str) -> int | None:
        """Return half of the available memory, since the shadow takes the other half.

        Parameters
        ----------
        tier : {"device", "host"}
            The tier.

        Returns
        -------
        int or None
            Bytes; None if they are not known.
        """
        available = available_ram()
        return None if available is None else available // 2

    def bind(self, regions: Sequence[Region]) -> None:
        with self._lock, self._entered():
            if self._bound is not None:
                raise ValueError(BOUND_ALREADY)
            self._bound = Shadow(Regions(regions))

    def _pool(self) -> Shadow:
        if self._bound is None:
            raise ValueError(NOT_BOUND)
        return self._bound

    def _unbind(self, bound: Shadow, access: Access) -> None:
        """Release the pools. They may not be used any more: work that is still enqueued on them is dropped, and
        reported as a race."""
        self._findings.compare(bound, access)
        self._overwrite(bound, access, bound.everything())
        self._bound = None
        self._scheduler.drop_bound()

    def _overwrite(self, bound: Shadow, access: Access, rows: Rows) -> None:
        """The calling thread takes memory away."""
        opened = HostAccess(access, rows[:0], rows)
        self._findings.note(bound.order.begin(opened, self._waits.of_thread()))
        bound.order.end(opened)

    # -- streams ---------------------------------------------------------------------------------

    def as_stream(self, stream: Any) -> Stream:
        checked = stream_argument(stream)
        if checked.handle in self._graphs:
            raise ValueError(f"stream: expected one that is not being captured, got {stream!r}")
        return checked

    @contextmanager
    def capture(self, stream: StreamLike) -> Iterator[Graph]:
        """Capture a stream in a graph while the context is open, as CUDA does.

        Parameters
        ----------
        stream : Stream, int, or stream of another package
            The stream. Work that ``launch`` enqueues there, and uploads that a pool captures, are recorded. Other calls
            refuse the stream.

        Yields
        ------
        Graph
            The recorded work, for ``replay``.
        """
        handle, graph = self.as_stream(stream).handle, Graph()
        self._graphs[handle] = graph
        try:
            yield graph
        finally:
            del self._graphs[handle]

    def replay(self, graph: Graph, stream: StreamLike) -> None:
        """Enqueue the work of a graph.

        Parameters
        ----------
        graph : Graph
            The graph, which can be replayed any number of times.
        stream : Stream, int, or stream of another package
            The stream on which it runs.
        """
        for call in graph:
            call(stream)

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        with self._lock, self._entered():
            return self._scheduler.create(name)

    def _queue(self, stream: Any) -> Queue:
        """The queue of a stream, whose next work comes after all that any thread has waited for."""
        queue = self._scheduler.queue(self.as_stream(stream))
        queue.clock = joined(queue.clock, self._waits.of_any)
        return queue

    def copy_blocks(self, copy_ops: Int64s, stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        with self._lock, self._entered():
            bound = self._pool()
            copy_ops, queue = copy_ops.copy(), self._queue(stream)  # The caller may use its array again at once.
            if len(copy_ops):
                access = Access("copy_blocks", queue.name, call_site())
                reads, writes = rows_of_copies(copy_ops)
                self._findings.note(bound.order.dependent_rows(access, reads[:, 0], writes[:, 0]))
                steps = copying(copy_ops, bound, self._chunk_bytes, layers, self._choices)
                self._submit(queue, Task(access, writes, steps, mirrored=True), reads, layers)
            self._scheduler.poll()

    def enqueue(self, work: Work, stream: Stream = NULL_STREAM, captured: bool = False) -> None:
        if captured:
            if stream.handle not in self._graphs:
                raise ValueError(f"stream: expected one that is being captured, got {stream!r:.80}")
            self._graphs[stream.handle].append(partial(self.enqueue, work))
            return
        with self._lock, self._entered():
            bound = self._pool()
            if isinstance(work, Fragments):
                work = Fragments(work.rows.copy())  # The caller may use its array again at once.
                read, written = (bound.rows_of_memory(work.rows[:, [end, BYTES]]) for end in (FROM, TO))
            elif isinstance(work, TokenMoves):
                work = TokenMoves(work.moves.copy(), work.starts.copy())
                read, written = work.reads_and_writes(bound.regions.width)
            elif id(work.buffer) not in self._allocated:
                raise ValueError("staged: a buffer that allocate gave, and that was not freed, is needed")
            else:
                read, written = self._rows(None, None, [work.buffer], [table.owner for table in work.written()])
            self._launch(_KINDS[type(work)], stream, partial(_run, work, bound), read, written)

    def launch(
        self,
        stream: StreamLike,
        function: Callable[[], None],
        *,
        reads: RowsLike | None = None,
        writes: RowsLike | None = None,
        loads: Memory = (),
        stores: Memory = (),
        layers: Layers = ALL_LAYERS,
    ) -> None:
        """Enqueue a kernel of the engine: a function that reads and writes pool memory directly.

        Parameters
        ----------
        stream : Stream, int, or stream of another package
            The stream.
        function : callable
            ``() -> None``, called when its turn comes.
        reads : array_like of int64, shape (n, 3), optional
            The tokens that it may read: block id, first token, and end of the tokens.
        writes : array_like of int64, shape (n, 3), optional
            The tokens that it may write.
        loads : sequence of ndarray, optional
            Arrays outside the pools that it may read, such as block tables.
        stores : sequence of ndarray, optional
            Arrays outside the pools that it may write.
        layers : Layers, optional
            The layers of the blocks that it touches, such as ``Layers(3, 32)`` for layer 3 of 32. By default all.

        Raises
        ------
        TypeError, ValueError
            For a bad argument, and for rows without a bound pool.

        Notes
        -----
        It is a failure if the function raises, or writes anywhere else in the pools or in these arrays.
        """
        if not callable(function):
            raise TypeError(f"function: expected a callable without arguments, got {function!r:.80}")
        graph = self._graphs.get(stream_argument(stream).handle)
        if graph is not None:
            what = partial(self.launch, function=function, reads=reads, writes=writes, layers=layers)
            graph.append(partial(what, loads=loads, stores=stores))
            return
        with self._lock, self._entered():
            self._launch("launch", stream, function, *self._rows(reads, writes, loads, stores), layers)

    def _launch(
        self,
        kind: str,
        stream: Any,
        function: Callable[[], object],
        read: Rows,
        written: Rows,
        layers: Layers = ALL_LAYERS,
    ) -> None:
        queue = self._queue(stream)
        access = Access(kind, queue.name, call_site())
        self._submit(queue, Task(access, written, self._call(function), bool(len(read) or len(written))), read, layers)
        self._scheduler.poll()

    def _call(self, function: Callable[[], object]) -> Iterator[bool]:
        """A function in one step."""
        try:
            function()
        except Exception as error:
            self._findings.note([error])
        yield True

    def _rows(self, reads: Any, writes: Any, loads: Memory, stores: Memory) -> tuple[Rows, Rows]:
        if reads is None and writes is None and not len(loads) and not len(stores):
            return NO_ROWS, NO_ROWS
        return self._pool().rows(("reads", "loads"), reads, loads), self._pool().rows(
            ("writes", "stores"), writes, stores
        )

    def _submit(self, queue: Queue, work: Task, reads: Rows, layers: Layers) -> None:
        self._accesses += 1
        key = (self._accesses << LANE_BITS) | queue.lane
        if self._bound is not None:
            order = self._bound.order
            self._findings.note(order.enqueue(work.access, key, queue.clock, reads, work.writes, layers))
        queue.clock[queue.lane] = key
        self._scheduler.add(queue, work)

    def _finished(self, work: Task) -> None:
        if self._bound is not None:
            # While a thread of the host writes, a copy may have read more of its bytes than the shadow's copy did. That
            # race has been noted.
            if not work.mirrored or self._bound.order.open:
                self._bound.adopt(work.writes)
            self._findings.finished(self._bound, work.access)

    def record(self, stream: Stream) -> DeviceEvent:
        with self._lock, self._entered():
            queue = self._queue(stream)
            event = SimEvent(queue, call_site())
            self._scheduler.add(queue, event)
            self._scheduler.poll()
            return event

    def wait(self, stream: Stream, event: DeviceEvent) -> None:
        with self._lock, self._entered():
            recorded = self._event(event)
            queue = self._queue(stream)
            if recorded is not None:
                queue.clock = joined(queue.clock, recorded.clock)
                if not recorded.done:
                    self._scheduler.add(queue, Wait(Access("wait", queue.name, call_site()), recorded))
            self._scheduler.poll()

    def stall(self, stream: StreamLike) -> Gate:
        """Hold back all work that is enqueued on a stream after this call, as if the stream were busy.

        Parameters
        ----------
        stream : Stream, int, or stream of another package
            The stream.

        Returns
        -------
        Gate
            The work runs after its ``open``.
        """
        with self._lock, self._entered():
            queue = self._queue(stream)
            entry = Wait(Access("stall", queue.name, call_site()))
            self._scheduler.add(queue, entry)
            self._scheduler.poll()
            return Gate(lambda: self._open(entry))

    def _open(self, entry: Wait) -> None:
        with self._lock, self._settled():
            entry.opened = True
            if not self._closed:
                self._scheduler.settle()
                self._scheduler.poll()

    # -- waiting ---------------------------------------------------------------------------------

    def query(self, event: DeviceEvent) -> bool:
        """Return whether an event is complete.

        Parameters
        ----------
        event : DeviceEvent
            The event.

        Returns
        -------
        bool
            Whether all work before it is done.

        Raises
        ------
        Deadlock
            In a loop that cannot end.

        Notes
        -----
        Some queries take a step toward the event, so that a loop over ``query`` ends.
        """
        with self._lock, self._entered(query=True):
            recorded = self._event(event)
            if recorded is None:
                return True
            self._scheduler.poll()
            if not recorded.done:
                recorded.queries += 1
                if recorded.queries % _FAIR_QUERIES == 0:
                    self._scheduler.toward(recorded)
            if recorded.done:
                self._waits.add_known(recorded.clock)
            elif self._vain > _VAIN_QUERIES and not self._scheduler.runnable():
                raise self._deadlock(f"a loop over query({describe(recorded)})")
            return recorded.done

    def synchronize(self, event: DeviceEvent | None = None) -> None:
        """Take steps until an event is complete.

        Parameters
        ----------
        event : DeviceEvent, optional
            The event. By default the call takes all steps, and then does what ``check`` does.

        Raises
        ------
        Deadlock
            If the event can never be complete.
        """
        with self._lock, self._entered():
            recorded = None if event is None else self._event(event)
            if (event is None or recorded is not None) and not self._scheduler.finish(recorded):
                raise self._deadlock(f"synchronize({'' if recorded is None else describe(recorded)})")
            if recorded is not None:
                self._waits.add(recorded.clock)
            if event is None:
                self._waits.add_for_all([queue.clock for queue in self._scheduler.queues.values()])
        if event is None:
            self.check()

    def _deadlock(self, what: str) -> Deadlock:
        return Deadlock(f"{what} can never end:\n{self._scheduler.stuck()}\n[{self!r}]")

    def run(self, steps: int | None = None) -> None:
        """Take steps of any work that can run now.

        Parameters
        ----------
        steps : int, optional
            The most steps. By default all that closed gates allow.
        """
        count = None if steps is None else integer_argument("steps", steps, 0, 2**62)
        with self._lock, self._entered():
            self._scheduler.run(count)

    def _event(self, event: Any) -> SimEvent | None:
        """An event of this device, or None for the event that is complete from the start."""
        if event is NULL_EVENT:
            return None
        if not isinstance(event, SimEvent) or event.queue is not self._scheduler.queues.get(event.queue.handle):
            raise TypeError(f"event: expected one that this device has recorded, got {event!r:.80}")
        return event

    # -- the host --------------------------------------------------------------------------------

    def host_access(
        self,
        *,
        reads: RowsLike | None = None,
        writes: RowsLike | None = None,
        loads: Memory = (),
        stores: Memory = (),
        outside: bool = False,
    ) -> HostSpan:
        """Declare that this thread reads and writes memory directly, while a context is open.

        Parameters
        ----------
        reads : array_like of int64, shape (n, 3), optional
            As for ``launch``.
        writes : array_like of int64, shape (n, 3), optional
            As for ``launch``.
        loads : sequence of ndarray, optional
            As for ``launch``.
        stores : sequence of ndarray, optional
            As for ``launch``.
        outside : bool, default False
            Whether another process accesses the memory, after all work that this thread has waited for. The access can
            then race with this thread too.

        Returns
        -------
        HostSpan
            The context manager.

        Raises
        ------
        TypeError, ValueError
            For a bad argument.

        Notes
        -----
        The access races with every conflicting operation that this thread has not waited for (by ``synchronize``, or by
        a ``query`` that was true), with each that is enqueued before the context ends, and with other open contexts.
        """
        with self._lock, self._entered():
            access = host_call("another process" if outside else "host_access")
            thread = 0 if outside else threading.get_ident()
            opened = HostAccess(access, *self._rows(reads, writes, loads, stores), thread)
            return HostSpan(lambda: self._begin(opened), lambda: self._end(opened))

    def _begin(self, opened: HostAccess) -> None:
        with self._lock, self._entered():
            self._scheduler.poll()
            self._findings.note(self._pool().order.begin(opened, self._waits.of_thread()))

    def _end(self, opened: HostAccess) -> None:
        """Never waits, since a destructor may end an access inside any call. What cannot be done now is done first in
        the next call."""
        self._ended.append(opened)
        if self._own_lock._is_owned():  # type: ignore[attr-defined]
            return
        taken: list[bool] = []
        try:
            # Taken and noted by one call of C, in which no handler runs.
            taken.extend(map(self._own_lock.acquire, (False,)))
            if any(taken):
                with self._settled():
                    pass
        finally:
            if any(taken):
                self._own_lock.release()

    # -- failures --------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare all memory with its shadow, and raise the oldest failure. It runs no work.

        Raises
        ------
        RaceError
            For all races so far, once.
        UndeclaredWrite
            For a change of memory that no call had declared.
        Exception
            Any that a launched function has raised.
        """
        with self._lock, self._entered():
            self._findings.compare(self._bound, None)
            self._findings.raise_first()

    def close(self) -> None:
        """Close the device, and raise the oldest failure.

        Raises
        ------
        RaceError, UndeclaredWrite, Exception
            As for ``check``.

        Notes
        -----
        Work on the pools that is still enqueued, or for which this thread has not waited, is a race.
        """
        with self._lock, self._settled():
            if self._closed:
                return
            self._closed = True
            if self._bound is not None:
                self._unbind(self._bound, host_call("close"))
            else:
                self._findings.compare(None, None)
            self._allocated = {key: entry for key, entry in self._allocated.items() if entry[1]}
            self._findings.freed.clear()
            self._findings.raise_first()


def _run(work: Work, bound: Shadow) -> None:
    """Do work on the pools alone, not on their shadow. A buffer may have been written too early."""
    if isinstance(work, StagedRows | StagedStep):
        work.check()
    work.run(bound.real)

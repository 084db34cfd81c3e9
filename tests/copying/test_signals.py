"""Handlers of signals that raise: how they are deferred, and what a timer that raises all the time leaves behind."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import numpy as np
import pytest

import kvpool.common.interrupt
from engine import Clock, small_layout
from kvpool import KVCacheManager, PagedKV, gather_kv
from kvpool.common.interrupt import LOOK_AT_ALL, Bell, DeferSignals, deliver
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice
from kvpool.pool import operations
from kvpool.state.records import LIVE, SWAPPED
from steps import arrays
from tests.exact import Alarm, At

T, P, S = 4, 16, 12
Counts = tuple[Any, ...]
Act = Callable[[], object]


def alarm(number: int, frame: FrameType | None) -> None:
    raise Alarm


@contextmanager
def handled(number: int = signal.SIGALRM, handler: Any = alarm) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
        assert signal.getsignal(number) is handler, "the handler was not given back"
    finally:
        signal.signal(number, before)


class Desk:
    """A pool that holds some of everything; ``verbs`` are calls on it, each from the same state."""

    def __init__(self, device: str | Device) -> None:
        self.clock = Clock()
        self.cache = KVCacheManager(
            small_layout(T),
            device_blocks=P,
            host_blocks=S,
            device=device,
            clock=self.clock,
            secret=bytes(32),
            event_capacity=256,
            max_sequences=16,
        )
        self.sim = device if isinstance(device, SimDevice) else None
        self.known = self.cache.block_keys(range(2 * T))
        self.fresh = self.cache.block_keys(range(500, 500 + 2 * T + 1))
        self.extra = self.cache.block_keys(range(700, 700 + T), extra_ids=range(T))
        self.import_at = 1000
        data = [np.full(self.cache.layout.block_bytes, 7 + i, np.uint8) for i in range(2)]
        assert self.cache.import_blocks(self.known, data) == 2

    def ready(self) -> None:
        """The state before each call."""
        cache = self.cache
        cache.offload(self.known)
        self.sequence = cache.add_sequence([*range(2 * T), 250])
        self.drafted = cache.add_sequence([*range(300, 303)])
        cache.commit(self.drafted)
        cache.append_tokens(self.drafted, [1, 2, 3])
        self.both = [self.sequence, self.drafted]
        self.lease = cache.pin(self.known.keys[:1], owner="reader", tier="host")
        self.reservation = cache.reserve(range(400, 406), owner="loader")
        self.imported = cache.block_keys(range(self.import_at, self.import_at + 2 * T))
        self.import_at += 2 * T
        self.begun, self.got = cache.events().next, None

    def counts(self) -> Counts:
        """What is held, and what sequences have."""
        cache, state = self.cache, self.cache.core.tokens
        held, rows = state.blocks["ref_word"], state.sequences
        live = rows["live"] != 0
        return (
            int(live.sum()),
            len(cache.leases),
            len(cache.reservations),
            int((held >> 32).sum()),
            int((held & 0xFFFFFFFF).sum()),
            sorted(rows["length"][live].tolist()),
            sorted(rows["committed"][live].tolist()),
        )

    def check(self, where: str) -> None:
        """Invariants; no lock is held, nothing is queued or lost."""
        cache, staging = self.cache, self.cache._staging
        assert not cache.core._owned() and not cache.core.transfer.enqueuing and not cache._imports._one.locked(), where
        assert not staging._lock.locked() and not cache.core.transfer._queue and cache.core.transfer.broken is None, (
            where
        )
        if self.sim is not None:
            assert not self.sim._lock._lock.locked(), where
            self.sim.synchronize()
        assert staging.retained + len(staging._free) == len(staging._buffers), f"a buffer was lost {where}"
        assert len(cache._imports.pinned) == 0, where
        cache.verify()
        events = cache.events()
        assert events.number == (self.begun if self.got is None else self.got.next), f"events were lost {where}"
        assert cache.stats().events_dropped == 0

    def bytes_are_right(self, where: str) -> None:
        self.cache.prefetch(self.known)
        self.cache.offload(self.known)
        for tier, pool in ("host", self.cache.host_pool), ("device", self.cache.device_pool):
            with self.cache.pin(self.known.keys, tier=tier) as lease:
                for i, block in enumerate(lease.blocks.tolist()):
                    block_bytes = pool[block - P] if tier == "host" else pool[:, :, block]
                    assert (block_bytes.view(np.uint8) == 7 + i).all(), f"a byte is wrong {where}"

    def clear(self, where: str) -> None:
        """Back to an empty desk: all that is held can be found, and given back."""
        cache = self.cache
        for lease in cache.leases:
            lease.close()
        for reservation in cache.reservations:
            reservation.abort()
        live = cache.core.live()
        if len(live):
            cache.release(live)
        assert not cache.core.tokens.blocks["ref_word"].any(), f"a block is held by nobody {where}"


def add_batch(desk: Desk) -> Act:
    prompts = [desk.known, desk.fresh, desk.extra]
    return lambda: desk.cache.add_sequence_batch(prompts, retention=[None, [(0, None, 50, 1000)], None])


def pin_context(desk: Desk) -> Act:
    def act() -> None:
        with desk.cache.pin(desk.known.keys):
            pass

    return act


def revoke(desk: Desk) -> Act:
    desk.cache.reserve(range(440, 443), owner="reader")
    return lambda: desk.cache.revoke("reader")


def import_blocks(desk: Desk) -> Act:
    data = [bytes([i]) * desk.cache.layout.block_bytes for i in range(2)]
    return lambda: desk.cache.import_blocks(desk.imported, data)


def reserve_context(desk: Desk) -> Act:
    def act() -> None:
        with desk.cache.reserve([*range(2 * T), 900, 901]):
            pass

    return act


def events(desk: Desk) -> Act:
    desk.cache.release(desk.cache.add_sequence(desk.extra))

    def act() -> None:
        desk.got = desk.cache.events()

    return act


def snapshot(desk: Desk) -> Act:
    def act() -> None:
        desk.got = desk.cache.events(snapshot=True)

    return act


def offsets(desk: Desk) -> Act:
    target = np.zeros((4, 8), np.int32)
    return lambda: desk.cache.copy_batch_block_offsets(target, desk.both, stream=3)


def csr(desk: Desk) -> Act:
    vectors = [np.zeros(64, np.int32) for _ in range(3)]
    return lambda: desk.cache.copy_batch_block_csr(*vectors, desk.both, stream=3)


def reading(desk: Desk) -> Act:
    cache = desk.cache

    def act() -> None:
        cache.match_prefix(desk.known)
        cache.blocks_needed(desk.fresh)
        cache.blocks_needed(sequences=[desk.sequence], new_tokens=9)
        cache.sequence_length([desk.sequence])
        cache.evictable_after_release([desk.sequence])
        cache.stats()
        assert cache.leases and cache.reservations

    return act


def export(desk: Desk) -> Act:
    def act() -> None:
        np.from_dlpack(desk.cache.export("host"))

    return act


def gather(desk: Desk) -> Act:
    slots, out = np.arange(2 * T), np.zeros((2, 2, 2 * T, 2, 3), np.uint16)
    paged = PagedKV.of_pool(desk.cache.layout, desk.cache.device_pool)
    if desk.sim is not None:
        desk.sim.synchronize()

    def act() -> None:
        with desk.cache.core.device.host_access(reads=[(0, 0, T), (1, 0, T)]):
            gather_kv(paged, slots, out)

    return act


Verb = Callable[[Desk], Act]
GIVING: dict[str, Verb] = {
    "add": lambda desk: lambda: desk.cache.add_sequence([*range(2 * T + 2)]),
    "add_batch": add_batch,
    "fork": lambda desk: lambda: desk.cache.fork(desk.both, 2),
    "pin": lambda desk: lambda: desk.cache.pin(desk.known.keys),
    "find_and_pin": lambda desk: lambda: desk.cache.find_and_pin_host(desk.known.keys[1], stream=3),
    "pin_blocks": lambda desk: lambda: desk.cache.pin_blocks([0]),
    "reserve": lambda desk: lambda: desk.cache.reserve([*range(2 * T), 900, 901]),
}
"""Those that give the caller something it has to give back."""
VERBS = GIVING | {
    "append": lambda desk: lambda: desk.cache.append_tokens(desk.both, range(7), [3, 4]),
    "commit": lambda desk: lambda: desk.cache.commit(desk.both),
    "rewind": lambda desk: lambda: desk.cache.rewind(desk.both, [2, 1]),
    "release": lambda desk: lambda: desk.cache.release(desk.both),
    "reorder": lambda desk: lambda: desk.cache.reorder(desk.both, [0, 0]),
    "keep": lambda desk: lambda: desk.cache.accept_drafts(desk.drafted, 3, [0, 2]),
    "offload": lambda desk: lambda: desk.cache.offload(desk.known),
    "prefetch": lambda desk: lambda: desk.cache.prefetch(desk.known),
    "close_lease": lambda desk: desk.lease.close,
    "pin_context": pin_context,
    "revoke": revoke,
    "import_blocks": import_blocks,
    "commit_reserved": lambda desk: lambda: desk.reservation.commit(0),
    "abort_reserved": lambda desk: desk.reservation.abort,
    "reserve_context": reserve_context,
    "load_targets": lambda desk: lambda: desk.cache.load_targets(desk.both),
    "events": events,
    "snapshot": snapshot,
    "offsets": offsets,
    "csr": csr,
    "copy_step_tables": lambda desk: lambda: desk.cache.copy_step_tables(arrays(2, 64, 8, 64), desk.both, stream=3),
    "block_table": lambda desk: lambda: desk.cache.block_table([desk.sequence], stream=3).dense(),
    "reading": reading,
    "refresh": lambda desk: lambda: desk.cache.refresh(10**6),
    "export": export,
    "gather": gather,
}
DEVICES: dict[str, Callable[[], Any]] = {"cpu": lambda: "cpu", "sim": lambda: SimDevice(5, progress=0.3)}


# -- the deferral itself -------------------------------------------------------------------------------


class Second(Exception):
    pass


def second(number: int, frame: FrameType | None) -> None:
    raise Second


def arrive(*numbers: int) -> None:
    for number in numbers:
        signal.raise_signal(number)


def test_all_signals_that_arrived_are_delivered_though_the_first_one_raises() -> None:
    undone: list[int] = []
    with (
        handled(),
        handled(signal.SIGUSR1, second),
        handled(signal.SIGUSR2, lambda number, frame: undone.append(number)),
    ):
        with pytest.raises((Alarm, Second)) as raised, DeferSignals() as signals:
            signals.undo = lambda: undone.append(0)
            arrive(signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
            assert undone == []
        assert {type(raised.value), type(raised.value.__context__)} == {Alarm, Second}
        assert sorted(undone) == [0, signal.SIGUSR2]


def test_what_a_handler_interrupts_is_not_undone_if_it_raises_nothing() -> None:
    seen: list[int] = []
    with handled(signal.SIGUSR1, lambda number, frame: seen.append(number)), DeferSignals() as signals:
        signals.undo = lambda: seen.append(0)
        arrive(signal.SIGUSR1)
        with DeferSignals():
            arrive(signal.SIGUSR1)
        assert seen == []
    assert seen == [signal.SIGUSR1]


def nested() -> None:
    with DeferSignals():
        pass


def test_a_wait_inside_delivers_what_has_arrived_and_what_arrives() -> None:
    with handled():
        for before in (True, False):
            with DeferSignals():
                if before:
                    arrive(signal.SIGALRM)
                with pytest.raises(Alarm):
                    deliver(arrive, *() if before else (signal.SIGALRM,))
        with pytest.raises(Alarm), DeferSignals():
            deliver(nested)
            arrive(signal.SIGALRM)  # held back again


def test_a_handler_that_is_changed_inside_stays() -> None:
    with DeferSignals():
        before = signal.signal(signal.SIGUSR1, second)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is second and signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, before)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_realtime_signal_is_held_back_once_it_has_been_seen() -> None:
    number = int(signal.SIGRTMIN) + 3
    with handled(number):
        for _ in range(LOOK_AT_ALL):
            with DeferSignals():
                pass
        whole = False
        with pytest.raises(Alarm), DeferSignals():
            arrive(number)
            whole = True
        assert whole


def test_other_threads_end_what_failed_and_hold_nothing_back() -> None:
    undone: list[int] = []

    def work() -> None:
        with suppress(Alarm), DeferSignals() as signals:
            signals.undo = lambda: undone.append(1)
            raise Alarm

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert undone == [1] and signal.getsignal(signal.SIGINT) is before


# -- a timer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_a_timer_that_raises_all_the_time_leaves_nothing_behind(device: str) -> None:
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    random, desk, hits = np.random.default_rng(seed), Desk(DEVICES[device]()), 0
    acts = [verb for name, verb in VERBS.items() if name not in ("gather", "export")]
    for verb in acts:  # loads what is compiled
        desk.ready()
        verb(desk)()
        desk.clear("")
    for attempt in itertools.count(1):
        desk.ready()
        act = acts[random.integers(len(acts))](desk)
        with handled():
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, float(random.uniform(1e-5, 4e-4)), 1e-3)
                    act()
                finally:
                    # It may raise once more right here.
                    signal.signal(signal.SIGALRM, signal.SIG_IGN)
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Alarm:
                hits += 1
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        desk.check(f"seed {seed}")
        desk.bytes_are_right(f"seed {seed}")
        desk.clear(f"seed {seed}")
        if hits and attempt >= (50 if device == "cpu" else 10):
            break


# ----------------------------------------
# Signals that arrive before every instruction, also in the standard library, and two at once: a call has changed
# nothing, or is whole, and nothing is lost. What the handler raised is alive while the pool is looked at, so that
# nothing is held by a traceback.


pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other instructions look for signals there"),
    # What a handler raises inside a destructor is swallowed by the interpreter.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SAMPLE = 12


def resume(desk: Desk) -> Act:
    desk.cache.swap_out([desk.drafted])
    return lambda: desk.cache.resume([desk.drafted])


def asking(desk: Desk) -> Act:
    def act() -> None:
        cache = desk.cache
        cache.cached_blocks(desk.known)
        cache.missing_blocks(desk.known, np.ones((1, 2), bool))
        cache.keys_of([desk.sequence])
        cache.request_stats([desk.sequence])
        assert cache.free_blocks

    return act


ALL = VERBS | {
    "apply": lambda desk: (
        lambda: desk.cache.apply([operations.add([[*range(2 * T + 2)]]), operations.match(desk.known)])
    ),
    "plan": lambda desk: lambda: desk.cache.plan_batch([desk.known, desk.fresh, desk.extra]),
    "swap_out": lambda desk: lambda: desk.cache.swap_out([desk.drafted]),
    "resume": resume,
    "set_priority": lambda desk: lambda: desk.cache.set_priority(desk.known, 80, ttl_ms=1000),
    "step_tables": lambda desk: lambda: desk.cache.step_tables(desk.both, stream=3),
    "asking": asking,
}


def clear(desk: Desk, where: str) -> None:
    live = desk.cache.core.live(int(LIVE | SWAPPED))
    if len(live):
        desk.cache.release(live)
    desk.clear(where)


def places(desk: Desk, verb: Verb) -> Iterator[int]:
    """Where to raise: everywhere, and after the end; on ``sim``, which compares all memory after each step, at some
    places."""
    if desk.sim is None:
        yield from range(1, 1 << 30)
    desk.ready()
    at = At(1 << 30)
    at.run(verb(desk))
    clear(desk, "")
    count = (1 << 30) - at.left
    yield from np.random.default_rng(count).integers(1, count, SAMPLE).tolist()
    yield 2 * count


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("device", DEVICES)
def test_a_signal_before_any_instruction_finds_the_call_undone_or_whole(device: str, name: str) -> None:
    desk, verb = Desk(DEVICES[device]()), ALL[name]
    desk.ready()
    act, before = verb(desk), desk.counts()
    act()
    after = desk.counts()
    clear(desk, "")
    for k in places(desk, verb):
        desk.ready()
        at = At(k)
        raised = at.run(verb(desk))
        reached, counts, where = at.reached, desk.counts(), f"place {k} {at.where}"
        assert kvpool.common.interrupt._current is None, f"signals are deferred for ever {where}"
        assert (raised is not None) == reached or name == "export", f"the signal was not delivered {where}"
        if at.ended:
            assert counts == after, where
        elif name in (*GIVING, "apply"):
            assert counts == before, where
        elif "context" not in name:
            assert counts in (before, after), where
        desk.check(where)
        desk.bytes_are_right(where)
        del raised
        clear(desk, where)
        if not reached:
            break
    assert k > 10


DECIDING = ("append", "commit", "fork", "keep", "offsets", "release", "reorder", "rewind")


@pytest.mark.parametrize("name", DECIDING)
def test_no_handler_runs_while_a_decision_holds_the_lock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for a thread that waits for this lock."""
    desk, verb, held = Desk("cpu"), VERBS[name], list[bool]()

    def look(number: int, frame: FrameType | None) -> None:
        held.append(desk.cache.core._owned())
        raise Alarm

    for _ in range(2):  # loads what is compiled
        desk.ready()
        verb(desk)()
        clear(desk, "")
    monkeypatch.setattr("tests.exact.alarm", look)
    k, reached = 0, True
    while reached:
        k += 1
        desk.ready()
        at = At(k)
        at.run(verb(desk))
        reached = at.reached
        assert not any(held), at.where
        clear(desk, at.where)
    assert k > 10 and len(held) == k - 1


@pytest.mark.parametrize("name", ["pin", "reserve"])
def test_two_signals_at_once_leave_nothing_behind(name: str) -> None:
    """At the latest, the next call undoes what nobody got."""
    desk, verb = Desk("cpu"), VERBS[name]
    desk.ready()
    before = desk.counts()
    verb(desk)()
    after = desk.counts()
    clear(desk, "")
    k, reached = 60, True
    while reached:
        k += 1
        desk.ready()
        # The very first instructions of what undoes are not protected from the second one.
        at = At(k, 8 + k % 30)
        raised = at.run(verb(desk))
        reached = at.reached
        desk.cache.refresh(0)
        assert desk.counts() == (before if raised and not at.ended else after), at.where
        clear(desk, at.where)


def test_deferring_goes_on_after_two_signals_at_once() -> None:
    def act() -> None:
        with DeferSignals():
            pass

    for k in range(1, 60):
        for second in range(1, 12):
            at = At(k, second)
            at.run(act)
            assert kvpool.common.interrupt._current is None, at.where
            with DeferSignals():
                assert kvpool.common.interrupt._current is not None
    assert not kvpool.common.interrupt._noted


def test_a_wait_that_a_handler_leaves_keeps_no_other_thread_waiting() -> None:
    reached, k = True, 0
    while reached:
        k += 1
        bell, rung = Bell(), list[bool]()
        at = At(k)
        at.run(lambda bell=bell: bell.wait_for(lambda: False, 0.001))
        reached = at.reached
        ringer = threading.Thread(target=lambda bell=bell, rung=rung: (bell.ring(), rung.append(True)), daemon=True)
        ringer.start()
        ringer.join(600)
        assert rung, at.where
    assert k > 10


def test_a_bell_wakes_all_who_wait() -> None:
    bell, come, done = Bell(), [False], list[Any]()
    threads = [threading.Thread(target=lambda: done.append(bell.wait_for(lambda: come[0], 60))) for _ in range(4)]
    for thread in threads:
        thread.start()
    come[0] = True
    bell.ring()
    for thread in threads:
        thread.join(600)
    assert done == [True] * 4 and not bell.wait_for(lambda: False, 0) and not bell._waiting

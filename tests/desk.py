"""A pool that holds some of everything, and calls on it, each from the same state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from engine import Clock, small_layout
from kvpool import KVCacheManager, PagedKV, gather_kv
from kvpool.device.base import Device
from kvpool.device.sim import SimDevice
from steps import arrays
from tests.exact import Alarm

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


def works_in_another_thread(call: Callable[[], Any], where: str) -> None:
    done: list[object] = []
    thread = threading.Thread(target=lambda: done.append(call()), daemon=True)
    thread.start()
    thread.join(600)
    assert done, f"a lock is held {where}"


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
        assert self.cache.imports.import_blocks(self.known, data) == 2

    def ready(self) -> None:
        """The state before each call."""
        cache = self.cache
        cache.content.offload(self.known)
        self.sequence = cache.add_sequence([*range(2 * T), 250])
        self.drafted = cache.add_sequence([*range(300, 303)])
        cache.commit(self.drafted)
        cache.append_tokens(self.drafted, [1, 2, 3])
        self.both = [self.sequence, self.drafted]
        self.lease = cache.pin(self.known.keys[:1], owner="reader", tier="host")
        self.reservation = cache.imports.reserve(range(400, 406), owner="loader")
        self.imported = cache.block_keys(range(self.import_at, self.import_at + 2 * T))
        self.import_at += 2 * T

    def counts(self) -> Counts:
        """What is held, and what sequences have."""
        cache, state = self.cache, self.cache.core.tokens
        held, rows = state.blocks["ref_word"], state.sequences
        live = rows["live"] != 0
        return (
            int(live.sum()),
            len(cache.leases),
            len(cache.imports.reservations),
            int((held >> 32).sum()),
            int((held & 0xFFFFFFFF).sum()),
            sorted(rows["length"][live].tolist()),
            sorted(rows["committed"][live].tolist()),
        )

    def check(self, where: str) -> None:
        """Invariants; no lock is held; the next call enqueues what is queued; nothing is lost."""
        cache, staging, transfer = self.cache, self.cache._staging, self.cache.core.transfer
        assert not cache.core._owned() and not transfer.enqueuing and not cache._writer._one.locked(), where
        assert not staging._lock.locked(), where
        works_in_another_thread(lambda: cache.free_blocks, where)
        cache.verify()
        cache.content.refresh(0)
        cache._writer._give_back(0)  # as the next import does
        assert not transfer._queue and transfer.broken is None and cache.core.changes.torn is None, where
        assert not cache.core.changes._open, where
        if self.sim is not None:
            self.sim.synchronize()
        cache.verify()
        assert cache.stats().events_dropped == 0

    def bytes_are_right(self, where: str) -> None:
        self.cache.content.prefetch(self.known)
        self.cache.content.offload(self.known)
        for tier, pool in ("host", self.cache.memory.host_pool), ("device", self.cache.memory.device_pool):
            with self.cache.pin(self.known.keys, tier=tier) as lease:
                for i, block in enumerate(lease.blocks.tolist()):
                    block_bytes = pool[block - P] if tier == "host" else pool[:, :, block]
                    assert (block_bytes.view(np.uint8) == 7 + i).all(), f"a byte is wrong {where}"

    def clear(self, where: str) -> None:
        """Back to an empty desk: all that is held can be found, and given back."""
        cache = self.cache
        for lease in cache.leases:
            lease.close()
        for reservation in cache.imports.reservations:
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
    desk.cache.imports.reserve(range(440, 443), owner="reader")
    return lambda: desk.cache.revoke("reader")


def import_blocks(desk: Desk) -> Act:
    data = [bytes([i]) * desk.cache.layout.block_bytes for i in range(2)]
    return lambda: desk.cache.imports.import_blocks(desk.imported, data)


def reserve_context(desk: Desk) -> Act:
    def act() -> None:
        with desk.cache.imports.reserve([*range(2 * T), 900, 901]):
            pass

    return act


def events(desk: Desk) -> Act:
    desk.cache.release(desk.cache.add_sequence(desk.extra))

    return desk.cache.events


def snapshot(desk: Desk) -> Act:
    return lambda: desk.cache.events(snapshot=True)


def offsets(desk: Desk) -> Act:
    target = np.zeros((4, 8), np.int32)
    return lambda: desk.cache.tables.copy_batch_block_offsets(target, desk.both, stream=3)


def csr(desk: Desk) -> Act:
    vectors = [np.zeros(64, np.int32) for _ in range(3)]
    return lambda: desk.cache.tables.copy_batch_block_csr(*vectors, desk.both, stream=3)


def reading(desk: Desk) -> Act:
    cache = desk.cache

    def act() -> None:
        cache.match_prefix(desk.known)
        cache.blocks_needed(desk.fresh)
        cache.blocks_needed(sequences=[desk.sequence], new_tokens=9)
        cache.sequence_length([desk.sequence])
        cache.evictable_after_release([desk.sequence])
        cache.stats()
        assert cache.leases and cache.imports.reservations

    return act


def export(desk: Desk) -> Act:
    def act() -> None:
        np.from_dlpack(desk.cache.memory.export("host"))

    return act


def gather(desk: Desk) -> Act:
    slots, out = np.arange(2 * T), np.zeros((2, 2, 2 * T, 2, 3), np.uint16)
    paged = PagedKV.of_pool(desk.cache.layout, desk.cache.memory.device_pool)
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
    "reserve": lambda desk: lambda: desk.cache.imports.reserve([*range(2 * T), 900, 901]),
}
"""Those that give the caller something it has to give back."""
VERBS = GIVING | {
    "append": lambda desk: lambda: desk.cache.append_tokens(desk.both, range(7), [3, 4]),
    "commit": lambda desk: lambda: desk.cache.commit(desk.both),
    "rewind": lambda desk: lambda: desk.cache.rewind(desk.both, [2, 1]),
    "release": lambda desk: lambda: desk.cache.release(desk.both),
    "reorder": lambda desk: lambda: desk.cache.reorder(desk.both, [0, 0]),
    "keep": lambda desk: lambda: desk.cache.accept_drafts(desk.drafted, 3, [0, 2]),
    "offload": lambda desk: lambda: desk.cache.content.offload(desk.known),
    "prefetch": lambda desk: lambda: desk.cache.content.prefetch(desk.known),
    "close_lease": lambda desk: desk.lease.close,
    "pin_context": pin_context,
    "revoke": revoke,
    "import_blocks": import_blocks,
    "commit_reserved": lambda desk: lambda: desk.reservation.commit(0),
    "abort_reserved": lambda desk: desk.reservation.abort,
    "reserve_context": reserve_context,
    "load_targets": lambda desk: lambda: desk.cache.imports.load_targets(desk.both),
    "events": events,
    "snapshot": snapshot,
    "offsets": offsets,
    "csr": csr,
    "copy_step_tables": lambda desk: (
        lambda: desk.cache.tables.copy_step_tables(arrays(2, 64, 8, 64), desk.both, stream=3)
    ),
    "block_table": lambda desk: lambda: desk.cache.block_table([desk.sequence], stream=3).dense(),
    "reading": reading,
    "refresh": lambda desk: lambda: desk.cache.content.refresh(10**6),
    "export": export,
    "gather": gather,
}
DEVICES: dict[str, Callable[[], Any]] = {"cpu": lambda: "cpu", "sim": lambda: SimDevice(5, progress=0.3)}


def clear(desk: Desk, where: str) -> None:
    live = desk.cache.sequences
    if live:
        desk.cache.release(live)
    desk.clear(where)


class Ends:
    """Something that ends a call inside another one."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.itself = act, self

    def __del__(self) -> None:
        self.act()

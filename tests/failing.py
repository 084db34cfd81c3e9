"""A pool on a device that can be set to fail, all whose cached bytes are known; and calls that make moves of every
kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine import Clock, Engine, EventReplay, Item, Request, small_layout
from kvpool import KVCacheManager
from kvpool.device.base import NULL_STREAM, Stream
from kvpool.device.cpu import CpuDevice
from kvpool.device.regions import ALL_LAYERS, Layers
from kvpool.errors import DeviceError
from kvpool.state import records as fields
from kvpool.state.verify import verify_states
from tests import debug
from tests.device.faults import FaultyDevice

T = 4
Names = tuple[object, list[Item]]


class Armed(FaultyDevice):
    """Notes every move; once armed, ``refuses(place)`` decides, moves counted from then on, whichever call they come
    in."""

    def __init__(self) -> None:
        super().__init__(CpuDevice(), self._refuse)
        self.refuses: Callable[[int], bool] | None = None
        self.before: Callable[[], None] | None = None
        self.seen: list[NDArray[np.int64]] = []
        self._place = 0

    def arm(self, refuses: Callable[[int], bool] | None = None) -> None:
        self.refuses, self.calls, self.seen, self._place = refuses, 0, [], 0

    def _refuse(self, call: int, index: int, move: NDArray[np.int64]) -> bool:
        return self.refuses is not None and self.refuses(self._place + index)

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        self.seen.append(moves.copy())
        if self.before is not None:
            self.before()
        try:
            super().copy_blocks(moves, stream, layers)
        except DeviceError as error:
            self._place += error.completed + 1
            raise
        self._place += len(moves)


class Rig(Engine):
    """An engine on a device that can fail; knows what every cached block should hold."""

    def __init__(self, P: int, S: int, **options: Any) -> None:
        self.device = Armed()
        clock = options.pop("clock", Clock())
        options = {"event_capacity": 1 << 14, "clock": clock, "secret": bytes(32), **options}
        super().__init__(KVCacheManager(small_layout(T), device_blocks=P, host_blocks=S, device=self.device, **options))
        self.cache.core.tokens.sequences["generation"] = 0  # dumps of two pools can be compared
        self.clock = clock
        self.events = EventReplay()
        self.contents: dict[bytes, Names] = {}
        self.failed: list[int] = []

    def learn(self, sequence: Request) -> Request:
        """Note the content of every key of a sequence."""
        salt, adapter = sequence.namespace  # type: ignore[misc]
        tokens = [token for token, _ in sequence.items]
        keys = self.cache.block_keys(tokens, salt=salt, adapter_id=adapter).keys if tokens else []
        for i, key in enumerate(keys):
            self.contents[key.tobytes()] = (sequence.namespace, sequence.items[: (i + 1) * T])
        return sequence

    def _done(self, sequence: Request) -> Request:
        return super()._done(self.learn(sequence))

    def admit(self, prompts: list[list[int]], **options: Any) -> list[Request | None]:
        """``add_batch`` where some of the sequences may be lost on the way."""
        prompts = [tokens[: self.cache.device_blocks * T] for tokens in prompts]  # a longer one would never fit
        batch = self.cache.add_sequence_batch([self.prompt(tokens) for tokens in prompts], **options)
        return [self.arrived(int(i), tokens) for i, tokens in zip(batch.ids, prompts, strict=False)]

    def arrived(self, new: int, tokens: list[int]) -> Request | None:
        try:
            self.cache.cached_tokens(new)
        except DeviceError:
            self.failed.append(new)
            return None
        return self.admitted(new, tokens)

    @property
    def lost(self) -> int:
        return int(self.cache.stats().lost_blocks)

    def check_everything(self, *, closed: bool = False) -> None:
        """Invariants, the bytes of live sequences and of all cached blocks and tails, and events that rebuild what is
        cached."""
        state = self.cache.core.tokens
        leased = [lease.blocks for lease in self.cache.leases]
        verify_states(self.cache.core.states, np.concatenate(leased) if leased else np.empty(0, np.int64))
        for tier in debug.cached(state).values():
            for key, block in tier.items():
                namespace, items = self.contents[key]
                self.check_content(block, namespace, items, len(items) - T)
        for b in np.flatnonzero(state.blocks["flags"] & fields.TAIL):
            parent = state.blocks[b]["parent0"].tobytes() + state.blocks[b]["parent1"].tobytes()
            namespace, items = self.contents.get(parent, ((None, None), []))
            tail = [(int(token), 0) for token in state.tokens[b, : state.blocks[b]["filled"]]]
            self.check_content(int(b), namespace, items + tail, len(items))
        if not closed:
            self.check_all()
            self.events.feed(self.cache.events())
            assert self.events.cached == {tier: set(keys) for tier, keys in debug.cached(state).items()}

    def check_failed(self) -> None:
        """Sequences that lost a block say so at every use, change nothing, and can be released."""
        for i in self.failed:
            before = debug.dump(self.cache.core.tokens)
            for use in (
                lambda i=i: self.cache.append_tokens(i, [1]),
                lambda i=i: self.cache.commit(i),
                lambda i=i: self.cache.rewind(i, [1]),
                lambda i=i: self.cache.block_table(i),
                lambda i=i: self.cache.tables.copy_batch_block_offsets(np.zeros((1, 32), np.int32), i),
                lambda i=i: self.cache.cached_tokens(i),
                lambda i=i: self.cache.imports.load_targets(i),
                lambda i=i: self.cache.blocks_needed(sequences=i, new_tokens=9),
                lambda i=i: self.cache.evictable_after_release(i),
            ):
                with pytest.raises(DeviceError, match=rf"sequence {i} lost a block"):
                    use()
            assert debug.dump(self.cache.core.tokens) == before
        self.cache.release(self.failed)
        self.failed = []
        self.check_everything()


Action = Callable[[Rig], object]


def full_of_content(rig: Rig, priority: int = 60) -> None:
    """Fill the device with cached blocks of single-block prompts, whose eviction offloads them."""
    for i in range(rig.free()):
        rig.seed(range(9000 + 10 * i, 9004 + 10 * i), committed=4, retention=[(0, None, priority, None)])


def on_host_only(rig: Rig, start: int, count: int) -> None:
    rig.seed(range(start, start + count), committed=count, retention=[(0, None, 90, None)])
    rig.cache.content.offload(list(range(start, start + count)))
    rig.release(rig.add(range(7000, 7000 + T * rig.free())), store=False)


def batch(rig: Rig) -> Action:
    on_host_only(rig, 0, 12)
    rig.seed(range(100, 108), committed=8, retention=[(0, None, 99, None)])
    full_of_content(rig)
    shared = [[*range(8), 50, 51], [*range(8), 60], [*range(6), 80], [*range(10), 90]]
    return lambda rig: rig.admit([*shared, [100, 101, 102, 103, 104, 105, 70, 71, 72], [200] * 5])


def append(rig: Rig) -> Action:
    sequences = [rig.add([1, 2, 3]), rig.add([4, 5, 6, 7])]
    full_of_content(rig)
    tokens = [list(range(20, 29)), list(range(30, 35))]

    def act(rig: Rig) -> None:
        rig.cache.append_tokens([s.id for s in sequences], tokens[0] + tokens[1], [9, 5])
        for sequence, new in zip(sequences, tokens, strict=True):
            rig.appended(sequence, new)

    return act


def prefetch(rig: Rig) -> Action:
    on_host_only(rig, 0, 12)
    full_of_content(rig)
    return lambda rig: rig.cache.content.prefetch(list(range(12)))


def offload(rig: Rig) -> Action:
    rig.seed(range(13), committed=13)
    return lambda rig: rig.cache.content.offload(list(range(12)))


def rewind(rig: Rig) -> Action:
    """Two holders of a committed block both rewind into it: one or two private copies, each at the price of an
    eviction."""
    sequences = [rig.rewind(rig.commit(rig.add([*range(8), 50 + i])), 1) for i in range(3)]
    full_of_content(rig)

    def act(rig: Rig) -> None:
        rig.cache.rewind([s.id for s in sequences[:2]], [3, 2])
        for sequence, count in zip(sequences[:2], (3, 2), strict=True):
            rewound_or_failed(rig, sequence, count)

    return act


# source on the host, target on the host, part of a block
OFFLOAD, ONBOARD, COPY, COPY_OF_HOST = (
    (False, True, False),
    (True, False, False),
    (False, False, True),
    (True, False, True),
)


def rewound_or_failed(rig: Rig, sequence: Request, count: int) -> None:
    try:
        rig.cache.cached_tokens(sequence.id)
    except DeviceError:
        rig.failed.append(rig.live.pop(sequence.id).id)
    else:
        rig.rewound(sequence, count)


SCENARIOS: dict[str, tuple[Callable[[Rig], Action], set[tuple[bool, bool, bool]]]] = {
    "batch": (batch, {OFFLOAD, ONBOARD, COPY, COPY_OF_HOST}),
    "append": (append, {OFFLOAD}),
    "prefetch": (prefetch, {OFFLOAD, ONBOARD}),
    "offload": (offload, {OFFLOAD}),
    "rewind": (rewind, {OFFLOAD, COPY}),
}

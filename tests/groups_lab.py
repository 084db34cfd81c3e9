"""A fake engine on a pool of several groups of layers, on ``cpu`` or ``sim``: bytes name their content in every group
and part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from engine import Bytes, TokenBytes, block_of
from kvpool import BlockLayout, KVCacheManager, KVPoolError, LayerGroup
from kvpool.device.base import NULL_STREAM, Device
from kvpool.device.sim import SimDevice
from kvpool.pool import LoadTarget
from tests import debug

T = 4
WIDE = BlockLayout(2, 2, 3, T, "uint16")
NARROW = BlockLayout(1, 3, 5, T, "uint8", order="block_first", tokens="HND")
STATE = BlockLayout(1, 1, 24, 1, "uint8", planes=1)
FULL, WINDOWED = LayerGroup([WIDE, NARROW]), LayerGroup(NARROW, window=8)
RECURRENT, CROSS = LayerGroup(STATE, kind="recurrent"), LayerGroup(WIDE, kind="cross")
Rows = list[list[int]]


def pins(cache: KVCacheManager) -> int:
    """All pins of all groups."""
    return sum(int((state.blocks["ref_word"] >> 32).sum()) for state in cache.core.states)


class GroupEngine:
    """Runs requests; every reuse is compared byte by byte when the device comes to it."""

    def __init__(
        self,
        P: Sequence[int],
        S: Any = 0,
        groups: Sequence[LayerGroup] = (FULL, WINDOWED),
        device: str | Device = "cpu",
        **options: Any,
    ) -> None:
        self.sim = SimDevice(0, progress=0.0) if device == "sim" else None
        options = {"secret": bytes(32), **options}
        self.cache = KVCacheManager(
            groups=list(groups), device_blocks=list(P), host_blocks=S, device=self.sim or device, **options
        )
        self.a, self.b = (self.sim.create_stream(name) if self.sim else NULL_STREAM for name in "ab")
        self.expected = [[TokenBytes(layout) for layout in group.layouts] for group in self.cache.groups]
        self.kv = [group.index for group in self.cache.groups if group.kind == "attention"]
        self.live: dict[int, list[int]] = {}
        self.wrong: list[str] = []

    # -- bytes -----------------------------------------------------------------------------------

    def block(self, g: int, part: int, b: int) -> Bytes:
        return block_of(self.cache, b, g, part)

    def bytes_of(self, g: int, part: int, tokens: Sequence[int]) -> list[Bytes]:
        return self.expected[g][part].of((g, part), [(token, 0) for token in tokens])

    def run(
        self, stream: Any, kernel: Callable[[], object], *, reads: Rows | None = None, writes: Rows | None = None
    ) -> None:
        """Work of the engine, now or when the device comes to it; rows are (block as leases have it, first token,
        end)."""
        if self.sim is None:
            kernel()
        elif reads or writes:
            rows = {name: np.array(slots, np.int64) for name, slots in (("reads", reads), ("writes", writes)) if slots}
            self.sim.launch(stream, kernel, **rows)

    def rows(self, g: int, slots: np.ndarray) -> Rows:
        first = self.cache.groups[g].first_device_block
        return [[first + int(slot) // T, int(slot) % T, int(slot) % T + 1] for slot in slots if slot >= 0]

    def slots(self, g: int, sequence: int, start: int, end: int) -> np.ndarray:
        """Where tokens of a live sequence lie, -1 for those before ``start`` and those that a window has passed."""
        row = self.cache.block_table(sequence, group=g).dense()[0]
        place = np.arange(end)
        slots = np.where(row[place // T] < 0, -1, row[place // T].astype(np.int64) * T + place % T)
        slots[:start] = -1
        return slots

    def places(self, g: int, slots: np.ndarray, tokens: Sequence[int]) -> Iterator[tuple[str, Bytes, Bytes]]:
        """The part and slot of each token that has one, the memory there, and the bytes that it should have."""
        for part in range(len(self.cache.groups[g].layouts)):
            for slot, expected in zip(slots.tolist(), self.bytes_of(g, part, tokens), strict=True):
                if slot >= 0:
                    yield f"part {part}, slot {slot}", self.block(g, part, slot // T)[:, :, slot % T], expected

    def put(self, g: int, slots: np.ndarray, tokens: Sequence[int], stream: Any = None) -> None:
        """Write tokens where they go."""

        def kernel() -> None:
            for _, memory, expected in self.places(g, slots, tokens):
                memory[...] = expected

        self.run(stream or self.a, kernel, writes=self.rows(g, slots))

    def compare(self, g: int, slots: np.ndarray, tokens: Sequence[int], stream: Any = None) -> None:
        def kernel() -> None:
            for place, memory, expected in self.places(g, slots, tokens):
                if not np.array_equal(memory, expected):
                    self.wrong.append(f"group {g}, {place} does not hold its token of {tokens}")

        self.run(stream or self.a, kernel, reads=self.rows(g, slots))

    # -- verbs -----------------------------------------------------------------------------------

    def add(self, tokens: Sequence[int], *, cached: int | None = None, **options: Any) -> int:
        """Admit, compare what is reused, compute the rest."""
        new = self.cache.add_sequence(list(tokens), stream=self.a, **options)
        skip = int(self.cache.cached_tokens(new))
        assert cached is None or skip == cached
        self.live[new] = list(tokens)
        for g in self.kv:
            self.compare(g, self.slots(g, new, 0, skip), tokens[:skip])
            self.put(g, self.slots(g, new, skip, len(tokens)), tokens)
        return int(new)

    def append(self, sequence: int, tokens: Sequence[int]) -> None:
        before = self.live[sequence]
        self.cache.append_tokens(sequence, list(tokens))
        self.live[sequence] = [*before, *tokens]
        for g in self.kv:
            self.put(g, self.slots(g, sequence, len(before), len(self.live[sequence])), self.live[sequence])

    def release(self, *sequences: int, store: bool = True) -> None:
        for sequence in sequences:
            tokens = self.live.pop(sequence)
            for g in self.kv:
                self.compare(g, self.slots(g, sequence, 0, len(tokens)), tokens)
        self.cache.release(list(sequences), store=store)
        self.cache.verify()

    def seed(self, tokens: Sequence[int]) -> None:
        """Have a prompt cached, all of its tokens."""
        sequence = self.add(tokens)
        self.cache.commit(sequence)
        self.release(sequence)

    def load(self, load_targets: LoadTarget, tokens: Sequence[int], stream: Any = None) -> None:
        """Bring what the pool lacks in all groups with KV."""
        for g in self.kv:
            self.put(g, load_targets.slot_mapping_of(g), tokens[: load_targets.tokens], stream)

    # -- looking ---------------------------------------------------------------------------------

    def free(self) -> list[int]:
        """Device blocks of each group that nobody holds."""
        pairs = zip(self.cache.core.states, self.cache.groups, strict=True)
        return [int((state.blocks["ref_word"][: group.device_blocks] == 0).sum()) for state, group in pairs]

    def cached(self) -> list[dict[str, list[bytes]]]:
        """Keys by group and tier."""
        return [{tier: sorted(keys) for tier, keys in debug.cached(state).items()} for state in self.cache.core.states]

    def orders(self) -> list[Any]:
        return [debug.lists(state) for state in self.cache.core.states]

    def reusable(self, tokens: Sequence[int]) -> int:
        return int(self.cache.match_prefix([*tokens]).tokens)

    # -- the end ---------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """Let everything run and close; what was found wrong by the device, the comparisons or the invariants."""
        failures = []
        steps: list[Callable[[], object]] = [self.cache.verify] if not self.cache.closed else []
        if self.sim is not None:
            steps += [self.sim.synchronize, self.sim.check]
        for step in (*steps, lambda: self.cache.close()):
            try:
                step()
            except (KVPoolError, AssertionError) as error:
                failures.append(f"{type(error).__name__}: {error}")
        if self.sim is not None:
            self.sim.close()
        return failures + self.wrong


Make = Callable[..., GroupEngine]


@pytest.fixture
def make() -> Iterator[Callable[..., GroupEngine]]:
    """Engines on pools of several groups; nothing may be wrong, or pinned, at their end."""
    opened: list[GroupEngine] = []

    def build(*args: Any, **options: Any) -> GroupEngine:
        opened.append(GroupEngine(*args, **options))
        return opened[-1]

    yield build
    for engine in opened:
        assert engine.cache.closed or (engine.cache.leases == [] and pins(engine.cache) == 0)
        assert engine.findings() == []

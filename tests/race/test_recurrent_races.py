"""An engine whose kernels compute states out of states, on two streams of the sim device: each finds the state that it
goes on from."""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, KVCacheManager, KVPoolError, LayerGroup, OutOfBlocks
from kvpool.device.sim import SimDevice
from tests.seeds import some_of

T, SIZE = 2, 16
Sequence = tuple[int, list[int]]


def after(state: bytes, token: int) -> bytes:
    return hashlib.blake2b(state + bytes([token]), digest_size=SIZE).digest()


def behind(tokens: list[int]) -> bytes:
    state = bytes(SIZE)
    for token in tokens:
        state = after(state, token)
    return state


class Lab:
    """A pool of a recurrent group, ``alone`` or behind a full one; ``wrong`` are states that a kernel did not find as
    they should be."""

    def __init__(self, seed: int, progress: float, guard: str | None = None, *, alone: bool = False) -> None:
        self.draw, self.sim = random.Random(seed), SimDevice(seed, progress=progress)
        state = BlockLayout(
            layers=1, kv_heads=1, head_dim=SIZE, tokens_per_block=1, planes=1, dtype="uint8", order="block_first"
        )
        full = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=T, dtype="uint8")
        snapshot = self.draw.choice((None, T, 2 * T))
        groups = [LayerGroup(full), LayerGroup(state, kind="recurrent", snapshot_tokens=snapshot)]
        self.g = 0 if alone else 1
        first, options = 1 - self.g, {"tokens_per_block": T} if alone else {}
        self.cache = KVCacheManager(
            groups=groups[first:],
            device_blocks=[40, 7][first:],
            host_blocks=[40, 6][first:],
            device=self.sim,
            secret=bytes(32),
            max_sequence_tokens=40,
            **options,
        )
        if guard is not None:
            self.cache.core.disable_guard(guard)
        self.streams = [self.sim.create_stream("a"), self.sim.create_stream("b")]
        self.documents = [[self.draw.randrange(256) for _ in range(12)] for _ in range(3)]
        self.live: list[Sequence] = []
        self.wrong: list[str] = []

    def bytes_of(self, block: int) -> Any:
        return self.cache.memory.device_pools[self.g][0][block].reshape(-1)

    def rows(self, ids: list[int]) -> Any:
        """The blocks of the recurrent group as the device wants them."""
        first = self.cache.groups[self.g].first_device_block
        return np.array([(first + block, 0, 1) for block in sorted(set(ids))], np.int64).reshape(-1, 3)

    def run(self, sequence: Sequence, stream: Any) -> None:
        """The kernel of one step: from the state behind the committed tokens to that behind all, snapshots on the
        way."""
        number, tokens = sequence[0], list(sequence[1])
        source, target = (int(block) for block in self.cache.tables.state_blocks(number, stream, group=self.g)[0])
        row = self.cache.block_table(number, group=self.g).dense()[0].tolist()
        done = int(self.cache.committed_tokens(number))
        ends = {
            min((i + 1) * T, len(tokens)): block for i, block in enumerate(row) if block >= 0 and (i + 1) * T > done
        }
        assert ends[len(tokens)] == target

        def kernel() -> None:
            state = self.bytes_of(source).tobytes() if source >= 0 else bytes(SIZE)
            if state != behind(tokens[:done]):
                self.wrong.append(f"sequence {number} does not find the state behind {done} tokens in block {source}")
            for n in range(done, len(tokens)):
                state = after(state, tokens[n])
                if n + 1 in ends:
                    self.bytes_of(ends[n + 1])[:] = np.frombuffer(state, np.uint8)

        self.sim.launch(
            stream, kernel, reads=self.rows([source] if source >= 0 else []), writes=self.rows([*ends.values()])
        )

    def step(self, sequence: Sequence, new: list[int], stream: Any) -> None:
        self.cache.append_tokens(sequence[0], new, stream=stream)
        sequence[1].extend(new)
        self.run(sequence, stream)
        self.cache.commit(sequence[0], stream=stream)

    def verb(self) -> None:
        draw, stream = self.draw, self.draw.choice(self.streams)
        name = draw.choice(
            ("add", "add", "step", "step", "step", "fork", "speculate", "reorder", "release", "release", "move")
        )
        if name == "add" or not self.live:
            sequence = self.add(draw.choice(self.documents)[: draw.randint(1, 12)], stream)
            self.cache.commit(sequence[0], stream=stream)
            return
        sequence = draw.choice(self.live)
        new = [draw.randrange(256) for _ in range(draw.randint(1, 5))]
        if name == "step" and len(sequence[1]) < 30:
            self.step(sequence, new, stream)
        elif name == "fork":
            self.live.append((int(self.cache.fork(sequence[0], stream=stream)[0]), list(sequence[1])))
        elif name == "reorder":
            parents = [draw.randrange(len(self.live)) for _ in self.live]
            self.cache.reorder([number for number, _ in self.live], parents, store=True, stream=stream)
            self.live = [(number, list(self.live[p][1])) for (number, _), p in zip(self.live, parents, strict=True)]
        elif name == "speculate" and len(sequence[1]) < 30:
            self.speculate(sequence, new, stream)
        elif name == "move":
            prompt = self.cache.block_keys(draw.choice(self.documents))
            draw.choice((self.cache.content.offload, self.cache.content.prefetch))(prompt)
        elif name == "release":
            self.cache.release(sequence[0], store=draw.random() < 0.8)
            self.live.remove(sequence)

    def add(self, tokens: list[int], stream: Any) -> Sequence:
        """A sequence whose states are on their way, and not committed."""
        sequence = (self.cache.add_sequence(tokens, stream=stream), list(tokens))
        self.live.append(sequence)
        self.run(sequence, stream)
        return sequence

    def speculate(self, sequence: Sequence, new: list[int], stream: Any) -> None:
        """Drafts whose states the engine keeps by itself; it writes the one of those that were accepted."""
        number, kept = sequence[0], self.draw.randint(0, len(new))
        self.cache.append_tokens(number, new, stream=stream)
        if self.draw.random() < 0.5:
            self.run((number, sequence[1] + new), stream)
        before, base = self.cache.block_table(number, group=self.g).dense()[0].tolist(), len(sequence[1])
        self.cache.rewind(number, [len(new) - kept], stream=stream)
        sequence[1].extend(new[:kept])
        tokens, row = list(sequence[1]), self.cache.block_table(number, group=self.g).dense()[0].tolist()
        ends = {
            min((i + 1) * T, len(tokens)): block for i, block in enumerate(row) if block >= 0 and (i + 1) * T > base
        }
        if not kept and (base % T or before[len(row) - 1] != row[-1]):
            ends[base] = row[-1]

        def kernel() -> None:
            for n, block in ends.items():
                self.bytes_of(block)[:] = np.frombuffer(behind(tokens[:n]), np.uint8)

        self.sim.launch(stream, kernel, writes=self.rows([*ends.values()]))
        self.cache.commit(number, stream=stream)

    def findings(self, steps: int) -> list[str]:
        """Do so many verbs, let everything run; what was found wrong by the device, by the kernels or by ``verify``.
        Closes the pool."""
        failures = []
        try:
            for _ in range(steps):
                with suppress(OutOfBlocks):
                    self.verb()
                self.cache.verify()
            self.cache.release([number for number, _ in self.live])
        except (KVPoolError, AssertionError) as error:
            failures.append(f"{type(error).__name__}: {error}")
        for last in (self.sim.synchronize, self.sim.check, lambda: self.cache.close(force=True)):
            try:
                last()
            except (KVPoolError, AssertionError) as error:
                failures.append(f"{type(error).__name__}: {error}")
        return failures + self.wrong


@pytest.mark.parametrize("progress", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("seed", some_of(2, range(8)))
def test_every_step_finds_its_state_and_nothing_races(seed: int, progress: float) -> None:
    lab = Lab(seed, progress, alone=bool(seed % 2))
    races = lab.findings(60)
    assert not races, f"seed {seed}, progress {progress}: {races[:3]}"


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_a_shared_state_is_copied_behind_its_write_and_before_the_next_one(progress: float) -> None:
    lab = Lab(0, progress, alone=True)
    number, tokens = lab.add([1, 2, 3, 4, 5], lab.streams[0])
    (fork,) = lab.cache.fork(number)
    shared = lab.cache.block_table(fork, group=lab.g).dense()[0][1]
    lab.cache.rewind(number, [2])
    del tokens[3:]
    assert lab.cache.block_table(number, group=lab.g).dense()[0][1] != shared
    lab.run((number, tokens), lab.streams[0])
    lab.live.append((int(fork), [1, 2, 3, 4, 5]))
    races = lab.findings(0)
    assert not races, races


@pytest.mark.parametrize("progress", [0.0, 1.0])
def test_a_state_that_a_rewind_drops_is_written_by_others_behind_its_write(progress: float) -> None:
    lab = Lab(0, progress, alone=True)
    number, tokens = lab.add([1, 2], lab.streams[0])
    lab.cache.commit(number)
    lab.cache.append_tokens(number, [3, 4, 5])
    lab.run((number, [1, 2, 3, 4, 5]), lab.streams[0])
    dropped = {int(block) for block in lab.cache.block_table(number, group=lab.g).dense()[0][1:] if block >= 0}
    lab.cache.rewind(number, [3])
    other, _ = lab.add([7], lab.streams[1])
    assert int(lab.cache.block_table(other, group=lab.g).dense()[0][0]) in dropped
    races = lab.findings(0)
    assert not races, races


@pytest.mark.parametrize(
    "guard", ["engine_writes_after_engine", "engine_reads_after_engine", "copy_writes_after_engine"]
)
def test_without_its_guard_a_race_is_found(guard: str) -> None:
    assert any(Lab(seed, 0.0, guard, alone=True).findings(60) for seed in range(8))

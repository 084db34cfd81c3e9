"""Scheduler, readers, an importer and a client that hints at once on the sim device, with each policy of eviction:
nothing races, no byte is wrong, the pool verifies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool import OutOfBlocks
from kvpool.errors import BlockNotFound
from kvpool.state.policies.chains import AGENT
from tests.race.lab import Lab
from tests.seeds import some_of

T, P, S = 2, 6, 12
SAID: list[dict[str, Any]] = [{}, {"stop": "tool_use"}, {"ends": True}, {"returns_in_ms": 5}]


def prompt(random: np.random.Generator) -> list[int]:
    """One of a few families of prompts that share beginnings."""
    family, length = int(random.integers(4)), int(random.integers(1, 9))
    return [100 * family + i for i in range(length)] + [int(random.integers(1000, 1010))]


class Crew:
    """Threads that use one lab until the scheduler is done, which goes on until all have done something; the first
    error of each is kept."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.seed, self.errors, self.done = lab, seed, [], threading.Event()
        self.turns: dict[str, int] = {}
        self.chains, self.hinted = lab.cache.core.states[0].policy_state is not None, 0

    def done_enough(self) -> bool:
        stats = self.lab.cache.stats()
        return stats.offloaded_blocks > 10 and stats.onboarded_blocks > 0 and (not self.chains or self.hinted > 0)

    def loop(
        self, name: str, turn: Callable[[np.random.Generator], None], turns: int | None = None
    ) -> threading.Thread:
        def work() -> None:
            random = np.random.default_rng([self.seed, len(name)])
            count = 0
            try:
                while not self.done.is_set():
                    if turns is not None and count >= turns and (self.errors or self.done_enough()):
                        break
                    turn(random)
                    count += 1
            except BaseException as error:
                self.errors.append(error)
            if turns is not None:
                self.done.set()
            self.turns[name] = count

        thread = threading.Thread(target=work, name=name)
        thread.start()
        return thread

    def schedule(self, random: np.random.Generator) -> None:
        lab = self.lab
        stream = (lab.a, lab.b)[int(random.integers(2))]
        try:
            sequence = lab.add(prompt(random), stream=stream)
            if random.random() < 0.5:
                lab.use(sequence, (lab.a, lab.b)[int(random.integers(2))])
            if random.random() < 0.3:
                lab.append(sequence, [int(random.integers(1000, 1010))])
            lab.commit(sequence)
            if random.random() < 0.2 and len(sequence) > 2:
                lab.rewind(sequence, 2)
            said = SAID[int(random.integers(len(SAID)))] if self.chains else {}
            lab.clock.now += int(random.integers(20))
            lab.release(sequence, store=bool(random.random() < 0.8), **said)
        except OutOfBlocks:
            for sequence in list(lab.live.values()):
                lab.release(sequence)

    def hint(self, random: np.random.Generator) -> None:
        """A wish about some prompt."""
        kind = ("pin", "retain", "prefetch", "drop")[int(random.integers(4))]
        payload = {"tokens": prompt(random), "lease_ms": int(random.integers(1, 40))}
        action = {"action_id": "1", "action_type": kind, "action_version": 1, "payload": payload}
        (answer,) = self.lab.cache.content.hints({"protocol_version": 1, "message_id": "1", "actions": [action]})
        self.hinted += answer.blocks

    def read(self, random: np.random.Generator) -> None:
        """Pin by key; read on the host, or enqueue a copy on a stream of the reader's."""
        lab, tokens = self.lab, prompt(random)
        full = len(tokens) // T * T
        if not full:
            return
        key = lab.cache.block_keys(tokens).keys[full // T - 1]
        stream = self.reader if random.random() < 0.5 else None
        try:
            tier = "host" if random.random() < 0.8 else "device"
            with lab.cache.pin([key], tier=tier, stream=stream) as lease:
                lab.read(lease, tokens[:full], stream)
        except BlockNotFound:
            pass

    def bring(self, random: np.random.Generator) -> None:
        lab, tokens = self.lab, prompt(random)
        keys = lab.cache.block_keys(tokens)
        expected = lab.expected.of((None, None), [(token, 0) for token in tokens])
        data = []
        for i in range(len(keys.keys)):
            block = np.zeros(lab.cache.layout.block_bytes, np.uint8)
            view = (
                block.view(lab.cache.layout.storage_dtype).reshape(lab.cache.memory.host_pool.shape[1:]).view(np.uint8)
            )
            for slot in range(T):
                view[:, :, slot] = expected[i * T + slot]
            data.append(block)
        lab.cache.imports.import_blocks(keys, data)
        lab.cache.content.prefetch(keys) if random.random() < 0.5 else lab.cache.content.offload(keys)

    reader: Any = None


@pytest.mark.parametrize(
    ("seed", "progress", "policy"),
    some_of(
        2,
        [(1, 0.4, "lru"), (4, 0.4, "agent"), (0, 0.0, "lru"), (2, 1.0, "lru"), (3, 0.0, "reuse"), (5, 1.0, "adaptive")],
    ),
)
def test_threads_race_nowhere(seed: int, progress: float, policy: str) -> None:
    print(f"seed {seed}, progress {progress}, {policy}")
    lab = Lab(P, S, T=T, seed=seed, progress=progress, event_capacity=0, policy=policy)
    crew = Crew(lab, seed)
    if policy == "adaptive":
        lab.cache.core.states[0].policy_state.policy_state["follows"] = AGENT
    crew.reader = lab.sim.create_stream("reader")
    threads = [
        crew.loop("scheduler", crew.schedule, 40),
        crew.loop("reader", crew.read),
        crew.loop("importer!", crew.bring),
    ]
    if crew.chains:
        threads.append(crew.loop("client", crew.hint))
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), f"stuck: {crew.turns}"
    assert not crew.errors, f"seed {seed}: {crew.errors}"
    assert not lab.findings(), f"seed {seed}"
    assert crew.done_enough(), crew.turns

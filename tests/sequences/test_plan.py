"""Plans: what an admission would do now, down to the block, and which sequence is computing what a prompt lacks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from group_engine import GroupsEngine
from kvpool import OutOfBlocks, OutOfSequences
from tests import debug

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]
RECURRENT = {"kind": "recurrent", "snapshot_tokens": 8}
POOLS: dict[str, list[dict[str, Any]]] = {
    "attention": [{"host_blocks": 6}],
    "a window": [{"window": 6, "sinks": 2, "host_blocks": 4}],
    "states": [RECURRENT | {"host_blocks": 4}],
    "all kinds": [
        {"host_blocks": 4},
        {"window": 8, "device_blocks": 9},
        RECURRENT | {"host_blocks": 2},
        {"kind": "cross"},
    ],
}


def picture(engine: Engine) -> bytes:
    return debug.dump_all(engine.cache.core.states)


def on_the_host(engine: Engine, tokens: range) -> None:
    """Cache a prompt, on the host alone."""
    engine.seed(tokens, committed=len(tokens) // engine.T * engine.T)
    engine.cache.offload(list(tokens))
    engine.release(engine.add(range(9000, 9000 + engine.T * engine.free())), store=False)


def test_blocks_that_prompts_of_a_batch_share_count_once(make: Make) -> None:
    """Three onboards and a block for the last token of each."""
    engine = make(P=8, S=4)
    on_the_host(engine, range(13))
    prompts = [engine.prompt(range(13))] * 2
    assert [engine.cache.blocks_needed(prompt) for prompt in prompts] == [4, 4]
    planned = engine.cache.plan_batch(prompts)
    assert planned.blocks == 5 and planned.host_tokens.tolist() == [12, 12]
    free = engine.free()
    engine.cache.add_sequence_batch(prompts)
    assert free - engine.free() == 5


def test_a_part_that_a_batch_has_to_give_up_is_not_planned(make: Make) -> None:
    engine = make(P=2)
    engine.seed([1, 2, 3], committed=3)
    prompts = [engine.prompt([1, 2, 3, 8]), engine.prompt([1, 2, 3, 9])]
    assert [engine.cache.match_prefix(prompt).tokens for prompt in prompts] == [3, 3]
    planned = engine.cache.plan_batch(prompts)
    assert planned.partial_tokens.tolist() == [3, 0] and planned.blocks == 2
    assert [one.cached for one in engine.add_batch([[1, 2, 3, 8], [1, 2, 3, 9]])] == [3, 0]


def test_a_prompt_that_can_never_fit_holds_up_no_other(make: Make) -> None:
    planned = make(P=4).cache.plan_batch([[1], [2] * 40, [3]])
    assert planned.admitted == 2 and [*planned.refused] == [1] and planned.blocks == 2
    assert planned.missed_blocks.tolist() == [1, 0, 1] and planned.computing.tolist() == [-1] * 3


def test_a_scheduler_can_wait_for_a_sequence_that_computes_the_same(make: Make) -> None:
    engine = make(P=32)
    running = engine.add(range(14))
    prompt = [*range(10), 90, 91]
    planned = engine.cache.plan_batch([prompt, [5] * 9, list(range(30))])
    assert planned.computing.tolist() == [running.id, -1, running.id]
    assert planned.computing_tokens.tolist() == [8, 0, 12]
    engine.commit(running, 7)
    assert engine.cache.plan_batch([prompt]).computing_tokens.tolist() == [8]
    engine.commit(running, 8)
    later = engine.cache.plan_batch([prompt])
    assert later.cached_tokens.tolist() == [8] and later.computing.tolist() == [-1]


def test_a_running_state_is_not_waited_for(open_: Open) -> None:
    """The last column has a state that the next token overwrites."""
    engine = open_({"kind": "recurrent"})
    engine.add(range(12))
    assert engine.cache.plan_batch([list(range(20))]).computing_tokens.tolist() == [8]


def test_reservations_and_failed_sequences_are_not_waited_for(make: Make) -> None:
    engine = make(P=16)
    reservation = engine.cache.reserve(list(range(8)))
    assert engine.cache.plan_batch([list(range(9))]).computing.tolist() == [-1]
    reservation.abort()
    failed = engine.add(range(100, 109))
    engine.cache.core.tokens.sequences["failed"][failed.id & 0xFFFFFFFF] = 1
    assert engine.cache.plan_batch([list(range(100, 109))]).computing.tolist() == [-1]
    engine.cache.core.tokens.sequences["failed"] = 0


# -- drawn -------------------------------------------------------------------------------------------


class Drawn:
    """Requests of three documents through one pool, each batch planned first."""

    def __init__(self, engine: GroupsEngine, seed: int) -> None:
        self.engine, self.draw = engine, random.Random(seed)
        self.crosses = any(side.kind == "cross" for side in engine.sides)
        self.documents = [[self.draw.randrange(3) for _ in range(21)] for _ in range(3)]
        self.live: list[int] = []

    def prompts(self) -> list[list[int]]:
        found = []
        for _ in range(self.draw.choice((1, 1, 2, 3, 4))):
            document = self.draw.choice(self.documents)
            own = [self.draw.randrange(3) for _ in range(self.draw.choice((0, 0, 1, 3)))]
            found.append(document[: self.draw.randint(1, 21)] + own)
        return found

    def step(self) -> None:
        cache, draw = self.engine.cache, self.draw
        act = draw.choice(("add", "add", "commit", "append", "release", "offload", "prefetch", "reset"))
        if act == "add":
            self.add()
        elif act == "offload" or act == "prefetch":
            getattr(cache, act)(draw.choice(self.documents))
        elif act == "reset" and not self.live and draw.random() < 0.2:
            cache.reset()
        elif self.live and act == "commit":
            cache.commit([draw.choice(self.live)])
        elif self.live and act == "append":
            try:
                cache.append_tokens(draw.choice(self.live), [draw.randrange(3) for _ in range(draw.randint(1, 4))])
            except OutOfBlocks:
                cache.release(self.live.pop())
        elif self.live and act == "release":
            cache.release(self.live.pop(draw.randrange(len(self.live))), store=draw.random() < 0.8)

    def add(self) -> None:
        cache, prompts, partial = self.engine.cache, self.prompts(), self.draw.random() < 0.5
        named = {"encoder_tokens": [self.draw.randint(1, 9) for _ in prompts]} if self.crosses else {}
        before, free = picture(self.engine), self.engine.free_blocks()
        planned = cache.plan_batch(prompts, **named)
        assert picture(self.engine) == before, "a plan has changed the pool"
        self.check_computing(prompts, planned)
        try:
            got = cache.add_sequence_batch(prompts, allow_partial_batch=partial, **named)
        except (OutOfBlocks, OutOfSequences, ValueError) as error:
            assert picture(self.engine) == before, "a call that raised has changed the pool"
            assert planned.refused if isinstance(error, ValueError) else planned.admitted < len(prompts)
            return
        self.live += [i for i in got.ids.tolist() if i >= 0]
        for name in ("cached_tokens", "device_tokens", "host_tokens", "partial_tokens", "missed_blocks"):
            np.testing.assert_array_equal(getattr(planned, name), getattr(got, name), name)
        assert planned.refused == got.refused and planned.admitted == got.admitted
        taken = [was - left for was, left in zip(free, self.engine.free_blocks(), strict=True)]
        assert np.atleast_1d(planned.blocks).tolist() == taken

    def check_computing(self, prompts: list[list[int]], planned: Any) -> None:
        for prompt, i, tokens, full in zip(
            prompts, planned.computing, planned.computing_tokens, planned.full_tokens, strict=False
        ):
            assert (i in self.live and tokens > full) if i >= 0 else tokens == 0
            assert tokens % self.engine.T == 0 and tokens < len(prompt)
            if i >= 0:
                assert int(self.engine.cache.committed_tokens(int(i))) < tokens


@pytest.mark.parametrize("kinds", POOLS)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_waited_for_can_be_reused_after_its_commit(open_: Open, kinds: str, seed: int) -> None:
    print(f"seed {seed}")
    engine = open_(*POOLS[kinds], max_sequences=5)
    drawn, waited = Drawn(engine, seed), 0
    for _ in range(120):
        drawn.step()
        prompt = drawn.prompts()[0]
        planned = engine.cache.plan_batch([prompt], **({"encoder_tokens": [1]} if drawn.crosses else {}))
        if planned.admitted and planned.computing[0] >= 0:
            engine.cache.commit(int(planned.computing[0]), planned.computing_tokens)
            assert engine.cache.match_prefix(prompt).full_tokens >= planned.computing_tokens[0]
            waited += 1
    assert waited
    engine.cache.release(drawn.live)

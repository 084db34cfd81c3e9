"""Plans: what an admission would do now, down to the block, and which sequence is computing what a prompt lacks."""

from __future__ import annotations

from collections.abc import Callable

from engine import Engine
from group_engine import GroupsEngine

Make = Callable[..., Engine]
Open = Callable[..., GroupsEngine]


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

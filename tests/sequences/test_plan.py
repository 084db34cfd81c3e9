"""Plans: what an admission would do now, down to the block, and which sequence is computing what a prompt lacks."""

from __future__ import annotations

import numpy as np
import pytest

from engine import Engine, Make
from group_engine import Open


def on_the_host(engine: Engine, tokens: range) -> None:
    """Cache a prompt, on the host alone."""
    engine.seed(tokens, committed=len(tokens) // engine.T * engine.T)
    engine.cache.content.offload(list(tokens))
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
    assert [admitted.cached for admitted in engine.add_batch([[1, 2, 3, 8], [1, 2, 3, 9]])] == [3, 0]


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
    reservation = engine.cache.imports.reserve(list(range(8)))
    assert engine.cache.plan_batch([list(range(9))]).computing.tolist() == [-1]
    reservation.abort()
    failed = engine.add(range(100, 109))
    engine.cache.core.tokens.sequences["failed"][failed.id & 0xFFFFFFFF] = 1
    assert engine.cache.plan_batch([list(range(100, 109))]).computing.tolist() == [-1]
    engine.cache.core.tokens.sequences["failed"] = 0


# ----------------------------------------
# ``free_blocks``: what an admission could take now, from the lists themselves.


def test_each_group_has_its_own(open_: Open) -> None:
    engine = open_({}, {"window": 6}, {"kind": "recurrent"}, {"kind": "cross", "device_blocks": 5})
    assert engine.cache.free_blocks_per_group.tolist() == [12, 12, 12, 5]
    sequence = engine.add(range(21), encoder_tokens=7)
    engine.commit(sequence)
    free = engine.cache.free_blocks_per_group
    assert free.dtype == np.int64 and free.tolist() == engine.free_blocks()
    free[:] = 0
    assert engine.cache.free_blocks_per_group.tolist() == engine.free_blocks()
    with pytest.raises(ValueError, match="free_blocks: expected free_blocks_per_group .*4 groups"):
        engine.cache.free_blocks  # noqa: B018


# ----------------------------------------
# A prompt that the pool can never hold is refused as such, by name, and holds up no other; one that may fit later
# waits.


A = list(range(1000, 1400))


def test_a_batch_goes_on_without_it_and_names_it(make: Make) -> None:
    engine = make(T=4, P=20)
    cache, batch = engine.cache, [A[:5], A[:200], A[20:24], A[200:276], A[:300]]
    with pytest.raises(ValueError, match=r"^prompts\[1\]: 50 device blocks .* never"):
        cache.add_sequence_batch(batch)
    assert engine.free() == 20
    admission = cache.add_sequence_batch(batch, allow_partial_batch=True)
    assert sorted(admission.refused) == [1, 4], "those after the first that waits are named too"
    assert all("never" in why for why in admission.refused.values())
    assert admission.admitted == 2 and len(admission.ids) == 3, "the fourth may fit later"
    assert admission.ids[1] == -1 and engine.free() == 17 and admission.missed_blocks.tolist() == [2, 0, 1]
    assert cache.sequence_length(admission.ids[[0, 2]]).tolist() == [5, 4]
    cache.release(admission.ids[[0, 2]])
    rest = cache.add_sequence_batch(batch[3:], allow_partial_batch=True)
    assert rest.admitted == 1 and rest.ids[1] == -1 and list(rest.refused) == [1]

"""A prompt that the pool can never hold is refused as such, by name, and holds up no other; one that may fit later
waits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine import Engine
from kvpool import OutOfBlocks

Make = Callable[..., Engine]
A = list(range(1000, 1400))
T = 4
CROSS, RECURRENT = {"kind": "cross"}, {"kind": "recurrent"}


def test_a_prompt_that_fits_exactly_waits_and_one_block_more_never_fits(make: Make) -> None:
    engine = make(T=T, P=20)
    busy = engine.add([7])
    with pytest.raises(OutOfBlocks):
        engine.cache.add_sequence(A[: 20 * T])
    with pytest.raises(ValueError, match="^prompt: 21 device blocks are needed at once, of 20: it can never fit$"):
        engine.cache.add_sequence(A[: 20 * T + 1])
    with pytest.raises(ValueError, match="never"):
        engine.cache.reserve(A[: 20 * T + 1])
    engine.release(busy)
    engine.add(A[: 20 * T])


def test_a_batch_goes_on_without_it_and_names_it(make: Make) -> None:
    engine = make(T=T, P=20)
    batch = [A[:5], A[:200], A[20:24], A[200:276], A[:300]]
    with pytest.raises(ValueError, match=r"^prompts\[1\]: 50 device blocks .* never"):
        engine.cache.add_sequence_batch(batch)
    assert engine.free() == 20
    admission = engine.cache.add_sequence_batch(batch, allow_partial_batch=True)
    assert sorted(admission.refused) == [1, 4], "those behind the first that waits are named too"
    assert all("never" in why for why in admission.refused.values())
    assert admission.admitted == 2 and len(admission.ids) == 3, "the fourth may fit later"
    assert admission.ids[1] == -1 and engine.free() == 17
    assert admission.missed_blocks.tolist() == [2, 0, 1]
    for sequence, tokens in ((admission.ids[0], A[:5]), (admission.ids[2], A[20:24])):
        assert engine.cache.sequence_length(int(sequence)) == len(tokens)
    engine.cache.release(admission.ids[admission.ids >= 0])
    rest = engine.cache.add_sequence_batch(batch[len(admission.ids) :], allow_partial_batch=True)
    assert rest.admitted == 1 and rest.ids[1] == -1 and list(rest.refused) == [1]

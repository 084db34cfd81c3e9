"""Why a prompt misses is told of stores too: which ones have it, and what was last wrong with it there."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.storage import FAILED, OK
from kvpool.storage import writeback as bridge
from tests.engine import Engine
from tests.stores.keeping import fetch, keeper, seed, store, tokens
from tests.stores.lab import Clock, Wrong

PROMPT = tokens(17)


def test_what_a_store_has_and_the_pool_has_forgotten(one: Engine) -> None:
    with keeper(one, store()) as kept:
        seed(one, kept, [PROMPT])
        assert kept.explain(PROMPT) == one.cache.explain(PROMPT), "all of it is in the pool"
        one.cache.forget(one.keys(PROMPT)[2:])
        first, last = kept.explain(PROMPT).missed
        assert first[:3] == (8, 8, "forgotten") and first.stores == ("memory",) and not first.trouble
        assert last == (16, 1, "always_computed", None, (), ())
        with pytest.raises(TypeError, match="prompt"):
            kept.explain("text")


def test_what_is_damaged_or_failed_is_told_of_its_blocks_until_it_is_right_again(one: Engine, wrong: Wrong) -> None:
    wrong.after["load"] = lambda answer: (np.where(np.arange(len(answer[0])) < 3, answer[0], FAILED), answer[1])
    with keeper(one, wrong) as kept:
        assert fetch(one, kept, PROMPT) == 3
        missed = kept.explain(PROMPT).missed
        assert [(each.first, each.tokens, each.trouble) for each in missed] == [
            (12, 4, (("wrong", "failed"),)),
            (16, 1, ()),
        ]
        del wrong.after["load"]
        assert fetch(one, kept, PROMPT) == 1
        one.cache.forget(PROMPT)
        assert kept.explain(PROMPT).missed[0].trouble == ()


def test_seals_that_do_not_fit_are_called_damaged(one: Engine, wrong: Wrong) -> None:
    wrong.after["load"] = lambda answer: (answer[0], answer[1] ^ 1)
    with keeper(one, wrong) as kept:
        assert fetch(one, kept, PROMPT) == 0
        assert kept.explain(PROMPT).missed[0].trouble == (("wrong", "damaged"),)


def test_what_came_too_late_is_told(one: Engine, wrong: Wrong) -> None:
    gate, clock = wrong.hold("load"), Clock()
    with keeper(one, wrong, clock=clock) as kept:
        handle = kept.prefetch(one.prompt(PROMPT), 5.0)
        assert gate.reached.wait(600)
        clock.pass_(5.0)
        assert handle.wait(600)
        gate.open()
        assert kept.drain(600)
        assert {each.trouble for each in kept.explain(PROMPT).missed[:-1]} == {(("wrong", "late"),)}


def test_what_is_not_worth_loading_is_told(one: Engine) -> None:
    """A load takes 100 s, and the engine computes a prompt in 0.2 s."""
    clock, slow = Clock(), Wrong(store(1024))
    slow.before["load"] = lambda: clock.pass_(100.0)
    with keeper(one, slow, prefill_tokens_per_s=100.0, clock=clock, deadline_ms=10**6) as kept:
        for first in range(0, 3000, 100):
            seed(one, kept, [prompt := tokens(17, first)])
            one.cache.forget(prompt)
            handle = kept.prefetch(one.prompt(prompt), 1e5)
            assert handle.wait(600)
            if handle.ended == "declined":
                break
        assert kept.explain(prompt).missed[0].trouble == (("wrong", "declined"),)
        assert kept.explain(prompt).missed[0].stores == ("wrong",)


def test_a_prefetch_may_take_as_long_as_its_request_waits_for_the_engine(one: Engine) -> None:
    """The engine computes a prompt in 0.2 s, and a load takes 5 s."""
    clock, slow = Clock(), Wrong(store(1024))
    slow.before["load"] = lambda: clock.pass_(5.0)
    with keeper(one, slow, prefill_tokens_per_s=100.0, clock=clock, deadline_ms=10**6) as kept:
        for first in range(0, 700, 100):
            seed(one, kept, [prompt := tokens(17, first)])
            one.cache.forget(prompt)
            handle = kept.prefetch(one.prompt(prompt), 1e5, spare=60.0)
            assert handle.wait(600) and handle.ended == "loaded"
        with pytest.raises(ValueError, match="spare: .*-1"):
            kept.prefetch(one.prompt(PROMPT), spare=-1.0)
        assert kept.stats().prefetches == {"loaded": 7}


def test_why_blocks_were_not_saved_is_remembered_in_bounded_memory(
    one: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge, "NOTED", 2)
    refusing = Wrong(store())
    refusing.after["save"] = lambda codes: np.where(codes == OK, np.uint8(FAILED), codes)
    with keeper(one, refusing, failures=1000) as kept:
        seed(one, kept, [PROMPT])
        one.cache.forget(PROMPT)
        found = kept.explain(PROMPT).missed
    assert sum(each.tokens for each in found if each.trouble == (("wrong", "failed"),)) == 8, "of two blocks"

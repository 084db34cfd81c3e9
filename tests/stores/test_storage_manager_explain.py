"""``explain`` covers stores too: which ones have a prompt, and what last failed with it there."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.storage import FAILED, OK, tier_storage
from tests.engine import Engine
from tests.stores.lab import Wrong
from tests.stores.pool_lab import fetch, make_manager, seed, store, tokens

PROMPT = tokens(17)


def test_what_a_store_has_and_the_pool_has_forgotten(engine: Engine) -> None:
    with make_manager(engine, store()) as manager:
        seed(engine, manager, [PROMPT])
        assert manager.explain(PROMPT) == engine.cache.content.explain(PROMPT), "all of it is in the pool"
        engine.cache.content.forget(engine.keys(PROMPT)[2:])
        first, last = manager.explain(PROMPT).missed
        assert first[:3] == (8, 8, "forgotten") and first.stores == ("memory",) and not first.trouble
        assert last == (16, 1, "always_computed", None, (), ())
        with pytest.raises(TypeError, match="prompt"):
            manager.explain("text")


def test_damaged_or_failed_blocks_are_reported_until_they_are_right_again(engine: Engine, wrong: Wrong) -> None:
    wrong.after["load"] = lambda answer: (np.where(np.arange(len(answer[0])) < 3, answer[0], FAILED), answer[1])
    with make_manager(engine, wrong) as manager:
        assert fetch(engine, manager, PROMPT) == 3
        missed = manager.explain(PROMPT).missed
        assert [(each.first, each.tokens, each.trouble) for each in missed] == [
            (12, 4, (("wrong", "failed"),)),
            (16, 1, ()),
        ]
        wrong.after["load"] = lambda answer: (answer[0], answer[1] ^ 1)
        assert fetch(engine, manager, PROMPT) == 0
        assert manager.explain(PROMPT).missed[0].trouble == (("wrong", "damaged"),)
        del wrong.after["load"]
        seed(engine, manager, [PROMPT])
        engine.cache.content.forget(PROMPT)
        assert manager.explain(PROMPT).missed[0].trouble == ()


def test_why_blocks_were_not_saved_is_remembered_in_bounded_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_storage, "NOTED", 2)
    refusing = Wrong(store())
    refusing.after["save"] = lambda codes: np.where(codes == OK, np.uint8(FAILED), codes)
    with make_manager(engine, refusing, failures=1000) as manager:
        seed(engine, manager, [PROMPT])
        engine.cache.content.forget(PROMPT)
        missed = manager.explain(PROMPT).missed
    assert sum(each.tokens for each in missed if each.trouble == (("wrong", "failed"),)) == 8, "of two blocks"

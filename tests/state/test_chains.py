"""The policies that look at conversations: what goes, what stays, and that their records are true after every call."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest

from kvpool import BlockLayout, EvictionOptions, KVCacheManager, LayerGroup, OutOfBlocks
from kvpool.errors import IntegrityError
from kvpool.state.arrays import POLICY_BYTES, PolicyState
from kvpool.state.policies.chains import AGENT, LRU
from kvpool.state.policies.pauses import CLASSES, PAUSE_BINS, ROWS, TABLES, learn, worth
from kvpool.state.policies.pauses import KINDS as KINDS_OF_PAUSES
from tests.engine import Clock
from tests.golden.pools import KINDS, SECRET, Driver, open_pool
from tests.golden.recorder import Recorder

LAYOUT = BlockLayout(layers=1, kv_heads=1, head_dim=8, tokens_per_block=1, dtype="uint8", planes=1)
CHAINED = [kind for kind, groups in KINDS.items() if "recurrent" not in groups]


class Talks:
    """Conversations of blocks with one token through a pool, one request at a time. The clock counts seconds."""

    def __init__(self, blocks: int, policy: str = "agent", **options: Any) -> None:
        self.clock, self.texts, self._asked = Clock(), dict[str, list[int]](), 0
        options |= {"device": "cpu", "policy": policy, "partial_reuse": False, "clock": self.clock, "secret": SECRET}
        self.cache = KVCacheManager(LAYOUT, device_blocks=blocks + 1, **options)

    @property
    def policy(self) -> Any:
        return self.cache.core.states[0].policy_state

    @property
    def owners(self) -> Any:
        return self.cache.core.states[0].blocks["owner"]

    @property
    def records(self) -> list[Any]:
        """Every array of the policy, and the owners of blocks."""
        return [*(array for array in vars(self.policy).values() if isinstance(array, np.ndarray)), self.owners]

    def turn(self, name: str, more: int, at: float | None = None, retention: Any = None, **said: Any) -> int:
        """Continue a conversation with that many new blocks. Return how many were hits."""
        self.clock.now = self.clock.now if at is None else int(at * 1000)
        text = self.texts.setdefault(name, [])
        text += range(start := 1 + sum(map(len, self.texts.values())) + 1000 * len(self.texts), start + more)
        return self.ask(text, retention, **said)

    def ask(self, text: list[int], retention: Any = None, **said: Any) -> int:
        """The pool verifies itself after every sixteenth request; ``test_the_records_are_true`` has it do so after
        each call."""
        admitted = self.cache.add_sequence_batch([[*text, 0]], retention=None if retention is None else [retention])
        self.cache.commit(admitted.ids, np.array([len(text)]))
        self.cache.rewind(admitted.ids, np.array([1]))
        self.cache.release(admitted.ids, **said)
        self._asked += 1
        if self._asked % 16 == 0:
            self.cache.verify()
        return int(admitted.cached_tokens[0])

    def cached(self, name: str) -> int:
        """How many blocks of a conversation would be hits now."""
        return self.cache.match_prefix([*self.texts[name], 0]).tokens

    def fill(self, more: int) -> None:
        """Take that many blocks for a prompt that nobody continues."""
        self.turn(f"other {len(self.texts)}", more)


@contextmanager
def talks(*args: Any, **options: Any) -> Iterator[Talks]:
    opened = Talks(*args, **options)
    with opened.cache:
        yield opened
        opened.cache.verify()


def taught(opened: Talks, rounds: int = 30, **said: Any) -> None:
    """One conversation of 50 blocks comes back every ten seconds, another one every two hundred."""
    for at in range(0, 200 * rounds, 10):
        opened.turn("soon", 0 if at else 50, at=at, **said)
        if at % 200 == 0:
            opened.turn("late", 0 if at else 50, at=at)


# -- what goes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "cached"), [("lru", (10, 50)), ("agent", (50, 10))])
def test_the_conversation_that_is_away_for_longer_goes_though_it_was_used_later(
    policy: str, cached: tuple[int, int]
) -> None:
    with talks(120, policy) as opened:
        taught(opened)
        opened.turn("soon", 0, at=6_000)
        opened.turn("late", 0, at=6_001)
        opened.fill(60)
        assert (opened.cached("soon"), opened.cached("late")) == cached


def test_the_host_too_loses_the_conversation_that_is_away_for_longer() -> None:
    for policy, cached in (("lru", (0, 50)), ("agent", (50, 0))):
        with talks(70, policy, host_blocks=50) as opened:
            taught(opened, 10)
            opened.turn("soon", 0, at=2_000)
            opened.turn("late", 0, at=2_001)
            opened.fill(60)
            opened.clock.now += 1_000
            opened.fill(10)
            assert (opened.cached("soon"), opened.cached("late")) == cached, policy


def test_whoever_has_come_back_stays_where_most_never_do() -> None:
    """All prompts are of one length, and new ones of every age: only a talk comes back often."""
    for policy, cached in (("lru", 0), ("reuse", 40)):
        with talks(480, policy) as opened:
            for i in range(212):
                opened.fill(40)
                opened.clock.now += 1_000
                if i < 200 and i % 27 in (0, 3, 12):  # pauses of 3, 9 and 15 seconds
                    opened.turn("talk", 0 if i else 40)
            assert opened.cached("talk") == cached, policy


def test_who_has_come_back_is_worth_more_than_who_was_seen_as_long_and_has_not() -> None:
    rates = np.zeros((2, TABLES, ROWS, PAUSE_BINS))
    for came in (0, 1):
        for _ in range(20):
            learn(rates[came], 0, 5_000, bool(came))
    assert worth(rates[1], 0, 1_000) > 4 * worth(rates[0], 0, 1_000)


def test_a_conversation_loses_its_end_first() -> None:
    with talks(100) as opened:
        opened.turn("one", 60, at=1)
        opened.turn("two", 50, at=2)
        assert (opened.cached("one"), opened.cached("two")) in ((50, 50), (60, 40))


def test_what_a_turn_has_left_over_goes_before_everything_else() -> None:
    with talks(100) as opened:
        opened.turn("old", 30, at=1)
        opened.turn("one", 60, at=2)
        opened.texts["one"] = opened.texts["one"][:50]  # its last ten blocks are said anew
        opened.turn("one", 5, at=3)
        opened.fill(15)
        assert opened.cached("old") == 30 and opened.cached("one") == 55


def test_what_forks_share_stays_while_one_of_them_has_more() -> None:
    with talks(100) as opened:
        opened.turn("first", 40, at=1)
        opened.texts["second"] = opened.texts["first"][:10]
        opened.turn("second", 20, at=2)
        assert opened.cached("second") == 30
        opened.turn("second", 1, at=3, ends=True)
        opened.fill(65)
        assert opened.cached("second") == 10 and opened.cached("first") == 35


def test_what_a_fork_has_of_its_own_goes_though_others_hold_what_it_shares() -> None:
    with talks(70) as opened:
        stem = list(range(1, 21))
        running = opened.cache.add_sequence([*stem, 0])
        opened.cache.commit(running, 20)
        opened.texts = {"fork": [*stem, *range(100, 120)]}
        opened.turn("fork", 0, ends=True)
        opened.turn("other", 20)
        opened.fill(25)
        assert (opened.cached("fork"), opened.cached("other")) == (24, 20)
        opened.cache.release(running)


def test_what_comes_from_the_host_belongs_to_its_own_conversation() -> None:
    with talks(66, host_blocks=200) as opened:
        for name, blocks in (("one", 30), ("two", 40), ("three", 60)):  # each pushes the ones before out
            opened.turn(name, blocks, at=10 * len(opened.texts))
        for name in ("one", "two", "three"):
            assert opened.turn(name, 5, at=100 + 10 * len(name)) in (30, 40, 60)
        assert opened.policy.policy_state["known"][0] == 3
        assert list(opened.policy.chains["pauses"][:4]) == [1, 1, 1, 0]


def test_a_conversation_without_its_end_still_goes_when_it_is_the_oldest() -> None:
    with talks(100) as opened:
        opened.turn("old", 40, at=1)
        opened.turn("new", 50, at=2, returns_in_ms=100)
        opened.cache.content.forget(opened.cache.block_keys(opened.texts["old"]).keys[-1:])
        opened.fill(40)
        assert opened.cached("new") == 50 and opened.cached("old") < 20


def test_what_is_of_no_conversation_goes_when_it_is_the_oldest() -> None:
    with talks(100) as opened:
        alone = opened.cache.add_sequence(opened.cache.block_keys(range(40), reuse=False))
        opened.cache.commit(alone)
        opened.cache.release(alone)
        opened.turn("new", 50, at=2, ends=True)
        opened.fill(40)
        assert opened.cached("new") == 50 and opened.cache.match_prefix(range(41)).tokens < 20


def test_what_lru_has_left_of_a_conversation_is_still_known() -> None:
    with talks(100, "adaptive") as opened:
        opened.turn("old", 40, at=1)
        opened.turn("new", 50, at=2)
        opened.policy.policy_state["follows"] = LRU
        opened.fill(40)
        kept = opened.cached("old")
        assert kept < 20
        opened.turn("new", 0, at=3, ends=True)
        opened.policy.policy_state["follows"] = AGENT
        opened.fill(20)
        assert opened.policy.chains["size"][0] == opened.cached("old") == kept and opened.cached("new") < 50


def test_what_the_engine_says_goes_before_what_was_learnt() -> None:
    for soon, late in (({"ends": True}, {}), ({}, {"returns_in_ms": 2_000})):
        with talks(120) as opened:
            taught(opened)
            opened.turn("soon", 0, at=6_000, **soon)
            opened.turn("late", 0, at=6_001, **late)
            opened.fill(60)
            assert (opened.cached("soon"), opened.cached("late")) == (10, 50)


def test_a_moment_that_has_passed_is_not_a_promise_any_more() -> None:
    with talks(120) as opened:
        opened.turn("liar", 50, at=1, returns_in_ms=10)
        opened.turn("other", 50, at=30_000, returns_in_ms=60_000)
        opened.fill(60)
        assert opened.cached("other") == 50 and opened.cached("liar") < 20


@pytest.mark.parametrize("said", [{"ends": True}, {"returns_in_ms": 10_000_000}])
def test_hints_that_were_mostly_wrong_are_ignored(said: dict[str, Any]) -> None:
    with talks(120) as opened:
        taught(opened, 20, **said)
        opened.turn("soon", 0, at=4_000, **said)
        opened.turn("late", 0, at=4_001)
        opened.fill(60)
        assert (opened.cached("soon"), opened.cached("late")) == (50, 10)


def test_priorities_stand_above_the_policy() -> None:
    with talks(100) as opened:
        opened.turn("high", 30, at=1, retention=[(0, None, 80, None)], ends=True)
        opened.turn("low", 30, at=2, retention=[(0, None, 20, None)], returns_in_ms=1)
        opened.turn("usual", 30, at=3)
        opened.fill(35)
        assert opened.cached("high") == 30 and opened.cached("usual") == 30 and opened.cached("low") == 5


def test_pauses_count_by_the_reason_why_the_model_stopped() -> None:
    with talks(2_000) as opened:
        for i in range(100):
            opened.turn("tool", 1, at=1000 * i + 2, stop="end_turn")
            opened.turn("tool", 1, at=1000 * i + 900, stop="tool_use")
        now = np.array([worth(opened.policy.rates[1], row, 1) for row in range(CLASSES)]).reshape(KINDS_OF_PAUSES, -1)
        assert now[1].max() > now[2].max()


@pytest.mark.parametrize(
    "said", [{"stop": "tired"}, {"stop": 3}, {"ends": 1}, {"returns_in_ms": -1}, {"ends": True, "returns_in_ms": 5}]
)
def test_what_is_not_a_hint_is_refused_and_nothing_is_released(said: dict[str, Any]) -> None:
    with talks(10) as opened:
        kept = opened.cache.add_sequence([1, 2])
        with pytest.raises((TypeError, ValueError), match=next(reversed(said))):
            opened.cache.release(kept, **said)
        opened.cache.release(kept)


# -- adaptive ----------------------------------------------------------------------------------------------


def circle(opened: Talks) -> float:
    """15 conversations that take turns. Returns the share of blocks that were hits."""
    turns = [(f"talk {at % 15}", 1.0 + at) for at in range(15 * 60)]
    hits = sum(opened.turn(name, 20 if name not in opened.texts else 0, at=at) for name, at in turns)
    return hits / (20 * len(turns))


def test_adaptive_follows_who_would_have_hit_more_and_a_switch_moves_no_block() -> None:
    with talks(200, "lru") as lru, talks(200, "adaptive") as opened:
        follows, lists = opened.policy.policy_state["follows"], opened.cache.core.states[0].lists
        assert follows[0] == LRU
        assert circle(lru) == 0
        assert circle(opened) > 0.3
        assert follows[0] != LRU
        before, follows[0] = lists.copy(), LRU
        opened.cache.verify()
        assert np.array_equal(lists, before)


def test_beside_a_flood_adaptive_still_sees_what_others_than_lru_would_hit() -> None:
    hits, fresh = 0, itertools.count(1 << 24, 10)
    with talks(1_500, "adaptive") as opened:
        for i in range(20 * 15):
            for _ in range(4):
                opened.ask(list(range(first := next(fresh), first + 10)))
            name = f"talk {i % 15 if i % 15 < 10 else 10 + i // 15 * 5 % 50 + i % 5}"
            hits += opened.turn(name, 200 if name not in opened.texts else 0, at=i)
        # LRU would have hit nothing.
        assert opened.policy.scores[1, AGENT] > 0.4 * hits > 0


def test_what_has_a_low_priority_is_not_a_conversation() -> None:
    with talks(100) as opened:
        opened.turn("flood", 40, at=1, retention=[(0, None, 10, None)])
        opened.turn("part", 40, at=2, retention=[(0, 20, 80, None)])
        assert opened.policy.policy_state["known"][0] == 1


def test_adaptive_is_lru_where_nothing_is_gained() -> None:
    with talks(200, "lru") as lru, talks(200, "adaptive") as opened:
        for i in range(300):  # whoever asked last asks again
            assert lru.turn(f"talk {i // 3}", 7, at=i) == opened.turn(f"talk {i // 3}", 7, at=i)
        assert [lru.cached(name) for name in lru.texts] == [opened.cached(name) for name in opened.texts]


def served(policy: str) -> tuple[int, str | None]:
    """Conversations in a pool that also keeps states: the tokens that are hits, and the policy that evicts."""
    random, clock, hits = Random(5), Clock(), 0
    texts = [list(range(100 * n, 100 * n + 8)) for n in range(12)]
    state = LayerGroup(LAYOUT, kind="recurrent", snapshot_tokens=8)
    groups = [LayerGroup(BlockLayout(1, 1, 8, 4, "uint8", planes=1)), state]
    options: dict[str, Any] = {"clock": clock, "secret": SECRET, "eviction": EvictionOptions(history_bytes=1 << 12)}
    with KVCacheManager(groups=groups, device_blocks=[60, 30], device="cpu", policy=policy, **options) as cache:
        for turn in range(300):
            clock.now += random.randrange(1_000)
            text = texts[random.randrange(4) if turn % 3 else random.randrange(12)]
            admitted = cache.add_sequence_batch([text])
            hits += int(admitted.cached_tokens[0])
            cache.commit(admitted.ids, np.array([len(text)]))
            cache.release(admitted.ids)
            text += [1000 + turn] * 4 if len(text) < 60 else []
        cache.verify()
        assert "evicted" in {missed.reason for text in texts for missed in cache.content.explain(text).missed}
        return hits, cache.core.config.settings.policy


def test_beside_states_the_oldest_go_since_a_hit_needs_the_end_of_a_conversation() -> None:
    assert served("adaptive") == served("lru")
    assert served("lru")[0] > 0 and served("lru")[1] == "lru"
    for policy in ("reuse", "agent"):
        with pytest.raises(ValueError, match="expected lru or adaptive, since a recurrent group needs the ends"):
            served(policy)


# -- the records -------------------------------------------------------------------------------------------


class Checked(Driver):
    """Draws calls, and checks the records after each."""

    def look_around(self) -> None:
        self.clock.now += self.random.choice((0, 3, 700, 60_000))
        self.cache.verify()
        super().look_around()


def driven(kind: str, policy: str, seed: int) -> str:
    """The digest of a case."""
    recorder, clock = Recorder(), Clock()
    with open_pool(kind, secret=SECRET, clock=clock, policy=policy) as cache:
        for state in cache.core.states:
            state.policy_state.policy_state["follows"] = AGENT
        Checked(cache, recorder, clock, seed).run()
    return recorder.digest


@pytest.mark.parametrize(("kind", "policy"), [*((kind, "agent") for kind in CHAINED), ("cross", "adaptive")])
def test_the_records_are_true_after_every_call(kind: str, policy: str) -> None:
    seed = int.from_bytes(os.urandom(2), "little")
    print(f"seed {seed}")
    assert driven(kind, policy, seed) == driven(kind, policy, seed), "the same calls, the same decisions"


@pytest.mark.exhaustive
def test_the_interpreter_decides_as_machine_code_does() -> None:
    code = "from tests.state.test_chains import driven; print(driven('cross', 'adaptive', 3))"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert plain.stdout.strip() == driven("cross", "adaptive", 3)


@pytest.mark.parametrize("policy", ["reuse", "agent", "adaptive"])
def test_what_is_refused_changes_no_byte_of_the_records(policy: str) -> None:
    with talks(60, policy) as opened:
        opened.policy.policy_state["follows"] = AGENT
        five(opened)
        live = opened.cache.add_sequence(range(5000, 5030))
        before = [array.tobytes() for array in opened.records]
        opened.cache.plan_batch([[*opened.texts["talk 1"], 7]])
        with pytest.raises(OutOfBlocks):
            opened.cache.add_sequence(opened.texts["talk 1"][:5] + list(range(9000, 9050)))
        assert [array.tobytes() for array in opened.records] == before
        opened.cache.verify()
        opened.cache.release(live)


def _set(name: str, at: Any, value: int) -> Callable[[Any], object]:
    return lambda state: (getattr(state, name) if hasattr(state, name) else state.chains[name]).__setitem__(at, value)


BROKEN: dict[str, list[Callable[[Any], object]]] = {
    "chains": [
        lambda state: state.order.__setitem__(0, state.order[1]),
        _set("order", 0, 1 << 20),
        _set("first", 0, 1 << 20),
        _set("before", 0, -1),
        _set("row", 0, 200),
        _set("alike", 0, 200),
        lambda state: state.policy_state["pick"].__setitem__(0, len(state.chains)),
    ],
    "names": [_set("names", 0, (1 << 20) << 8)],
    "rings": [lambda state: state.chains["after"].__setitem__(int(state.order[0]), int(state.order[1]))],
    "turns": [_set("turns", 0, 1 << 20), _set("turns", 0, -2), lambda state: state.chains["turns"].__setitem__(0, 3)],
    "ghosts": [lambda state: state.ghosts.__setitem__((0, 0), state.ghosts[0, 0] + 1)],
}


def five(opened: Talks) -> None:
    """Five conversations of a few turns."""
    for i in range(12):
        opened.turn(f"talk {i % 5}", 6, at=10 * i)


@pytest.mark.parametrize("check", BROKEN)
def test_verify_sees_a_broken_record(check: str) -> None:
    with talks(60, "adaptive") as opened:
        five(opened)
        arrays = opened.records
        kept = [array.copy() for array in arrays]
        strange = [lambda state: opened.owners.__setitem__(0, 1 << 20)] if check == "chains" else []
        for wrong in BROKEN[check] + strange:
            wrong(opened.policy)
            with pytest.raises(IntegrityError, match=check):
                opened.cache.verify()
            for array, copy in zip(arrays, kept, strict=True):
                array[...] = copy
            opened.cache.verify()


@pytest.mark.parametrize("count", [300, 3_000, 10_000, 1 << 17])
def test_the_records_take_at_most_that_many_bytes_a_block(count: int) -> None:
    state = PolicyState("adaptive", 0, count, count, 1)
    arrays = state.chains, state.names, state.order, state.tier_lists, state.host_order, state.ghosts
    assert sum(array.nbytes for array in arrays) <= POLICY_BYTES * count

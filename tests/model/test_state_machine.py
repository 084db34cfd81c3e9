"""Random sequences of every public verb, done to the pool and to its model; both agree on everything visible after each
step.

Pools have one group of layers or several, windowed, recurrent and cross ones among them. Hypothesis chooses and shrinks
the sequence of verbs and the pool; the arguments come from a seeded generator per step, whose seed is printed, since
uniform draws meet far more of the pool's corners. ``KVPOOL_MODEL_EXAMPLES`` sets how many sequences are tried, seven
times as many with ``--exhaustive``, and ``KVPOOL_MODEL_STEPS`` their length. A failure prints its calls and a
``reproduce_failure`` line; with ``KVPOOL_MODEL_SHRINK=1`` hypothesis looks for a shorter one first, which can take
minutes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from random import Random
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.state import saving
from parts import reach

from .draws import SAID, STEP_MS, pool_options, some_ranges
from .groups import GroupsModel
from .pair import Pair
from .tiers import Prompt

VOCABULARY = 2
OWNERS = ("reader", "other")
NAMESPACES = (*[(None, None)] * 9, ("A", None), (b"B", None), (None, 1), ("A", "lora"))
RANDOM = st.randoms(use_true_random=True)


class PoolMachine(RuleBasedStateMachine):
    """Sequences are named by the model's ids, leases too."""

    several = False
    """Groups of layers."""

    @initialize(random=RANDOM)
    def create(self, random: Random) -> None:
        options = pool_options(random, self.several)
        note(f"pool: {options}")
        self.pair = Pair(**options)
        self.T: int = options["tokens_per_block"]
        self.documents = [[random.randrange(VOCABULARY) for _ in range(5 * self.T + 1)] for _ in range(3)]

    @property
    def model(self) -> GroupsModel:
        return self.pair.model

    def teardown(self) -> None:
        if hasattr(self, "pair"):
            self.pair.cache.close()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pair"):
            self.pair.check()

    # -- drawing -------------------------------------------------------------------------------

    def new_tokens(self, random: Random, longest: int) -> list[int]:
        return [random.randrange(VOCABULARY) for _ in range(random.randint(0, longest))]

    def prompt(self, random: Random) -> Prompt:
        """The beginning of a known document, often with an end of its own."""
        document = random.choice(self.documents)
        tokens = document[: random.randint(1, len(document))]
        if random.random() < 0.4:
            tokens = tokens + self.new_tokens(random, self.T)
        if random.random() < 0.1:
            self.documents[random.randrange(3)] = tokens
        salt, adapter = random.choice(NAMESPACES)
        extra = None
        if random.random() < 0.1:
            head = random.randint(0, len(tokens))
            extra = tuple(random.randint(0, 2) if i < head else 0 for i in range(len(tokens)))
        reuse, publish = random.random() < 0.95, random.random() < 0.95
        return Prompt(tuple(tokens), salt, adapter, extra, reuse, publish)

    def live(self) -> bool:
        return bool(self.model.sequences)

    def some(self, random: Random) -> list[int]:
        """Live sequences, at least one, in any order."""
        live = sorted(self.model.sequences)
        return random.sample(live, random.randint(1, min(3, len(live))))

    def content(self, random: Random) -> Any:
        """Mostly cached content; the first block of some prompt else."""
        known = [*random.choice(self.model.groups).rows]
        if known and random.random() < 0.9:
            return random.choice(known)
        tokens = tuple(random.randrange(VOCABULARY) for _ in range(self.T))
        return self.model.groups[0].contents(Prompt(tokens))[0]

    def encoder(self, random: Random, count: int) -> list[int] | None:
        """Lengths of what encoders gave, where there is cross attention."""
        has = any(not group.matches for group in self.model.groups)
        return [random.randint(1, 3 * self.T) for _ in range(count)] if has else None

    def key(self, content: Any) -> Any:
        return np.frombuffer(self.pair.key_of(content), np.uint64)

    # -- requests ------------------------------------------------------------------------------

    @rule(random=RANDOM)
    def add(self, random: Random) -> None:
        prompts = [self.prompt(random) for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4, 0)))]
        if prompts and random.random() < 0.2:
            # Requests that go on from the same place, where they reuse part of a block.
            prompts = [
                replace(prompts[0], tokens=prompts[0].tokens + (i,), extra_ids=None)
                for i in range(random.randint(2, 3))
            ]
        retention = [some_ranges(random, len(prompt.tokens), self.T) for prompt in prompts]
        self.pair.add(
            prompts,
            retention=random.choice((None, retention)),
            decode_priority=random.choice((35, 35, 10, 60)),
            encoder_tokens=self.encoder(random, len(prompts)),
            allow_partial_batch=random.random() < 0.5,
        )

    @rule(random=RANDOM)
    def serve(self, random: Random) -> None:
        """A whole life: what fills the cache."""
        before = set(self.model.sequences)
        prompt = self.prompt(random)
        ranges = some_ranges(random, len(prompt.tokens), self.T)
        self.pair.add([prompt], retention=[ranges], encoder_tokens=self.encoder(random, 1))
        for i in sorted(set(self.model.sequences) - before):
            self.pair.check()
            self.pair.append([i], [self.new_tokens(random, self.T)])
            self.pair.check()
            self.finish([i], store=True)

    @precondition(live)
    @rule(random=RANDOM)
    def append(self, random: Random) -> None:
        ids = [i for i in self.some(random) if len(self.model.sequences[i].items) <= 8 * self.T]
        if ids:
            self.pair.append(ids, [self.new_tokens(random, 2 * self.T) for _ in ids])

    @precondition(live)
    @rule(random=RANDOM)
    def commit(self, random: Random) -> None:
        ids = self.some(random)
        counts = None
        if random.random() < 0.5:
            live = [self.model.sequences[i] for i in ids]
            low = -1 if random.random() < 0.05 else 0
            counts = [random.randint(max(0, s.committed + low), len(s.items)) for s in live]
        self.pair.commit(ids, counts)

    @precondition(live)
    @rule(random=RANDOM)
    def rewind(self, random: Random) -> None:
        ids = self.some(random)
        counts = [random.randint(0, min(len(self.model.sequences[i].items), 2 * self.T + 1)) for i in ids]
        self.pair.rewind(ids, counts)

    @precondition(live)
    @rule(random=RANDOM)
    def fork(self, random: Random) -> None:
        """Often with a token for each right away, so that they part."""
        parents = self.some(random)[:2]
        new = self.pair.fork(parents, random.choice((1, 1, 2, 3)))
        together = [*parents, *(i for each in new for i in each)]
        if new and random.random() < 0.5:
            self.pair.check()
            self.pair.append(random.sample(together, len(together)), [self.new_tokens(random, 2) for _ in together])

    @precondition(live)
    @rule(random=RANDOM)
    def reorder(self, random: Random) -> None:
        """Sequences of one request or of several; now and then every one stays what it is."""
        live = sorted(self.model.sequences)
        ids = random.sample(live, random.randint(1, len(live)))
        parents = [random.randrange(len(ids)) for _ in ids] if random.random() < 0.9 else list(range(len(ids)))
        self.pair.reorder(ids, parents, random.random() < 0.5)

    @precondition(live)
    @rule(random=RANDOM)
    def speculate(self, random: Random) -> None:
        """Append trees of drafts and keep a path of each, or now and then ask for something that is refused."""
        ids = [i for i in self.some(random) if len(self.model.sequences[i].items) <= 8 * self.T]
        tokens = [self.new_tokens(random, 2 * self.T) for _ in ids]
        parents = [[random.randint(-1, i - 1) for i in range(len(new))] for new in tokens]
        if not ids or not self.pair.draft(ids, tokens, parents):
            return
        paths: list[list[int]] = []
        for above in parents:
            at, path = random.randint(-1, len(above) - 1), list[int]()
            while at >= 0:
                path, at = [at, *path], above[at]
            paths.append(path)
        if random.random() < 0.1:
            last = self.model.sequences[ids[-1]]
            for drafts, path in ((len(last.items) - last.committed + 1, []), (1, [0, 0]), (1, [1])):
                self.pair.accept_drafts(ids, [*map(len, tokens[:-1]), drafts], [*paths[:-1], path])
        if not self.pair.accept_drafts(ids, [len(new) for new in tokens], paths):
            # Refused for want of blocks: the drafts go on as one chain, whose bytes are others.
            for i, new in zip(ids, tokens, strict=True):
                self.pair.engine.chained(self.pair.requests[i], len(new))

    @precondition(live)
    @rule(random=RANDOM)
    def swap_out(self, random: Random) -> None:
        """Any of those that run, or all: families of forks leave together or one by one."""
        ids = self.some(random) if random.random() < 0.7 else sorted(self.model.sequences)
        self.pair.swap_out(ids)

    @precondition(lambda self: self.live() and all(group.matches for group in self.model.groups))
    @rule(random=RANDOM)
    def exclusive(self, random: Random) -> None:
        """A step of an engine in one block; often one that does not fit."""
        some = [i for i in self.some(random) if len(self.model.sequences[i].items) <= 8 * self.T]
        ids, gone = some[: len(some) // 2 + 1], some[len(some) // 2 + 1 :]
        self.pair.exclusive(ids, [self.new_tokens(random, 2 * self.T) for _ in ids], gone, self.prompt(random))

    @precondition(lambda self: bool(self.model.swapped))
    @rule(random=RANDOM, release=st.booleans())
    def resume(self, random: Random, release: bool) -> None:
        """Mostly; or such sequences end where they are, beside others that run."""
        away = sorted(self.model.swapped)
        ids = random.sample(away, random.randint(1, len(away)))
        if release and random.random() < 0.3:
            some = self.some(random) if self.live() else []
            self.pair.release(random.sample([*ids, *some], len(ids) + len(some)), random.random() < 0.5)
        else:
            self.pair.resume(ids)

    def finish(self, ids: list[int], *, store: bool) -> None:
        """Commit all but the last token and release."""
        live = [self.model.sequences[i] for i in ids]
        self.pair.commit(ids, [max(len(s.items) - 1, s.committed) for s in live])
        self.pair.check()
        self.pair.release(ids, store)

    @precondition(live)
    @rule(random=RANDOM)
    def release(self, random: Random) -> None:
        ids, store = self.some(random), random.random() < 0.75
        if random.random() < 0.7:
            self.finish(ids, store=store)
        else:
            self.pair.release(ids, store, **random.choice(SAID))

    @precondition(live)
    @rule(
        random=RANDOM,
        verb=st.sampled_from(
            (
                "append_tokens",
                "commit",
                "rewind",
                "accept_drafts",
                "release",
                "fork",
                "reorder",
                "evictable_after_release",
                "swap_out",
                "resume",
            )
        ),
    )
    def misuse(self, random: Random, verb: str) -> None:
        """A stale, foreign, repeated or swapped id at the end of a batch: an error, and nothing has changed."""
        ids = self.some(random)
        real = self.pair.real_ids(ids)
        reserved = [(i, self.pair.reservations[i].id) for i in self.model.reservations]
        away = [(i, parked.id) for i, parked in self.pair.away.items() if verb != "release"]
        ours, foreign = random.choice([*self.pair.released, *reserved, *away, (-1, 77 << 32), (ids[0], real[0])])
        bad, wrong = [*ids, ours], [*real, foreign]
        each: dict[str, tuple[list[Any], list[Any]]] = {
            "append_tokens": ([[0] * len(bad), [1] * len(bad)], [[[0]] * len(bad)]),
            "rewind": ([[0] * len(bad)], [[0] * len(bad)]),
            "fork": ([1], [1]),
            "reorder": ([[0] * len(bad)], [[0] * len(bad)]),
            "accept_drafts": ([[0] * len(bad), [], [0] * len(bad)], [[0] * len(bad), [[]] * len(bad)]),
        }
        args, model_args = each.get(verb, ([], []))
        names = self.pair.engine.named(0) if verb == "evictable_after_release" else {}
        failed = self.pair.both(
            lambda: reach(self.pair.cache, verb)(wrong, *args, **names),
            lambda: getattr(self.model, verb)(bad, *model_args),
        )
        assert failed is None

    # -- loaders -------------------------------------------------------------------------------

    @precondition(lambda self: all(group.matches for group in self.model.groups))
    @rule(random=RANDOM, owner=st.sampled_from(OWNERS))
    def reserve(self, random: Random, owner: str) -> None:
        prompt = self.prompt(random)
        deadline = random.randrange(1, 60 * STEP_MS) / 1000 if random.random() < 0.5 else None
        retention = some_ranges(random, len(prompt.tokens), self.T)
        self.pair.reserve(prompt, owner=owner, retention=retention, deadline_seconds=deadline)

    @precondition(lambda self: bool(self.pair.reservations))
    @rule(random=RANDOM)
    def end_reserved(self, random: Random) -> None:
        """Mostly one that is open; closed and revoked ones too."""
        known = self.model.reservations if self.model.reservations and random.random() < 0.9 else self.pair.reservations
        reservation = random.choice(sorted(known))
        length = self.pair.reservations[reservation].tokens
        skip = self.pair.reservations[reservation].skip_prefix_n_tokens
        self.pair.end_reserved(reservation, random.choice((None, length, random.randint(skip, length))))

    # -- looking and moving --------------------------------------------------------------------

    @rule(random=RANDOM)
    def look(self, random: Random) -> None:
        cache, prompt, new = self.pair.cache, self.prompt(random), random.randint(0, 2 * self.T)
        keyed = self.pair.keyed(prompt)

        def tokens_of(match: Any) -> tuple[int, int, int, int]:
            return match.device_tokens, match.host_tokens, match.partial_tokens, match.tokens

        self.pair.both(lambda: tokens_of(cache.match_prefix(keyed)), lambda: tokens_of(self.model.match_prefix(prompt)))
        if all(group.matches for group in self.model.groups):
            self.pair.both(
                lambda: self.pair.each(lambda **group: cache.blocks_needed(keyed, new_tokens=new, **group)),
                lambda: self.model.blocks_needed(prompt, new_tokens=new),
            )
        if self.live():
            ids = self.some(random)
            real = self.pair.real_ids(ids)
            self.pair.both(
                lambda: self.pair.each(lambda **group: cache.blocks_needed(sequences=real, new_tokens=new, **group)),
                lambda: self.model.blocks_needed(sequences=ids, new_tokens=new),
            )
            self.pair.both(
                lambda: self.pair.each(lambda **group: cache.evictable_after_release(real, **group)),
                lambda: self.model.evictable_after_release(ids),
            )

    @precondition(live)
    @rule(random=RANDOM)
    def look_at_keys(self, random: Random) -> None:
        self.pair.check_keys(self.some(random))

    @rule(random=RANDOM)
    def look_elsewhere(self, random: Random) -> None:
        """What another pool could bring of a prompt."""
        prompt = self.prompt(random)
        full = len(prompt.tokens) // self.T
        there = [[random.random() < 0.7 for _ in range(full)] for _ in self.model.groups]
        available = np.array(there, np.bool_).reshape(len(self.model.groups), full)

        def missing() -> tuple[int, list[list[int]]]:
            tokens, blocks = self.pair.cache.content.missing_blocks(self.pair.keyed(prompt), available)
            return tokens, [group_blocks.tolist() for group_blocks in blocks]

        self.pair.both(missing, lambda: self.model.missing_blocks(prompt, there))
        cached = [[content in group.rows for content in group.contents(prompt)] for group in self.model.groups]
        assert self.pair.cache.content.cached_blocks(self.pair.keyed(prompt)).tolist() == cached

    @rule(random=RANDOM)
    def forget(self, random: Random) -> None:
        """A prompt, keys or a namespace; rarely, so that there is something to forget."""
        cache, model = self.pair.cache, self.model
        if random.random() < 0.5:
            return
        contents = [self.content(random) for _ in range(random.randint(1, 3))]
        keys = np.stack([self.key(content) for content in contents])
        prompt, namespace = self.prompt(random), random.choice(NAMESPACES[8:])
        note(f"forget({prompt} | {contents} | {namespace})")
        self.pair.both(
            *random.choice(
                (
                    (lambda: cache.content.forget(self.pair.keyed(prompt)), lambda: model.forget(prompt)),
                    (lambda: cache.content.forget(keys), lambda: model.forget_keys(contents)),
                    (lambda: cache.content.forget(namespace=namespace), lambda: model.forget_namespace(namespace)),
                )
            )
        )

    @rule(random=RANDOM)
    def set_priority(self, random: Random) -> None:
        """With a ttl of one content in one group: the order of blocks that expire at the same moment is not defined."""
        contents, priority = [self.content(random) for _ in range(random.randint(1, 3))], random.choice((0, 29, 35, 80))
        contents = list(dict.fromkeys(contents))
        alone = len(contents) == len(self.model.groups) == 1
        ttl = random.randrange(1, 30 * STEP_MS) if alone and random.random() < 0.5 else None
        keys = np.stack([self.key(content) for content in contents])
        note(f"set_priority({contents}, {priority}, {ttl})")
        self.pair.both(
            lambda: self.pair.cache.content.set_priority(keys, priority, ttl_ms=ttl),
            lambda: self.model.set_priority(contents, priority, ttl),
        )

    @rule(random=RANDOM, verb=st.sampled_from(("prefetch", "offload")))
    def move(self, random: Random, verb: str) -> None:
        prompt = self.prompt(random)
        keyed = self.pair.keyed(prompt)
        note(f"{verb}({prompt})")
        self.pair.both(lambda: reach(self.pair.cache, verb)(keyed), lambda: getattr(self.model, verb)(prompt))

    @rule(random=RANDOM, how=st.sampled_from(("stored", "sweep", "victims")))
    def save(self, random: Random, how: str) -> None:
        """Read the dirty-block cursor: what was stored, what was used that often, what is evicted soon."""
        groups, pair, rows = self.model.groups, self.pair, random.choice((1, 3, 64))
        if how == "stored":
            # A sweep may come before some events.
            pair.save(
                saving.stored, [pair.at], rows, lambda: [group.read_dirty(group.every_block()) for group in groups]
            )
        elif how == "sweep":
            uses, pair.at[saving.PLACE] = random.choice((1, 2)), 0
            pair.save(
                saving.sweep,
                [uses, pair.at],
                rows,
                lambda: [group.read_dirty(group.every_block(), uses) for group in groups],
            )
        else:
            margins = [random.randint(0, group.host.capacity) for group in groups]
            pair.save(
                saving.victims,
                [np.array(margins)],
                rows,
                lambda: [group.read_dirty(group.soon_evicted(m)) for group, m in zip(groups, margins, strict=True)],
            )

    @rule(step=st.integers(1, 40), refresh=st.booleans())
    def pass_time(self, step: int, refresh: bool) -> None:
        self.pair.clock.now += step * STEP_MS
        if refresh:
            self.pair.both(self.pair.cache.content.refresh, self.model.refresh)

    # -- pins ----------------------------------------------------------------------------------

    @rule(random=RANDOM, tier=st.sampled_from((None, "device", "host")), owner=st.sampled_from(OWNERS))
    def pin(self, random: Random, tier: str | None, owner: str) -> None:
        cache, model = self.pair.cache, self.model
        contents = [self.content(random) for _ in range(random.randint(1, 2))]
        keys = np.stack([self.key(content) for content in contents])
        note(f"pin({contents}, tier={tier})")
        if tier == "host" and random.random() < 0.5:
            self.pair.lease(
                lambda: cache.find_and_pin_host(keys[0], owner=owner),
                lambda: model.find_and_pin_host(contents[0], owner=owner),
            )
        else:
            self.pair.lease(
                lambda: cache.pin(keys, owner=owner, tier=tier), lambda: model.pin(contents, owner=owner, tier=tier)
            )

    @rule(random=RANDOM, owner=st.sampled_from(OWNERS))
    def pin_blocks(self, random: Random, owner: str) -> None:
        total = sum(len(group.every_block()) for group in self.model.groups)
        ids = [random.randrange(total) for _ in range(random.randint(1, 2))]
        if self.live() and random.random() < 0.6:
            g, i = random.randrange(len(self.model.groups)), self.some(random)[0]
            ids = [
                self.model.global_id(g, block)
                for block in self.model.groups[g].sequences[i].blocks
                if block is not None
            ]
        note(f"pin_blocks({ids})")
        if ids:
            self.pair.lease(
                lambda: self.pair.cache.pin_blocks(ids, owner=owner), lambda: self.model.pin_blocks(ids, owner=owner)
            )

    @precondition(lambda self: bool(self.pair.leases))
    @rule(random=RANDOM)
    def close_lease(self, random: Random) -> None:
        """Mostly one that is open; closed and revoked ones too."""
        leases = sorted(self.model.leases) if self.model.leases and random.random() < 0.8 else sorted(self.pair.leases)
        lease = random.choice(leases)
        self.pair.both(self.pair.leases[lease].close, lambda: self.model.close_lease(lease))

    @precondition(lambda self: bool(self.model.leases or self.model.reservations))
    @rule(owner=st.sampled_from(OWNERS))
    def revoke(self, owner: str) -> None:
        self.pair.both(lambda: self.pair.cache.revoke(owner), lambda: self.model.revoke(owner))

    # -- the whole pool ------------------------------------------------------------------------

    @rule(random=RANDOM)
    def reset(self, random: Random) -> None:
        """Rarely, so that there is something to lose."""
        if random.random() < 0.2:
            self.pair.reset(force=random.random() < 0.5)


class GroupsMachine(PoolMachine):
    """The same over several groups."""

    several = True


class LongPoolMachine(PoolMachine):
    """The same with seven times as many sequences."""


class LongGroupsMachine(GroupsMachine):
    """The same over several groups, with seven times as many sequences."""


EXAMPLES = int(os.environ.get("KVPOOL_MODEL_EXAMPLES", "6"))
PoolMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=int(os.environ.get("KVPOOL_MODEL_STEPS", "50")),
    deadline=None,
    derandomize=False,
    print_blob=True,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if os.environ.get("KVPOOL_MODEL_SHRINK") else [])],
    suppress_health_check=list(HealthCheck),
)
TestThePoolDoesWhatItsModelDoes: Any = PoolMachine.TestCase
GroupsMachine.TestCase.settings = settings(PoolMachine.TestCase.settings, max_examples=EXAMPLES)
TestAPoolOfGroupsDoesWhatItsModelDoes: Any = GroupsMachine.TestCase
for machine in (LongPoolMachine, LongGroupsMachine):
    machine.TestCase.settings = settings(PoolMachine.TestCase.settings, max_examples=7 * EXAMPLES)
TestThePoolDoesWhatItsModelDoesAtLength: Any = pytest.mark.exhaustive(LongPoolMachine.TestCase)
TestAPoolOfGroupsDoesWhatItsModelDoesAtLength: Any = pytest.mark.exhaustive(LongGroupsMachine.TestCase)

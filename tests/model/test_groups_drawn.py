"""Random verbs on models of several groups alone: what must hold between groups whatever the pool does, and where
states may lie."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.seeds import some_of

from .groups import GroupsModel
from .recurrent import Recurrent
from .tiers import NeverFits, OutOfBlocks, OutOfSequences, Prompt

T = 4
STEPS = 200
Group = dict[str, Any]


class States:
    """The states that an engine writes into the blocks of a recurrent group without a host tier, by the items that
    precede them."""

    def __init__(self, group: Recurrent) -> None:
        self.group = group
        self.items_of: dict[int, tuple[Any, ...]] = {}

    def write(self, seq: int, start: int) -> None:
        for block, items in self._places(seq):
            if len(items) > start:
                self.items_of[block] = items

    def check(self) -> None:
        for seq in self.group.sequences:
            for block, items in self._places(seq):
                assert self.items_of[block] == items, (
                    f"the state after {len(items)} tokens of sequence {seq} is not in block {block}"
                )
        for (_, items), block in self.group.cached("device").items():
            assert self.items_of[block] == items, f"block {block} is cached for what it does not hold"

    def _places(self, seq: int) -> list[tuple[int, tuple[Any, ...]]]:
        sequence = self.group.sequences[seq]
        return [
            (b.id, tuple(sequence.items[: (i + 1) * self.group.T]))
            for i, b in enumerate(sequence.blocks)
            if b is not None
        ]


class Driver:
    """Draws verbs and does them; a refusal is the end of a step."""

    def __init__(self, model: GroupsModel, random: Random) -> None:
        self.model, self.random = model, random
        self.states = [States(group) for group in model.groups if isinstance(group, Recurrent)]
        self.has_cross = any(not group.matches for group in model.groups)

    def step(self) -> None:
        grow, other = (
            (self.add, self.append),
            (self.commit, self.rewind, self.release, self.fork, self.reorder, self.accept_drafts),
        )
        verb = self.random.choice((*grow, *grow, *other))
        try:
            verb()
        except (NeverFits, OutOfBlocks, OutOfSequences):
            pass
        self.model.check()
        for states in self.states:
            states.check()

    def tokens(self, longest: int) -> list[int]:
        return [self.random.randrange(2) for _ in range(self.random.randint(1, longest))]

    def some(self) -> list[int]:
        live = sorted(self.model.sequences)
        return self.random.sample(live, min(len(live), self.random.randint(1, 3)))

    def length(self, seq: int) -> int:
        return len(self.model.sequences[seq].items)

    def wrote(self, seq: int, start: int) -> None:
        for states in self.states:
            states.write(seq, start)

    def add(self) -> None:
        prompts = [Prompt(tuple(self.tokens(5 * T))) for _ in range(self.random.randint(1, 3))]
        encoder = [self.random.randint(1, 2 * T) for _ in prompts] if self.has_cross else None
        promised = [self.model.match_prefix(prompt) for prompt in prompts]
        admitted = self.model.add_sequence_batch(prompts, encoder_tokens=encoder, allow_partial_batch=True)
        for admission, match in zip(admitted, promised, strict=False):
            if admission is None:
                continue
            assert (admission.match.device_tokens, admission.match.host_tokens) == (
                match.device_tokens,
                match.host_tokens,
            )
            self.wrote(admission.id, admission.match.tokens)

    def append(self) -> None:
        ids = [i for i in self.some() if self.length(i) < 8 * T]
        before, new = [self.length(i) for i in ids], [self.tokens(2 * T) for _ in ids]
        self.model.append_tokens(ids, new)
        for i, start in zip(ids, before, strict=True):
            self.wrote(i, start)

    def commit(self) -> None:
        ids = self.some()
        self.model.commit(ids, [self.random.randint(self.model.sequences[i].committed, self.length(i)) for i in ids])

    def rewind(self) -> None:
        for i in self.some():
            count = self.random.randint(0, self.length(i))
            try:
                self.model.rewind([i], [count])
            except ValueError:
                continue
            self.wrote(i, self.length(i) - 1 if count else self.length(i))

    def accept_drafts(self) -> None:
        for i in self.some():
            start, drafts = self.length(i), self.tokens(2 * T)
            self.model.append_tokens([i], [drafts])
            path = sorted(self.random.sample(range(len(drafts)), self.random.randint(0, len(drafts))))
            self.model.accept_drafts([i], [len(drafts)], [path])
            self.wrote(i, start if path else start - 1)

    def release(self) -> None:
        ids = self.some()
        self.model.release(ids, store=self.random.random() < 0.8)

    def fork(self) -> None:
        self.model.fork(self.some()[:2], self.random.randint(1, 2))

    def reorder(self) -> None:
        ids = self.some()
        if ids:
            self.model.reorder(ids, [self.random.randrange(len(ids)) for _ in ids], store=self.random.random() < 0.5)


def drive(groups: list[Group], seed: int, **options: Any) -> Driver:
    print(f"seed={seed}, {groups}, {options}")
    model = GroupsModel(groups, tokens_per_block=T, max_sequences=6, **options)
    driver = Driver(model, Random(seed))
    for _ in range(STEPS):
        driver.step()
    return driver


def picture(model: GroupsModel, g: int) -> Any:
    """All that can be seen of a group."""
    group = model.groups[g]
    rows = [[None if block is None else block.id for block in seq.blocks] for seq in group.sequences.values()]
    return rows, [(group.order(tier), group.cached(tier)) for tier in ("device", "host")], group.counts


DRAWN = pytest.mark.parametrize("drawn", some_of(1, [2, 6]))
"""So many sequences of calls."""
WINDOWED = {"window": 6, "sinks": 1}
SNAPSHOTS = {"kind": "recurrent", "snapshot_tokens": 2 * T}


@DRAWN
@pytest.mark.parametrize("own", [{}, WINDOWED, {"kind": "recurrent"}, SNAPSHOTS])
def test_groups_that_are_alike_do_what_one_alone_does(own: Group, drawn: int) -> None:
    for _ in range(drawn):
        seed = Random().getrandbits(32)
        group = {"device_blocks": 9, "host_blocks": 3} | own
        alone = drive([group], seed).model if own.get("kind") != "recurrent" else None
        group = group if alone else group | {"host_blocks": 0}
        single, three = drive([group], seed).model, drive([group] * 3, seed).model
        assert single.sequences == three.sequences
        for g in range(3):
            assert picture(three, g) == picture(single, 0)


@DRAWN
def test_cross_attention_with_room_changes_nothing_elsewhere(drawn: int) -> None:
    for _ in range(drawn):
        seed = Random().getrandbits(32)
        groups: list[Group] = [
            {"device_blocks": 9, "host_blocks": 3},
            {"device_blocks": 11, "host_blocks": 1} | WINDOWED,
        ]
        cross: Group = {"kind": "cross", "device_blocks": 20, "host_blocks": 0}
        after, before = drive([*groups, cross], seed).model, drive([cross, *groups], seed).model
        for g in range(2):
            assert picture(after, g) == picture(before, g + 1)
        assert picture(after, 2) == picture(before, 0)


@DRAWN
@pytest.mark.parametrize("own", [{"kind": "recurrent"}, SNAPSHOTS, {"kind": "recurrent", "snapshot_tokens": T}])
def test_a_cached_state_is_that_of_its_prefix(own: Group, drawn: int) -> None:
    for _ in range(drawn):
        groups: list[Group] = [
            {"device_blocks": 14, "host_blocks": 2} | WINDOWED,
            {"device_blocks": 12, "host_blocks": 0} | own,
        ]
        driver = drive(groups, Random().getrandbits(32))
        assert driver.model.groups[1].counts["prompt_tokens"]


@DRAWN
def test_groups_of_all_kinds_stay_in_step(drawn: int) -> None:
    for _ in range(drawn):
        kinds: list[Group] = [{}, WINDOWED, SNAPSHOTS | {"host_blocks": 0}, {"kind": "cross"}]
        seed = Random().getrandbits(32)
        random = Random(seed)
        drive(
            [{"device_blocks": random.randint(6, 14), "host_blocks": random.randint(0, 4)} | kind for kind in kinds],
            seed,
        )

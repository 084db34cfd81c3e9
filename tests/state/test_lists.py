"""The lists of blocks and the heap of expiries refuse a change that does not fit the block, before they write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvpool.device.memory.pools import BLOCKS_MAX
from kvpool.device.regions import SOURCE, TARGET, TICKET
from kvpool.pool.transfer.levels import Levels
from kvpool.state.arrays import GroupSizes, Settings, State, States, buckets
from kvpool.state.index import bucket
from kvpool.state.policies import block_lists
from kvpool.state.records import group_at
from kvpool.state.verify import findings
from tests.debug import dump


@pytest.fixture
def state() -> State:
    """Four device and two host blocks, all in the lists of empty ones but for block 1, which has been taken out."""
    states = States([GroupSizes(4, 2)], Settings(4, 2, 4, bytes(16)))
    block_lists.unlink(header(states[0]), 1)
    return states[0]


def header(state: State) -> Any:
    """The header of a group as jitted code and the interpreter take it."""
    return group_at(state.groups, state.group)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: block_lists.unlink(header(s), 1),
        lambda s: block_lists.relink(header(s), 0),
        lambda s: block_lists.push(header(s), 0, 35, block_lists.BACK),
        lambda s: block_lists.push(header(s), 5, 35, block_lists.FRONT),
        lambda s: (block_lists.heap_push(header(s), 2, 7), block_lists.heap_push(header(s), 2, 8)),
    ],
    ids=["unlink", "relink", "push_back", "push_front", "heap_push"],
)
def test_what_does_not_fit_raises(state: State, change: Callable[[State], object]) -> None:
    before = state.lists.copy()
    with pytest.raises(RuntimeError, match="a block was"):
        change(state)
    assert np.array_equal(state.lists, before)


def test_unlinked_blocks_come_back_where_they_were(state: State) -> None:
    block_lists.relink(header(state), 1)
    before = dump(state)
    for b in (0, 2, 1, 4):
        block_lists.unlink(header(state), b)
    for b in (4, 1, 2, 0):
        block_lists.relink(header(state), b)
    assert dump(state) == before and not findings(state, np.empty(0, np.int64))


# ----------------------------------------
# The index has a bucket for every key, however many blocks there are.


@pytest.mark.parametrize("blocks", [1, 7, 2**29, 2**29 + 1, BLOCKS_MAX])
def test_every_key_has_a_bucket(blocks: int) -> None:
    count = buckets(blocks)
    assert bucket(np.int64(0), np.int64(count)) == 0 and bucket(np.int64(-1), np.int64(count)) == count - 1
    for key in np.random.default_rng(0).integers(-(2**63), 2**63, 100, np.int64):
        assert 0 <= bucket(key, np.int64(count)) < count


# ----------------------------------------
# A batch cut into levels means what it meant as a sequence, in whatever order the moves of a level are made.


WIDTH, BLOCKS = 4, 6


def random_moves(random: np.random.Generator) -> np.ndarray:
    count = int(random.integers(0, 12))
    source = random.integers(0, BLOCKS, count)
    target = (source + random.integers(1, BLOCKS, count)) % BLOCKS
    tokens = np.where(random.random(count) < 0.7, WIDTH, random.integers(1, WIDTH, count))
    return np.stack([source, target, tokens, np.arange(count)], axis=1).astype(np.int64)


def make(memory: np.ndarray, moves: np.ndarray) -> np.ndarray:
    for source, target, tokens, _ in moves:
        memory[target, :tokens] = memory[source, :tokens]
    return memory


@pytest.mark.parametrize("seed", range(20))
def test_levels_in_any_order_leave_what_the_sequence_leaves(seed: int) -> None:
    random, levels = np.random.default_rng(seed), Levels(np.full(BLOCKS, WIDTH))
    for _ in range(100):
        moves = random_moves(random)
        memory = np.arange(BLOCKS * WIDTH).reshape(BLOCKS, WIDTH)
        expected = make(memory.copy(), moves)
        for level in levels.cut(moves):
            memory = make(memory, random.permutation(level))
        np.testing.assert_array_equal(memory, expected, f"seed {seed}: {moves.tolist()}")
        assert not any(scratch.any() for scratch in levels._free)


@pytest.mark.parametrize("seed", range(20))
def test_moves_of_one_level_do_not_depend_on_each_other(seed: int) -> None:
    random, levels = np.random.default_rng(seed), Levels(np.full(BLOCKS, WIDTH))
    for _ in range(50):
        for level in levels.cut(random_moves(random)):
            targets, sources = set(level[:, TARGET]), set(level[:, SOURCE])
            assert len(targets) == len(level) and not targets & sources, f"seed {seed}"


@pytest.mark.parametrize(
    ("moves", "levels"),
    [
        pytest.param([(0, 3, 4), (1, 3, 4)], [[1]], id="overwritten unread"),
        pytest.param([(0, 3, 4), (3, 4, 1), (1, 3, 4)], [[0], [1], [2]], id="read in between"),
        pytest.param([(0, 3, 4), (1, 3, 3)], [[0], [1]], id="overwritten in part"),
        pytest.param([(0, 3, 4), (1, 4, 4), (0, 5, 2)], [[0, 1, 2]], id="independent"),
    ],
)
def test_a_move_waits_for_those_that_it_depends_on_and_is_left_out_where_nobody_reads_its_target(
    moves: list[tuple[int, int, int]], levels: list[list[int]]
) -> None:
    rows = np.array([(*move, ticket) for ticket, move in enumerate(moves)], np.int64)
    assert [level[:, TICKET].tolist() for level in Levels(np.full(BLOCKS, WIDTH)).cut(rows)] == levels

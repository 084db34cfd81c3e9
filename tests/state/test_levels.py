"""A batch cut into levels means what it meant as a sequence, in whatever order the moves of a level are made."""

from __future__ import annotations

import numpy as np
import pytest

from kvpool.copying.transfer import Levels
from kvpool.device.base import SOURCE, TARGET, TOKENS

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


@pytest.mark.parametrize("seed", range(40))
def test_levels_in_any_order_leave_what_the_sequence_leaves(seed: int) -> None:
    random = np.random.default_rng(seed)
    levels = Levels(BLOCKS, WIDTH)
    for _ in range(50):
        moves = random_moves(random)
        memory = np.arange(BLOCKS * WIDTH).reshape(BLOCKS, WIDTH)
        expected = make(memory.copy(), moves)
        for level in levels.cut(moves):
            memory = make(memory, random.permutation(level))
        np.testing.assert_array_equal(memory, expected, f"seed {seed}: {moves.tolist()}")
        assert not any(scratch.any() for scratch in levels._free)


@pytest.mark.parametrize("seed", range(20))
def test_moves_of_one_level_do_not_depend_on_each_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    levels = Levels(BLOCKS, WIDTH)
    for _ in range(50):
        for level in levels.cut(random_moves(random)):
            assert len(set(level[:, TARGET])) == len(level), f"seed {seed}"
            assert not set(level[:, TARGET]) & set(level[:, SOURCE]), f"seed {seed}"


def test_a_move_whose_target_is_overwritten_unread_is_not_made() -> None:
    levels = Levels(BLOCKS, WIDTH)
    overwritten = np.array([(0, 3, WIDTH, 0), (1, 3, WIDTH, 1)], np.int64)
    assert [level.tolist() for level in levels.cut(overwritten)] == [[[1, 3, WIDTH, 1]]]
    read_between = np.array([(0, 3, WIDTH, 0), (3, 4, 1, 1), (1, 3, WIDTH, 2)], np.int64)
    assert [level[0, TARGET] for level in levels.cut(read_between)] == [3, 4, 3]
    in_part = np.array([(0, 3, WIDTH, 0), (1, 3, WIDTH - 1, 1)], np.int64)
    assert [level[0, TOKENS] for level in levels.cut(in_part)] == [WIDTH, WIDTH - 1]


def test_independent_moves_stay_one_batch() -> None:
    moves = np.array([(0, 3, WIDTH, 0), (1, 4, WIDTH, 1), (0, 5, 2, 2)], np.int64)
    (only,) = Levels(BLOCKS, WIDTH).cut(moves)
    assert only is moves

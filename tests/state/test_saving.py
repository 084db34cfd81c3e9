"""Each dirty-block cursor reads each content once, as long as some tier has it: as it is stored, in a sweep, or when it
would be evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine
from kvpool.state import saving
from kvpool.state.records import NONE, H

T = 4
Open = Callable[..., Engine]


class DirtyCursor:
    """A dirty-block cursor of a pool, and the keys of what it reads."""

    def __init__(self, of: Engine, pending: bool = True) -> None:
        self.of = of
        self.number = self._run(saving.open_dirty_cursor, pending)
        self.at = np.array([0, NONE, 0], np.int64)

    def _run(self, verb: Callable[..., int], *args: Any) -> int:
        return int(self.of.cache.core.decide(None, verb, *args))

    def _read(self, verb: Callable[..., int], *args: Any, rows: int = 64) -> list[bytes]:
        rows_read = np.empty((rows, saving.FOUND), np.int64)
        count = self._run(verb, self.number, *args, rows_read)
        self.of.cache.verify()
        return [row[1:3].tobytes() for row in rows_read[:count]]

    def stored(self, rows: int = 64) -> list[bytes]:
        return self._read(saving.stored, self.at, rows=rows)

    def sweep(self, uses: int = 1) -> list[bytes]:
        self.at[saving.PLACE] = 0
        contents: list[bytes] = []
        while self.at[saving.PLACE] != NONE:
            contents += self._read(saving.sweep, uses, self.at, rows=3)
        return contents

    def victims(self, margin: int) -> list[bytes]:
        return self._read(saving.victims, np.array([margin]))

    def close(self) -> None:
        self._run(saving.close_dirty_cursor, self.number)


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Callable[..., Engine]:
    return lambda P=8, S=8, events=64: make(T, P, S, event_capacity=events)


def prompt(first: int, blocks: int = 4) -> list[int]:
    return list(range(first, first + blocks * T))


def test_content_is_read_once_while_it_moves_between_tiers(engine: Open) -> None:
    of = engine()
    cursor = DirtyCursor(of)
    of.seed(prompt(0), 16)
    assert cursor.stored() == of.keys(prompt(0)) and not cursor.stored() and not cursor.sweep()
    of.cache.content.offload(of.prompt(prompt(0)))
    of.release(of.add(prompt(900, 8)), store=False)  # the device evicts it
    of.release(of.add([*prompt(0), 1]))  # it is onboarded
    assert not cursor.stored() and not cursor.sweep() and not cursor.victims(8)


def test_content_that_is_computed_beside_its_host_copy_is_not_read_again(engine: Open) -> None:
    of = engine()
    cursor = DirtyCursor(of)
    of.seed(prompt(0), 16)
    contents = cursor.stored()
    of.release(of.add(prompt(900, 8)), store=False)
    # Two requests that cannot reuse it compute it again.
    sequence = of.cache.add_sequence(of.cache.block_keys(prompt(0), reuse=False))
    of.cache.commit(sequence)
    assert len(contents) == 4 and not cursor.sweep() and not cursor.stored()
    of.cache.release(sequence)


def test_content_that_has_gone_and_comes_again_is_read_again(engine: Open) -> None:
    of = engine(P=4, S=0)
    cursor = DirtyCursor(of)
    for _ in range(2):
        of.seed(prompt(0), 16)
        assert cursor.stored() == of.keys(prompt(0))
        of.cache.content.forget(of.prompt(prompt(0)))


def test_savers_know_nothing_of_each_other(engine: Open) -> None:
    of = engine()
    first, second = DirtyCursor(of), DirtyCursor(of)
    of.seed(prompt(0), 16)
    assert first.sweep() == second.sweep() and len(second.stored()) == 0
    first.close()
    assert DirtyCursor(of).number == first.number
    assert len(DirtyCursor(of).sweep()) == 4
    third = DirtyCursor(of)
    first.close()
    again = DirtyCursor(of)
    assert (again.number, len(again.sweep()), len(third.sweep())) == (first.number, 4, 4)


def test_what_the_host_evicts_next_is_read_in_that_order(engine: Open) -> None:
    of = engine(P=4, S=8)
    cursor = DirtyCursor(of)
    for first in (0, 100, 200):
        of.seed(prompt(first), 16)
    order = [key for block in of.order("host") for key, at in of.cached("host").items() if at == block]
    assert len(order) == 8, "the host is full"
    assert cursor.victims(0) == [] and cursor.victims(3) == order[:3] and cursor.victims(5) == order[3:5]
    of.cache.content.prefetch(of.prompt(prompt(100)))  # these are clean copies now, and nothing is lost with them
    of.cache.content.offload(of.prompt(prompt(100)))
    clean = int(of.cache.stats().host.redundant)
    assert clean and cursor.victims(clean) == []


def test_events_that_came_too_late_are_counted_and_all_blocks_looked_at(engine: Open) -> None:
    of = engine(P=64, S=8, events=32)
    cursor = DirtyCursor(of)
    for first in range(0, 4000, 400):
        of.seed(prompt(first, 6), 24)
    contents = cursor.stored(rows=100)
    missed = int(cursor.at[saving.MISSED])
    assert missed > 0 and cursor.at[saving.PLACE] == 0
    assert len({*contents, *cursor.sweep()}) == len(of.cached()) and not cursor.stored()
    assert cursor.at[saving.MISSED] == missed


def test_what_is_evicted_before_it_was_read_is_counted(engine: Open) -> None:
    of = engine(P=4, S=4)
    cursor, other = DirtyCursor(of), DirtyCursor(of, pending=False)
    for first in (0, 100):
        of.seed(prompt(first), 16)
    assert len(cursor.sweep()) == 8
    of.seed(prompt(200), 16)
    assert of.cache.core.states.groups[0, H.unsaved] == 0 and other.number != cursor.number
    of.seed(prompt(300), 16)
    of.seed(prompt(400), 16)
    assert of.cache.core.states.groups[0, H.unsaved] == 4

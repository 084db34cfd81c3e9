"""What is told of stores that fail: the first of each kind at once, then numbers, and no flood."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvpool.stores.store_client import TroubleLog

LOG = logging.getLogger("kvpool.stores.test")


class Told:
    """What was logged since the last look, under a clock of the test's."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now, self._caplog = 0.0, caplog
        self.troubles = TroubleLog("the disk", lambda: self.now, LOG)
        self._seen = 0

    def lines(self) -> list[str]:
        found = [record.getMessage() for record in self._caplog.records[self._seen :]]
        self._seen = len(self._caplog.records)
        return found


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    caplog.set_level(logging.INFO, LOG.name)
    return Told(caplog)


def test_the_first_trouble_of_each_kind_is_a_warning_with_its_meaning(told: Told) -> None:
    told.troubles.note("load", "damaged", 3)
    told.troubles.note("save", "failed", 2, "No space left on device")
    damaged, failed = told.lines()
    assert "store the disk: load of 3 blocks: damaged (the bytes were not those that were saved)" in damaged
    assert "save of 2 blocks: failed No space left on device" in failed


def test_trouble_that_goes_on_is_counted_and_told_once_a_minute(told: Told) -> None:
    told.troubles.note("load", "late", 1)
    assert len(told.lines()) == 1
    for second in range(1, 60):
        told.now = float(second)
        told.troubles.note("load", "late", 2)
    assert told.lines() == []
    told.now = 60.0
    told.troubles.note("load", "late", 2)
    (line,) = told.lines()
    assert "load of 120 blocks more: late" in line
    assert told.troubles.counts["load", "late"] == 121


def test_what_follows_from_trouble_that_was_told_is_counted_only(told: Told) -> None:
    note: Callable[..., None] = told.troubles.note
    note("load", "suspended", 5, quiet=True)
    assert told.lines() == [] and told.troubles.counts["load", "suspended"] == 5

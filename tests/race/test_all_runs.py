"""Every race of the tables, in the runs of the sim device that the other files leave out: found in each of them without
its guard, and in none with it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.race import test_forks, test_loaders, test_races, test_sequence_races
from tests.race.lab import OTHERS
from tests.race.test_races import Scenario, a_failure_at_a_move, is_right, needs

pytestmark = pytest.mark.exhaustive
RACES: dict[Scenario, tuple[str | None, dict[str, Any]]] = {
    **test_races.RACES,
    **test_sequence_races.RACES,
    **test_loaders.RACES,
    **test_forks.RACES,
    **dict.fromkeys(test_forks.ALWAYS, (None, {"P": 2, "S": 0, "T": 4})),
}


@pytest.mark.parametrize("scenario", RACES, ids=lambda scenario: scenario.__name__)
def test_it_is_found_without_its_guard_alone(scenario: Scenario) -> None:
    guard, options = RACES[scenario]
    is_right(scenario, options, OTHERS)
    if guard is not None:
        needs(guard, scenario, options, OTHERS)


def test_content_that_never_came_is_handed_out_without_its_guard_alone() -> None:
    for seed, progress in OTHERS:
        assert not [found for place in range(4) for found in a_failure_at_a_move(place, seed, progress, None)]
        guard = "lost_content_is_forgotten"
        assert any(a_failure_at_a_move(place, seed, progress, guard) for place in range(4))

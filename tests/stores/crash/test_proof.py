"""DiskStore survives crashes: what was acknowledged is there, nothing is wrong, and opening works. A store that does
things in a wrong order is found."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from tests.stores.crash import proof
from tests.stores.crash.log import Missing
from tests.stores.crash.model import Fate
from tests.stores.crash.proof import Recording

SEED = int(os.environ.get("KVPOOL_CRASH_SEED", "1"))


def record(folder: Path, skip: str = "", breakage: str = "") -> Recording:
    print(f"KVPOOL_CRASH_SEED={SEED}")
    try:
        return proof.recorded(folder, SEED, skip, breakage)
    except Missing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return record(tmp_path_factory.mktemp("crash"))


@pytest.fixture
def built() -> Iterator[Path]:
    """Where crash states are built."""
    with proof.in_memory() as folder:
        yield folder / "root"


@pytest.mark.parametrize("states", [20, pytest.param(300, marks=pytest.mark.exhaustive)])
def test_in_hundreds_of_crash_states_nothing_acknowledged_is_lost(
    recording: Recording, built: Path, states: int
) -> None:
    result = proof.replayed(recording, states, SEED, built)
    assert result.states == states and not result.failures, result.failures
    assert result.promised > states and result.gone > states


@pytest.mark.exhaustive
@pytest.mark.parametrize("fate", [None, Fate(keep=0.1, tear=1.0, noise=0.1)], ids=["any fate", "noise"])
def test_a_crash_of_the_opening_after_a_crash_loses_nothing(
    recording: Recording, fate: Fate | None, tmp_path: Path, built: Path
) -> None:
    """Power that fails may leave noise where something is written, and so no block is written that is there."""
    again = proof.recovered(recording, tmp_path, SEED)
    result = proof.replayed(again, 80, SEED, built, fate=fate)
    assert result.states == 80 and result.promised and not result.failures, result.failures


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("skip", "breakage", "harms"),
    [
        ("slab", "", ["was promised"]),
        ("rows.sqlite-wal", "", ["was promised"]),
        ("/store", "", ["was promised"]),
        ("/recorded", "", ["was promised"]),
        ("", "row first", ["was promised"]),
        ("", "acknowledged first", ["was promised", "was forgotten"]),
    ],
    ids=["slab not synced", "rows not synced", "names not synced", "folder not synced", "row first", "no wait"],
)
def test_a_wrong_order_is_found(skip: str, breakage: str, harms: list[str], tmp_path: Path, built: Path) -> None:
    """Crash states are drawn until each of these harms has been seen, at most 4,000."""
    recording = record(tmp_path, skip, breakage)

    def all_seen(failures: Sequence[str]) -> bool:
        return all(any(harm in failure for failure in failures) for harm in harms)

    draws = (proof.replayed(recording, 200, SEED + number, built, all_seen).failures for number in range(20))
    assert any(all_seen(failures) for failures in draws), f"not all of {harms}"

"""The example with trees of drafts: its logits are those of the model without a cache, and it notices tokens that did
not move."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.seeds import some_of

HAPPENED = [
    "blocks reused on the device",
    "blocks offloaded",
    "blocks onboarded",
    "accepted drafts that were moved",
    "drafts that were accepted",
    "drafts that were dropped",
    "preemptions",
]


@pytest.fixture
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("drafts_numpy")


@pytest.mark.parametrize(
    ("device", "seed"),
    some_of(1, [("sim", 0), ("cpu", 0), ("sim", 1), ("cpu", 1)]),
)
def test_every_logit_is_that_of_the_model_without_a_cache(
    example: ModuleType, device: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main(["--seed", str(seed), "--device", device, "--check"]) == 0
    counts = {line[8:]: int(line[:7].replace(",", "")) for line in capsys.readouterr().out.splitlines()}
    assert all(counts[what] for what in HAPPENED), counts


@pytest.mark.usefixtures("unmoved_drafts")
def test_drafts_whose_bytes_stay_where_they_were_are_noticed(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([]) == 1
    assert "the logits differ" in capsys.readouterr().out

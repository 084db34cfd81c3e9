"""``asv_bench.first_token`` runs from end to end with a tiny model, goes on where it was ended, and notices what is
wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asv_bench import first_token
from asv_bench.first_token import Sizes, schedule
from asv_bench.first_token_arms import ARMS
from kvpool.device.cuda import unusable
from tests import emulated

SHAPE = first_token.Shape()


@pytest.fixture
def gpu() -> None:
    missing = unusable()
    if missing:
        pytest.skip(missing)


def results_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


@pytest.mark.gpu
def test_a_run_goes_on_where_it_was_ended(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All arms, one after the other; the third is ended, and runs again. Over the emulated driver without those of
    PyTorch, which need a build for a GPU."""
    if emulated.running():
        monkeypatch.setattr(first_token, "missing", lambda arm: "no GPU" if arm.needs_torch else None)
    keys = [arm.key for arm in ARMS if not first_token.missing(arm)]
    run_arm, begun = first_token.run_arm, []

    def counted(arm: Any, *arguments: Any) -> Any:
        begun.append(arm.key)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return run_arm(arm, *arguments)

    monkeypatch.setattr(first_token, "run_arm", counted)
    command = ["--tiny", "--out", str(tmp_path), "--seconds", "3000"]
    with pytest.raises(KeyboardInterrupt):
        first_token.main(command)
    assert [arm["arm"] for arm in results_in(tmp_path)["arms"]] == keys[:2]
    assert "compute again" in (tmp_path / "table.md").read_text(encoding="utf-8")

    assert first_token.main(command) == 0
    assert begun == [*keys[:3], *keys[2:]]
    data = results_in(tmp_path)
    assert [arm["arm"] for arm in data["arms"]] == keys and {*data["left_out"], *keys} == {arm.key for arm in ARMS}
    for arm in data["arms"]:
        assert arm["right"] and (arm["loaded_bytes"] > 0) == (arm["arm"] not in "DA")
    assert data["verified"] and all(count and not wrong for _, count, wrong in data["verified"])
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert data["settings"]["emulated"] == ("NOT A GPU" in table)


# -- without a GPU


def test_the_schedule_ends_at_whole_blocks() -> None:
    """So that no arm computes a block again that another one reuses."""
    sizes = Sizes()
    for chat, turns in enumerate(schedule(SHAPE, sizes, 0)):
        tokens = 0
        for message in turns:
            tokens += len(message) + sizes.answer
            assert tokens % SHAPE.block_tokens == 1
        assert tokens == sizes.length(SHAPE, chat)

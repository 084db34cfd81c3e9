"""``asv_bench.first_token`` runs from end to end with a tiny model, goes on where it was ended, and notices what is
wrong."""

from __future__ import annotations

import importlib
import json
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asv_bench import first_token
from asv_bench.first_token import Sizes, schedule
from asv_bench.first_token_arms import ARMS
from kvpool.device.cuda import unusable

SHAPE = first_token.Shape()


class Tensor:
    """As much of a tensor as the arms of PyTorch use: over CuPy, or over NumPy for pinned memory."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.device = "cpu" if isinstance(array, np.ndarray) else "cuda"

    def movedim(self, source: int, target: int) -> Tensor:
        return Tensor(np.moveaxis(self.array, source, target))

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key.array if isinstance(key, Tensor) else key])

    def __setitem__(self, key: Tensor, value: Tensor) -> None:
        self.array[key.array] = value.array

    def __len__(self) -> int:
        return len(self.array)

    def to(self, device: str) -> Tensor:
        return Tensor(importlib.import_module("cupy").asarray(self.array))

    def copy_(self, source: Tensor, non_blocking: bool) -> None:
        assert self.array.flags.c_contiguous and non_blocking and self.device != source.device
        if self.device == "cuda":
            self.array.set(source.array)
        else:
            source.array.get(out=self.array)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for PyTorch over CuPy: the arms of PyTorch need a build for a GPU, which no emulated driver runs."""
    cupy, made = importlib.import_module("cupy"), ModuleType("torch")
    made.__spec__ = ModuleSpec("torch", None)
    streams = SimpleNamespace(ExternalStream=cupy.cuda.ExternalStream, stream=lambda stream: stream or nullcontext())
    functions = {
        "cuda": streams,
        "from_dlpack": Tensor,
        "from_numpy": Tensor,
        "empty": lambda shape, dtype, pin_memory: Tensor(np.empty(shape, dtype)),
        "empty_like": lambda tensor, device: Tensor(cupy.empty(tensor.shape, tensor.dtype)),
    }
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, "torch", made)


@pytest.fixture
def gpu() -> None:
    missing = unusable()
    if missing:
        pytest.skip(missing)


def results_in(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "results.json").read_text(encoding="utf-8")))


@pytest.mark.gpu
def test_a_run_goes_on_where_it_was_ended(
    gpu: None, torch: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arms, one after the other; the third is ended, and runs again."""
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
    assert [arm["arm"] for arm in results_in(tmp_path)["arms"]] == ["D", "A"]
    assert "compute again" in (tmp_path / "table.md").read_text(encoding="utf-8")

    assert first_token.main(command) == 0
    assert begun == ["D", "A", "B2", "B2", "C2", "B1", "C1", "C3"]
    data = results_in(tmp_path)
    assert [arm["arm"] for arm in data["arms"]] == [arm.key for arm in ARMS]
    assert not data["left_out"] and all(arm["right"] for arm in data["arms"])
    assert {arm["arm"]: arm["loaded_bytes"] > 0 for arm in data["arms"]} == {
        arm.key: arm.key not in "DA" for arm in ARMS
    }
    assert [wrong for _, _, wrong in data["verified"]] == [0] * 4 and all(count for _, count, _ in data["verified"])
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

"""The engine with sliding windows runs, its logits are those without a cache, and a pool that gives back too much is
noticed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import kvpool
from tests.seeds import some_of


@pytest.fixture
def engine(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("windows_numpy")


@pytest.mark.parametrize(("device", "seed"), some_of(2, [("cpu", 0), ("sim", 1), ("cpu", 1), ("sim", 0)]))
def test_every_logit_is_that_of_the_windowed_model_without_a_cache(
    engine: ModuleType, device: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine.main(["--chats", "16", "--seed", str(seed), "--device", device, "--check"]) == 0
    assert "the window had passed" in capsys.readouterr().out


@pytest.mark.parametrize("less", [{"window": 11}, {"sinks": 0}])
def test_a_pool_that_gives_back_what_is_still_seen_is_noticed(
    engine: ModuleType, less: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = kvpool.KVCacheManager

    def wrong(*arguments: Any, **options: Any) -> kvpool.KVCacheManager:
        return manager(*arguments, **(options | less))

    monkeypatch.setattr(kvpool, "KVCacheManager", wrong)
    assert engine.main(["--chats", "16"]) == 1
    assert "the logits differ" in capsys.readouterr().out

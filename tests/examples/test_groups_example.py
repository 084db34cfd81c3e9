"""What a group of layers, or a window, loses or mixes up is noticed by the engines of the examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

import kvpool
from kvpool.device import get_device
from kvpool.device.sim import RaceError
from tests.seeds import some_of


@pytest.fixture
def example(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("groups_numpy")


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[kvpool.LayerGroup], kvpool.LayerGroup]) -> None:
    """Pools whose groups are other than the model's."""
    manager = kvpool.KVCacheManager

    def wrong(*, groups: Any, **options: Any) -> kvpool.KVCacheManager:
        return manager(groups=[change(group) for group in groups], **options)

    monkeypatch.setattr(kvpool, "KVCacheManager", wrong)


def served(example: ModuleType, engine: str) -> int:
    """The exit code of one engine of the example."""
    groups, blocks = {
        "PlainEngine": ("FULL WINDOWED RECURRENT", [26, 20, 16]),
        "GuessingEngine": ("FULL WINDOWED", [26, 20]),
        "TreesEngine": ("FULL WINDOWED", [30, 24]),
    }[engine]
    layers = tuple(getattr(example, name) for name in groups.split())
    return int(example.serve(get_device("cpu"), getattr(example, engine), layers, blocks, chats=8, seed=0, check=False))


def test_a_group_that_gives_back_what_is_still_seen_is_noticed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(monkeypatch, lambda group: replace(group, window=11) if group.window else group)
    assert served(example, "GuessingEngine") == 1
    assert "the logits differ" in capsys.readouterr().out


def test_a_state_that_comes_back_to_the_wrong_prefix_is_noticed(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states_of = example.states_of

    def late(columns: Any, start: int, end: int) -> Any:
        read, written = states_of(columns, start, end)
        return read, [(min(count + 1, end), block) for count, block in written]

    monkeypatch.setattr(example, "states_of", late)
    assert served(example, "PlainEngine") == 1
    assert "the logits differ" in capsys.readouterr().out


@pytest.mark.usefixtures("unmoved_drafts")
def test_drafts_that_do_not_move_are_noticed(
    example: ModuleType, load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert served(example, "TreesEngine") == 1
    assert "the logits differ" in capsys.readouterr().out
    assert load("drafts_numpy").main([]) == 1
    assert "the logits differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rule", some_of(1, ["copy_writes_after_engine", "copy_writes_after_copies", "engine_reads_after_copies"])
)
def test_the_order_of_copies_is_needed_in_groups_too(
    example: ModuleType, rule: str, without: Callable[[str], None]
) -> None:
    without(rule)
    with pytest.raises(RaceError, match="nothing orders"):
        example.main(["--device", "sim"])


@pytest.mark.parametrize("less", [{"window": 11}, {"sinks": 0}])
def test_a_pool_that_gives_back_what_is_still_seen_is_noticed(
    load: Callable[[str], ModuleType],
    less: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    manager = kvpool.KVCacheManager

    def wrong(*arguments: Any, **options: Any) -> kvpool.KVCacheManager:
        return manager(*arguments, **(options | less))

    monkeypatch.setattr(kvpool, "KVCacheManager", wrong)
    assert load("windows_numpy").main(["--chats", "16"]) == 1
    assert "the logits differ" in capsys.readouterr().out

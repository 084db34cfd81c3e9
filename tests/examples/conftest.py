"""The examples are imported in the process of the tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvpool


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports an example in this process."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes a guard out of the pools that are made from now on."""
    opened = kvpool.KVCacheManager.__init__

    def disable(rule: str) -> None:
        def unguarded(self: kvpool.KVCacheManager, *arguments: Any, **options: Any) -> None:
            opened(self, *arguments, **options)
            self.core.disable_guard(rule)

        monkeypatch.setattr(kvpool.KVCacheManager, "__init__", unguarded)

    return disable


@pytest.fixture
def unmoved_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that are kept stay where they were written."""

    def rewound(self: Any, ids: Any, drafts: Any, accepted: Any, counts: Any, *, stream: Any) -> None:
        self.rewind(ids, [most - kept for most, kept in zip(drafts, counts, strict=True)], stream=stream)

    monkeypatch.setattr(kvpool.KVCacheManager, "accept_drafts", rewound)

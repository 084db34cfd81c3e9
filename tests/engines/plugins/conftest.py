"""What both plug-ins' tests see of the stores that a plug-in opens. A test module names its plug-in ``plugin``."""

from __future__ import annotations

from typing import Any

import pytest

from kvpool.integrations import staged
from kvpool.storage import MemoryStore
from tests.stores.lab import Wrong


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> dict[str, Wrong]:
    """The stores that are opened, by their texts: each text is one store, as a path is."""
    stores_opened: dict[str, Wrong] = {}

    def open_store(text: str, **names: Any) -> Any:
        store = Wrong(MemoryStore(1 << 22))
        return store if names["part"] == "check" else stores_opened.setdefault(text.format(**names), store)

    monkeypatch.setattr(staged, "open_store", open_store)
    return stores_opened


@pytest.fixture
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[staged.StagedBlocks]:
    """The blocks that the plug-in has opened stores for, in order."""
    staged_blocks: list[staged.StagedBlocks] = []

    class Recorded(staged.StagedBlocks):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            staged_blocks.append(self)

    monkeypatch.setattr(request.module.plugin, "StagedBlocks", Recorded)
    return staged_blocks

"""DiskStore keeps the contract."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpool.stores.disk import DiskStore
from tests.stores.contract import LastingContract
from tests.stores.lab import BLOCK_BYTES


class TestDiskStore(LastingContract):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Callable[[int], DiskStore]:
        return lambda blocks: DiskStore(tmp_path / "store", blocks * BLOCK_BYTES)

    @pytest.fixture
    def again(self, tmp_path: Path) -> Callable[[], DiskStore]:
        return lambda: DiskStore(tmp_path / "store")

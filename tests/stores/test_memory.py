"""MemoryStore keeps the contract."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvpool.stores import MemoryStore
from tests.stores.contract import LastingContract
from tests.stores.lab import BLOCK_BYTES


class TestMemoryStore(LastingContract):
    @pytest.fixture
    def made(self) -> list[MemoryStore]:
        return []

    @pytest.fixture
    def make(self, made: list[MemoryStore]) -> Callable[[int], MemoryStore]:
        def build(blocks: int) -> MemoryStore:
            made.append(MemoryStore(blocks * BLOCK_BYTES))
            return made[-1]

        return build

    @pytest.fixture
    def again(self, made: list[MemoryStore]) -> Callable[[], MemoryStore]:
        return lambda: made[-1]

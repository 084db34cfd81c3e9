"""Clients of these tests wait for a starved server as long as the tests do."""

from __future__ import annotations

import pytest

from kvpool.remote import BlockClient


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = BlockClient.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "timeout", 600.0)

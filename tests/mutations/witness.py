"""A pytest plugin: writes down which package the tests of a mutated copy imported, and which of them failed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kvpool

_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.nodeid not in _failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    seen = {"package": str(kvpool.__file__), "ran": session.testscollected, "failed": _failed}
    Path(os.environ["KVPOOL_WITNESS"]).write_text(json.dumps(seen), encoding="utf-8")

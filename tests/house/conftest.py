"""The documentation, built once for all tests of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.counter import ROOT


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages as HTML, made as the README says. Skips where what makes them is not installed."""
    for package in ("sphinx", "myst_parser", "furo", "sphinx_copybutton", "msgspec", "prometheus_client", "zmq"):
        pytest.importorskip(package)
    html = tmp_path_factory.mktemp("docs") / "html"
    options = ["-q", "-W", "--keep-going", "-d", str(html / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "docs", str(html)]
    run = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return html

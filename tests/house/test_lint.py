"""The tree passes mypy and ruff with the project's settings."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", ["mypy kvpool", "ruff check .", "ruff format --check ."])
def test_tool_finds_nothing(command: str) -> None:
    tool = command.split()[0]
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f"{tool} is not installed; it comes with the extra 'test'")
    done = subprocess.run([sys.executable, "-m", *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

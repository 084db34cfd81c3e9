"""Request traces for tests: one that is part of the project, and recorded ones, which nobody has to have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TRACES = "KVPOOL_TRACES"
"""Environment variable: a folder with recorded traces, which are not part of the project."""
CHATS = Path(__file__).with_name("chats.jsonl")
"""The trace that ``python -m tests.data`` writes: chats of several turns, in the Mooncake format."""
CONVERSATION = "conversation_trace.jsonl"
"""The file name of the trace published with the Mooncake paper: 12,031 requests of an online chat service."""


def recorded(name: str = CONVERSATION) -> Path | None:
    """The file of this name in the folder that ``KVPOOL_TRACES`` names. None if the variable is not set.

    Raises
    ------
    FileNotFoundError
        The variable is set, and the folder has no such file.
    """
    folder = os.environ.get(TRACES)
    if not folder:
        return None
    path = Path(folder) / name
    if not path.is_file():
        raise FileNotFoundError(f"{TRACES}: expected a folder with {name}, got {folder!r}")
    return path


def recorded_or_skip(name: str = CONVERSATION) -> Path:
    """The file of this name in that folder. Skips the test if the variable is not set."""
    path = recorded(name)
    if path is None:
        pytest.skip(f"needs a recorded trace: set {TRACES} to a folder with {name}")
    return path

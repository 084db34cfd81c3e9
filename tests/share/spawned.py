"""Processes of their own, which are ended with the test."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

_PATIENCE = 600


class Spawned:
    """A process and the pipe to it. ``recv`` raises EOFError where it has ended, and fails where it says nothing for a
    minute."""

    def __init__(self, run: Callable[[Connection], None]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.send = self.pipe.send

    def recv(self) -> Any:
        assert self.pipe.poll(_PATIENCE), f"{self.process} says nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


Spawn = Callable[[Callable[[Connection], None]], Spawned]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts processes; what they do is a function of ``processes``."""
    started: list[Spawned] = []

    def build(run: Callable[[Connection], None]) -> Spawned:
        started.append(Spawned(run))
        return started[-1]

    yield build
    for process in started:
        process.kill()

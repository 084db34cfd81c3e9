"""A mutation: one rule of the package taken out, or got wrong, and the tests that must notice."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """In ``file``, a path in the package, ``before`` stands once and becomes ``after``; ``harm`` is what a user would
    see of it.

    Every one of ``tests``, node ids of pytest, must then fail. They run in the interpreter (NUMBA_DISABLE_JIT), where a
    changed module costs nothing, unless the mutation is ``compiled``: what only machine code shows.
    """

    name: str
    file: str
    before: str
    after: str
    harm: str
    tests: tuple[str, ...]
    compiled: bool = False

    def applied_to(self, text: str) -> str:
        """The text of its file with the mutation made. Raises ValueError where what it replaces does not stand there
        exactly once."""
        found = text.count(self.before)
        if found != 1:
            raise ValueError(f"{self.name}: kvpool/{self.file} has {found} times, and not once: {self.before!r}")
        return text.replace(self.before, self.after)

"""Opens a store as a crash has left it, and says what is wrong."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from pathlib import Path

from kvpool.storage import ABSENT, DAMAGED, OK
from kvpool.storage.store import Bytes
from tests.stores.crash.session import GROWN, ROWS, Session, disk_store

FRESH = range(1_000_000, 1_000_003)
"""Numbers of blocks that no recorded program has saved."""


class Checker:
    """Checks folders, one at a time. ``numbers``: all blocks that may ever have been saved."""

    def __init__(self, numbers: Collection[int], rows: Bytes) -> None:
        self._numbers, self._rows = sorted(numbers), rows
        self.loaded = self.damaged = 0

    def wrong(self, folder: Path, promised: set[int], gone: set[int], rng: random.Random) -> list[str]:
        """What is wrong with the store in this folder, in words. The store is changed.

        Opening and closing must work. No block has wrong bytes. Promised blocks load. Those that are gone are not
        found. What is saved now, is acknowledged as if nothing had happened: it loads, even if the crash has left its
        row without its bytes.
        """
        try:
            session = Session(disk_store(folder, GROWN), self._rows)
        except Exception as error:
            return [f"opening failed: {type(error).__name__}: {error}"]
        with session:
            back = sorted(gone & set(session.find(self._numbers)))
            if back:
                return [f"block {number} was forgotten, and is found" for number in back]
            if rng.random() < 0.5:
                return [*self._saved_again(session, promised), *self._load(session, promised, "promised")]
            return [*self._load(session, promised, "promised"), *self._fresh(session)]

    def _load(self, session: Session, expected: Collection[int], name: str) -> list[str]:
        failures = []
        for first in range(0, len(self._numbers), ROWS):
            failures += self._load_some(session, self._numbers[first : first + ROWS], expected, name)
        return failures

    def _load_some(self, session: Session, numbers: Sequence[int], expected: Collection[int], name: str) -> list[str]:
        codes, wrong = session.load(numbers)
        self.loaded += codes.count(OK)
        self.damaged += codes.count(DAMAGED)
        failures = [f"wrong bytes of block {number}" for number in wrong]
        for number, code in zip(numbers, codes, strict=True):
            if number in expected and code != OK:
                failures.append(f"block {number} was {name}, and its code is {code}")
            elif code not in (OK, ABSENT, DAMAGED):
                failures.append(f"block {number} has the code {code}")
        return failures

    def _saved_again(self, session: Session, promised: set[int]) -> list[str]:
        """Save all that the store says it has, before anything is loaded."""
        there = session.find(self._numbers)
        failures = [f"block {number} was promised, and is not found" for number in sorted(promised - set(there))]
        codes = session.save(there)
        failures += [
            f"block {number} was there, and saving it again gives {code}"
            for number, code in zip(there, codes, strict=True)
            if code != OK
        ]
        return failures + self._load_some(session, there, there, "saved again")

    def _fresh(self, session: Session) -> list[str]:
        """Save blocks that are new. Others may be evicted."""
        codes = session.save(FRESH)
        failures = [] if set(codes) == {OK} else [f"saving new blocks gives {codes}"]
        return [*failures, *self._load_some(session, FRESH, FRESH, "saved now"), *self._load(session, (), "")]

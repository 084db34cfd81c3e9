"""What is recorded: a program that saves, loads and forgets blocks in every way that changes files.
``python -m tests.stores.crash.workload FOLDER PART SEED [BREAKAGE]``

Each part is a process. "first" fills a new store, from several threads, evicts, forgets, has a limit, clears, closes
and opens again, and is killed in mid-work. "second" opens what that one left with a greater capacity, and acknowledges
blocks that are there already. "recovery" does only this, over a folder as a crash has left it. A breakage is one of
``breakages``.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvpool.storage import OK
from tests.stores.crash.breakages import BREAKAGES
from tests.stores.crash.session import CAPACITY, GROWN, Session, disk_store

RECORDER = ctypes.CDLL(None)
THREADS = 3
MANY = 90
"""More blocks than there is room for, of which some stay."""


def mark(**values: object) -> None:
    """Put a mark into the log, if this is recorded."""
    data = json.dumps(values).encode()
    if hasattr(RECORDER, "crash_mark"):
        RECORDER.crash_mark(data, len(data))


class Marked:
    """A session that says in the log what it does. ``seen`` are all numbers that were saved."""

    def __init__(self, session: Session) -> None:
        self.session, self.seen = session, set[int]()

    def save(self, numbers: Sequence[int], first_row: int = 0, **options: Any) -> list[int]:
        """The numbers of those that are acknowledged."""
        self.seen.update(numbers)
        mark(saving=numbers)
        codes = self.session.save(numbers, first_row, **options)
        saved = [number for number, code in zip(numbers, codes, strict=True) if code == OK]
        mark(saved=saved)
        return saved

    def forget(self, numbers: Sequence[int]) -> bool:
        """Whether it is confirmed."""
        mark(forgetting=numbers)
        confirmed = self.session.forget(numbers)
        mark(forgot=numbers if confirmed else [])
        return confirmed

    def clear(self, numbers: Sequence[int], namespace: bytes | None = None) -> None:
        """Drop a namespace, or everything: these numbers."""
        mark(forgetting=numbers)
        mark(forgot=numbers if self.session.clear(namespace) else [])

    def look(self, evicted: bool | None = None) -> list[int]:
        """Say what is there."""
        numbers = sorted(self.seen)
        mark(looking=0)
        present = self.session.find(numbers)
        mark(seen=present, evicted=self.session.evicted() if evicted is None else evicted)
        return present


def together(count: int, work: Callable[[int], None]) -> None:
    """Do work(0), work(1), ... in threads that begin at once."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> None:
        barrier.wait(600)
        work(number)

    with ThreadPoolExecutor(count) as pool:
        for done in [pool.submit(begin, number) for number in range(count)]:
            done.result()


def within_capacity(marked: Marked, first: int, rounds: int) -> None:
    """Several threads save, some the same blocks, and forget their own. Nothing is evicted."""
    marked.forget(marked.look())
    marked.look()

    def work(thread: int) -> None:
        private = list(range(first + 10 * (thread + 1), first + 10 * (thread + 1) + 2))
        for _ in range(rounds):
            marked.save([*private, first, first + 1], thread * 8)
            marked.forget(private)
        marked.save(private, thread * 8)

    together(THREADS, work)
    assert len(marked.look()) < CAPACITY


def beyond_capacity(marked: Marked, first: int, rounds: int, rng: random.Random) -> None:
    """Blocks that evict others, also those that were evicted before. Some are forgotten meanwhile."""
    for turn in range(rounds):
        count = 1 + turn % THREADS
        saved = [rng.sample(range(first, first + MANY), rng.randint(1, 20)) for _ in range(count)]
        others = sorted(set(range(first, first + MANY)).difference(*saved))

        def work(thread: int, turn: int = turn, saved: list[list[int]] = saved, others: list[int] = others) -> None:
            if thread < len(saved):
                marked.save(saved[thread], thread * 32, namespace=b"%d" % (turn % 2))
            for number in others[::5] if thread == len(saved) else ():
                marked.forget([number])

        together(count + 1, work)
        marked.look()


def with_a_limit(marked: Marked, first: int, rounds: int) -> None:
    """A namespace that has reached what it may have drops its older blocks."""
    for turn in range(rounds):
        marked.save([first + 2 * turn, first + 2 * turn + 1], namespace=b"small", limit=4)
        marked.look()


def with_clears(marked: Marked, first: int, rounds: int) -> None:
    """Tenants come and leave, and then everything goes."""
    for turn in range(rounds):
        leaving, others = [first + 3 * turn + i for i in range(3)], [first + 50]
        marked.save(leaving, namespace=b"leaves")
        marked.save(others, 8)
        marked.clear(leaving, b"leaves")
        assert set(marked.look()) & {*leaving, *others} <= set(others)
    marked.clear(sorted(marked.seen))
    marked.save([first, first + 50])
    marked.look()


def first_part(folder: Path, rng: random.Random) -> None:
    with Session(disk_store(folder)) as session:
        marked = Marked(session)
        within_capacity(marked, 0, 3)
        beyond_capacity(marked, 100, 12, rng)
        with_a_limit(marked, 200, 5)
        with_clears(marked, 220, 4)
    with Session(disk_store(folder)) as session:
        again = Marked(session)
        again.seen = marked.seen
        again.look(evicted=False)
        within_capacity(again, 300, 2)
        within_capacity(again, 400, 1)
        threading.Timer(0.05, RECORDER.crash_die).start()
        while True:
            again.save(again.look(evicted=False))
            together(THREADS, lambda thread: again.save([450 + thread], thread * 8))
            again.forget([450 + thread for thread in range(THREADS)])


def second_part(folder: Path, rng: random.Random) -> None:
    with Session(disk_store(folder, GROWN)) as session:
        marked = Marked(session)
        marked.seen.update(range(700))
        there = marked.look(evicted=False)
        marked.save(there)
        marked.save([450 + thread for thread in range(THREADS)])
        marked.look()
        beyond_capacity(marked, 500, 6, rng)
        within_capacity(marked, 600, 2)


def recovery(folder: Path, rng: random.Random) -> None:
    with Session(disk_store(folder, GROWN)) as session:
        marked = Marked(session)
        marked.seen.update(range(700))
        marked.save(marked.look(evicted=False))
        marked.look()


if __name__ == "__main__":
    PARTS = {"first": first_part, "second": second_part, "recovery": recovery}
    BREAKAGES[sys.argv[4] if len(sys.argv) > 4 else ""]()
    PARTS[sys.argv[2]](Path(sys.argv[1]), random.Random(int(sys.argv[3])))

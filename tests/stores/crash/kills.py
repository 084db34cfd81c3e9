"""Real kills: processes save without end and are killed at any moment; the next one finds all that was acknowledged.

``python -m tests.stores.crash.kills FOLDER COUNT SEED [BREAKAGE]`` prints what came of it, as JSON. It forks, so it
is a process of its own that has no threads. Its children report through a pipe what they begin and what was
acknowledged.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from kvpool.storage import ABSENT, DAMAGED, OK
from tests.stores.crash.breakages import BREAKAGES
from tests.stores.crash.session import ROWS, Session, disk_store

CAPACITY = 64
THREADS = 3
OWN = 6
"""Blocks that each thread keeps before it forgets its oldest: fewer than the capacity, so that none is evicted."""
LIMIT = 8
LIMITED = 1 << 20
"""Numbers from here on are of a namespace with a limit, and may be dropped at any time."""
DELAYS = {"saving": 0.02, "opening": 0.004, "closing": 0.002, "any": 0.1, "checking": 0.004}
"""When a child is killed: up to this many seconds after it reported it, or, for "any", after its beginning."""
LONGEST = 600.0
"""A child that has not said by then what is waited for is killed all the same, in seconds: nothing hangs."""


class Life:
    """One child, from its opening to its kill. ``promised``, ``gone``: the blocks that must be there at first, and must
    not."""

    def __init__(
        self, folder: Path, pipe: int, promised: Iterable[int], gone: Iterable[int], first: int, seed: int
    ) -> None:
        self._folder, self._pipe, self._kept, self._gone = folder, pipe, list(promised), list(gone)
        self._numbers, self._rng = iter(range(first, LIMITED)), random.Random(seed)
        self._limited = list(range(LIMITED + max(0, first - ROWS), LIMITED + first))

    def run(self) -> None:
        """Open, check, save and close until killed."""
        while True:
            self._say("opening")
            session = Session(disk_store(self._folder, CAPACITY))
            self._check(session)
            self._say("saving")
            end = time.monotonic() + self._rng.uniform(0.002, 0.03)
            lists: list[list[int]] = [self._kept[i::THREADS] for i in range(THREADS)]
            works = [threading.Thread(target=self._work, args=(session, i, lists[i], end)) for i in range(THREADS)]
            for work in works:
                work.start()
            for work in works:
                work.join()
            self._kept = [number for numbers in lists for number in numbers]
            self._say("closing")
            session.close()
            self._say("closed")

    def _say(self, what: str, numbers: Iterable[int] = ()) -> None:
        os.write(self._pipe, " ".join([what, *map(str, numbers)]).encode() + b"\n")

    def _check(self, session: Session) -> None:
        self._say("checking")
        kept = self._kept
        codes, wrong = session.load(kept)
        lost = [number for number, code in zip(kept, codes, strict=True) if code != OK]
        optional, also = session.load(self._limited[-ROWS:])
        back = session.find(self._gone)
        if wrong or lost or also or back or set(optional) - {OK, ABSENT, DAMAGED}:
            codes = sorted(set(codes + optional))
            self._say(f"wrong: bytes of {wrong + also}, lost {lost}, not gone {back}, codes {codes};")
        self._say("checked", [len(kept)])

    def _work(self, session: Session, thread: int, kept: list[int], end: float) -> None:
        """Save new blocks, once at least, and forget the oldest."""
        row = thread * 16
        for turn in itertools.count(1):
            new = [next(self._numbers) for _ in range(1 + turn % 3)]
            self._say("saves", new)
            codes = session.save(new, row)
            self._say("saved", [number for number, code in zip(new, codes, strict=True) if code == OK])
            kept += new
            while len(kept) > OWN:
                oldest = kept.pop(0)
                self._say("forgets", [oldest])
                if session.forget([oldest]):
                    self._say("forgot", [oldest])
                    self._gone.append(oldest)
            if thread == 0:
                self._limited.append(LIMITED + new[0])
                session.save(self._limited[-1:], row + 8, namespace=b"limited", limit=LIMIT)
            if time.monotonic() >= end:
                break


class Ledger:
    """What the children have said."""

    def __init__(self) -> None:
        self.promised: dict[int, None] = {}
        self.gone: dict[int, None] = {}
        self.next, self.checked = 0, 0
        self.wrong: list[str] = []
        self.moments: Counter[str] = Counter()
        self.last = "starting"

    def take(self, line: str) -> None:
        what, *rest = line.split(" ")
        numbers = [int(part) for part in rest] if what in ("saves", "saved", "forgets", "forgot", "checked") else []
        if what == "saves":
            self.next = max(self.next, *(number + 1 for number in numbers))
        elif what == "saved":
            self.promised.update(dict.fromkeys(numbers))
        elif what == "forgets":
            for number in numbers:
                self.promised.pop(number, None)
        elif what == "forgot":
            self.gone.update(dict.fromkeys(numbers))
        elif what == "checked":
            self.checked += numbers[0]
        elif what == "wrong:":
            self.wrong.append(line)
        if what in ("opening", "checking", "saving", "closing", "closed"):
            self.last = what


def one_life(folder: Path, ledger: Ledger, moment: str, rng: random.Random) -> None:
    """Fork a child and kill it: a little after it said that this moment has come, or at any time."""
    out, into = os.pipe()
    seed = rng.randrange(1 << 32)
    child = os.fork()
    if child == 0:
        os.close(out)
        try:
            Life(folder, into, ledger.promised, ledger.gone, ledger.next, seed).run()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")
            os.write(into, f"wrong: the child ended by itself, {text[:2000]}\n".encode())
        os._exit(1)
    os.close(into)
    wait = rng.uniform(0.0, DELAYS[moment])
    kill_at = time.monotonic() + (wait if moment == "any" else LONGEST)
    rest, alive, came = b"", True, moment == "any"
    while True:
        left = kill_at - time.monotonic() if alive else LONGEST
        if select.select([out], [], [], max(left, 0.0))[0]:
            data = os.read(out, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                ledger.take(line.decode())
                if line.decode() == moment and not came:
                    came, kill_at = True, time.monotonic() + wait
        if alive and time.monotonic() >= kill_at:
            os.kill(child, signal.SIGKILL)
            alive = False
    os.close(out)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        ledger.wrong.append(f"wrong: the child was not killed, its status is {status}")
    ledger.moments[ledger.last] += 1


def main(arguments: list[str]) -> None:
    folder, count, seed = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    BREAKAGES[arguments[3] if len(arguments) > 3 else ""]()
    rng, ledger = random.Random(seed), Ledger()
    moments = [*DELAYS]
    for number in range(count):
        one_life(folder, ledger, moments[number % len(moments)], rng)
    with Session(disk_store(folder, CAPACITY)) as session:
        codes, wrong = session.load(list(ledger.promised))
        back = session.find(list(ledger.gone))
        if wrong or back or set(codes) - {OK}:
            ledger.wrong.append(f"wrong: at the end, bytes of {wrong}, not gone {back}, codes {codes}")
    said = {"kills": count, "moments": ledger.moments, "checked": ledger.checked, "gone": len(ledger.gone)}
    print(json.dumps({**said, "wrong": ledger.wrong}))


if __name__ == "__main__":
    main(sys.argv[1:])

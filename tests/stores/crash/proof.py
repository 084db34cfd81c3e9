"""The proof: a program is recorded, and its log replayed into crash states, each of which is checked."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.stores.crash.check import Checker
from tests.stores.crash.log import Record, record
from tests.stores.crash.model import ALL, NOTHING, Disk, Existing, Fate, Folder, Unsupported
from tests.stores.crash.promises import Promises
from tests.stores.crash.session import ROWS
from tests.stores.lab import memory

WORKLOAD = "-m", "tests.stores.crash.workload"
PAUSE_US = 300
FAST = Path("/dev/shm")


@contextmanager
def in_memory() -> Iterator[Path]:
    """A temporary folder for crash states, in memory where the system has that: they need not last."""
    with tempfile.TemporaryDirectory(dir=FAST if FAST.is_dir() else None) as folder:
        yield Path(folder)


@dataclass
class Result:
    """What came of some crash states."""

    states: int = 0
    promised: int = 0
    gone: int = 0
    loaded: int = 0
    damaged: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.states} crash states: {self.promised} promised blocks, {self.gone} that must be gone, "
            f"{self.loaded} loads that were right, "
            f"{self.damaged} damaged blocks found by their MACs, {len(self.failures)} failures"
        )


@dataclass(frozen=True)
class Recording:
    """A log, the folder below which it happened, and what was there and promised before."""

    root: Path
    records: Sequence[Record]
    there: Sequence[Existing] = ()
    promised: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()

    def disk(self) -> Disk:
        return Disk(self.root, self.there)

    def promises(self) -> Promises:
        return Promises(self.records, self.promised, self.gone)


def recorded(folder: Path, seed: int, skip: str = "", breakage: str = "") -> Recording:
    """Record the workload below a new folder. ``skip``: as in ``record``. ``breakage``: as in
    ``workload``."""
    root = folder.resolve() / "recorded"
    root.mkdir(mode=0o700)
    programs = [(*WORKLOAD, str(root / "store"), part, str(seed), breakage) for part in ("first", "second")]
    return explained(Recording(root, record(programs, root, folder / "log", PAUSE_US, skip)))


def recovered(recording: Recording, folder: Path, seed: int) -> Recording:
    """Record how a store is opened that a crash at some point of another log has left."""
    rng, disk, root = random.Random(seed), recording.disk(), folder.resolve() / "recovered"
    promises = recording.promises()
    point = rng.choice(promises.acknowledged_with(promises.at))
    disk.apply(recording.records[:point])
    copy = Folder(root)
    copy.become(disk.state(Fate.drawn(rng), rng))
    there, promised, gone = copy.there(), frozenset(promises.at(point)), frozenset(promises.gone(point))
    records = record([(*WORKLOAD, str(root / "store"), "recovery", str(seed))], root, folder / "log", PAUSE_US)
    return explained(Recording(root, records, there, promised, gone))


def explained(recording: Recording) -> Recording:
    """Raises Unsupported if the log does not lead to what is in the folder, files aside that are mapped."""
    disk = recording.disk()
    disk.apply(recording.records)
    said = disk.state(ALL, random.Random(0))
    there = {path: content for _, path, content in Folder(recording.root).there()}
    differ = [path for path in sorted({*said, *there} - disk.mapped()) if said.get(path, 0) != there.get(path, 0)]
    if differ:
        raise Unsupported(f"system calls were not recorded: the log does not lead to what is in {', '.join(differ)}")
    return recording


def points(
    recording: Recording, promises: Promises, states: int, rng: random.Random, fate: Fate | None = None
) -> Iterator[tuple[int, Fate]]:
    """Crash points in their order. Each place in the log comes with all and with nothing of what is not durable, as far
    as there are that many states, and other fates are drawn: half of them right after an acknowledgement, in turn one
    at which a block is promised and one at which a block is gone. With a ``fate`` any places come with that."""
    count = len(recording.records)
    if fate is not None:
        yield from ((point, fate) for point in sorted(rng.randint(0, count) for _ in range(states)))
        return
    plain = [(point, fate) for point in range(count + 1) for fate in (ALL, NOTHING)]
    if len(plain) > states // 2:
        plain = rng.sample(plain, states // 2)
    anywhere = range(count + 1)
    places = anywhere, promises.acknowledged_with(promises.at), anywhere, promises.acknowledged_with(promises.gone)
    drawn = [(rng.choice(places[number % 4]), Fate.drawn(rng)) for number in range(states - len(plain))]
    yield from sorted([*plain, *drawn], key=lambda entry: entry[0])


def twenty(failures: Sequence[str]) -> bool:
    return len(failures) >= 20


def replayed(
    recording: Recording,
    states: int,
    seed: int,
    folder: Path,
    enough: Callable[[Sequence[str]], bool] = twenty,
    fate: Fate | None = None,
) -> Result:
    """Build crash states in this folder and check them, until there are ``enough`` failures. ``fate``: as in
    ``points``."""
    rng, promises, result = random.Random(seed), recording.promises(), Result()
    result.failures += promises.lost
    checker, disk, copy = Checker(promises.numbers, memory(ROWS)), recording.disk(), Folder(folder)
    for point, own_fate in points(recording, promises, states, rng, fate):
        disk.apply(recording.records[disk.point : point])
        point_seed = rng.randrange(1 << 32)
        copy.become(disk.state(own_fate, random.Random(point_seed)))
        promised, gone = promises.at(point), promises.gone(point)
        wrong = checker.wrong(folder / "store", promised, gone, random.Random(point_seed))
        result.states += 1
        result.promised += len(promised)
        result.gone += len(gone)
        if wrong:
            result.failures.append(f"point {point}, {own_fate}, seed {point_seed}: {'; '.join(wrong)[:400]}")
        if enough(result.failures):
            break
    result.loaded, result.damaged = checker.loaded, checker.damaged
    return result

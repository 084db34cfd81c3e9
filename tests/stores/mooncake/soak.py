"""Saves and loads for minutes, while parts of a cluster die, hang and come back at random::

    python -m tests.stores.mooncake.soak --minutes 10 --seed 1

It ends with status 1 if a wrong byte was served, if a job ended late, or if the memory of this process grew.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from kvpool.common.errors import StoreBusy
from kvpool.storage import OK, StoreRequest, StoreWorker
from kvpool.storage.backends.mooncake.mooncake_store import MooncakeStore
from kvpool.storage.store import CODES
from tests.stores.lab import IDENTITY, content, memory, names
from tests.stores.mooncake.cluster import Cluster

BLOCK_BYTES, GROUP, GROUPS, NUMBERS = 64 << 10, 16, 8, 4096
SECRET = bytes(range(32))
DEADLINE, LATE_BY, PAUSE = 2.0, 1.0, 0.1
GROWTH_MAX = 64 << 20


class Load:
    """One thread that saves and loads groups of blocks, in rows of its own."""

    def __init__(self, soak: Soak, place: int) -> None:
        self.soak, self.rows = soak, np.arange(place * GROUP, (place + 1) * GROUP)
        self.random = random.Random(f"{soak.seed} {place}")
        self.thread = threading.Thread(target=self.run, name=f"load {place}")
        self.thread.start()

    def run(self) -> None:
        while not self.soak.over.is_set():
            first = self.random.randrange(0, NUMBERS, GROUP)
            verb = self.random.choice(("save", "load", "load", "find", "forget"))
            self.soak.over.wait(self.random.uniform(0, PAUSE))
            try:
                self.do(verb, first)
            except StoreBusy:
                self.soak.count(f"{verb} busy", 1)
                time.sleep(0.1)
            except Exception as error:
                self.soak.wrong(f"{verb}: {type(error).__name__}: {error}")
                return

    def do(self, verb: str, first: int) -> None:
        queue = self.soak.queue
        keys = queue.secret.derive_keys(names(GROUP, first))
        began = queue.now()
        if verb == "save":
            for place, row in enumerate(self.rows.tolist()):
                queue.memory[row] = content(first + place, BLOCK_BYTES)
            began = queue.now()
            job = queue.save(keys, self.rows, deadline=began + DEADLINE)
        elif verb == "load":
            job = queue.load(keys, self.rows, deadline=began + DEADLINE)
        else:
            job = queue.find(keys, deadline=began + DEADLINE) if verb == "find" else queue.forget(keys)
        done = job.wait(DEADLINE + 300.0)
        if not done or (verb != "forget" and queue.now() - began > DEADLINE + LATE_BY):
            self.soak.wrong(f"{verb} took {queue.now() - began:.1f} s")
        if not job.wait(600.0, returned=True):
            self.soak.wrong(f"{verb} has not returned its rows")
        self.check(verb, first, job)

    def check(self, verb: str, first: int, job: StoreRequest) -> None:
        for code, count in enumerate(np.bincount(job.codes, minlength=len(CODES)).tolist()):
            self.soak.count(f"{verb} {CODES[code]}", count)
        if verb == "load":
            for place in np.flatnonzero(job.codes == OK).tolist():
                block = self.soak.queue.memory[self.rows[place]]
                if not np.array_equal(block, content(first + place, BLOCK_BYTES)):
                    self.soak.wrong(f"a wrong byte in block {first + place}")


class Soak:
    """The cluster, the load, and the faults."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.over, self.lock = threading.Event(), threading.Lock()
        self.counts, self.errors = Counter[str](), list[str]()
        self.cluster = Cluster(folder, "--client_ttl=3", "--default_kv_lease_ttl=500")
        self.holders = [self.cluster.worker(SECRET, 64 << 20) for _ in range(2)]
        self.queue = StoreWorker(
            MooncakeStore(self.cluster.address, secret=SECRET),
            memory(GROUPS * GROUP, BLOCK_BYTES),
            IDENTITY,
        )

    def count(self, name: str, count: int) -> None:
        with self.lock:
            self.counts[name] += count

    def wrong(self, text: str) -> None:
        with self.lock:
            self.errors.append(f"{time.monotonic():.1f} {text}")

    def fault(self) -> str:
        """Do one wrong to the cluster, and mend it."""
        kind = self.random.choice(("kill", "freeze", "freeze", "master dies", "master hangs", "nothing"))
        seconds, place = self.random.uniform(0.2, 6.0), self.random.randrange(len(self.holders))
        if kind == "kill":
            self.holders[place].kill()
            self.cluster.workers.remove(self.holders[place])
            self.over.wait(seconds)
            self.holders[place] = self.cluster.worker(SECRET, 64 << 20)
        elif kind == "freeze":
            self.holders[place].freeze()
            self.over.wait(seconds)
            self.holders[place].resume()
        elif kind == "master dies":
            self.cluster.master.kill()
            self.over.wait(seconds)
            self.cluster.restart_master()
        elif kind == "master hangs":
            self.cluster.master.freeze()
            self.over.wait(seconds)
            self.cluster.master.resume()
        return f"{kind} {seconds:.1f} s"

    def run(self, minutes: float) -> None:
        loads = [Load(self, place) for place in range(GROUPS)]
        end, base, said = time.monotonic() + 60 * minutes, 0, 0.0
        warm = time.monotonic() + min(60.0, 20 * minutes)
        while time.monotonic() < end and not self.errors:
            self.over.wait(self.random.uniform(0.5, 4.0))
            what = self.fault()
            self.count(f"fault: {what.rpartition(' ')[0].rpartition(' ')[0]}", 1)
            if not base and time.monotonic() > warm:
                base = resident()
            if time.monotonic() > said + 30:
                said = time.monotonic()
                print(f"{end - said:5.0f} s left, {resident() >> 20} MiB, last fault: {what}", flush=True)
        self.over.set()
        for load in loads:
            load.thread.join(600)
        if base and resident() - base > GROWTH_MAX:
            self.wrong(f"memory grew from {base >> 20} to {resident() >> 20} MiB")
        print(f"memory: {base >> 20} MiB when warm, {resident() >> 20} MiB at the end")

    def close(self) -> None:
        self.over.set()
        print({name: value for name, value in self.queue.stats().store.items() if value})
        if not self.queue.close(300):
            self.wrong("the queue has not closed")
        self.cluster.close()


def resident() -> int:
    """Bytes of main memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--seed", type=int, default=int(time.time()))
    asked = options.parse_args()
    print(f"seed {asked.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(asked.seed, Path(folder))
        try:
            soak.run(asked.minutes)
        finally:
            soak.close()
    for name, count in sorted(soak.counts.items()):
        print(f"{name}: {count}")
    print("\n".join(soak.errors) or "nothing wrong")
    return 1 if soak.errors else 0


if __name__ == "__main__":
    raise SystemExit(main())

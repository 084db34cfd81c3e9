"""Rates of a MooncakeStore beside bare calls of the same blocks, over a master and a worker on loopback::

    python -m asv_bench.mooncake_rates [--rounds 41] [--calls 2]

``bare`` is batch_put_from and batch_get_into; ``store`` is the store without MACs, on the same thread, in calls of the
same blocks: 4 MiB each; ``padded`` the same with padding after its rows, as storage managers of pools have it;
``worker`` is a StoreWorker with such rows, which makes and verifies MACs and has four threads; ``bare x4`` are the
bare calls on four threads. They alternate. Printed are the medians of GB/s, and the medians of the shares of the bare
calls of the same round.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.storage import OK, StoreWorker
from kvpool.storage.backends.mooncake import MooncakeStore
from kvpool.storage.store import Space
from tests.stores.lab import IDENTITY, memory
from tests.stores.mooncake.cluster import Cluster

CALL_BYTES, PADDING, THREADS = 4 << 20, 4096, 4
numbers = itertools.count()


def new_keys(count: int) -> np.ndarray:
    """Return keys that were not used before."""
    fresh = np.zeros((count, 32), np.uint8)
    for place in range(count):
        fresh[place, :8] = np.frombuffer(next(numbers).to_bytes(8, "little"), np.uint8)
    return fresh


class Bare:
    """The library itself."""

    def __init__(self, address: str, rows: np.ndarray, per_call: int, threads: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.rows, self.per_call, self.threads = rows, per_call, threads
        self.library = MooncakeDistributedStore()
        assert self.library.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
        assert self.library.register_buffer(rows.ctypes.data, rows.nbytes) == 0
        self.pool = ThreadPoolExecutor(threads)

    def _do(self, call: Callable[..., list[int]], keys: np.ndarray, good: int) -> None:
        size = self.rows.shape[1]
        names = [key.tobytes().hex() for key in keys]
        places = [self.rows.ctypes.data + place * size for place in range(len(keys))]

        def part(start: int) -> None:
            span = slice(start, start + self.per_call)
            assert set(call(names[span], places[span], [size] * len(names[span]))) == {good}

        parts = range(0, len(keys), self.per_call)
        list(self.pool.map(part, parts) if self.threads > 1 else map(part, parts))

    def save(self, keys: np.ndarray) -> None:
        self._do(self.library.batch_put_from, keys, 0)

    def load(self, keys: np.ndarray) -> None:
        self._do(self.library.batch_get_into, keys, self.rows.shape[1])

    def forget(self, keys: np.ndarray) -> None:
        self.library.batch_remove([key.tobytes().hex() for key in keys], True)

    def close(self) -> None:
        self.pool.shutdown()
        self.library.close()


class Plain:
    """The store on one thread, without MACs."""

    def __init__(self, address: str, rows: np.ndarray, per_call: int, row_padding: int = 0) -> None:
        self.store, self.per_call = MooncakeStore(address, secret=bytes(32)), per_call
        self.store.open(Space(bytes(16), rows, row_padding))
        self.macs = np.zeros((len(rows), 16), np.uint8)

    def save(self, keys: np.ndarray) -> None:
        for start in range(0, len(keys), self.per_call):
            rows = np.arange(start, start + self.per_call)
            codes = self.store.save(keys[rows], rows, self.macs[rows], bytes(16), (1 << 63) - 1, lambda: False)
            assert (codes == OK).all(), self.store.stats()

    def load(self, keys: np.ndarray) -> None:
        for start in range(0, len(keys), self.per_call):
            rows = np.arange(start, start + self.per_call)
            assert (self.store.load(keys[rows], rows, lambda: False)[0] == OK).all(), self.store.stats()

    def forget(self, keys: np.ndarray) -> None:
        self.store.forget(keys)

    def close(self) -> None:
        self.store.close()


class Worker:
    """A StoreWorker, with MACs."""

    def __init__(self, address: str, rows: np.ndarray) -> None:
        store = MooncakeStore(address, secret=bytes(32), threads=THREADS)
        self.worker = StoreWorker(store, rows, IDENTITY, piece_bytes=CALL_BYTES, row_padding=PADDING)

    def save(self, keys: np.ndarray) -> None:
        request = self.worker.save(keys, np.arange(len(keys)))
        assert request.wait(60, returned=True) and request.ok == len(keys), request.error

    def load(self, keys: np.ndarray) -> None:
        request = self.worker.load(keys, np.arange(len(keys)))
        assert request.wait(60, returned=True) and request.ok == len(keys), request.error

    def forget(self, keys: np.ndarray) -> None:
        assert self.worker.forget(keys).wait(60)

    def close(self) -> None:
        self.worker.close(60)


def share(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def measure(address: str, block_bytes: int, calls: int, rounds: int) -> None:
    per_call = max(1, CALL_BYTES // block_bytes)
    count = per_call * calls
    rows = [memory(count, block_bytes + row_padding) for row_padding in (0, 0, PADDING, 0, PADDING)]
    for each in rows:
        each[:, :block_bytes] = np.frombuffer(os.urandom(block_bytes), np.uint8)
    kinds: dict[str, Any] = {
        "bare": Bare(address, rows[0], per_call, 1),
        "store": Plain(address, rows[1], per_call),
        "padded": Plain(address, rows[2], per_call, PADDING),
        "bare x4": Bare(address, rows[3], per_call, THREADS),
        "worker": Worker(address, rows[4]),
    }
    rates: dict[tuple[str, str], list[float]] = {(kind, verb): [] for kind in kinds for verb in ("save", "load")}
    for number in range(rounds + 2):
        order = list(kinds) if number % 2 else list(kinds)[::-1]
        for kind in order:
            keys = new_keys(count)
            for verb in ("save", "load"):
                began = time.perf_counter()
                getattr(kinds[kind], verb)(keys)
                if number >= 2:
                    rates[kind, verb].append(count * block_bytes / (time.perf_counter() - began) / 1e9)
            kinds[kind].forget(keys)
    for verb in ("save", "load"):
        medians = {kind: statistics.median(rates[kind, verb]) for kind in kinds}
        shown = "  ".join(f"{kind} {rate:.2f}" for kind, rate in medians.items())
        shares = [
            f"{ours}/{theirs} {share(rates[ours, verb], rates[theirs, verb]):.2f}"
            for ours, theirs in (("store", "bare"), ("padded", "bare"), ("worker", "bare x4"))
        ]
        print(f"{block_bytes >> 10:5} KiB {verb}: {shown} GB/s; {', '.join(shares)}", flush=True)
    for made in kinds.values():
        made.close()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=41)
    options.add_argument("--calls", type=int, default=2)
    parsed = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.worker(bytes(32), 512 << 20)
            for block_bytes in (256 << 10, 1 << 20):
                measure(cluster.address, block_bytes, parsed.calls, parsed.rounds)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()

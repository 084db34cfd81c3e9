"""A store in a folder: how long it takes to open it, and how fast blocks are saved and loaded, with their MACs. The
folder is in TMPDIR."""

from __future__ import annotations

import tempfile
from time import perf_counter
from typing import Any

import numpy as np

from kvpool import ModelIdentity
from kvpool.storage import StoreWorker
from kvpool.storage.backends.disk import DiskStore
from kvpool.storage.backends.disk.database import Database
from kvpool.storage.backends.disk.folder import Folder
from kvpool.storage.backends.disk.slab import System
from kvpool.storage.backends.disk.slot_index import ENTRY, PER_PAGE
from kvpool.storage.store import Space

IDENTITY = ModelIdentity("benchmark", "1", "float16", "pages", "1")
KIB, MIB = 1 << 10, 1 << 20


def aligned(blocks: int, block_bytes: int) -> np.ndarray:
    """Rows at addresses that direct I/O takes."""
    raw = np.ones(blocks * block_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + blocks * block_bytes].reshape(blocks, block_bytes)


class Opening:
    """Seconds to open a store with this many blocks; the best of three."""

    params = [1_000, 1_000_000]
    param_names = ["blocks"]

    def setup(self, blocks: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path, self.space = f"{self.folder.name}/store", Space(bytes(16), aligned(1, 4096))
        store = DiskStore(self.path, blocks * 4096)
        store.open(self.space)
        store.close()
        # As that many saves would leave it.
        entries = np.zeros(-(-blocks // PER_PAGE) * PER_PAGE, ENTRY)
        random = np.random.default_rng(1)
        entries["key"] = random.integers(0, 256, (len(entries), 32), np.uint8).view("V32").ravel()
        entries["used"][:blocks] = random.permutation(blocks) + 1
        pages = [(i, part.tobytes()) for i, part in enumerate(entries.reshape(-1, PER_PAGE))]
        folder = Folder(self.path)
        database = Database(folder, System())
        database.write(pages)
        database.close()
        folder.close()

    def teardown(self, blocks: int) -> None:
        self.folder.cleanup()

    def track_open(self, blocks: int) -> float:
        times = []
        for _ in range(3):
            store = DiskStore(self.path)
            began = perf_counter()
            store.open(self.space)
            times.append(perf_counter() - began)
            assert store.stats()["opened_blocks"] == blocks
            store.close()
        return min(times)

    track_open.unit = "s"  # type: ignore[attr-defined]


class Blocks:
    """GB/s of a worker over a store that is full, 32 MiB in four requests at a time; the best of some rounds. ``python
    -m asv_bench.disk_fio`` compares with fio."""

    params: Any = ([256 * KIB, MIB], ["load", "save"])
    param_names = ["block_bytes", "kind"]
    nbytes, requests = 256 * MIB, 4

    def setup(self, block_bytes: int, kind: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.rows = 32 * MIB // block_bytes
        self.worker = StoreWorker(
            DiskStore(f"{self.folder.name}/store", self.nbytes), aligned(self.rows, block_bytes), IDENTITY
        )
        self.count = 0
        for _ in range(self.nbytes // (32 * MIB)):
            self._round("save")

    def teardown(self, block_bytes: int, kind: str) -> None:
        self.worker.close()
        self.folder.cleanup()

    def _round(self, kind: str) -> float:
        if kind == "save":
            self.count += self.rows
        # Neighbours in the file would be read by one call.
        numbers = np.random.default_rng(self.count).permutation(self.rows) + self.count
        keys, rows = self.worker.secret.derive_keys(b"%d" % number for number in numbers), np.arange(self.rows)
        call, size = getattr(self.worker, kind), self.rows // self.requests
        began = perf_counter()
        parts = [slice(i * size, (i + 1) * size) for i in range(self.requests)]
        requests = [call(keys[part], rows[part]) for part in parts]
        assert all(request.wait(60, returned=True) and request.ok == size for request in requests)
        return perf_counter() - began

    def track_speed(self, block_bytes: int, kind: str) -> float:
        return self.rows * block_bytes / min(self._round(kind) for _ in range(8)) / 1e9

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]

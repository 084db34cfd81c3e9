"""A store in another process: how fast blocks are saved and loaded over loopback, with their MACs."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter
from typing import Any

import numpy as np

from kvpool import ModelIdentity
from kvpool.storage import StoreWorker
from kvpool.storage.backends.peer import PeerStore

IDENTITY = ModelIdentity("benchmark", "1", "float16", "rows", "1")
SECRET = bytes(32)
KIB, MIB = 1 << 10, 1 << 20
SERVER = """
import sys
from kvpool.storage import MemoryStore
from kvpool.storage.backends.peer import StoreServer

with StoreServer(MemoryStore(1 << 30), block_bytes=int(sys.argv[1]), secret=bytes(32)) as server:
    print(server.endpoint, flush=True)
    sys.stdin.read()
"""


class Blocks:
    """GB/s of a worker over a ``PeerStore`` in front of the memory of another process; the best of some rounds."""

    params: Any = ([256 * KIB, MIB], ["load", "save"])
    param_names = ["block_bytes", "kind"]
    nbytes, rounds = 64 * MIB, 3

    def setup(self, block_bytes: int, kind: str) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(block_bytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        endpoint = self.server.stdout.readline().strip()
        count = self.nbytes // block_bytes
        memory = np.ones((count, block_bytes), np.uint8)
        self.worker = StoreWorker(PeerStore(endpoint, secret=SECRET), memory, IDENTITY)
        self.keys, self.rows = self.worker.secret.derive_keys([b"%d" % i for i in range(count)]), np.arange(count)
        assert self.worker.save(self.keys, self.rows).wait(60, returned=True)

    def teardown(self, block_bytes: int, kind: str) -> None:
        self.worker.close()
        self.server.communicate()

    def track_speed(self, block_bytes: int, kind: str) -> float:
        return max(self._once(kind) for _ in range(self.rounds))

    track_speed.unit = "GB/s"  # type: ignore[attr-defined]

    def _once(self, kind: str) -> float:
        if kind == "save":
            assert self.worker.forget(self.keys).wait(60)
        began = perf_counter()
        request = (self.worker.load if kind == "load" else self.worker.save)(self.keys, self.rows)
        assert request.wait(60, returned=True) and request.ok == len(self.keys), request.error
        return self.nbytes / (perf_counter() - began) / 1e9

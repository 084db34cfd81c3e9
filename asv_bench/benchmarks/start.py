"""What a process pays before its first request is served: the import, and the first call, with and without machine code
on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import kvpool

IMPORT = "import kvpool"
FIRST_REQUEST = """
cache = kvpool.KVCacheManager(kvpool.BlockLayout(1, 1, 1, 16, dtype="uint8", planes=1), device_blocks=64, device="cpu")
sequence = cache.add_sequence(list(range(100)))
cache.commit(sequence)
cache.append_tokens(sequence, [1])
cache.release(sequence)
cache.close()
"""


class Start:
    """Seconds on the clock of a fresh interpreter. "cold" has an empty folder for machine code, "warm" all that it
    needs on disk."""

    params = ["warm", "cold"]
    param_names = ["machine_code"]
    timeout = 900

    def setup(self, machine_code: str) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvpool-start-")
        self.environment = {**os.environ, "PYTHONPATH": str(Path(kvpool.__file__).resolve().parents[1])}
        if machine_code == "cold":
            self.environment["NUMBA_CACHE_DIR"] = self.folder.name
        else:
            self._seconds(IMPORT + FIRST_REQUEST)

    def teardown(self, machine_code: str) -> None:
        self.folder.cleanup()

    def _seconds(self, code: str, before: str = "") -> float:
        timed = f"import time\n{before}\nbegin = time.perf_counter()\n{code}\nprint(time.perf_counter() - begin)"
        done = subprocess.run(
            [sys.executable, "-c", timed],
            env=self.environment,
            cwd=self.folder.name,
            capture_output=True,
            text=True,
            check=True,
        )
        return float(done.stdout)

    def track_import(self, machine_code: str) -> float:
        return min(self._seconds(IMPORT) for _ in range(3))

    def track_first_request(self, machine_code: str) -> float:
        return self._seconds(FIRST_REQUEST, IMPORT)

    track_import.unit = track_first_request.unit = "s"  # type: ignore[attr-defined]

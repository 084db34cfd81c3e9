"""A DiskStore beside fio on the same file system: random reads and writes of whole blocks, in alternating runs.

``python -m asv_bench.disk_fio --folder FOLDER`` needs fio and some GiB. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvpool import ModelIdentity
from kvpool.storage import StoreWorker, staging_rows
from kvpool.storage.backends.disk import DiskStore

IDENTITY = ModelIdentity("benchmark", "1", "float16", "pages", "1")


def rows(blocks: int, block_bytes: int) -> np.ndarray:
    """Return random bytes in rows like those of a storage manager."""
    staged = staging_rows(blocks, block_bytes)
    staged[:] = np.frombuffer(os.urandom(block_bytes), np.uint8)
    return staged


class Subject:
    """A full store, and requests of some blocks each, several of which are in flight."""

    def __init__(
        self, folder: str, block_bytes: int, nbytes: int, threads: int, request_blocks: int, requests: int
    ) -> None:
        self.block_bytes, self.request_blocks, self.requests = block_bytes, request_blocks, requests
        self.blocks = nbytes // block_bytes
        self.store = DiskStore(folder, nbytes, threads=threads)
        self.worker = StoreWorker(self.store, rows(requests * request_blocks, block_bytes), IDENTITY)
        self.random, self.count = np.random.default_rng(1), 0
        self.run("save", self.blocks // request_blocks)

    def keys(self, kind: str) -> np.ndarray:
        """New keys to save, or some of those that were saved last, in random order."""
        if kind == "load":
            numbers = self.count - 1 - self.random.choice(self.blocks * 15 // 16, self.request_blocks, replace=False)
        else:
            numbers = np.arange(self.count, self.count + self.request_blocks)
            self.count += self.request_blocks
        return self.worker.secret.derive_keys(b"%d" % number for number in numbers)

    def run(self, kind: str, requests: int | None = None, seconds: float = float("inf")) -> float:
        """Bytes per second of this many requests, or of as many as fit into this time."""
        running: deque[tuple[object, int]] = deque()
        free, done, began = deque(range(self.requests)), 0, time.perf_counter()
        begin = self.worker.load if kind == "load" else self.worker.save
        while running or (requests is None or requests) and time.perf_counter() - began < seconds:
            while free and (requests is None or requests) and time.perf_counter() - began < seconds:
                place = free.popleft()
                rows = np.arange(place * self.request_blocks, (place + 1) * self.request_blocks)
                running.append((begin(self.keys(kind), rows), place))
                requests = None if requests is None else requests - 1
            request, place = running.popleft()
            assert request.wait(60, returned=True) and request.ok == self.request_blocks, (request, request.error)
            free.append(place)
            done += self.request_blocks
        return done * self.block_bytes / (time.perf_counter() - began)


def fio(folder: str, rw: str, block_bytes: int, nbytes: int, seconds: float, sync: int) -> float:
    """Bytes per second of fio, over ``seconds``. 0: until the file is whole."""
    command = [
        *("fio", "--name=x", f"--filename={folder}/fio", f"--size={nbytes}", "--ioengine=psync", "--direct=1"),
        *("--numjobs=4", f"--rw={rw}", f"--bs={block_bytes}", "--group_reporting", "--output-format=json"),
        *([f"--runtime={seconds}", "--time_based"] if seconds else []),
        *([f"--fdatasync={sync}"] if sync else []),
    ]
    result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(result["jobs"][0]["read" if rw == "randread" else "write"]["bw_bytes"])


def measure(arguments: argparse.Namespace, block_bytes: int, folder: str) -> Iterator[tuple[str, float, float, float]]:
    """Medians: what, bytes per second of fio, of the store, and the ratio of both, of alternating runs."""
    nbytes, seconds = arguments.gib << 30, arguments.seconds
    request_blocks = max(1, arguments.request_mib * (1 << 20) // block_bytes)
    subject = Subject(f"{folder}/store", block_bytes, nbytes, arguments.threads, request_blocks, arguments.requests)
    # What was only allocated would be read as zeros, without the disk.
    fio(folder, "write", block_bytes, nbytes, 0, 0)
    kinds = [("read", "load", "randread", 0), ("write", "save", "randwrite", 0)]
    # Four jobs of fio, each of which syncs after this many blocks.
    kinds.append(("write, fio syncs", "save", "randwrite", max(1, (16 << 20) // block_bytes)))
    for what, kind, rw, sync in kinds:
        pairs = [
            (fio(folder, rw, block_bytes, nbytes, seconds, sync), subject.run(kind, seconds=seconds))
            for _ in range(arguments.runs)
        ]
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        yield what, *medians, statistics.median(ours / theirs for theirs, ours in pairs)
    subject.worker.close(60)
    shutil.rmtree(f"{folder}/store")
    Path(f"{folder}/fio").unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the files are made (%(default)s)")
    parser.add_argument("--gib", type=int, default=2, help="GiB of blocks (%(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="of one run (%(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="of each, alternating (%(default)s)")
    parser.add_argument("--threads", type=int, default=16, help="of the store (%(default)s)")
    parser.add_argument("--request-mib", type=int, default=32, help="MiB of one request (%(default)s)")
    parser.add_argument("--requests", type=int, default=4, help="requests in flight (%(default)s)")
    arguments = parser.parse_args()
    for block_bytes in (256 << 10, 1 << 20):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            for what, theirs, ours, ratio in measure(arguments, block_bytes, folder):
                print(
                    f"{block_bytes >> 10} KiB, {what}: fio {theirs / 1e9:.2f} GB/s, DiskStore {ours / 1e9:.2f} GB/s,"
                    f" median of the ratios {ratio:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""One opening of a DiskStore: blocks by number, each with bytes of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from kvpool.storage import OK, StoreWorker
from kvpool.storage.store import Bytes, Store
from kvpool.storage.store_requests import StoreRequest
from tests.stores.lab import BLOCK_BYTES, IDENTITY, content, memory, names

CAPACITY, GROWN = 60, 100
"""In blocks. A store is opened with more than before once. Its table has two pages, and then three."""
ROWS = 128
KNOWN = functools.cache(content)


def disk_store(path: Path, blocks: int = CAPACITY) -> Store:
    from kvpool.storage.backends.disk import DiskStore

    return DiskStore(path, blocks * BLOCK_BYTES)


class Session:
    """A queue over a store, and calls that wait. ``rows`` of a call are ``first_row`` and those after it."""

    def __init__(self, store: Store, rows: Bytes | None = None) -> None:
        self.queue = StoreWorker(store, memory(ROWS) if rows is None else rows, IDENTITY)
        self._evicted = 0

    def keys(self, numbers: Iterable[int]) -> Bytes:
        return self.queue.secret.derive_keys([name for number in numbers for name in names(1, number)])

    def save(
        self, numbers: Sequence[int], first_row: int = 0, namespace: bytes = b"", limit: int = 1 << 40
    ) -> list[int]:
        """The codes."""
        for row, number in enumerate(numbers, first_row):
            self.queue.memory[row] = KNOWN(number)
        rows = np.arange(first_row, first_row + len(numbers))
        tag = self.queue.secret.tag(namespace)
        return _codes(self.queue.save(self.keys(numbers), rows, tag=tag, limit=limit))

    def load(self, numbers: Sequence[int], first_row: int = 0) -> tuple[list[int], list[int]]:
        """The codes, and the numbers of those that are OK and have wrong bytes."""
        self.queue.memory[first_row : first_row + len(numbers)] = 0
        codes = _codes(self.queue.load(self.keys(numbers), np.arange(first_row, first_row + len(numbers))))
        wrong = [
            number
            for row, (number, code) in enumerate(zip(numbers, codes, strict=True), first_row)
            if code == OK and not np.array_equal(self.queue.memory[row], KNOWN(number))
        ]
        return codes, wrong

    def find(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of those that are there."""
        codes = _codes(self.queue.find(self.keys(numbers)))
        return [number for number, code in zip(numbers, codes, strict=True) if code == OK]

    def forget(self, numbers: Sequence[int]) -> bool:
        """Whether it is confirmed. If not, the store has given an error, and the queue goes on trying."""
        return _confirmed(self.queue.forget(self.keys(numbers)))

    def clear(self, namespace: bytes | None = None) -> bool:
        """Drop a namespace, or everything of the model. Returns as ``forget``."""
        return _confirmed(self.queue.clear(None if namespace is None else self.queue.secret.tag(namespace)))

    def evicted(self) -> bool:
        """Whether the store has evicted any block since the last call."""
        before, self._evicted = self._evicted, self.queue.stats().store["evicted"]
        return self._evicted != before

    def close(self) -> None:
        assert self.queue.close(600), "closing hangs"

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _confirmed(job: StoreRequest) -> bool:
    while not job.wait(0.01) and not job.error:
        pass
    return job.done and job.ok == len(job.codes)


def _codes(job: StoreRequest) -> list[int]:
    assert job.wait(600, returned=True), "a job hangs"
    return job.codes.tolist()

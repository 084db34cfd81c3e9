"""What the tests of stores share: identities, memory, blocks of known bytes, a store that does wrong on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool import ModelIdentity
from kvpool.storage import OK, StoreRequest, StoreWorker
from kvpool.storage.store import Bytes, Rows, Space, Stop, Store

BLOCK_BYTES = 4096
SLOTS = 64
IDENTITY = ModelIdentity("tiny", "rev 1", "uint16", "2 layers", "test 1")
OTHER = ModelIdentity("tiny", "rev 2", "uint16", "2 layers", "test 1")


def memory(slots: int = SLOTS, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """Page-aligned rows, as direct I/O wants them."""
    raw = np.zeros(slots * block_bytes + 4096, np.uint8)
    start = -raw.ctypes.data % 4096
    return raw[start : start + slots * block_bytes].reshape(slots, block_bytes)


def content(number: int, block_bytes: int = BLOCK_BYTES) -> np.ndarray:
    """The bytes of a block with this number."""
    return np.random.default_rng(number).integers(0, 256, block_bytes, np.uint8)


def names(count: int, first: int = 0) -> list[bytes]:
    return [b"block %d" % number for number in range(first, first + count)]


def open_queue(store: Store, identity: ModelIdentity = IDENTITY, **options: Any) -> StoreWorker:
    return StoreWorker(store, memory(), identity, **options)


def fill(rows: np.ndarray, count: int, first: int = 0) -> None:
    for place in range(count):
        rows[place] = content(first + place, rows.shape[1])


class Wrong(Store):
    """A store in front of another. ``before[kind]`` is called before a call of that kind; ``after[kind]`` gets what it
    answered and gives what is answered instead. Kinds are "open", "find", "save", "load", "forget", "clear", "close".
    ``deaf``: a save gets no signal to stop."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.name, self.threads, self.clears_prefix = inner, "wrong", inner.threads, inner.clears_prefix
        self.persistent = inner.persistent
        self.before: dict[str, Callable[[], None]] = {}
        self.after: dict[str, Callable[[Any], Any]] = {}
        self.calls: list[str] = []
        self.deaf = False

    def hold(self, kind: str) -> Gate:
        """Calls of this kind wait from now on, until the gate is opened."""
        gate = self.before[kind] = Gate()
        return gate

    @property
    def secret(self) -> bytes:
        return self.inner.secret

    def _do(self, kind: str, call: Callable[[], Any]) -> Any:
        self.calls += [kind] if kind != "epoch" else []
        self.before.get(kind, lambda: None)()
        answer = call()
        return self.after[kind](answer) if kind in self.after else answer

    def open(self, space: Space) -> bytes:
        self.memory = space.memory
        return self._do("open", lambda: self.inner.open(space))

    def epoch(self, model: bytes, new: bool) -> bytes | None:
        return self._do("epoch", lambda: self.inner.epoch(model, new))

    def find(self, keys: Bytes) -> Bytes:
        return self._do("find", lambda: self.inner.find(keys))

    def save(self, keys: Bytes, rows: Rows, macs: Bytes, tag: bytes, limit: int, stop: Stop) -> Bytes:
        hears = (lambda: False) if self.deaf else stop
        return self._do("save", lambda: self.inner.save(keys, rows, macs, tag, limit, hears))

    def load(self, keys: Bytes, rows: Rows, stop: Stop) -> tuple[Bytes, Bytes]:
        return self._do("load", lambda: self.inner.load(keys, rows, stop))

    def forget(self, keys: Bytes) -> int:
        return self._do("forget", lambda: self.inner.forget(keys))

    def clear(self, tag: bytes) -> int:
        return self._do("clear", lambda: self.inner.clear(tag))

    def stats(self) -> dict[str, int]:
        return self.inner.stats()

    def close(self) -> None:
        self._do("close", self.inner.close)


def raising(error: BaseException) -> Callable[..., Any]:
    """What raises this, whatever it is given."""

    def call(*_: Any) -> None:
        raise error

    return call


fail = raising(OSError(5, "I/O error"))


class Gate:
    """Holds the calls that come to it until it is opened."""

    def __init__(self) -> None:
        self._open, self.reached = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(600)

    def wait(self) -> None:
        """Until a call has come."""
        assert self.reached.wait(600)

    def open(self) -> None:
        self._open.set()


class Clock:
    """Seconds that a test sets. A thread that waits for a deadline looks at them again and again."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds

    def soon(self) -> float:
        """A deadline that passes when a test says so."""
        return self.now + 0.05


def done(job: StoreRequest) -> StoreRequest:
    """The job, when it is done. What its store was asked may still be under way."""
    assert job.wait(600), job.error
    return job


def returned(job: StoreRequest) -> StoreRequest:
    """The job, when all calls of it have returned."""
    assert job.wait(600, returned=True), job.error
    return job


def right(queue: StoreWorker, job: StoreRequest, first: int = 0) -> StoreRequest:
    """The job, when all calls of it have returned. The blocks that have come are right: they are numbered from
    ``first`` on."""
    for place in np.flatnonzero(returned(job).codes == OK).tolist():
        expected = content(first + place, queue.block_bytes)
        assert np.array_equal(queue.memory[job.rows[place]], expected), "a wrong byte"
    return job


def codes_of(job: StoreRequest) -> list[int]:
    """The codes of a job, when all calls of it have returned."""
    return returned(job).codes.tolist()


def keys_of(queue: StoreWorker, count: int, first: int = 0) -> Bytes:
    """The keys of blocks with these numbers."""
    return queue.secret.derive_keys(names(count, first))


def begin_save(queue: StoreWorker, count: int, first: int = 0, **options: Any) -> StoreRequest:
    """Save blocks of known content from the first rows."""
    fill(queue.memory, count, first)
    return queue.save(keys_of(queue, count, first), np.arange(count), **options)


def begin_load(queue: StoreWorker, keys: Any, first_row: int = 0) -> StoreRequest:
    return queue.load(keys, np.arange(first_row, first_row + len(keys)))


def saved(queue: StoreWorker, count: int, first: int = 0, **options: Any) -> Bytes:
    """Save blocks of known content from the first rows. Returns their keys."""
    job = returned(begin_save(queue, count, first, **options))
    assert (job.codes == OK).all(), job.error
    return keys_of(queue, count, first)

"""What a large batch of copies costs the thread that decides it: for how long at a time it holds the transfer lock, how
long its call takes, and how long the next call is blocked by the thread that enqueues the batch."""

from __future__ import annotations

import threading
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpool.common.jit import jit
from kvpool.device.base import NULL_STREAM, DeviceEvent, Stream, WrappedDevice
from kvpool.device.cpu import CpuDevice
from kvpool.device.regions import ALL_LAYERS, Layers

from .pools import Once, blocks_of, make_pool, make_prompts, store

PROMPT_TOKENS = 2_048
FRAGMENTS_PER_BLOCK = 64
SECONDS_PER_FRAGMENT = 0.5e-6
"""What drivers take for one descriptor of a batch."""


@jit
def _spin(rounds: int) -> int:
    value = np.int64(rounds)
    for _ in range(rounds):
        value = value * 6364136223846793005 + 1442695040888963407
    return value


def _seconds_per_round(rounds: int) -> float:
    began = perf_counter()
    _spin(rounds)
    return (perf_counter() - began) / rounds


class Submitting(WrappedDevice):
    """Copies nothing. Enqueueing a fragment takes this time, without the interpreter's lock."""

    synchronous = False

    def __init__(self) -> None:
        super().__init__(CpuDevice())
        self.synchronous, self._streams = False, 1
        self._rounds = SECONDS_PER_FRAGMENT / min(map(_seconds_per_round, [1_000_000] * 20))

    @property
    def at_once(self) -> int:
        return 128 // FRAGMENTS_PER_BLOCK

    def create_stream(self, name: str, urgent: bool = False) -> Stream:
        self._streams += 1
        return Stream(self._streams)

    def record(self, stream: Stream) -> DeviceEvent:
        return DeviceEvent()

    def query(self, event: DeviceEvent) -> bool:
        return True

    def copy_blocks(self, moves: NDArray[np.int64], stream: Stream = NULL_STREAM, layers: Layers = ALL_LAYERS) -> None:
        _spin(int(len(moves) * FRAGMENTS_PER_BLOCK * self._rounds))


class Submission(Once):
    """128 blocks of 64 fragments come from the host: ahead of a request ("prefetch"), or for one ("admission")."""

    params = ["prefetch", "admission"]
    param_names = ["call"]

    def setup(self, call: str) -> None:
        self.device = Submitting()
        blocks = blocks_of(PROMPT_TOKENS)
        self.cache = make_pool(2 * blocks, 4 * blocks, device=self.device)
        (prompt,) = make_prompts(1, PROMPT_TOKENS, seed=1)
        self.keys = self.cache.block_keys(prompt)
        store(self.cache, [self.keys, *make_prompts(2, PROMPT_TOKENS, seed=2)])
        self.running = self.cache.add_sequence([1, 2, 3])

    def _measured(self, call: str) -> tuple[list[float], float, float]:
        """The holds of the transfer lock by this thread, in time of its processor, the time of the call, and of a
        commit right after it: seconds."""
        transfer = self.cache.core.transfer
        lock = OwnLock(transfer.lock)
        transfer.lock = lock  # type: ignore[assignment]
        began = perf_counter()
        (self.cache.content.prefetch if call == "prefetch" else self.cache.add_sequence)(self.keys)
        between = perf_counter()
        self.cache.commit(self.running)
        ended = perf_counter()
        transfer.lock = lock.inner
        return lock.held, between - began, ended - between

    def track_held(self, call: str) -> float:
        """The longest but one of a hundred holds: interrupts of the processor are not the pool's."""
        return 1e6 * float(np.percentile(self._measured(call)[0], 99))

    def track_call(self, call: str) -> float:
        return 1e6 * self._measured(call)[1]

    def track_next_call(self, call: str) -> float:
        return 1e6 * self._measured(call)[2]

    track_held.unit = track_call.unit = track_next_call.unit = "us"  # type: ignore[attr-defined]

    def teardown(self, call: str) -> None:
        super().teardown(call)
        self.device.close()


class OwnLock:
    """The transfer lock of a pool, which records for how long the thread that made this held it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.held = inner, [0.0]
        self._owner, self._since = threading.get_ident(), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> None:
        self.inner.acquire()
        self._since = thread_time()

    def __exit__(self, *exception: object) -> None:
        if threading.get_ident() == self._owner:
            self.held.append(thread_time() - self._since)
        self.inner.release()

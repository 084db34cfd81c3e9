"""A pool on the sim device, and an engine whose kernels read and write KV on streams of its own: what it finds wrong is
collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from engine import Clock, Engine, Request, small_layout
from kvpool import KVCacheManager, KVPoolError, Lease
from kvpool.device.base import Device, Stream
from kvpool.device.regions import Layers
from kvpool.device.sim import SimDevice
from kvpool.errors import IntegrityError

Wrap = Callable[[SimDevice], Device]
Runs = list[tuple[int, float]]
SOME = [(0, 0.0), (0, 0.3), (1, 0.9), (0, 1.0)]
"""Seeds and progress of the sim device in each run of a test."""
OTHERS = [run for progress in (0.0, 0.3, 0.9, 1.0) for seed in range(3) if (run := (seed, progress)) not in SOME]
"""Those of an exhaustive test."""
RUNS = pytest.mark.parametrize(
    "runs", [SOME, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["some", "others"]
)


class Lab(Engine):
    """An engine on two streams, ``a`` (the default) and ``b``; bytes are compared when the device comes to it."""

    def __init__(
        self,
        P: int,
        S: int,
        *,
        T: int = 2,
        seed: int = 0,
        progress: float = 0.0,
        guard: str | None = None,
        wrap: Wrap | None = None,
        **options: Any,
    ) -> None:
        self.sim = SimDevice(seed, progress=progress)
        device = wrap(self.sim) if wrap else self.sim
        clock = Clock()
        options = {"secret": bytes(32), **options}
        super().__init__(
            KVCacheManager(small_layout(T), device_blocks=P, host_blocks=S, device=device, clock=clock, **options)
        )
        self.clock = clock
        self.a, self.b = self.sim.create_stream("a"), self.sim.create_stream("b")
        self._stream = self.a
        self._streams: dict[int, Stream] = {}
        self.wrong: list[str] = []
        if guard is not None:
            self.cache.core.disable_guard(guard)

    # -- kernels ---------------------------------------------------------------------------------

    def write(self, sequence: Request, start: int) -> None:
        table, expected = self.table(sequence), list(sequence.bytes)

        def kernel() -> None:
            for i in range(start, len(expected)):
                self.block(table[i // self.T])[:, :, i % self.T] = expected[i]

        if start < len(expected):
            self.sim.launch(self._on(sequence), kernel, writes=self.rows(table, start, len(expected)))

    def check(self, sequence: Request, count: int | None = None) -> None:
        table, expected = self.table(sequence), sequence.bytes[: len(sequence) if count is None else count]

        def kernel() -> None:
            for i, token_bytes in enumerate(expected):
                if table[i // self.T] < 0:
                    continue
                self.compare(table[i // self.T], i % self.T, token_bytes, f"token {i} of {sequence}")

        if expected:
            self.sim.launch(self._on(sequence), kernel, reads=self.rows(table, 0, len(expected)))

    def compare(self, block: int, slot: int, expected: Any, what: str) -> None:
        if not np.array_equal(self.block(block)[:, :, slot], expected):
            self.wrong.append(f"block {block}, slot {slot} does not hold the bytes of {what}")

    def rows(self, table: Sequence[int], start: int, end: int) -> np.ndarray:
        """Tokens [start, end) of a sequence as the device wants them."""
        first = range(start // self.T, -(-end // self.T))
        return np.array(
            [(table[i], max(start - i * self.T, 0), min(end - i * self.T, self.T)) for i in first if table[i] >= 0],
            np.int64,
        )

    def _on(self, sequence: Request) -> Stream:
        return self._streams.setdefault(sequence.id, self._stream)

    # -- verbs -----------------------------------------------------------------------------------

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """New sequences go on ``stream``."""
        before, self._stream = self._stream, stream
        yield
        self._stream = before

    def add(self, tokens: Sequence[int], **options: Any) -> Request:
        stream = options.setdefault("stream", self._stream)
        with self.on(stream):
            return super().add(tokens, **options)

    def use(self, sequence: Request, stream: Stream) -> None:
        """The engine goes on with a sequence on another stream."""
        self.cache.block_table(sequence.id, stream)
        self._streams[sequence.id] = stream
        self.check(sequence)

    def read(self, lease: Lease, tokens: Sequence[int], stream: Stream | None = None) -> None:
        """Compare the leased block with the last T of ``tokens``: on the host now, or on a stream."""
        expected = self.expected.of((None, None), [(token, 0) for token in tokens])[-self.T :]
        block = int(lease.blocks[0])

        def kernel() -> None:
            for slot, token_bytes in enumerate(expected):
                self.compare(block, slot, token_bytes, f"{tokens}")

        if stream is None:
            kernel()
        else:
            self.sim.launch(stream, kernel, reads=self.rows([block], 0, self.T))

    def read_layers(self, sequence: int, tokens: Sequence[int], layers: Sequence[int]) -> None:
        """A kernel for each of these layers, on stream ``a``, which compares what it has of ``tokens``."""
        table = [int(b) for b in self.cache.block_table(sequence).dense()[0]]
        expected = self.expected.of((None, None), [(token, 0) for token in tokens])
        for layer in layers:

            def kernel(layer: int = layer) -> None:
                for i, token_bytes in enumerate(expected):
                    if not np.array_equal(self.block(table[i // self.T])[layer, :, i % self.T], token_bytes[layer]):
                        self.wrong.append(f"layer {layer} of token {i} of {tokens} has not come")

            rows = self.rows(table, 0, len(expected))
            self.sim.launch(self.a, kernel, reads=rows, layers=Layers(layer, self.cache.layout.layers))

    # -- the end -----------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """Let everything run; what was found wrong by the device, by the kernels or by ``verify``. Closes the pool."""
        failures = []
        for step in (self.sim.synchronize, self.sim.check, self.cache.verify, self._close):
            try:
                step()
            except (KVPoolError, AssertionError) as error:
                failures.append(f"{type(error).__name__}: {error}")
        return failures + self.wrong

    def _close(self) -> None:
        if not self.cache.closed:
            for lease in self.cache.leases:
                lease.close()
            if self.live:
                self.cache.release(list(self.live))
        self.cache.close()
        self.sim.close()


__all__ = ["IntegrityError", "Lab"]

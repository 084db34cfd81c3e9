"""Pins of host blocks, as a remote reader takes them: on their own, from a second thread, and while a long prompt is
admitted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import median
from threading import Event
from time import perf_counter
from typing import Any

import kvpool

from .pools import LONG_PROMPT_TOKENS, PROMPT_TOKENS, Pooled, blocks_of, make_pool, make_prompts, store

READ_TOKENS = 4_096


class Pinned(Pooled):
    """Base: a pool with one prompt on both tiers, and a second thread."""

    def prepare(self, device_blocks: int) -> None:
        # Nothing is offloaded but what is asked for, so that the host tier keeps it.
        self.cache = make_pool(
            device_blocks + blocks_of(READ_TOKENS),
            2 * blocks_of(READ_TOKENS),
            eviction=kvpool.EvictionOptions(offload_min_priority=100),
        )
        (prompt,) = make_prompts(1, READ_TOKENS, seed=1)
        keys = self.cache.block_keys(prompt)
        store(self.cache, [keys])
        self.cache.content.offload(keys)
        self.keys = keys.keys
        self.team = ThreadPoolExecutor(1)

    def teardown(self, *parameters: Any) -> None:
        self.team.shutdown()
        super().teardown()


class Pins(Pinned):
    """A lease on some blocks by their keys, and its close; by the calling thread, and by a second one."""

    params = [1, 16, 256]
    param_names = ["blocks"]

    def setup(self, blocks: int) -> None:
        self.prepare(blocks_of(READ_TOKENS))
        self.time_pin_on_second_thread(blocks)

    def time_pin(self, blocks: int) -> None:
        self.cache.pin(self.keys[:blocks], tier="host").close()

    def time_find_and_pin(self, blocks: int) -> None:
        for key in self.keys[:blocks]:
            lease = self.cache.find_and_pin_host(key)
            assert lease is not None
            lease.close()

    def time_pin_on_second_thread(self, blocks: int) -> None:
        self.team.submit(self.time_pin, blocks).result()


class PinDuringAdmission(Pinned):
    """How long a pin on a second thread takes, close included, while the first thread admits a prompt that evicts; and
    without that.

    The longest pin that overlaps an admission: its median over the admissions. It waits for the lock, and for
    the interpreter.
    """

    params = [PROMPT_TOKENS, LONG_PROMPT_TOKENS]
    param_names = ["tokens"]
    admissions = 20

    def setup(self, tokens: int) -> None:
        self.prepare(2 * blocks_of(tokens))
        self.prompts = [self.cache.block_keys(prompt) for prompt in make_prompts(self.admissions, tokens)]
        store(self.cache, make_prompts(3, tokens, seed=2))

    def _pin_until(self, done: Event) -> list[tuple[float, float]]:
        """When each pin began and ended."""
        spans = []
        while not done.is_set():
            begin = perf_counter()
            lease = self.cache.find_and_pin_host(self.keys[0])
            assert lease is not None
            lease.close()
            spans.append((begin, perf_counter()))
        return spans

    def _longest_pins(self) -> list[float]:
        done, admitted = Event(), []
        pins = self.team.submit(self._pin_until, done)
        for keys in self.prompts:
            begin = perf_counter()
            sequence = self.cache.add_sequence(keys)
            admitted.append((begin, perf_counter()))
            self.cache.release(sequence)
        done.set()
        longest = [
            max((e - b for b, e in pins.result() if b < end and e > begin), default=0.0) for begin, end in admitted
        ]
        return [seconds for seconds in longest if seconds]

    def track_alone(self, tokens: int) -> float:
        done = Event()
        pins = self.team.submit(self._pin_until, done)
        done.wait(0.05)
        done.set()
        return 1e6 * median(end - begin for begin, end in pins.result())

    def track_longest(self, tokens: int) -> float:
        return 1e6 * median(self._longest_pins())

    def track_worst(self, tokens: int) -> float:
        return 1e6 * max(self._longest_pins())

    track_alone.unit = track_longest.unit = track_worst.unit = "us"  # type: ignore[attr-defined]

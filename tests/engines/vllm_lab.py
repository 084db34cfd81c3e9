"""Managers of the plug-in for vLLM, driven as vLLM's scheduler drives them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

import kvpool

vllm = pytest.importorskip(
    "kvpool.integrations.vllm.spec",
    reason="needs vLLM: python -m tests.engines build, then python -m tests.engines test",
    exc_type=ImportError,
)

from vllm.v1.kv_offload.base import LookupResult, Medium, ReqContext, ScheduleEndContext, make_offload_key  # noqa: E402

from kvpool.integrations.options import EngineOptions  # noqa: E402

IDENTITY = kvpool.ModelIdentity("toy", "r1", "uint8", "chunks", "tests 1")
MISS, HIT, PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING


def keys(*numbers: int) -> list[Any]:
    return [make_offload_key(str(number).encode() * 8, 0) for number in numbers]


def request(name: str = "r") -> Any:
    return ReqContext(req_id=name)


class Manager:
    """A manager, and what it says in numbers of chunks."""

    def __init__(self, chunks: int, events: int, **options: Any) -> None:
        self.cache = kvpool.HostCache(chunks, 64, identity=IDENTITY, event_capacity=events, **options)
        self.real = vllm.KVPoolOffloadingManager(self.cache)

    def lookup(self, *numbers: int) -> list[Any]:
        return [self.real.lookup(key, request()) for key in keys(*numbers)]

    def prepare_store(self, *numbers: int) -> Any:
        """Numbers to store, host blocks, evicted numbers; or None."""
        output = self.real.prepare_store(keys(*numbers), request())
        if output is None:
            return None
        return self.numbers(output.keys_to_store), output.store_spec.blocks, self.numbers(output.evicted_keys)

    def complete_store(self, *numbers: int, success: bool = True) -> None:
        self.real.complete_store(set(keys(*numbers)), request(), success)

    def store(self, *numbers: int) -> tuple[int, ...]:
        _, blocks, _ = self.prepare_store(*numbers)
        self.complete_store(*numbers)
        return tuple(blocks)

    def load(self, name: str, *numbers: int) -> tuple[int, ...]:
        return tuple(self.real.prepare_load(keys(*numbers), request(name)).blocks)

    def complete_load(self, name: str, *numbers: int) -> None:
        self.real.complete_load(set(keys(*numbers)), request(name))

    def events(self) -> list[tuple[bool, set[int]]]:
        """Whether they were removed, and which."""
        events = list(self.real.take_events())
        assert all(event.medium is Medium.CPU for event in events)
        return [(event.removed, set(self.numbers(event.keys))) for event in events]

    def follow(self, known: set[int]) -> set[int]:
        """What a listener knows after the events so far."""
        for removed, numbers in self.events():
            known = known - numbers if removed else known | numbers
        return known

    def counted(self) -> dict[str, float]:
        stats = self.real.get_stats()
        return {} if stats is None else stats.reduce()

    def numbers(self, block_keys: list[Any]) -> list[int]:
        return [int(key[:-4][: len(key[:-4]) // 8]) for key in block_keys]


class Stored(Manager):
    """A manager whose chunks are in memory and are saved to a store."""

    made: list[Stored] = []

    def __init__(self, chunks: int, cache_clock: Callable[[], int] | None = None, **options: Any) -> None:
        self.cache = kvpool.HostCache(chunks, 64, identity=IDENTITY, history=8, clock=cache_clock)
        self.tier, self.now = kvpool.HostTier.of(self.cache), 0.0
        engine_options = EngineOptions(**{"stores": ("memory:?capacity=1MiB",), **options})
        self.real = vllm.KVPoolOffloadingManager(self.cache, engine_options, clock=lambda: self.now)
        self.made.append(self)
        self.real.open_stores(self.tier.share(), IDENTITY)

    def fill(self, *numbers: int) -> None:
        for number, block in zip(numbers, self.store(*numbers), strict=True):
            self.tier.blocks[block] = number

    def step(self) -> None:
        self.real.on_schedule_end(ScheduleEndContext((), ()))

    def await_states(self, *numbers: int) -> list[Any]:
        """What lookups say in the end, step by step, as long as the manager wants steps."""
        end = time.monotonic() + 600
        states = self.lookup(*numbers)
        while self.real.has_pending_work():
            assert time.monotonic() < end
            self.step()
        return self.lookup(*numbers) if PENDING in states else states

    def wait_saved(self, count: int) -> None:
        """Wait until the store has kept that many chunks more. A chunk that leaves the cache before is not kept."""
        end = time.monotonic() + 600
        while count > 0:
            assert time.monotonic() < end
            self.step()
            time.sleep(0.001)
            count -= int(self.counted().get("vllm:kvpool_store_saved_chunks", 0))

    def store_in_part(self, *numbers: int) -> tuple[int, ...]:
        _, blocks, _ = self.prepare_store(*numbers)
        self.real.report(vllm.WorkerReport(partial_blocks=set(blocks)))
        self.complete_store(*numbers)
        return tuple(blocks)


class Clock:
    """A clock in ms. It stands still, but for the steps that a test has it make, one in each call."""

    def __init__(self) -> None:
        self.now = 0
        self.steps: list[int] = []

    def __call__(self) -> int:
        self.now = self.steps.pop(0) if self.steps else self.now
        return self.now


PROMPT = range(20)


def positioned(name: str, known: bool) -> Any:
    """A request of which vLLM says where its chunks are, or not."""
    context = request(name)
    for place, key in enumerate(keys(*PROMPT) if known else ()):
        context.set_offload_key_position(key, 16 * (place + 1))
    return context

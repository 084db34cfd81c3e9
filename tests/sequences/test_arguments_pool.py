"""Bad input when a pool is made, and what is easily taken for good input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import open_engine, small_layout
from kvpool import EvictionOptions, KVCacheManager
from kvpool.device import CpuDevice
from kvpool.errors import InsufficientMemory
from tests.sequences.test_arguments import refused

HUGE = [2**63 - 1, 2**64, -(2**63) - 1]
CAPACITIES = ["device_blocks", "host_blocks", "max_sequences", "max_sequence_tokens", "event_capacity"]
EVICTION = ["offload_min_priority", "offload_min_reuse"]
NUMBERS = [*CAPACITIES, *EVICTION]


def made(**options: Any) -> KVCacheManager:
    eviction = EvictionOptions(**{name: options.pop(name) for name in EVICTION if name in options})
    defaults = {"layout": small_layout(4), "device_blocks": 4, "device": "cpu", "eviction": eviction}
    return KVCacheManager(**{**defaults, **options})


@pytest.mark.parametrize("width", [1, 2, 4])
def test_counts_whose_sum_wraps_are_refused(width: int) -> None:
    engine = open_engine(width, 16, 4)
    ids = [engine.add([10 * i]).id for i in range(8)]
    wrapping = (
        (8, [], [2**61] * 8),
        (4, [], [2**62] * 4),
        (4, [1, 2], [2**62] * 3 + [2**62 + 2]),
        (3, [], [2**63 - 1] * 2 + [2]),
    )
    for n, tokens, counts in wrapping:
        refused(
            engine.cache,
            lambda n=n, t=tokens, c=counts: engine.cache.append_tokens(ids[:n], t, c),
            ValueError,
            "counts",
        )
        refused(
            engine.cache,
            lambda n=n, c=counts: engine.cache.blocks_needed(sequences=ids[:n], new_tokens=c),
            ValueError,
            "new_tokens",
        )
    engine.cache.close()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        *(({"layout": bad}, TypeError, "layout: .*") for bad in (None, "x", {})),
        *(({name: bad}, TypeError, f"{name}: .*") for bad in (True, 1.5, "4", [4]) for name in NUMBERS),
        *(({name: bad}, ValueError, f"{name}: .*{bad}") for bad in (-1, *HUGE) for name in NUMBERS),
        *(
            ({name: 0}, ValueError, f"{name}: .*0")
            for name in ("device_blocks", "max_sequences", "max_sequence_tokens", "offload_min_reuse")
        ),
        ({"device_blocks": 2**31}, ValueError, f"device_blocks: .*{2**31}"),
        ({"host_blocks": 2**31 - 2}, ValueError, f"device_blocks, host_blocks: expected .*, got 4, {2**31 - 2}"),
        ({"max_sequences": (1 << 24) + 1}, ValueError, "max_sequences: .*"),
        ({"max_sequence_tokens": 2**31}, ValueError, "max_sequence_tokens: .*"),
        ({"offload_min_priority": 101}, ValueError, "offload_min_priority: .*101"),
        ({"offload_min_reuse": 65536}, ValueError, "offload_min_reuse: .*65536"),
        *(({"partial_reuse": bad}, TypeError, "partial_reuse: .*") for bad in (1, None, "yes")),
        *(
            ({"secret": bad}, (TypeError, ValueError), "secret.* 16 to 64 bytes")
            for bad in (5, "x" * 16, b"x" * 15, b"x" * 65, b"", bytearray(16))
        ),
        *(({"eviction": bad}, TypeError, "eviction: .*") for bad in (True, "lru", {}, EvictionOptions)),
        *(({"memory": bad}, TypeError, "memory: .*") for bad in (True, {}, EvictionOptions())),
        *(({"device": bad}, TypeError, "device: .*") for bad in (None, 5, CpuDevice)),
        ({"device": "tpu"}, ValueError, "device: .*'tpu'"),
        ({"layout": small_layout(1 << 15)}, ValueError, f"tokens_per_block: .*{1 << 15}"),
    ],
    ids=lambda v: f"{v!r:.50}",
)
def test_bad_options_of_a_pool_are_refused(options: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        made(**options)


def test_the_secret_is_not_shown() -> None:
    with pytest.raises(ValueError) as raised:
        made(secret=b"show nobody")
    assert "nobody" not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        {"max_sequence_tokens": 2**31 - 1, "max_sequences": 1 << 24},
        {"event_capacity": 1 << 31},
    ],
    ids=str,
)
def test_state_that_does_not_fit_says_so_and_leaves_the_device_free(options: dict[str, int]) -> None:
    device = CpuDevice()
    with pytest.raises(InsufficientMemory) as raised:
        made(device=device, layout=small_layout(1), **options)
    assert raised.value.requested > raised.value.available > 0
    made(device=device).close()


@pytest.mark.parametrize(
    ("name", "integer"),
    [(name, integer) for name in CAPACITIES for integer in (np.int8, np.uint8, np.int64, np.uint64)],
)
def test_any_integer_type_is_an_integer(name: str, integer: type) -> None:
    with made(**{name: integer(100)}) as cache, made(**{name: 100}) as plain:
        of_type, of_int = cache.core.tokens, plain.core.tokens
        assert of_type.table.shape == of_int.table.shape and of_type.rows.tolist() == of_int.rows.tolist()
        assert cache.stats().device == plain.stats().device
        cache.release(cache.add_sequence([1, 2, 3]))
        cache.verify()


@pytest.mark.parametrize("clock", [5, "x"])
def test_a_clock_that_is_none_is_refused(clock: Any) -> None:
    with pytest.raises(TypeError, match="clock: .*"):
        made(clock=clock)


@pytest.mark.parametrize("value", [1.5, "x", None, 2**63])
def test_a_clock_of_other_than_milliseconds_changes_nothing(value: Any) -> None:
    cache = made(clock=lambda: value)
    for call in (lambda: cache.add_sequence([1]), cache.content.refresh, cache.clear):
        refused(cache, call, (TypeError, ValueError, OverflowError), "")

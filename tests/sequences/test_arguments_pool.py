"""Bad input when a pool is made, what is easily taken for good input, and a sweep: no call that raises changes a
byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import Engine, open_engine, small_layout
from kvpool import EvictionOptions, KVCacheManager, KVPoolError, OutOfBlocks
from kvpool.device import CpuDevice
from kvpool.errors import InsufficientMemory, OutOfSequences, UnknownSequence
from tests.seeds import seeds
from tests.sequences.test_arguments import picture, refused

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
    for call in (lambda: cache.add_sequence([1]), cache.content.refresh, cache.reset):
        refused(cache, call, (TypeError, ValueError, OverflowError), "")


# -- no call that raises changes anything ------------------------------------------------------------


def random_call(engine: Engine, rng: random.Random, ids: list[int]) -> Callable[[], Any]:
    """Any verb, on arguments of which about half do not fit."""
    cache, clock = engine.cache, engine.clock
    clock.now += rng.choice([0, 0, 1, 50])
    some = [rng.choice(ids) for _ in range(rng.randint(1, 3))] if ids else [0]
    counts = [rng.choice([0, 1, 2, 5, 9, -1, 2**40][: rng.choice([4, 5, 7])]) for _ in some]
    prompt = lambda: [rng.randint(0, 2) for _ in range(rng.choice([1, 2, 5, 9, 14, 30]))]  # noqa: E731
    extra = rng.choice([None, [7]])
    several = [prompt() for _ in range(rng.randint(1, 4))]
    prompts = [cache.block_keys(p, extra_ids=None if extra is None else extra * len(p)) for p in several]
    ranges = [None, [(0, None, rng.choice([10, 35, 80]), rng.choice([None, 20]))], [(0, 4, 50), (4, None, 101)]]
    retention = [rng.choice(ranges[: rng.choice([2, 3])]) for _ in prompts]
    keys = np.concatenate([p.keys for p in prompts])
    return rng.choice(
        [
            lambda: cache.add_sequence_batch(prompts, retention=retention, allow_partial_batch=rng.random() < 0.2),
            lambda: cache.add_sequence_batch(prompts, retention=retention),
            lambda: cache.append_tokens(some, [1] * sum(c for c in counts if 0 <= c < 99), counts),
            lambda: cache.append_tokens(some[0], [1, 2] * rng.choice([1, 2, 3, 20])),
            lambda: cache.commit(some, rng.choice([None, counts])),
            lambda: cache.rewind(some, counts),
            lambda: cache.release(some, store=rng.random() < 0.7),
            lambda: cache.blocks_needed(sequences=some, new_tokens=counts),
            lambda: cache.block_table(some),
            lambda: cache.tables.copy_batch_block_offsets(
                np.zeros((3, 7), np.int32), some, max_blocks=rng.choice([None, 2])
            ),
            lambda: cache.content.prefetch(prompts[0]),
            lambda: cache.content.offload(prompts[0]),
            lambda: cache.pin(keys, tier=rng.choice([None, "host", "device"])).close(),
            lambda: cache.pin_blocks([rng.randint(0, 9), rng.randint(-1, 12)]).close(),
            lambda: cache.content.refresh(rng.choice([None, -1])),
            lambda: cache.reset(force=rng.random() < 0.1),
        ]
    )


@seeds(12, 70)
def test_no_call_that_raises_changes_a_byte(seeds: range) -> None:
    raised: dict[str, int] = {}
    for seed in seeds:
        print("seed", seed)
        rng = random.Random(seed)
        engine = open_engine(
            rng.randint(1, 4),
            rng.randint(1, 7),
            rng.randint(0, 5),
            max_sequences=rng.randint(1, 5),
            event_capacity=rng.choice([0, 4, 64]),
            max_sequence_tokens=rng.choice([None, 12]),
            partial_reuse=rng.random() < 0.8,
        )
        ids: list[int] = []
        for _ in range(60):
            call = random_call(engine, rng, ids)
            engine.cache.core.states.enable_extra()
            before = picture(engine.cache)
            try:
                done = call()
            except (KVPoolError, ValueError, TypeError) as error:
                raised[type(error).__name__] = raised.get(type(error).__name__, 0) + 1
                assert picture(engine.cache) == before, f"changed by what raised {error!r}"
            else:
                ids += done.ids.tolist() if hasattr(done, "ids") else []
            engine.cache.verify()
        engine.cache.close()
    for error in (OutOfBlocks, OutOfSequences, UnknownSequence, ValueError):
        assert raised[error.__name__] > len(seeds) // 8, raised

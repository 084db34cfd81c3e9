"""Bad input when a pool, or what lies around it, is made; and what is easily taken for good input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

import kvpool
from engine import small_layout
from kvpool import (
    BlockLayout,
    EvictionOptions,
    HostCache,
    HostTier,
    KVCacheManager,
    LayerGroup,
    MemoryOptions,
    ModelIdentity,
    OutOfBlocks,
)
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.device import CpuDevice
from kvpool.errors import InsufficientMemory
from kvpool.integrations.kv_events import KVEventPublisher, PublisherLimits
from kvpool.remote import BlockClient, BlockServer, ClientKeys, Limits, ServerKeys
from kvpool.storage import MemoryStore, StoreWorker
from kvpool.storage.urls import open_store
from tests.sequences.test_arguments import HUGE, NUMBER, Busy, Wrong, named, refused
from tests.sequences.test_arguments import busy as busy

LAYOUT = BlockLayout(2, 1, 4, 4)
IDENTITY = ModelIdentity("m", "r", "float16", "text", "v")


def made(**options: Any) -> KVCacheManager:
    names = [name for name in ("offload_min_priority", "offload_min_reuse") if name in options]
    eviction = EvictionOptions(**{name: options.pop(name) for name in names})
    return KVCacheManager(**{"layout": LAYOUT, "device_blocks": 4, "device": "cpu", "eviction": eviction, **options})


def pools(name: str, types: Sequence[Any] = (), values: Sequence[Any] = ()) -> Wrong:
    """An option of a pool that is made."""
    return Wrong(name, [lambda at, value: made(**{name: value})], types, values)


WRONG = [
    *(
        pools(name, NUMBER, [-1, *HUGE[1:3]])
        for name in "device_blocks host_blocks max_sequences max_sequence_tokens event_capacity offload_min_priority "
        "offload_min_reuse".split()
    ),
    pools("device_blocks", (), [0, 2**31]),
    pools("host_blocks", (), [2**31 - 2]),
    pools("max_sequences", (), [0, (1 << 24) + 1]),
    pools("max_sequence_tokens", (), [0, 2**31]),
    pools("offload_min_priority", (), [101]),
    pools("offload_min_reuse", (), [0, 65536]),
    pools("layout|tokens_per_block", ["x", {}, 5], [small_layout(1 << 15)])._replace(
        calls=[lambda at, layout: made(layout=layout)]
    ),
    pools("partial_reuse", [1, None, "yes"]),
    pools("secret", (), [5, "x" * 16, bytearray(16), b"x" * 15, b"x" * 65, b""]),
    pools("eviction", [True, "lru", {}, EvictionOptions]),
    pools("memory", [True, {}, EvictionOptions()]),
    pools("device", [None, 5, CpuDevice], ["tpu"]),
    pools("clock", [5, "x"]),
    pools("policy", (), ["fifo"]),
    pools("groups", [[LayerGroup(LAYOUT)]])._replace(name="layout"),
    Wrong("groups", [lambda at, groups: made(layout=None, groups=groups)], [5]),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.name)
def test_bad_options_of_a_pool_are_refused_by_name(busy: Busy, wrong: Wrong) -> None:
    wrong.check(busy)


OBJECTS: list[Callable[[Any], object]] = [
    lambda at: BlockLayout(0, 1, 1, 1),
    lambda at: BlockLayout(True, 1, 1, 1),
    lambda at: BlockLayout(1, 1, 1, 1, "text"),
    lambda at: BlockLayout(1, 1, 1, 1, None),
    lambda at: BlockLayout(1, 1, 1, 1, order="last"),
    lambda at: BlockLayout.for_model("gpt-1", tokens_per_block=4),
    lambda at: BlockLayout.of_block_bytes(7, 2),
    lambda at: LAYOUT.tier_shape("host", "8"),
    lambda at: LayerGroup([]),
    lambda at: LayerGroup(5),
    lambda at: LayerGroup(LAYOUT, kind="recurrent"),
    lambda at: LayerGroup(LAYOUT, kind="full"),
    lambda at: LayerGroup(LAYOUT, sinks=1),
    lambda at: LayerGroup([LAYOUT, BlockLayout(1, 1, 1, 2)]),
    lambda at: made(memory=MemoryOptions(host_memory=5)),
    lambda at: ModelIdentity("", "r", "d", "l", "v"),
    lambda at: HostCache(0, 16, identity=IDENTITY),
    lambda at: HostTier(2, 16, identity=IDENTITY, memory=np.zeros(5, np.uint8)),
    lambda at: kvpool.PagedKV.of([np.zeros((2, 2))], "L | B T D"),
    lambda at: kvpool.PagedKV.of(5, "L | B D"),
    lambda at: kvpool.PagedKV.of(5, "L"),
    lambda at: kvpool.PagedKV.of_pool(LAYOUT, np.zeros(3)),
    lambda at: kvpool.PagedKV.of_pool(LAYOUT, np.zeros(LAYOUT.device_shape(2)), "gpu"),
    lambda at: MemoryStore("16"),
    lambda at: open_store("floppy:/a"),
    lambda at: open_store("memory:?capacity=lots"),
    lambda at: StoreWorker(MemoryStore(1 << 20), np.zeros(5), IDENTITY),
    lambda at: as_strided("array", 5),
    lambda at: StridedArray(0, (2,), 1, strides=(1, 1)),
    lambda at: Limits(blocks_per_request=0),
    lambda at: Limits(bytes_per_client=1.5),
    lambda at: BlockServer(at.cache, "tcp://192.0.2.1:5555"),
    lambda at: BlockServer(at.cache, stall_seconds="5"),
    lambda at: BlockClient("tcp://127.0.0.1:1", at.cache, name="a\nb"),
    lambda at: BlockClient("tcp://127.0.0.1:1", at.cache, timeout=True),
    lambda at: ServerKeys(b"", b"", []),
    lambda at: ClientKeys(b"", b"", b""),
    lambda at: KVEventPublisher(at.cache, topic=5),
    lambda at: KVEventPublisher(at.cache, limits=5),
    lambda at: PublisherLimits(replay_messages=0),
    lambda at: at.cache.block_keys(at.cache.block_keys([1]), salt="x"),
    lambda at: at.cache.block_keys([1, 2])[1:],
    lambda at: at.cache.blocks_needed(),
    lambda at: at.cache.content.forget(),
    lambda at: at.cache.content.forget([1], namespace=("a", None)),
    lambda at: at.cache.release(at.live, ends=True, returns_in_ms=5),
    lambda at: at.cache.block_table(at.live, group=5),
    lambda at: at.cache.tables.copy_batch_block_offsets(np.zeros((0, 4), np.int32), at.live),
    lambda at: at.cache.tables.copy_batch_block_offsets(np.zeros((1, 4)), at.live),
    lambda at: at.cache.imports.layer_loads(parts=0),
]


def test_a_message_says_what_is_expected_and_what_came(busy: Busy) -> None:
    for place, call in enumerate(OBJECTS):
        print(place)
        refused(busy.cache, partial(call, busy), (TypeError, ValueError), named(r"\w+"))


def test_the_secret_is_not_shown() -> None:
    with pytest.raises(ValueError) as raised:
        made(secret=b"show nobody")
    assert "nobody" not in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"max_sequence_tokens": 2**31 - 1, "max_sequences": 1 << 24}, {"event_capacity": 1 << 31}], ids=str
)
def test_state_that_does_not_fit_says_so_and_leaves_the_device_free(options: dict[str, int]) -> None:
    device = CpuDevice()
    with pytest.raises(InsufficientMemory) as raised:
        made(device=device, layout=small_layout(1), **options)
    assert raised.value.requested > raised.value.available > 0
    made(device=device).close()


@pytest.mark.parametrize("integer", [np.int8, np.uint64])
def test_any_integer_type_is_an_integer(integer: type) -> None:
    names = ["device_blocks", "host_blocks", "max_sequences", "max_sequence_tokens", "event_capacity"]
    with made(**dict.fromkeys(names, integer(100))) as cache, made(**dict.fromkeys(names, 100)) as plain:
        of_type, of_int = cache.core.tokens, plain.core.tokens
        assert of_type.table.shape == of_int.table.shape and of_type.rows.tolist() == of_int.rows.tolist()
        assert cache.stats().device == plain.stats().device
        cache.release(cache.add_sequence([1, 2, 3]))
        cache.verify()


@pytest.mark.parametrize("value", [1.5, "x", None, 2**63])
def test_a_clock_of_other_than_milliseconds_changes_nothing(value: Any) -> None:
    cache = made(clock=lambda: value)
    for call in (lambda: cache.add_sequence([1]), cache.content.refresh, cache.clear):
        refused(cache, call, (TypeError, ValueError, OverflowError))


def test_one_of_a_thing_is_singular() -> None:
    with pytest.raises(OutOfBlocks, match="^device tier: 1 block needed, 0 free$"), made() as pool:
        for _ in range(5):
            pool.add_sequence([1])

"""Wrong values for many public calls: each message has the form ``name: expected X, got Y``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvpool
from engine import open_engine
from kvpool import (
    BlockLayout,
    HostCache,
    HostTier,
    KVCacheManager,
    LayerGroup,
    MemoryOptions,
    ModelIdentity,
    RetentionRange,
)
from kvpool.common.arrays.strided import StridedArray, as_strided
from kvpool.integrations.kv_events import KVEventPublisher, PublisherLimits
from kvpool.remote import BlockClient, BlockServer, ClientKeys, Limits, ServerKeys
from kvpool.storage import MemoryStore, StoreWorker
from kvpool.storage.urls import open_store
from parts import reach

NAME = r"[\w\[\].]+"
FORM = re.compile(rf"^{NAME}(, {NAME})*: expected .+, got .+", re.DOTALL)
LAYOUT = BlockLayout(2, 1, 4, 4)
IDENTITY = ModelIdentity("m", "r", "float16", "text", "v")


class Place(NamedTuple):
    pool: KVCacheManager
    sequence: int
    other: int
    host: HostCache


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    pool = open_engine(4, 8, 4, event_capacity=16).cache
    sequence, other = pool.add_sequence(list(range(9))), pool.add_sequence([7, 7])
    with HostCache(2, 16, identity=IDENTITY) as host:
        yield Place(pool, sequence, other, host)
    pool.close(force=True)


def made(**options: Any) -> KVCacheManager:
    return KVCacheManager(**{"layout": LAYOUT, "device_blocks": 4, "device": "cpu", **options})


WRONG: list[Callable[[Any], object]] = [
    # what is made
    lambda at: BlockLayout(0, 1, 1, 1),
    lambda at: BlockLayout(True, 1, 1, 1),
    lambda at: BlockLayout(1.5, 1, 1, 1),  # type: ignore[arg-type]
    lambda at: BlockLayout(1, 1, 1, 1, "text"),
    lambda at: BlockLayout(1, 1, 1, 1, None),
    lambda at: BlockLayout(1, 1, 1, 1, order="last"),
    lambda at: BlockLayout.for_model("gpt-1", tokens_per_block=4),
    lambda at: BlockLayout.of_block_bytes(7, 2),
    lambda at: LayerGroup(5),  # type: ignore[arg-type]
    lambda at: LayerGroup([]),
    lambda at: LayerGroup(LAYOUT, kind="full"),
    lambda at: LayerGroup(LAYOUT, window=0),
    lambda at: LayerGroup(LAYOUT, sinks=1),
    lambda at: LayerGroup(LAYOUT, kind="recurrent"),
    lambda at: LayerGroup([LAYOUT, BlockLayout(1, 1, 1, 2)]),
    lambda at: made(layout=5),
    lambda at: made(device_blocks="many"),
    lambda at: made(device_blocks=-1),
    lambda at: made(device="tpu"),
    lambda at: made(device=5),
    lambda at: made(policy="fifo"),
    lambda at: made(secret=b"short"),
    lambda at: made(secret="a text of more than 16 characters"),
    lambda at: made(clock=5),
    lambda at: made(groups=[LayerGroup(LAYOUT)]),
    lambda at: made(layout=None, groups=5),
    lambda at: made(memory=MemoryOptions(host_memory=5)),  # type: ignore[arg-type]
    lambda at: ModelIdentity("", "r", "d", "l", "v"),
    lambda at: ModelIdentity("m", "r", "float32", LAYOUT, "v"),
    lambda at: HostCache(0, 16, identity=IDENTITY),
    lambda at: HostCache(2, "16", identity=IDENTITY),  # type: ignore[arg-type]
    lambda at: HostCache(2, 16, identity="llama"),  # type: ignore[arg-type]
    lambda at: HostCache(2, 16, identity=IDENTITY, policy="fifo"),
    lambda at: HostTier(2, 16, identity=IDENTITY, memory=np.zeros(5, np.uint8)),
    lambda at: kvpool.PagedKV.of([np.zeros((2, 2))], "L"),
    lambda at: kvpool.PagedKV.of([np.zeros((2, 2))], "L | B T D"),
    lambda at: kvpool.PagedKV.of(5, "L | B D"),
    lambda at: MemoryStore("16"),  # type: ignore[arg-type]
    lambda at: open_store("floppy:/a"),
    lambda at: open_store("memory:?capacity=lots"),
    lambda at: StoreWorker(MemoryStore(1 << 20), np.zeros(5), IDENTITY),
    lambda at: LAYOUT.device_shape(-1),
    lambda at: LAYOUT.tier_shape("host", "8"),  # type: ignore[arg-type]
    lambda at: kvpool.PagedKV.of_pool(LAYOUT, np.zeros(3)),
    lambda at: kvpool.PagedKV.of_pool(LAYOUT, np.zeros(LAYOUT.device_shape(2)), "gpu"),  # type: ignore[arg-type]
    lambda at: as_strided("array", 5),  # type: ignore[arg-type]
    lambda at: StridedArray(0, "text", 1),  # type: ignore[arg-type]
    lambda at: StridedArray(0, (2,), 1, strides=(1, 1)),
    lambda at: StridedArray(0, (2,), 0),
    # what other workers, routers and operators see
    lambda at: Limits(blocks_per_request=0),
    lambda at: Limits(bytes_per_client=1.5),  # type: ignore[arg-type]
    lambda at: BlockServer(at.pool, "floppy:/a"),
    lambda at: BlockServer(at.pool, "tcp://192.0.2.1:5555"),
    lambda at: BlockServer(at.pool, stall_seconds=-1),
    lambda at: BlockServer(at.pool, stall_seconds="5"),  # type: ignore[arg-type]
    lambda at: BlockClient(5, at.pool),  # type: ignore[arg-type]
    lambda at: BlockClient("tcp://127.0.0.1:1", at.pool, name="a\nb"),
    lambda at: BlockClient("tcp://127.0.0.1:1", at.pool, timeout=0),
    lambda at: BlockClient("tcp://127.0.0.1:1", at.pool, timeout=True),
    lambda at: ServerKeys(b"", b"", []),
    lambda at: ClientKeys(b"", b"", b""),
    lambda at: KVEventPublisher(5),  # type: ignore[arg-type]
    lambda at: KVEventPublisher(at.pool, topic=5),  # type: ignore[arg-type]
    lambda at: KVEventPublisher(at.pool, limits=5),  # type: ignore[arg-type]
    lambda at: KVEventPublisher(at.pool, interval_seconds=0),
    lambda at: KVEventPublisher(at.pool, block_hashes="hex"),  # type: ignore[arg-type]
    lambda at: PublisherLimits(replay_messages=0),
    # prompts
    *(
        lambda at, call=call, prompt=prompt: reach(at.pool, call)(prompt)
        for call in ("add_sequence", "match_prefix", "block_keys", "prefetch", "offload")
        for prompt in (5, None, "abc", [], [-1], [True], [1.5], [2**31], [[1]], np.zeros((2, 2), int), np.ones(2, bool))
    ),
    lambda at: at.pool.add_sequence_batch(5),
    lambda at: at.pool.add_sequence_batch([1, 2, 3]),
    lambda at: at.pool.add_sequence_batch([[1], [True]]),
    lambda at: at.pool.add_sequence_batch([[1]], retention=[]),
    lambda at: at.pool.add_sequence_batch([[1]], allow_partial_batch=1),
    lambda at: at.pool.add_sequence([1], retention=5),
    lambda at: at.pool.add_sequence([1], retention=[5]),
    lambda at: at.pool.add_sequence([1], retention=[(3, 3, 35)]),
    lambda at: at.pool.add_sequence([1], retention=[(0, 3, 101)]),
    lambda at: at.pool.add_sequence([1], retention=[(0, None, 35), (4, 8, 35)]),
    lambda at: at.pool.add_sequence([1], retention=RetentionRange(0, None, 35)),
    lambda at: at.pool.add_sequence([1], decode_priority=101),
    lambda at: at.pool.add_sequence([1], decode_ttl_ms=0),
    lambda at: at.pool.add_sequence([1], encoder_tokens=3),
    lambda at: at.pool.block_keys([1], salt=5),
    lambda at: at.pool.block_keys([1], adapter_id=1.5),
    lambda at: at.pool.block_keys([1], extra_ids=[1, 2]),
    lambda at: at.pool.block_keys([1], extra_ids=[True]),
    lambda at: at.pool.block_keys([1], reuse=1),
    lambda at: at.pool.block_keys(at.pool.block_keys([1]), salt="x"),
    lambda at: at.pool.block_keys([1, 2])[0],
    lambda at: at.pool.block_keys([1, 2])[1:],
    lambda at: at.pool.block_keys([1, 2]).extend([-1]),
    lambda at: at.pool.blocks_needed(),
    lambda at: at.pool.content.forget(prompt=[1], namespace=("a", None)),
    # sequences
    lambda at: at.pool.append_tokens(at.sequence, [-1]),
    lambda at: at.pool.append_tokens(at.sequence, [True]),
    lambda at: at.pool.append_tokens([at.sequence, at.other], [1, 2]),
    lambda at: at.pool.append_tokens([at.sequence, at.other], [1, 2], [1]),
    lambda at: at.pool.append_tokens([at.sequence, at.other], [1, 2], [3, -1]),
    lambda at: at.pool.append_tokens("a", [1]),
    lambda at: at.pool.append_tokens([True], [1]),
    lambda at: at.pool.append_tokens([2**63], [1]),
    lambda at: at.pool.commit(at.sequence, 99),
    lambda at: at.pool.rewind(at.sequence, 99),
    lambda at: at.pool.rewind(at.sequence, "a"),
    lambda at: at.pool.release(at.sequence, stop="tired"),
    lambda at: at.pool.release(at.sequence, ends=1),
    lambda at: at.pool.release(at.sequence, ends=True, returns_in_ms=5),
    lambda at: at.pool.release([at.sequence, at.other], session="a"),
    lambda at: at.pool.accept_drafts(at.sequence, [0], [9], [1]),
    # keys, tables, memory
    lambda at: at.pool.pin(5),
    lambda at: at.pool.pin([b"short"]),
    lambda at: at.pool.pin(np.zeros(3)),
    lambda at: at.pool.pin([], owner=5),
    lambda at: at.pool.tables.copy_batch_block_offsets(np.zeros((1, 4)), [at.sequence]),
    lambda at: at.pool.tables.copy_batch_block_offsets(np.zeros((0, 4), np.int32), [at.sequence]),
    lambda at: at.pool.block_table(at.sequence, group=5),
    lambda at: at.pool.imports.layer_loads(parts=0),
    # host caches
    lambda at: at.host.reserve("a"),
    lambda at: at.host.reserve([b"a", 5]),
    lambda at: at.host.reserve(5),
    lambda at: at.host.pin([b""]),
    lambda at: at.host.find("a"),
    lambda at: at.host.find(b"a" * 65),
]


@pytest.mark.parametrize("call", WRONG, ids=range(len(WRONG)))
def test_a_message_says_what_is_expected_and_what_came(place: Place, call: Callable[[Place], object]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        call(place)
    assert FORM.match(str(raised.value)), str(raised.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda at: at.pool.add_sequence_batch([1, 2, 3]), "prompts[0]: expected a sequence of integers, got 1"),
        (
            lambda at: at.pool.add_sequence([1], retention=RetentionRange(0, None, 35)),
            "retention: expected a list of ranges, got RetentionRange(start=0, end=None, priority=35, ttl_ms=None)",
        ),
        (
            lambda at: at.pool.append_tokens(at.sequence, [-1]),
            "tokens: expected token ids from 0 to 2147483647, got -1",
        ),
        (lambda at: made(policy="fifo"), "policy: expected one of lru, reuse, agent, adaptive, got 'fifo'"),
    ],
)
def test_messages_that_misled(place: Place, call: Callable[[Place], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call(place)


def test_one_of_a_thing_is_singular() -> None:
    with pytest.raises(kvpool.OutOfBlocks, match="^device tier: 1 block needed, 0 free$"), made() as pool:
        for _ in range(5):
            pool.add_sequence([1])
    with pytest.warns(ResourceWarning, match="^the pool was closed while it held 1 sequence: "), made() as pool:
        pool.add_sequence([1])


def test_an_unknown_argument_is_one_of_the_class_that_was_called(place: Place) -> None:
    with pytest.raises(TypeError, match=r"^KVCacheManager\.add_sequence\(\) got an unexpected .* 'salt'"):
        place.pool.add_sequence([1], salt="a")  # type: ignore[call-arg]

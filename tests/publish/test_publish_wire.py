"""What is on the wire is what routers read, no socket is open by accident, and whatever peers do or leave undone is
counted."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from router import WAIT_MS, Publish, Route, Site, cached, publisher_options

from engine import Make
from kvpool import PoolClosed
from kvpool.integrations.kv_events import KVEventPublisher

CLEARED = {"type": "AllBlocksCleared"}


# -- the schema --------------------------------------------------------------------------------


def test_a_message_is_a_topic_a_number_and_a_batch(site: Site) -> None:
    engine, _, route = site(topic="kv@worker-1", data_parallel_rank=3)
    router = route()
    while not router.sub.poll(10):
        engine.cache.clear()
    frames = router.sub.recv_multipart()
    assert frames[0] == b"kv@worker-1" and len(frames) == 3 and len(frames[1]) == 8
    sent_at, events, rank = msgspec.msgpack.decode(frames[2])
    assert events[0] == CLEARED and rank == 3 and abs(sent_at - time.time()) < 3600


def test_stored_and_removed_have_the_published_fields(site: Site) -> None:
    engine, _, route = site(P=2, S=2)
    router = route()
    engine.seed(range(5), committed=4)
    engine.seed(range(10, 18), committed=8)
    router.follow()
    events = router.events
    key = int(engine.prompt(range(4)).keys[0, 0])
    first = {
        "type": "BlockStored",
        "block_hashes": [key],
        "parent_block_hash": None,
        "token_ids": [0, 1, 2, 3],
        "block_size": 4,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    assert events[:2] == [CLEARED, first]
    assert {**first, "medium": "CPU"} in events, "a host block is described like any other"
    assert {"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"} in events


def test_namespaces_and_extra_ids_are_published(site: Site) -> None:
    engine, _, route = site(P=32)
    router = route()
    names: list[dict[str, Any]] = [
        {"adapter_id": "lora"},
        {"adapter_id": 7},
        {"adapter_id": -7},
        {"salt": "tenant"},
        {"salt": b"\x01\xff"},
        {"adapter_id": "a", "salt": "s"},
    ]
    for namespace in names:
        engine.seed(range(9), committed=8, **namespace)
    engine.seed(range(9), committed=8, extra_ids=[0, 5, 5, -1, 0, 0, 0, 0, 0])
    router.follow()
    fields = [(e["lora_id"], e["lora_name"], e.get("cache_salt"), e.get("extra_keys")) for e in router.events[1:]]
    assert fields[:6] == [
        (None, "lora", None, [["lora"], ["lora"]]),
        (7, "7", None, [["7"], ["7"]]),
        (None, "-7", None, [["-7"], ["-7"]]),
        (None, None, "tenant", [["tenant"], None]),
        (None, None, "01ff", [["01ff"], None]),
        (None, "a", "s", [["a", "s"], ["a"]]),
    ]
    pairs = [["0" * 15 + "5" + "0" * 48, 1], ["f" * 16 + "0" * 48, 3]]
    assert fields[6] == (None, None, None, [pairs, None])


@pytest.fixture(scope="module")
def vllm_events() -> Iterator[ModuleType]:
    """The event classes of a vLLM that is installed, or of the wheel KVPOOL_VLLM_WHEEL, without importing the rest of
    it."""
    wheel, spec = os.environ.get("KVPOOL_VLLM_WHEEL"), importlib.util.find_spec("vllm")
    name = "vllm/distributed/kv_events.py"
    if wheel:
        with zipfile.ZipFile(wheel) as archive:
            source = archive.read(name).decode()
    elif spec is not None and spec.submodule_search_locations:
        source = (Path(spec.submodule_search_locations[0]).parent / name).read_text(encoding="utf-8")
    else:
        pytest.skip("no vLLM is installed, and KVPOOL_VLLM_WHEEL names no wheel")
    before = dict(sys.modules)
    module = ModuleType("vllm_kv_events")
    try:
        for line in source.splitlines():
            if line.startswith("from vllm"):
                sys.modules[line.split()[1]] = _Anything(line.split()[1])
        sys.modules[module.__name__] = module
        sys.modules["vllm.v1.core.kv_cache_utils"].__dict__["ExternalBlockHash"] = bytes | int
        exec(compile(source, name, "exec"), module.__dict__)
        module.__dict__["logger"] = logging.getLogger(name)
        yield module
    finally:
        for added in set(sys.modules) - set(before):
            del sys.modules[added]
        sys.modules.update(before)


class _Anything(ModuleType):
    """Stands in for modules whose names are imported and not needed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None


@pytest.mark.parametrize("hashes", ["int", "bytes"])
def test_the_classes_of_vllm_read_every_message(
    make: Make, publish: Publish, route: Route, vllm_events: ModuleType, hashes: str
) -> None:
    decoder = msgspec.msgpack.Decoder(vllm_events.KVEventBatch)

    def decode(payload: bytes) -> list[dict[str, Any]]:
        batch = decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        return [
            {"type": type(event).__name__} | {n: getattr(event, n) for n in event.__struct_fields__}
            for event in batch.events
        ]

    engine = make(P=10, S=8, event_capacity=512)
    router = route(publish(engine, block_hashes=hashes), decode=decode)
    for i in range(12):
        names: dict[str, Any] = [{}, {"adapter_id": 3}, {"salt": "s"}, {"extra_ids": [9] * 13}][i % 4]
        engine.seed(range(3 * (i % 5), 3 * (i % 5) + 13), committed=12, **names)
    router.follow()
    if hashes == "int":
        assert router.known == cached(engine.cache)
    engine.cache.clear()
    router.follow()
    assert {event["type"] for event in router.events} == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert not any(router.known.values())


@pytest.mark.parametrize(
    ("topic", "replay_topic"), [("kv@10.0.0.7@llama-3-8b", True), ("", True), ("kv@pod@model", False)]
)
def test_a_replay_has_the_topic_before_each_number_and_an_empty_one_at_its_end(
    site: Site, topic: str, replay_topic: bool
) -> None:
    """Readers of older engines get replays without a topic."""
    engine, publisher, route = site(topic=topic, replay_topic=replay_topic)
    engine.seed(range(9), committed=8)
    publisher.flush()
    router = route()
    assert [number for number, _ in router.replay(0)] == list(range(publisher.stats().messages))
    topics = [[topic.encode()]] * publisher.stats().messages + [[b""]]
    assert router.topics == (topics if replay_topic else [[] for _ in topics])


# -- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["publisher", "pool"])
def test_blocks_of_a_publisher_that_has_gone_are_dropped(site: Site, which: str) -> None:
    engine, publisher, route = site()
    router = route()
    engine.seed(range(9), committed=8)
    while not router.sub.poll(10):
        engine.cache.clear()
    router.follow()
    (publisher if which == "publisher" else engine.cache).close()
    last: list[bytes] = []
    while not last or router.decode(last[2])[-1] != CLEARED or int.from_bytes(last[1], "big") < router.next:
        assert router.sub.poll(WAIT_MS), "no last word"
        last = router.sub.recv_multipart()
    assert publisher.closed
    with pytest.raises(PoolClosed, match="ended"):
        publisher.flush()
    publisher.close()
    publisher.close()


# -- peers that misbehave ----------------------------------------------------------------------


def test_requests_that_are_none_are_counted_and_not_answered(site: Site) -> None:
    _, publisher, route = site()
    router = route()
    for frames in (
        [b""],
        [b"", b"1234567"],
        [b"", b"123456789"],
        [b"x", bytes(8)],
        [bytes(8)],
        [b"", bytes(8), b""],
        [b"", b""],
    ):
        router.ask.send_multipart(frames)
    assert [number for number, _ in router.replay(0)] == [0], "the first answer is to the first request that was one"
    publisher.flush()
    publisher.flush()
    assert publisher.stats().malformed == 7
    assert publisher.stats().replays == 1


@pytest.mark.parametrize("start", [1, 5, 2**63, 2**64 - 1])
def test_a_replay_of_what_has_not_been_published_yet_is_empty(
    make: Make, publish: Publish, route: Route, start: int
) -> None:
    assert route(publish(make(event_capacity=64))).replay(start) == []


# -- arguments ---------------------------------------------------------------------------------


REMOTE = ["tcp://0.0.0.0:*", "tcp://*:5557", "tcp://192.0.2.1:5557", "inproc://x", "udp://127.0.0.1:1", "", "ipc://"]


@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_other_machines_read_only_where_that_was_said(make: Make, which: str) -> None:
    cache = make(event_capacity=4).cache
    for endpoint in (*REMOTE, "ipc://a\0b"):
        with pytest.raises(ValueError, match=f"^{which}: .*"):
            KVEventPublisher(cache, **{which: endpoint})
    for endpoint in ("tcp://127.0.0.1:port", "tcp://127.0.0.1:65536", "tcp://127.0.0.1", "ipc:///no/x"):
        with pytest.raises((zmq.ZMQError, ValueError)):
            KVEventPublisher(cache, **{which: endpoint})


def test_other_machines_read_where_that_was_said(make: Make, publish: Publish) -> None:
    publisher = publish(make(event_capacity=4), "tcp://0.0.0.0:*", replay_endpoint=None, allow_remote=True)
    assert publisher.endpoint.startswith("tcp://0.0.0.0:") and publisher.replay_endpoint is None


def test_a_publisher_connects_to_a_router_that_listens(make: Make, publish: Publish) -> None:
    engine, context = make(event_capacity=64), zmq.Context[Any]()
    listener = context.socket(zmq.SUB)
    listener.subscribe(b"")
    port = listener.bind_to_random_port("tcp://127.0.0.1")
    publish(engine, f"tcp://127.0.0.1:{port}", bind=False)
    while not listener.poll(10):
        engine.cache.clear()
    assert len(listener.recv_multipart()) == 3
    context.destroy(linger=0)


WRONG: dict[str, tuple[Any, ...]] = {
    "endpoint": (None, b"tcp://127.0.0.1:*"),
    "replay_endpoint": (5,),
    "topic": (b"t",),
    "bind": (1,),
    "allow_remote": ("yes",),
    "block_hashes": ("hex",),
    "data_parallel_rank": (-1,),
    "interval_seconds": (0,),
    "replay_messages": (0,),
    "replay_bytes": (-1,),
    "hwm": (0, 1.5),
    "queue_bytes": (0,),
    "connections": (0, True),
    "replay_topic": ("no",),
}


def test_wrong_arguments_are_named(make: Make) -> None:
    cache, closed = make(event_capacity=4).cache, make(event_capacity=4).cache
    closed.close()
    for name, values in WRONG.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=name):
                KVEventPublisher(cache, **publisher_options({name: value}))
    with pytest.raises(TypeError, match="cache: .*"):
        KVEventPublisher("pool")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="event_capacity"):
        KVEventPublisher(make().cache)
    with pytest.raises(PoolClosed):
        KVEventPublisher(closed)


def test_a_flush_whose_events_are_never_published_says_so(site: Site) -> None:
    publisher = site()[1]

    def broken() -> None:
        raise PoolClosed("as a pool that was closed meanwhile")

    publisher._publish_new = broken  # type: ignore[method-assign]
    with pytest.raises(PoolClosed, match="ended"):
        publisher.flush()


@pytest.mark.parametrize("missing", ["msgspec", "zmq"])
def test_a_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "kvpool.integrations.kv_events"
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"\.\[events\]"):
        importlib.import_module(package)

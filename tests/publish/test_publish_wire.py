"""What is on the wire is what routers read, no socket is open by accident, and whatever peers do or leave undone is
counted."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq
from router import WAIT_MS, Router, Site, cached, publisher_options

from engine import Engine
from kvpool import KVPoolError, PoolClosed
from kvpool.integrations.kv_events import KVEventPublisher

Make = Callable[..., Engine]
Publish = Callable[..., KVEventPublisher]
Route = Callable[..., Router]
CLEARED = {"type": "AllBlocksCleared"}


def published(router: Router, count: int = 0) -> list[dict[str, Any]]:
    """All events from the first message on."""
    router.follow()
    return router.events[count:]


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
    events = published(router)
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
    fields = [(e["lora_id"], e["lora_name"], e.get("cache_salt"), e.get("extra_keys")) for e in published(router, 1)]
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


@pytest.mark.parametrize("topic", ["kv@10.0.0.7@llama-3-8b", ""])
def test_a_replay_has_the_topic_before_each_number_and_an_empty_one_at_its_end(site: Site, topic: str) -> None:
    engine, publisher, route = site(topic=topic)
    engine.seed(range(9), committed=8)
    publisher.flush()
    router = route()
    assert [number for number, _ in router.replay(0)] == list(range(publisher.stats().messages))
    assert router.topics == [[topic.encode()]] * publisher.stats().messages + [[b""]]


def test_readers_of_older_engines_get_replays_without_a_topic(site: Site) -> None:
    _, publisher, route = site(topic="kv@pod@model", replay_topic=False)
    router = route()
    assert len(router.replay(0)) == publisher.stats().messages
    assert router.topics == [[]] * (publisher.stats().messages + 1)


def test_a_replay_has_the_frames_of_vllms_own_publisher(
    make: Make, publish: Publish, route: Route, vllm_events: ModuleType
) -> None:
    """vLLM's publisher and ours are asked by one client, and its decoder reads both."""
    topic = "kv@pod@model"
    engine = make(event_capacity=64)
    ours = publish(engine, topic=topic)
    engine.seed(range(9), committed=8)
    ours.flush()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    theirs = vllm_events.ZmqEventPublisher(0, "inproc://kv-events", f"tcp://127.0.0.1:{port}", topic=topic)
    context = zmq.Context[Any]()
    try:
        theirs.publish(vllm_events.KVEventBatch(ts=time.time(), events=[vllm_events.AllBlocksCleared()]))
        answers = []
        for endpoint in (ours.replay_endpoint, f"tcp://127.0.0.1:{port}"):
            client = context.socket(zmq.DEALER)
            client.connect(endpoint)
            answers.append([])
            while not answers[-1]:
                client.send_multipart([b"", bytes(8)])
                frames: list[bytes] = []
                while frames[-2:] != [b"\xff" * 8, b""]:
                    assert client.poll(WAIT_MS), "a replay that does not end"
                    frames = client.recv_multipart()
                    answers[-1].append(frames)
                # vLLM's thread publishes a moment later.
                answers[-1] = answers[-1] if len(answers[-1]) > 1 else []
    finally:
        theirs.shutdown()
        context.destroy(linger=0)
    decoder = msgspec.msgpack.Decoder(vllm_events.KVEventBatch)
    if len(answers[1][0]) == 3:
        pytest.skip("this vLLM is older than 0.33: see replay_topic")
    for replay in answers:
        assert replay[-1] == [b"", b"", b"\xff" * 8, b""]
        for place, (delimiter, name, number, payload) in enumerate(replay[:-1]):
            assert (delimiter, name, number) == (b"", topic.encode(), place.to_bytes(8, "big"))
            assert decoder.decode(payload).events


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


def test_a_subscriber_that_does_not_read_is_counted_and_holds_up_nobody(site: Site) -> None:
    engine, publisher, route = site(P=64, T=64, events=256, hwm=2)
    context: zmq.Context[Any] = zmq.Context()
    stuck = context.socket(zmq.SUB)
    stuck.rcvhwm, stuck.rcvbuf = 1, 4096
    stuck.subscribe(b"")
    stuck.connect(publisher.endpoint)
    router = route()
    try:
        end = time.monotonic() + 600
        while not publisher.stats().overflows and time.monotonic() < end:
            engine.cache.clear()
            sequence = engine.cache.add_sequence(list(range(4000)))
            engine.cache.commit(sequence)
            engine.cache.release(sequence)
            router.follow()
        assert publisher.stats().overflows
        assert router.known == cached(engine.cache)
    finally:
        context.destroy(linger=0)


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


def test_a_client_that_has_gone_is_counted(site: Site) -> None:
    _, publisher, route = site(replay_messages=4, interval_seconds=0.2)
    router = route()
    router.replay(0)
    router.ask.send_multipart([b"", bytes(8)])
    router.ask.close(linger=600_000)
    end = time.monotonic() + 600
    while publisher.stats().replays + publisher.stats().replays_cut < 2 and time.monotonic() < end:
        time.sleep(0.01)
    router.ask = router.context.socket(zmq.DEALER)
    router.ask.connect(str(publisher.replay_endpoint))
    router.replay(0)
    # An answer is counted when it is whole, and may be read just before that.
    while publisher.stats().replays + publisher.stats().replays_cut < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert publisher.stats().replays + publisher.stats().replays_cut == 3


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://0.0.0.0:*",
        "tcp://*:5557",
        "tcp://192.0.2.1:5557",
        "inproc://x",
        "udp://127.0.0.1:1",
        "",
        "ipc://",
        "ipc://a\0b",
    ],
)
@pytest.mark.parametrize("which", ["endpoint", "replay_endpoint"])
def test_other_machines_read_only_where_that_was_said(make: Make, endpoint: str, which: str) -> None:
    with pytest.raises(ValueError, match=f"^{which}: .*"):
        KVEventPublisher(make(event_capacity=4).cache, **{which: endpoint})


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


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"endpoint": None}, TypeError),
        ({"endpoint": b"tcp://127.0.0.1:*"}, TypeError),
        ({"replay_endpoint": 5}, TypeError),
        ({"topic": b"t"}, TypeError),
        ({"bind": 1}, TypeError),
        ({"allow_remote": "yes"}, TypeError),
        ({"block_hashes": "hex"}, ValueError),
        ({"data_parallel_rank": -1}, ValueError),
        ({"interval_seconds": 0}, ValueError),
        ({"replay_messages": 0}, ValueError),
        ({"replay_bytes": -1}, ValueError),
        ({"hwm": 0}, ValueError),
        ({"hwm": 1.5}, TypeError),
        ({"queue_bytes": 0}, ValueError),
        ({"connections": 0}, ValueError),
        ({"connections": True}, TypeError),
        ({"replay_topic": "no"}, TypeError),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(make: Make, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(options))):
        KVEventPublisher(make(event_capacity=4).cache, **publisher_options(options))


@pytest.mark.parametrize("cache", [None, 3, "pool"])
def test_what_is_not_a_pool_is_refused(cache: Any) -> None:
    with pytest.raises(TypeError, match="cache: .*"):
        KVEventPublisher(cache)


def test_a_flush_whose_events_are_never_published_says_so(site: Site) -> None:
    publisher = site()[1]

    def broken() -> None:
        raise PoolClosed("as a pool that was closed meanwhile")

    publisher._publish_new = broken  # type: ignore[method-assign]
    with pytest.raises(PoolClosed, match="ended"):
        publisher.flush()


def test_a_pool_that_records_no_events_or_is_closed_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="event_capacity"):
        KVEventPublisher(make().cache)
    engine = make(event_capacity=4)
    engine.cache.close()
    with pytest.raises(KVPoolError):
        KVEventPublisher(engine.cache)


def test_a_taken_port_is_an_error_and_leaves_nothing_behind(site: Site) -> None:
    engine, publisher, _ = site(events=4)
    with pytest.raises(zmq.ZMQError):
        KVEventPublisher(engine.cache, publisher.endpoint)


@pytest.mark.parametrize("missing", ["msgspec", "zmq"])
def test_a_missing_package_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package = "kvpool.integrations.kv_events"
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=r"\.\[events\]"):
        importlib.import_module(package)

"""A router's side of the events: a subscriber that rebuilds what is cached on each medium, and asks for what it has
missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import zmq

from engine import Engine
from kvpool import KVCacheManager
from kvpool.integrations.kv_events import KVEventPublisher, PublisherLimits
from tests import debug

MEDIA = {"device": "GPU", "host": "CPU"}
END = 2**64 - 1
WAIT_MS = 600_000

Decode = Callable[[bytes], list[dict[str, Any]]]
Hash = int | bytes
Site = Callable[..., tuple[Engine, KVEventPublisher, Callable[..., "Router"]]]
"""Makes an engine, a publisher of its pool, and what makes routers that follow it."""


def plain(payload: bytes) -> list[dict[str, Any]]:
    """The events of a payload as dictionaries."""
    _, events, _ = msgspec.msgpack.decode(payload)
    return list(events)


def publisher_options(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a publisher: limits among them have an object of their own."""
    limits = {field.name for field in fields(PublisherLimits)} & options.keys()
    if not limits:
        return options
    others = {name: value for name, value in options.items() if name not in limits}
    return {**others, "limits": PublisherLimits(**{name: options[name] for name in limits})}


class Router:
    """Rebuilds the keys on each medium, and skips numbers that it has seen. ``misses(number)`` says which messages
    never arrive."""

    def __init__(
        self,
        publisher: KVEventPublisher,
        misses: Callable[[int], bool] = lambda number: False,
        decode: Decode = plain,
        stores: Sequence[str] = (),
    ) -> None:
        self.publisher, self.misses, self.decode = publisher, misses, decode
        self.media = ("GPU", "CPU", *stores)
        self.context: zmq.Context[Any] = zmq.Context()
        self.known: dict[str, set[Hash]] = {medium: set() for medium in self.media}
        self.stored: dict[tuple[str, Hash], dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.next = self.gaps = 0
        self.numbers: list[int] = []
        self.topics: list[list[bytes]] = []
        self.sub = self.context.socket(zmq.SUB)
        self.sub.rcvhwm = 0
        self.sub.subscribe(b"")
        self.sub.connect(publisher.endpoint)
        if publisher.replay_endpoint is not None:
            self.ask = self.context.socket(zmq.DEALER)
            self.ask.rcvhwm = 0
            self.ask.connect(publisher.replay_endpoint)

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        """Return what the replay socket sends from ``start`` on."""
        self.ask.send_multipart([b"", start.to_bytes(8, "big")])
        messages = []
        while True:
            assert self.ask.poll(WAIT_MS), "a replay that does not end"
            delimiter, *topic, number, payload = self.ask.recv_multipart()
            assert delimiter == b"" and len(number) == 8
            self.topics.append(topic)
            if int.from_bytes(number, "big") == END:
                assert payload == b""
                return messages
            messages.append((int.from_bytes(number, "big"), payload))

    def catch_up(self) -> None:
        """Ask for everything from the next number on."""
        for number, payload in self.replay(self.next):
            # As vLLM's own example of a subscriber does.
            if number >= self.next:
                self.apply(number, payload)

    def follow(self) -> None:
        """Take everything that has been published by now; what did not arrive is asked for."""
        self.publisher.flush()
        until = self.publisher.stats().messages
        while self.next < until:
            if not self.sub.poll(20):
                self.gaps += 1
                self.catch_up()
                continue
            _, number, payload = self.sub.recv_multipart()
            received = int.from_bytes(number, "big")
            if received < self.next or self.misses(received):
                continue
            if received > self.next:
                self.gaps += 1
                self.catch_up()
            if received == self.next:
                self.apply(received, payload)

    def apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        self.next = number + 1
        for event in self.decode(payload):
            self.events.append(event)
            if event["type"] == "AllBlocksCleared":
                self.known = {medium: set() for medium in self.media}
                self.stored.clear()
                continue
            hashes, there = event["block_hashes"], self.known[event["medium"]]
            if event["type"] == "BlockStored":
                assert not there & set(hashes), "stored twice"
                there.update(hashes)
                self._describe(event)
            else:
                assert event["type"] == "BlockRemoved"
                assert there >= set(hashes), "removed what was not there"
                there.difference_update(hashes)
                for block_hash in hashes:
                    del self.stored[event["medium"], block_hash]

    def _describe(self, event: dict[str, Any]) -> None:
        """Note each block with its parent and tokens: they must be in the event, whatever the medium."""
        size, parent = event["block_size"], event["parent_block_hash"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        for i, block_hash in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][i * size : (i + 1) * size]
            self.stored[event["medium"], block_hash] = {**event, "parent": parent, "tokens": tokens}
            parent = block_hash

    def close(self) -> None:
        self.context.destroy(linger=0)


Publish = Callable[..., KVEventPublisher]
Route = Callable[..., Router]


def cached(cache: KVCacheManager) -> dict[str, set[Hash]]:
    """The first half of each key that the pool has cached, by medium."""
    tiers = debug.cached(cache.core.tokens)
    return {MEDIA[tier]: {int(np.frombuffer(key, np.uint64)[0]) for key in keys} for tier, keys in tiers.items()}

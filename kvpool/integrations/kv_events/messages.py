"""The wire format: events as MessagePack in the schema of vLLM, one tagged map for each, in batches [time, events,
rank]."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from kvpool.common.arrays import Int64s, Uint64s
from kvpool.pool.config import Group
from kvpool.pool.events import Events, Name
from kvpool.state.tiers import CLEARED, REMOVED, STORED

MEDIA = {"device": "GPU", "host": "CPU"}
"""The routers' names for the tiers of a pool, whatever memory these are. A store has its own name, in capitals."""
BLOCKS_PER_MESSAGE = 4096
"""A message with this many blocks is full. A chain of blocks is never cut, so a message can have more."""
HashFormat: TypeAlias = Literal["int", "bytes"]
HASHES: tuple[HashFormat, ...] = ("int", "bytes")

Hash = int | bytes
Hashes = list[int] | list[bytes]
ExtraKeys = list[list[Any] | None]


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """A chain of blocks that is now on a medium. ``parent_block_hash`` is None if it begins a prompt. The last three
    fields are those of Spec."""

    block_hashes: Hashes
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: ExtraKeys | None = None
    cache_salt: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Blocks that are no longer on a medium."""

    block_hashes: Hashes
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, gc=False):
    """Nothing is on any medium."""


Message = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    """The content of one message."""

    ts: float
    events: list[Message]
    data_parallel_rank: int


class Spec(NamedTuple):
    """The fields of a message that describe a group: its number, the routers' word for its kind, and the tokens of its
    window.

    Empty for a pool with one group.
    """

    group_idx: int | None = None
    kind: str | None = None
    window: int | None = None

    @classmethod
    def of(cls, group: Group) -> Spec:
        kinds = {
            "attention": "sliding_window" if group.window else "full_attention",
            "recurrent": "mamba",
            "cross": "cross_attention",
        }
        return cls(group.index, kinds[group.kind], group.window)


class Labels(NamedTuple):
    """The text of a namespace: adapter, and salt (bytes as hexadecimal digits)."""

    lora_id: int | None
    lora_name: str | None
    salt: str | None
    root: tuple[int, int]

    @classmethod
    def of(cls, name: Name | None) -> Labels:
        if name is None:
            return cls(None, None, None, (0, 0))
        adapter, salt = name.adapter_id, name.salt
        # Routers take adapter numbers as unsigned. A name says the same, and newer routers read only names.
        number = adapter if isinstance(adapter, int) and 0 <= adapter < 1 << 63 else None
        return cls(
            number,
            None if adapter is None else str(adapter),
            salt.hex() if isinstance(salt, bytes) else salt,
            name.root,
        )


class Encoder:
    """Turns the events of one pool into payloads. Not thread-safe.

    ``hashes``: "int" is the first 64 bits of a key as an unsigned number, "bytes" all 16 bytes. ``specs``: the groups
    of layers to publish, by number.
    """

    def __init__(self, tokens_per_block: int, hashes: str, rank: int, specs: Mapping[int, Spec]) -> None:
        self._width, self._rank, self._specs = tokens_per_block, rank, specs
        self._hashes = _numbers if hashes == "int" else _strings
        self._encode = msgspec.msgpack.Encoder().encode

    def cleared(self) -> bytes:
        return self._payload([AllBlocksCleared()])

    def _payload(self, messages: list[Message]) -> bytes:
        return self._encode(Batch(time.time(), messages, self._rank))

    def payloads(
        self, events: Events, start: int, stop: int, blocks: int = BLOCKS_PER_MESSAGE
    ) -> Iterator[tuple[bytes, int, int]]:
        """Yield (payload, blocks stored, blocks removed) of messages with the events [start, stop). Each message but
        the last has ``blocks`` or more."""
        batch: list[Message] = []
        stored = removed = 0
        for message in self._messages(events, start, stop):
            batch.append(message)
            if isinstance(message, BlockStored):
                stored += len(message.block_hashes)
            elif isinstance(message, BlockRemoved):
                removed += len(message.block_hashes)
            if stored + removed >= blocks:
                yield self._payload(batch), stored, removed
                batch, stored, removed = [], 0, 0
        if batch:
            yield self._payload(batch), stored, removed

    def _messages(self, events: Events, start: int, stop: int) -> Iterator[Message]:
        """Yield the messages of the events, span by span. Making lists of all at once would keep other threads
        waiting."""
        while start < stop:
            end = int(np.searchsorted(events.bounds, events.bounds[start] + BLOCKS_PER_MESSAGE, side="right")) - 1
            end = min(max(end, start + 1), stop)
            yield from self._span(events, start, end)
            start = end

    def _span(self, events: Events, start: int, stop: int) -> Iterator[Message]:
        """One message for each event that changes where content is. Neighbouring removals from one tier share a
        message."""
        bounds = events.bounds[start : stop + 1].tolist()
        rows = slice(bounds[0], bounds[-1])
        first, width = bounds[0], self._width
        hashes = self._hashes(events.keys[rows])
        tokens = events.tokens[rows].reshape(-1).tolist()
        heads = events.records[np.array(bounds[:-1], np.int64)]
        parents = self._hashes(np.stack([heads["parent0"], heads["parent1"]], axis=1).view(np.uint64))
        labels: dict[int, Labels] = {}
        end = 0
        for (kind, tier, group), alike in groupby(heads.tolist(), itemgetter(0, 1, 4)):
            run = list(alike)
            begin, end = end, end + len(run)
            if kind == CLEARED:
                yield from [AllBlocksCleared() for _ in run]
            elif group in self._specs and kind == REMOVED:
                gone = hashes[bounds[begin] - first : bounds[end] - first]
                yield BlockRemoved(gone, medium(events.tiers[tier]), self._specs[group].group_idx)
            elif group in self._specs and kind == STORED:
                for i, (*_, parent0, parent1, namespace) in enumerate(run, begin):
                    low, high = bounds[i] - first, bounds[i + 1] - first
                    if namespace not in labels:
                        labels[namespace] = Labels.of(events.name(namespace))
                    own = labels[namespace]
                    begins = own.root == (parent0, parent1)
                    yield BlockStored(
                        hashes[low:high],
                        None if begins else parents[i],
                        tokens[low * width : high * width],
                        width,
                        own.lora_id,
                        medium(events.tiers[tier]),
                        own.lora_name,
                        _extra_keys(events, bounds[i], bounds[i + 1], own, begins),
                        own.salt,
                        *self._specs[group],
                    )


def medium(tier: str) -> str:
    """What routers call a tier, or a store."""
    return MEDIA.get(tier, tier.upper())


def _numbers(keys: Uint64s) -> Any:
    return keys[:, 0].tolist()


def _strings(keys: Uint64s) -> Any:
    data = keys.tobytes()
    return [data[i : i + 16] for i in range(0, len(data), 16)]


def _extra_keys(events: Events, start: int, end: int, labels: Labels, begins: bool) -> ExtraKeys | None:
    """For each block, what distinguishes it besides its tokens: the adapter's name, (extra id, place of its first
    token) pairs, and the salt in the first block of a prompt. None if there is nothing."""
    has = events.extra is not None and bool(events.records["extra"][start:end].any())
    if not has and labels.lora_name is None and labels.salt is None:
        return None
    found: ExtraKeys = []
    for row in range(start, end):
        keys: list[Any] = [] if labels.lora_name is None else [labels.lora_name]
        if has and events.extra is not None:
            keys += _extra_pairs(events.extra[row])
        if begins and row == start and labels.salt is not None:
            keys.append(labels.salt)
        found.append(keys or None)
    return found


def _extra_pairs(extra: Int64s) -> list[tuple[str, int]]:
    """Each extra id once, with the place of its first token. An id is 64 bits, written as the 64 hexadecimal digits
    that routers expect."""
    ids, places = np.unique(extra, return_index=True)
    order = np.argsort(places)
    return [(f"{int(ids[i]) & 0xFFFFFFFFFFFFFFFF:016x}".ljust(64, "0"), int(places[i])) for i in order if ids[i]]

"""KnownContent: which content a pool has, by the pool's own keys, and which stores are known to have it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.pool.config import Group
from kvpool.pool.events import NAMELESS, Events, Name, Rows3
from kvpool.pool.keys import BlockKeys
from kvpool.state.records import DEVICE, EVENT, HOST
from kvpool.state.ring import CLEARED, REMOVED, STORED, UPDATED
from kvpool.stores.seals import block_context

ON_DEVICE, ON_HOST = 1 << DEVICE, 1 << HOST
Namespace = tuple[bytes | str | None, int | str | None]
"""Salt and adapter."""


class Content:
    """A full block of a prompt in one group of layers.

    ``key``, ``parent``: the pool's keys of it and of the block before, 16 bytes each. ``tokens``: as bytes, with the
    ``extra`` ids, if there are any. ``on``: the tiers of the pool that have it, as bits. ``saved``: the stores that are
    known to have it, as bits; ``saving``: those that are asked to save it, or wait to be. Equal ones have one key
    in one group.
    """

    __slots__ = ("extra", "group", "key", "name", "namespace", "on", "parent", "priority", "saved", "saving", "tokens")

    def __init__(self, group: int, key: bytes) -> None:
        self.group, self.key = group, key
        self.on = self.saved = self.saving = self.priority = 0

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Content) and (self.key, self.group) == (other.key, other.group)

    def describe(self, parent: bytes, tokens: bytes, extra: bytes, namespace: int, name: Name) -> Content:
        """Say what it is. Of two contents with one key, it is the last one."""
        self.parent, self.tokens, self.extra, self.namespace, self.name = parent, tokens, extra, namespace, name
        return self

    @property
    def whose(self) -> Namespace:
        return self.name.salt, self.name.adapter_id

    @property
    def context(self) -> bytes:
        """All that its bytes depend on: part of its seal in a store."""
        tokens = np.frombuffer(self.tokens, "<i4")
        extra = np.frombuffer(self.extra, "<i8") if self.extra else None
        return block_context(self.parent, tokens, extra, namespace_bytes(self.whose), self.group)


Change = Callable[[Content, int, int], None]
"""Called after the tiers of a content have changed: (content, tiers before, its priority before)."""


class KnownContent:
    """Contents by group of layers and key, fed by the events of the pool.

    ``limit``: about how many contents it keeps. Those that the pool has are always kept, and of the others the latest.
    One thread changes it; others may ask ``known`` and ``all``.
    """

    def __init__(self, groups: Sequence[Group], width: int, limit: int) -> None:
        self._width, self._limit = width, limit
        self._contents: list[dict[bytes, Content]] = [{} for _ in groups]
        self._cross = [group.kind == "cross" for group in groups]
        # Blocks of another layout, or of layers that see other tokens, have other names.
        self._kinds = [
            hashlib.blake2b(
                ascii((group.index, group.kind, group.window, group.sinks, width,
                       [layout.fingerprint for layout in group.layouts])).encode(), digest_size=16,
            ).digest() for group in groups
        ]  # fmt: skip

    def __len__(self) -> int:
        return sum(map(len, self._contents))

    def all(self) -> list[Content]:
        """All contents, in the order in which they came."""
        return [one for of_group in self._contents for one in list(of_group.values())]

    def name(self, content: Content) -> bytes:
        """What stores make their keys of."""
        return self._kinds[content.group] + content.key

    # -- what the pool tells -------------------------------------------------------------------------

    def apply(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows ``first`` to ``last`` of events."""
        for row, content in _contents_of(events, first, last, self._of):
            kind, tier, priority = row[:3]
            if kind == CLEARED:
                self._cleared(changed)
            if content is None:
                continue
            before, valued = content.on, content.priority
            if kind == STORED:
                content.on, content.priority = before | 1 << tier, priority
            elif kind == REMOVED:
                content.on = before & ~(1 << tier)
                if not content.on:
                    # It is kept as one of the latest.
                    of_group = self._contents[content.group]
                    of_group[content.key] = of_group.pop(content.key)
            elif kind == UPDATED:
                content.priority = priority
            changed(content, before, valued)
        self._trim()

    def replace(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows of a snapshot, after events were missed. Only what has changed is told."""
        before = {content: (content.on, content.priority) for content in self.all() if content.on}
        for content in before:
            content.on = 0
        seen: dict[Content, tuple[int, int]] = {}

        def note(content: Content, _: int, valued: int) -> None:
            seen.setdefault(content, (0, valued))

        # The first row is the "cleared" of the snapshot.
        self.apply(events, first + 1, last, note)
        for content, (on, valued) in {**seen, **before}.items():
            if (content.on, content.priority) != (on, valued):
                changed(content, on, valued)

    def _of(self, group: int, key: bytes, stored: bool) -> Content | None:
        """The content with a key. One that is stored is new, if it is not known."""
        content = self._contents[group].get(key)
        if content is None and stored:
            content = self._contents[group][key] = Content(group, key)
        return content

    def _cleared(self, changed: Change) -> None:
        for content in self.all():
            if content.on:
                before, content.on = content.on, 0
                changed(content, before, content.priority)

    def _trim(self) -> None:
        """Forget the oldest contents that the pool does not have, many at a time."""
        over = len(self) - self._limit
        for of_group in self._contents if over > self._limit // 8 else ():
            gone = [key for key, one in of_group.items() if not one.on and not one.saving]
            for key in gone[:over]:
                del of_group[key]
            over -= len(gone[:over])

    # -- prompts, and what stores have ---------------------------------------------------------------

    def of_prompt(self, prompt: BlockKeys, count: int) -> list[list[Content]]:
        """The first ``count`` full blocks of a prompt, for each group of layers; none for cross attention. Those that
        are not known are new, and not kept."""
        name, width = Name(prompt.salt, prompt.adapter_id, prompt.root), self._width
        keys = _split(np.array(prompt.root, np.int64).tobytes() + prompt.keys[:count].tobytes(), 16)
        tokens = _split(prompt.tokens[: count * width].astype("<i4").tobytes(), 4 * width)
        extra = [b""] * count
        if prompt.extra_ids is not None:
            rows = prompt.extra_ids[: count * width].astype("<i8").reshape(count, width)
            extra = [row.tobytes() if row.any() else b"" for row in rows]

        def one(group: int, i: int) -> Content:
            known = self._contents[group].get(keys[i + 1])
            if known is not None and (known.parent, known.tokens, known.extra) == (keys[i], tokens[i], extra[i]):
                return known
            return Content(group, keys[i + 1]).describe(keys[i], tokens[i], extra[i], prompt.namespace, name)

        return [[] if cross else [one(group, i) for i in range(count)] for group, cross in enumerate(self._cross)]

    def of_keys(self, keys: npt.NDArray[np.int64]) -> list[Content]:
        """The contents with these keys of the pool, int64[n, 2], in all groups that cache some."""
        groups = [group for group, cross in enumerate(self._cross) if not cross]
        return [
            self._contents[group].get(key) or Content(group, key)
            for group in groups for key in _split(keys.tobytes(), 16)
        ]  # fmt: skip

    def now(self, content: Content) -> Content:
        """What is kept in place of a content that was new when ``of_prompt`` made it."""
        return self._contents[content.group].get(content.key, content)

    def note(self, content: Content, store: int, there: bool) -> bool:
        """Note whether a store has a content. Returns whether that is news."""
        known, bit = self.now(content), 1 << store
        if bool(known.saved & bit) == there:
            return False
        known.saved = known.saved | bit if there else known.saved & ~bit
        if there:
            self._contents[content.group][content.key] = known
        return True

    def known(self, prompt: BlockKeys, count: int) -> npt.NDArray[np.bool_]:
        """Which of the first full blocks of a prompt a store is known to have: bool[groups, count]. On any thread."""
        keys = _split(prompt.keys[:count].tobytes(), 16)
        found = [[_saved(of_group.get(key)) for key in keys] for of_group in self._contents]
        return np.array(found, np.bool_).reshape(len(self._contents), count)


def namespace_bytes(namespace: Namespace) -> bytes:
    """A namespace as bytes, which differ for all salts and adapters, of all types."""
    return ascii(namespace).encode()


def event_rows(kind: int, tier: int, contents: Sequence[Content], width: int) -> Rows3:
    """What a tier has got or lost, as rows of events. Neighbours that follow each other are one event."""
    records = np.zeros(len(contents), EVENT)
    tokens, extra = np.zeros((len(contents), width), np.int32), np.zeros((len(contents), width), np.int64)
    keys = np.frombuffer(b"".join(one.key + one.parent for one in contents), np.int64).reshape(-1, 4)
    records["key0"], records["key1"], records["parent0"], records["parent1"] = keys.T
    records["kind"], records["tier"] = kind, tier
    for i, one in enumerate(contents):
        records["namespace"][i], records["group"][i], records["extra"][i] = one.namespace, one.group, bool(one.extra)
        tokens[i] = np.frombuffer(one.tokens, "<i4")
        if one.extra:
            extra[i] = np.frombuffer(one.extra, "<i8")
    follows = [a.key == b.parent and a.group == b.group for a, b in zip(contents, contents[1:], strict=False)]
    records["joined"][1:] = np.array(follows, np.int8) * (kind == STORED)
    return records, tokens, extra if records["extra"].any() else None


def _contents_of(
    events: Events, first: int, last: int, of: Callable[[int, bytes, bool], Content | None]
) -> Iterator[tuple[tuple[int, ...], Content | None]]:
    """Rows of events, each with its content, if it has one that is known. Whole columns are read: to ask an array for
    one field of one row takes as long as all else."""
    records, tokens = events.records[first:last], events.tokens[first:last].astype("<i4", copy=False)
    keys = _split(events.keys[first:last].tobytes(), 16)
    parents = _split(np.stack([records["parent0"], records["parent1"]], axis=1).tobytes(), 16)
    blocks, size = tokens.tobytes(), 4 * tokens.shape[1]
    for i, row in enumerate(records.tolist()):
        kind, group, has_extra, namespace = row[0], row[4], row[5], row[10]
        content = of(group, keys[i], kind == STORED) if kind in (STORED, REMOVED, UPDATED) else None
        if content is not None and kind == STORED:
            extra = events.extra[first + i].astype("<i8").tobytes() if has_extra and events.extra is not None else b""
            name = events.names.get(namespace, NAMELESS)
            content.describe(parents[i], blocks[size * i : size * (i + 1)], extra, namespace, name)
        yield row, content


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[i : i + size] for i in range(0, len(data), size)]


def _saved(content: Content | None) -> bool:
    return content is not None and content.saved != 0

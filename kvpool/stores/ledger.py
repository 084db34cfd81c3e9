"""Ledger: what content a pool has, under which keys the stores have it, and which of them is known to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.config import Group
from kvpool.observe.events import NAMELESS, Events, Name
from kvpool.sequences.keys import BlockKeys
from kvpool.state.records import DEVICE, HOST
from kvpool.state.ring import CLEARED, REMOVED, STORED, UPDATED
from kvpool.stores.seals import Secret, block_content

ON_DEVICE, ON_HOST = 1 << DEVICE, 1 << HOST
Flags = npt.NDArray[np.bool_]


class Content:
    """A full block of a prompt in one group of layers.

    ``key``: the pool's, 16 bytes; ``parent``: that of the block before. ``keys``: those of the stores, one for each.
    ``on``: the tiers of the pool that have it, as bits. ``saved``: the stores that are known to have it, as bits;
    ``saving``: those that are asked to save it, or wait to be. ``block``: tokens and extra ids.
    """

    __slots__ = ("block", "depth", "group", "key", "keys", "name", "namespace", "on", "parent", "priority", "saved",
                 "saving")  # fmt: skip

    def __init__(
        self, group: int, key: bytes, parent: bytes, keys: tuple[bytes, ...], block: bytes, namespace: int, name: Name,
        depth: int,
    ) -> None:  # fmt: skip
        self.group, self.key, self.parent, self.keys, self.block = group, key, parent, keys, block
        self.namespace, self.name, self.depth = namespace, name, depth
        self.on = self.saved = self.saving = self.priority = 0


Change = Callable[[Content, int, int], None]
"""Called after the tiers of a content have changed: (content, tiers before, its priority before)."""


class Ledger:
    """Contents by group of layers and key, fed by the events of the pool.

    ``limit``: about how many contents it keeps. Those that the pool has are always kept, and of the others the latest.
    ``orphans`` counts blocks whose parent it does not know, so that they have no key in a store. One thread changes it;
    others may ask ``known``.
    """

    def __init__(self, groups: Sequence[Group], width: int, secrets: Sequence[Secret], limit: int) -> None:
        self._groups, self._width, self._secrets, self._limit = groups, width, secrets, limit
        self._contents: list[dict[bytes, Content]] = [{} for _ in groups]
        self._roots: dict[tuple[int, str], tuple[bytes, ...]] = {}
        self.orphans = 0

    def __len__(self) -> int:
        return sum(map(len, self._contents))

    def get(self, group: int, key: bytes) -> Content | None:
        return self._contents[group].get(key)

    def all(self) -> list[Content]:
        """All contents, parents before their children."""
        return sorted(
            (one for of_group in self._contents for one in list(of_group.values())), key=lambda one: one.depth
        )

    # -- what the pool tells -------------------------------------------------------------------------

    def apply(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows ``first`` to ``last`` of events."""
        heads = events.records[first:last].tolist()
        keys = events.keys[first:last].tobytes()
        missing: list[int] = []
        for i, (kind, tier, priority, _, group, *_) in enumerate(heads):
            key = keys[16 * i : 16 * i + 16]
            if kind == STORED and not self._stored(events, first + i, group, key, 1 << tier, priority, changed):
                missing.append(i)
            elif kind == REMOVED:
                self._removed(group, key, 1 << tier, changed)
            elif kind == UPDATED:
                self._valued(group, key, priority, changed)
            elif kind == CLEARED:
                self._cleared(changed)
        # A snapshot may name a child before its parent, on the other tier.
        for i in missing:
            self.orphans += not self._stored(
                events, first + i, heads[i][4], keys[16 * i : 16 * i + 16], 1 << heads[i][1], heads[i][2], changed
            )  # fmt: skip
        self._trim()

    def _stored(
        self, events: Events, row: int, group: int, key: bytes, tier: int, priority: int, changed: Change
    ) -> bool:
        """Returns False if the parent is not known."""
        content = self._contents[group].get(key)
        if content is None:
            content = self._of_row(events, row, group, key)
            if content is None:
                return False
            self._contents[group][key] = content
        before, valued = content.on, content.priority
        content.on, content.priority = before | tier, priority
        changed(content, before, valued)
        return True

    def _of_row(self, events: Events, row: int, group: int, key: bytes) -> Content | None:
        record = events.records[row]
        namespace, name = int(record["namespace"]), events.name(int(record["namespace"])) or NAMELESS
        parent = (int(record["parent0"]), int(record["parent1"]))
        extra = events.extra[row] if record["extra"] and events.extra is not None else None
        block = block_content(events.tokens[row], extra)
        before = np.array(parent, np.int64).tobytes()
        if parent == name.root and name is not NAMELESS:
            return self._linked(group, key, before, self.roots(group, name), block, namespace, name, 0)
        known = self._contents[group].get(before)
        if known is None:
            return None
        return self._linked(group, key, before, known.keys, block, namespace, name, known.depth + 1)

    def _removed(self, group: int, key: bytes, tier: int, changed: Change) -> None:
        content = self._contents[group].get(key)
        if content is not None and content.on & tier:
            before = content.on
            content.on = before & ~tier
            if not content.on:
                # It is kept as one of the latest.
                self._contents[group][key] = self._contents[group].pop(key)
            changed(content, before, content.priority)

    def _valued(self, group: int, key: bytes, priority: int, changed: Change) -> None:
        content = self._contents[group].get(key)
        if content is not None:
            before, content.priority = content.priority, priority
            changed(content, content.on, before)

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
            if over <= 0:
                return

    # -- what a prompt is called in the stores -------------------------------------------------------

    def roots(self, group: int, name: Name) -> tuple[bytes, ...]:
        """What the chains of a namespace begin with, in each store."""
        what = self._groups[group]
        # Blocks of another layout, or of layers that see other tokens, have other keys.
        text = ascii((name.salt, name.adapter_id, what.kind, what.window, what.sinks, self._width,
                      [layout.fingerprint for layout in what.layouts]))  # fmt: skip
        found = self._roots.get((group, text))
        if found is None:
            if len(self._roots) >= 4096:
                self._roots.clear()
            found = tuple(secret.root(text.encode(), group) for secret in self._secrets)
            self._roots[group, text] = found
        return found

    def chain(self, prompt: BlockKeys, group: int, count: int) -> list[Content]:
        """The first ``count`` full blocks of a prompt. Those that the ledger does not have are new, and not in it."""
        name = Name(prompt.salt, prompt.adapter_id, prompt.root)
        keys, found = prompt.keys[:count].tobytes(), list[Content]()
        before, parent = self.roots(group, name), np.array(prompt.root, np.int64).tobytes()
        for i in range(count):
            key = keys[16 * i : 16 * i + 16]
            content = self._contents[group].get(key)
            if content is None:
                own = slice(i * self._width, (i + 1) * self._width)
                extra = None if prompt.extra_ids is None else prompt.extra_ids[own]
                block = block_content(prompt.tokens[own], extra)
                content = self._linked(group, key, parent, before, block, prompt.namespace, name, i)
            found.append(content)
            before, parent = content.keys, key
        return found

    def _linked(
        self, group: int, key: bytes, parent: bytes, before: tuple[bytes, ...], block: bytes, namespace: int,
        name: Name, depth: int,
    ) -> Content:  # fmt: skip
        keys = tuple(secret.link(one, block) for secret, one in zip(self._secrets, before, strict=True))
        return Content(group, key, parent, keys, block, namespace, name, depth)

    def note(self, content: Content, store: int, there: bool) -> bool:
        """Note whether a store has a content. Returns whether that is news."""
        known, bit = self._contents[content.group].get(content.key, content), 1 << store
        if bool(known.saved & bit) == there:
            return False
        known.saved = known.saved | bit if there else known.saved & ~bit
        if there:
            self._contents[content.group][content.key] = known
        return True

    def known(self, prompt: BlockKeys, count: int) -> Flags:
        """Which of the first full blocks of a prompt a store is known to have: bool[groups, count]. On any thread."""
        keys = prompt.keys[:count].tobytes()
        rows = [keys[16 * i : 16 * i + 16] for i in range(count)]
        return np.array([[_saved(of_group.get(key)) for key in rows] for of_group in self._contents], np.bool_).reshape(
            len(self._contents), count
        )


def tokens_of(content: Content, width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None]:
    """The tokens of a content, and its extra ids if it has some."""
    tokens = np.frombuffer(content.block, "<i4", width).astype(np.int32)
    rest = content.block[4 * width :]
    return tokens, np.frombuffer(rest, "<i8").astype(np.int64) if rest else None


def in_runs(contents: Sequence[Content], alike: Callable[[Content], object]) -> Iterator[list[Content]]:
    """Neighbours that are alike, together."""
    run: list[Content] = []
    for content in contents:
        if run and alike(run[-1]) != alike(content):
            yield run
            run = []
        run.append(content)
    if run:
        yield run


def _saved(content: Content | None) -> bool:
    return content is not None and content.saved != 0

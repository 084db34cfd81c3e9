"""Ledger: what content a pool has, under which keys the stores have it, and which of them is known to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvpool.pool.config import Group
from kvpool.pool.events import NAMELESS, Events, Name
from kvpool.pool.keys import BlockKeys
from kvpool.state.records import DEVICE, HOST
from kvpool.state.ring import CLEARED, REMOVED, STORED, UPDATED
from kvpool.stores.seals import Secret, block_content
from kvpool.stores.store import KEY_BYTES, Bytes

ON_DEVICE, ON_HOST = 1 << DEVICE, 1 << HOST
Flags = npt.NDArray[np.bool_]


class Link:
    """A full block of a prompt, in all groups of layers.

    ``key``: the pool's, 16 bytes; ``parent``: that of the block before. ``chain``: from which the keys of the stores
    are made, one for each store. ``block``: tokens and extra ids. ``depth``: its place in the prompt.
    """

    __slots__ = ("block", "chain", "depth", "key", "name", "namespace", "parent")

    def __init__(
        self, key: bytes, parent: bytes, chain: tuple[bytes, ...], block: bytes, namespace: int, name: Name, depth: int
    ) -> None:
        self.key, self.parent, self.chain, self.block = key, parent, chain, block
        self.namespace, self.name, self.depth = namespace, name, depth


class Content:
    """A full block of a prompt in one group of layers.

    ``on``: the tiers of the pool that have it, as bits. ``saved``: the stores that are known to have it, as bits;
    ``saving``: those that are asked to save it, or wait to be.
    """

    __slots__ = ("group", "link", "on", "priority", "saved", "saving")

    def __init__(self, group: int, link: Link) -> None:
        self.group, self.link = group, link
        self.on = self.saved = self.saving = self.priority = 0

    @property
    def key(self) -> bytes:
        return self.link.key


Change = Callable[[Content, int, int], None]
"""Called after the tiers of a content have changed: (content, tiers before, its priority before)."""


class _Rows:
    """Rows of events, as whole columns: to ask an array for one field of one row takes as long as all else.

    ``heads``: the records as tuples. ``keys``: 16 bytes for each.
    """

    def __init__(self, events: Events, first: int, last: int) -> None:
        records, tokens = events.records[first:last], events.tokens[first:last].astype("<i4", copy=False)
        self.heads, self.keys = records.tolist(), events.keys[first:last].tobytes()
        self._parents = np.stack([records["parent0"], records["parent1"]], axis=1).tobytes()
        self._tokens, self._blocks, self._size = tokens, tokens.tobytes(), 4 * tokens.shape[1]
        self._extra = None if events.extra is None else events.extra[first:last]
        self._names = {tag: events.name(tag) for tag in set(records["namespace"].tolist())}

    def key(self, i: int) -> bytes:
        return self.keys[16 * i : 16 * i + 16]

    def parent(self, i: int) -> bytes:
        return self._parents[16 * i : 16 * i + 16]

    def block(self, i: int) -> bytes:
        """Tokens and extra ids."""
        if self._extra is not None:
            return block_content(self._tokens[i], self._extra[i])
        return self._blocks[self._size * i : self._size * (i + 1)]

    def name(self, i: int) -> tuple[int, Name, bool]:
        """The namespace, its name, and whether the block is the first of a prompt."""
        *_, parent0, parent1, namespace = self.heads[i]
        name = self._names[namespace]
        return namespace, name or NAMELESS, name is not None and name.root == (parent0, parent1)


class Ledger:
    """Contents by group of layers and key, fed by the events of the pool.

    ``limit``: about how many contents it keeps. Those that the pool has are always kept, and of the others the latest.
    ``orphans`` counts blocks whose parent it does not know, so that they have no key in a store. One thread changes it;
    others may ask ``known`` and ``all``.
    """

    def __init__(self, groups: Sequence[Group], width: int, secrets: Sequence[Secret], limit: int) -> None:
        self._width, self._secrets, self._limit = width, secrets, limit
        # Blocks of another layout, or of layers that see other tokens, have other keys.
        self._kinds = [
            ascii((group.index, group.kind, group.window, group.sinks, width,
                   [layout.fingerprint for layout in group.layouts])).encode() for group in groups
        ]  # fmt: skip
        self._contents: list[dict[bytes, Content]] = [{} for _ in groups]
        self._links: dict[bytes, Link] = {}
        self._late: list[tuple[_Rows, int]] = []
        self._roots: dict[tuple[bytes | str | None, int | str | None], tuple[bytes, ...]] = {}
        self.orphans = 0

    def __len__(self) -> int:
        return sum(map(len, self._contents))

    def get(self, group: int, key: bytes) -> Content | None:
        return self._contents[group].get(key)

    def all(self) -> list[Content]:
        """All contents, parents before their children."""
        return sorted((one for of_group in self._contents for one in list(of_group.values())), key=_depth)

    # -- what the pool tells -------------------------------------------------------------------------

    def apply(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows ``first`` to ``last`` of events."""
        late, self._late = self._late, []
        rows = _Rows(events, first, last)
        for i, head in enumerate(rows.heads):
            kind = head[0]
            if kind == STORED:
                if not self._stored(rows, i, changed):
                    self._late.append((rows, i))
            elif kind == REMOVED:
                self._removed(rows, i, changed)
            elif kind == UPDATED:
                self._valued(rows, i, changed)
            elif kind == CLEARED:
                self._cleared(changed)
        self.orphans += len(self._retried(late, changed))
        # A snapshot may name a child before its parent, on the other tier. So may several groups of layers, and then
        # the parent may be in the next rows.
        self._late = self._retried(self._late, changed)
        self._trim()

    def replace(self, events: Events, first: int, last: int, changed: Change) -> None:
        """Learn from the rows of a snapshot, after events were lost. Only what has changed is told."""
        before = {content: (content.on, content.priority) for content in self.all() if content.on}
        for content in before:
            content.on = 0
        seen: dict[Content, tuple[int, int]] = {}
        begin = first + int(events.records["kind"][first] == CLEARED)
        self.apply(events, begin, last, lambda content, on, valued: seen.setdefault(content, (0, valued)) and None)
        for content, (on, valued) in {**seen, **before}.items():
            if (content.on, content.priority) != (on, valued):
                changed(content, on, valued)

    def _retried(self, late: list[tuple[_Rows, int]], changed: Change) -> list[tuple[_Rows, int]]:
        """Try rows again whose parents were not known. Returns those of which they still are not."""
        return [(rows, i) for rows, i in late if not self._stored(rows, i, changed)]

    def _stored(self, rows: _Rows, i: int, changed: Change) -> bool:
        """Returns False if the parent is not known."""
        _, tier, priority, _, group, *_ = rows.heads[i]
        key = rows.key(i)
        content = self._contents[group].get(key)
        if content is None:
            link = self._links.get(key) or self._of_row(rows, i, key)
            if link is None:
                return False
            content = self._contents[group][key] = Content(group, link)
        before, valued = content.on, content.priority
        content.on, content.priority = before | 1 << tier, priority
        changed(content, before, valued)
        return True

    def _of_row(self, rows: _Rows, i: int, key: bytes) -> Link | None:
        parent, (namespace, name, begins) = rows.parent(i), rows.name(i)
        if begins:
            return self._linked(key, parent, self._root(name), rows.block(i), namespace, name, 0)
        known = self._links.get(parent)
        if known is None:
            return None
        return self._linked(key, parent, known.chain, rows.block(i), namespace, known.name, known.depth + 1)

    def _removed(self, rows: _Rows, i: int, changed: Change) -> None:
        _, tier, _, _, group, *_ = rows.heads[i]
        of_group, key = self._contents[group], rows.key(i)
        content = of_group.get(key)
        if content is None and self._late:
            self._late = [(others, j) for others, j in self._late if others.key(j) != key]
        if content is not None and content.on & 1 << tier:
            before = content.on
            content.on = before & ~(1 << tier)
            if not content.on:
                # It is kept as one of the latest.
                of_group[key] = of_group.pop(key)
            changed(content, before, content.priority)

    def _valued(self, rows: _Rows, i: int, changed: Change) -> None:
        _, _, priority, _, group, *_ = rows.heads[i]
        content = self._contents[group].get(rows.key(i))
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
        if len(self._links) > self._limit + self._limit // 8:
            unused = [key for key in self._links if not any(key in of_group for of_group in self._contents)]
            for key in unused[: len(self._links) - self._limit]:
                del self._links[key]

    # -- what a prompt is called in the stores -------------------------------------------------------

    def store_keys(self, contents: Sequence[Content], store: int) -> Bytes:
        """The keys of contents in a store: uint8[n, KEY_BYTES]."""
        secret = self._secrets[store]
        found = [secret.link(one.link.chain[store], self._kinds[one.group]) for one in contents]
        return np.frombuffer(b"".join(found), np.uint8).reshape(-1, KEY_BYTES)

    def links(self, prompt: BlockKeys, count: int) -> list[Link]:
        """The first ``count`` full blocks of a prompt."""
        name = Name(prompt.salt, prompt.adapter_id, prompt.root)
        keys, found = prompt.keys[:count].tobytes(), list[Link]()
        before, parent = self._root(name), np.array(prompt.root, np.int64).tobytes()
        for i in range(count):
            key = keys[16 * i : 16 * i + 16]
            link = self._links.get(key)
            if link is None:
                own = slice(i * self._width, (i + 1) * self._width)
                block = block_content(prompt.tokens[own], None if prompt.extra_ids is None else prompt.extra_ids[own])
                link = self._linked(key, parent, before, block, prompt.namespace, name, i)
            found.append(link)
            before, parent = link.chain, key
        return found

    def contents(self, links: Sequence[Link], group: int) -> list[Content]:
        """The contents of blocks in a group of layers. Those that the ledger does not have are new, and not in it."""
        return [self._contents[group].get(link.key) or Content(group, link) for link in links]

    def now(self, content: Content) -> Content:
        """What the ledger has in place of a content that was new when ``contents`` made it."""
        return self._contents[content.group].get(content.key, content)

    def _root(self, name: Name) -> tuple[bytes, ...]:
        """What the chains of a namespace begin with, in each store."""
        found = self._roots.get(name[:2])
        if found is None:
            if len(self._roots) >= 4096:
                self._roots.clear()
            found = self._roots[name[:2]] = tuple(secret.root(namespace_bytes(name), 0) for secret in self._secrets)
        return found

    def _linked(
        self, key: bytes, parent: bytes, before: tuple[bytes, ...], block: bytes, namespace: int, name: Name, depth: int
    ) -> Link:
        chain = tuple([secret.link(one, block) for secret, one in zip(self._secrets, before, strict=True)])
        link = self._links[key] = Link(key, parent, chain, block, namespace, name, depth)
        return link

    def note(self, content: Content, store: int, there: bool) -> bool:
        """Note whether a store has a content. Returns whether that is news."""
        known, bit = self.now(content), 1 << store
        if bool(known.saved & bit) == there:
            return False
        known.saved = known.saved | bit if there else known.saved & ~bit
        if there:
            self._contents[content.group][content.key] = known
        return True

    def named(self, keys: Sequence[bytes]) -> list[Link | None]:
        """The blocks with these keys of the pool, None for those that it does not know."""
        return [self._links.get(key) for key in keys]

    def known(self, prompt: BlockKeys, count: int) -> Flags:
        """Which of the first full blocks of a prompt a store is known to have: bool[groups, count]. On any thread."""
        keys = prompt.keys[:count].tobytes()
        rows = [keys[16 * i : 16 * i + 16] for i in range(count)]
        return np.array([[_saved(of_group.get(key)) for key in rows] for of_group in self._contents], np.bool_).reshape(
            len(self._contents), count
        )


def namespace_bytes(name: Name) -> bytes:
    """A namespace as bytes, which differ for all salts and adapters, of all types."""
    return ascii((name.salt, name.adapter_id)).encode()


def tokens_of(link: Link, width: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64] | None]:
    """The tokens of a block, and its extra ids if it has some."""
    tokens = np.frombuffer(link.block, "<i4", width).astype(np.int32)
    rest = link.block[4 * width :]
    return tokens, np.frombuffer(rest, "<i8").astype(np.int64) if rest else None


def _depth(content: Content) -> int:
    return content.link.depth


def _saved(content: Content | None) -> bool:
    return content is not None and content.saved != 0

"""Index: which slot has which key, who reads or writes it, and which block is evicted next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from kvpool.stores.disk.table import Table

HERE, PENDING, REFUSED = -1, -2, -3
"""Answers in the place of a slot. HERE: the key has one. PENDING: another call writes it."""


class _Pending(NamedTuple):
    slot: int
    tag: bytes


class Index:
    """The index of a store, over its table. The caller holds a lock.

    Victims are chosen as in a pool: the lowest priority first, and in it the least recently used. Of the keys of one
    call the last one goes first, since the end of a prompt is worth less than its beginning. Blocks of other models
    have the lowest priority. A block that is read is no victim.
    """

    def __init__(self, table: Table, model: bytes) -> None:
        self._table, self._model = table, model
        self._pending: dict[bytes, _Pending] = {}
        self._pins: Counter[int] = Counter()
        self._left: set[int] = set()  # slots whose key was dropped while they were read
        self._tags: dict[bytes, OrderedDict[bytes, None]] = {}  # keys of a tag that has a limit, oldest first
        self.evicted = 0
        entries = table.entries
        taken = np.flatnonzero(entries["used"])
        taken = taken[np.argsort(entries["used"][taken], kind="stable")]
        own = entries["model"][taken] == np.void(model)
        self._here, self._others = (self._by_key(taken[which]) for which in (own, ~own))
        self.duplicates = self._drop_duplicates(taken)
        free = np.flatnonzero(entries["used"] == 0)
        self._free: list[int] = free[::-1].tolist()

    def _by_key(self, slots: np.ndarray) -> OrderedDict[bytes, int]:
        return OrderedDict(zip(self._table.entries["key"][slots].tolist(), slots.tolist(), strict=True))

    def _drop_duplicates(self, taken: np.ndarray) -> int:
        """Of two slots with one key, the one that was used last counts. Only damage makes them."""
        if len(self._here) + len(self._others) == len(taken):
            return 0
        wrong = set(taken.tolist()) - set(self._here.values()) - set(self._others.values())
        for slot in wrong:
            self._table.clear(slot)
        return len(wrong)

    def __len__(self) -> int:
        return len(self._here) + len(self._others)

    @property
    def others(self) -> int:
        """Blocks of other models."""
        return len(self._others)

    def has(self, key: bytes) -> bool:
        return key in self._here

    def is_pending(self, key: bytes) -> bool:
        return key in self._pending

    # -- writers ---------------------------------------------------------------------------------------

    def reserve(self, keys: list[bytes], tag: bytes, limit: int) -> list[int]:
        """For each key a slot that the caller may write until it calls ``publish`` or ``abort``, or HERE, PENDING or
        REFUSED. Evicts what it must, but none of these keys."""
        self._use([key for key in keys if key in self._here])
        keep, answers = set(keys), []
        self._watch(tag, limit)
        for key in keys:
            if key in self._here:
                answers.append(HERE)
            elif key in self._pending:
                answers.append(PENDING)
            else:
                answers.append(self._take(key, tag, limit, keep))
        return answers

    def publish(self, keys: list[bytes], seals: list[bytes]) -> None:
        """The bytes of these keys are written: note them in the table. The keys are still pending."""
        for key, seal in zip(reversed(keys), reversed(seals), strict=True):
            slot, tag = self._pending[key]
            self._table.set(slot, key, seal, tag, self._model)

    def complete(self, keys: list[bytes]) -> None:
        """The table has become durable: from now on these keys are found."""
        for key in reversed(keys):
            slot, tag = self._pending.pop(key)
            self._here[key] = slot
            members = self._tags.get(tag)
            if members is not None:
                members.move_to_end(key)

    def abort(self, keys: list[bytes]) -> None:
        """The bytes of these keys will not come, and nobody writes to their slots."""
        for key in keys:
            slot, tag = self._pending.pop(key)
            self._table.clear(slot)
            self._free.append(slot)
            self._leaves(tag, key)

    # -- readers ---------------------------------------------------------------------------------------

    def pin(self, keys: list[bytes]) -> list[int]:
        """The slots of keys, -1 for those that are not there. They stay as they are until ``unpin``."""
        self._use([key for key in keys if key in self._here])
        slots = [self._here.get(key, -1) for key in keys]
        self._pins.update(slot for slot in slots if slot >= 0)
        return slots

    def unpin(self, slots: list[int]) -> None:
        for slot in slots:
            if slot < 0:
                continue
            self._pins[slot] -= 1
            if not self._pins[slot]:
                del self._pins[slot]
                if slot in self._left:
                    self._left.remove(slot)
                    self._free.append(slot)

    def forget(self, keys: list[bytes]) -> int:
        """Drop keys. Returns how many were there. A key that is pending stays with its writer."""
        count = 0
        for key in keys:
            if key in self._here:
                self._drop(self._here, key)
                count += 1
        return count

    # -- inside ----------------------------------------------------------------------------------------

    def _use(self, keys: list[bytes]) -> None:
        """These keys are used now, the first of them last."""
        for key in reversed(keys):
            self._here.move_to_end(key)
            slot = self._here[key]
            self._table.touch(slot)
            members = self._tags.get(self._tag(slot)) if self._tags else None
            if members is not None:
                members.move_to_end(key)

    def _take(self, key: bytes, tag: bytes, limit: int, keep: Collection[bytes]) -> int:
        """A slot for a key, or REFUSED."""
        if limit < 1:
            return REFUSED
        members = self._tags.get(tag)
        while members is not None and len(members) >= limit:
            if not self._evict(self._here, (key for key in members if key in self._here), keep):
                return REFUSED
        if not self._free and not self._evict(self._others, self._others, keep):
            self._evict(self._here, self._here, keep)
        if not self._free:
            return REFUSED
        slot = self._free.pop()
        self._pending[key] = _Pending(slot, tag)
        if members is not None:
            members[key] = None
        return slot

    def _evict(self, where: OrderedDict[bytes, int], oldest: Iterator[bytes] | OrderedDict[bytes, int],
               keep: Collection[bytes]) -> bool:  # fmt: skip
        """Free the slot of the first of these keys that nobody reads. Returns whether there is one."""
        victim = next((key for key in oldest if key not in keep and where[key] not in self._pins), None)
        if victim is None:
            return False
        self._drop(where, victim)
        self.evicted += 1
        return True

    def _drop(self, where: OrderedDict[bytes, int], key: bytes) -> None:
        slot = where.pop(key)
        self._leaves(self._tag(slot), key)
        self._table.clear(slot)
        if slot in self._pins:
            self._left.add(slot)
        else:
            self._free.append(slot)

    def _leaves(self, tag: bytes, key: bytes) -> None:
        members = self._tags.get(tag)
        if members is not None:
            members.pop(key, None)

    def _tag(self, slot: int) -> bytes:
        return self._table.entries["tag"][slot].tobytes()

    def _watch(self, tag: bytes, limit: int) -> None:
        """Keep the keys of a tag in order, from its first limit on that can be reached."""
        if tag in self._tags or limit >= len(self._table.entries):
            return
        entries = self._table.entries
        slots = np.flatnonzero((entries["tag"] == np.void(tag)) & (entries["model"] == np.void(self._model)))
        slots = slots[np.argsort(entries["used"][slots], kind="stable")]
        found = (key for key in entries["key"][slots].tolist() if key in self._here)
        pending = (key for key, held in self._pending.items() if held.tag == tag)
        self._tags[tag] = OrderedDict.fromkeys(chain(found, pending))

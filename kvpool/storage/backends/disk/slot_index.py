"""Index: which slot has which key, who reads or writes it, and which block is evicted next. It is kept in a table, and
the pages of that are what the database keeps."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from kvpool.common.arrays import Int64s
from kvpool.state.arrays import LRU, PolicyName
from kvpool.storage.backends.tag_limits import Victims
from kvpool.storage.store import KEY_BYTES, MAC_BYTES, TAG_BYTES

ENTRY = np.dtype(
    [
        ("key", f"V{KEY_BYTES}"),
        ("seal", "u1", MAC_BYTES),
        ("tag", f"V{TAG_BYTES}"),
        ("model", "V16"),  # the fingerprint of the identity
        ("used", "<i8"),  # when it was last used, as a number that grows; 0: the slot is empty
    ]
)
PER_PAGE = 46
"""A page of entries and what SQLite adds to it fit into one of SQLite's own pages, of 4,096 bytes."""
PAGE_BYTES = PER_PAGE * ENTRY.itemsize
USED_MAX = 1 << 62
_TOUCHED_AT_ONCE = 8

Page = tuple[int, bytes]
"""The number of a page, and its content."""


class SlotTable:
    """The entries of all slots. Nothing here is durable. The caller holds a lock.

    A page is *changed* when the database must get it with the next commit. It is *touched* when only the times of last
    use differ: some touched pages go with each commit, and all when the store is closed.
    """

    def __init__(self, slots: int) -> None:
        pages = -(-slots // PER_PAGE)
        self._all = np.zeros(pages * PER_PAGE, ENTRY)
        self.entries = self._all[:slots]
        self.used: Int64s = self.entries["used"]
        self._changed: set[int] = set()
        self._touched: dict[int, None] = {}
        self._now = 0

    def fill(self, pages: list[Page]) -> None:
        """Take pages as the database has them."""
        content = np.frombuffer(b"".join(content for _, content in pages), np.uint8)
        rows = self._all.view(np.uint8).reshape(-1, PAGE_BYTES)
        rows[[number for number, _ in pages]] = content.reshape(-1, PAGE_BYTES)

    def check(self, slots: int) -> int:
        """Empty the entries that cannot be true, and those beyond this many slots. Returns how many."""
        beyond = int(np.count_nonzero(self._all["used"][len(self.entries) :]))
        if beyond:
            self._all[len(self.entries) :] = np.zeros(1, ENTRY)
            self._changed.add(len(self.entries) // PER_PAGE)
        wrong = (self.used < 0) | (self.used > USED_MAX)
        wrong[slots:] |= self.used[slots:] != 0
        for slot in np.flatnonzero(wrong).tolist():
            self.clear(slot)
        self._now = int(self.used.max(initial=0))
        return beyond + int(np.count_nonzero(wrong))

    def now(self) -> int:
        """The next number for a last use."""
        self._now += 1
        return self._now

    def set(self, slot: int, key: bytes, mac: bytes, tag: bytes, model: bytes) -> None:
        """Note what a slot has, once its bytes are written."""
        self.entries[slot] = (key, np.frombuffer(mac, np.uint8), tag, model, self.now())
        self._changed.add(slot // PER_PAGE)

    def clear(self, slot: int) -> None:
        """Empty an entry."""
        if self.used[slot]:
            self.entries[slot] = np.zeros((), ENTRY)
            self._changed.add(slot // PER_PAGE)

    def put(self, slot: int, entry: bytes) -> bool:
        """Take an earlier entry back. Returns whether it had another meanwhile."""
        changed = self.entries[slot].tobytes() != entry
        if changed:
            self.entries[slot] = np.frombuffer(entry, ENTRY)[0]
            self._changed.add(slot // PER_PAGE)
        return changed

    def touch(self, slot: int) -> None:
        """Note that a slot is used now."""
        self.used[slot] = self.now()
        self._touched[slot // PER_PAGE] = None

    def take(self, everything: bool = False) -> list[Page]:
        """Copies of the pages that the database gets now. They count as unchanged from now on."""
        numbers, self._changed = self._changed, set()
        if numbers or everything:
            numbers.update(islice(self._touched, None if everything else _TOUCHED_AT_ONCE))
        for number in numbers:
            self._touched.pop(number, None)
        pages = self._all.reshape(-1, PER_PAGE)
        return [(number, pages[number].tobytes()) for number in sorted(numbers)]

    def give_back(self, pages: Iterable[Page]) -> None:
        """The database has not got these pages."""
        self._changed.update(number for number, _ in pages)


HERE, PENDING, REFUSED = -1, -2, -3
"""Answers in the place of a slot. HERE: the key has one. PENDING: another call writes it."""
_VICTIMS_MIN, _CHOSEN_AT_ONCE = 1024, 64


class _Pending(NamedTuple):
    """``before``: the slot of a doubtful entry of the key, or -1; ``entry``: that entry, which counts until the new one
    is durable."""

    slot: int
    tag: bytes
    before: int = -1
    entry: bytes = b""


class Index:
    """The index of a store, over its table. The caller holds a lock.

    After a crash (``in_doubt``) an entry that was there at the opening is *doubtful*: its slot may have got other bytes
    right before. So the first save of its key sees whether the slot has the right ones, and is not acknowledged before
    they are durable. Other bytes get another slot. The doubtful entry goes with the transaction that names the new one.

    Victims are chosen as in a pool: the lowest priority first, and in it as ``policy`` says, such as the least recently
    used. Of the keys of one call the last one goes first, since the end of a prompt is worth less than its beginning.
    Blocks of other models have the lowest priority, and go by LRU. A block that is read is no victim.
    """

    def __init__(self, table: SlotTable, model: bytes, in_doubt: bool, policy: PolicyName = LRU) -> None:
        self._table, self._model = table, model
        self._pending: dict[bytes, _Pending] = {}
        self._pins: Counter[int] = Counter()
        self._left: set[int] = set()  # slots whose key was dropped while they were read
        self._unclear: list[int] = []  # slots that a commit that failed may have named
        self._tags: dict[bytes, OrderedDict[bytes, None]] = {}  # keys of a tag that has a limit, oldest first
        self.evicted, self._tags_max = 0, 1024
        self._oldest: list[tuple[int, int]] = []  # slots and when they were used, the next victim at the end
        entries = table.entries
        taken = np.flatnonzero(entries["used"])
        same_model = entries["model"][taken] == np.void(model)
        self._here, self._others = (self._by_key(taken[which]) for which in (same_model, ~same_model))
        self.duplicates = self._drop_duplicates(taken)
        self._victims: Victims | None = None
        if policy != LRU:
            oldest = sorted(self._here, key=lambda key: int(table.used[self._here[key]]))
            self._victims = Victims(policy, len(entries), oldest)
        self._doubtful = (entries["used"] != 0) & in_doubt
        self._free: list[int] = []
        self._unused = iter(np.flatnonzero(entries["used"] == 0))  # since the opening

    def _by_key(self, slots: np.ndarray) -> dict[bytes, int]:
        return dict(zip(self._table.entries["key"][slots].tolist(), slots.tolist(), strict=True))

    def _drop_duplicates(self, taken: np.ndarray) -> int:
        """Of two slots with one key, the one that was used last counts. Only damage makes them."""
        count = len(taken) - len(self)
        if count:
            for where in (self._here, self._others):
                newest = self._by_key(taken[np.argsort(self._table.used[taken])])
                where.update((key, newest[key]) for key in where)
            for slot in set(taken.tolist()) - {*self._here.values(), *self._others.values()}:
                self._table.clear(slot)
        return count

    def __len__(self) -> int:
        return len(self._here) + len(self._others)

    @property
    def others(self) -> int:
        """Blocks of other models."""
        return len(self._others)

    @property
    def in_doubt(self) -> bool:
        """Whether any entry is doubtful."""
        return bool((self._doubtful & (self._table.used != 0)).any())

    def has(self, key: bytes) -> bool:
        return key in self._here

    def is_doubtful(self, key: bytes) -> bool:
        return key in self._here and bool(self._doubtful[self._here[key]])

    def is_pending(self, key: bytes) -> bool:
        return key in self._pending

    # -- writers ---------------------------------------------------------------------------------------

    def reserve(self, keys: list[bytes], tag: bytes, limit: int, same: Collection[bytes] = ()) -> list[int]:
        """For each key a slot that the caller may write until it calls ``publish`` or ``abort``, or HERE, PENDING or
        REFUSED. Evicts what it must, but none of these keys. ``same``: those of them whose doubtful slots were seen to
        have the right bytes: they get these slots, which are not to be written."""
        self._use([key for key in keys if key in self._here])
        keep, answers = set(keys), []
        self._watch(tag, limit)
        for key in keys:
            if key in self._here:
                answers.append(self._again(key, tag, key in same, keep) if self.is_doubtful(key) else HERE)
            elif key in self._pending:
                answers.append(PENDING)
            else:
                answers.append(self._take(key, tag, limit, keep))
        return answers

    def is_written(self, key: bytes) -> bool:
        """Whether the slot of a pending key is that of its doubtful entry, which has the right bytes."""
        return self._pending[key].slot == self._pending[key].before

    def publish(self, keys: list[bytes], macs: list[bytes]) -> None:
        """The bytes of these keys are written: note them in the table. The keys are still pending."""
        for key, mac in zip(reversed(keys), reversed(macs), strict=True):
            slot, tag, before, _ = self._pending[key]
            if before >= 0:
                self._table.clear(before)
            self._table.set(slot, key, mac, tag, self._model)

    def complete(self, keys: list[bytes]) -> None:
        """The table has become durable: from now on these keys are found."""
        for key in reversed(keys):
            slot, tag, before, _ = self._pending.pop(key)
            self._here[key], self._doubtful[slot] = slot, False
            if before not in (-1, slot):
                self._free_slot(before)
            members = self._tags.get(tag)
            if members is not None:
                members.move_to_end(key)
        if self._victims is not None:
            self._victims.use(keys)

    def abort(self, keys: list[bytes]) -> None:
        """The bytes of these keys will not come, and nobody writes to their slots."""
        for key in keys:
            slot, tag, before, entry = self._pending.pop(key)
            if before >= 0:
                self._here[key] = before
                # The commit may have failed and be durable all the same. Until the next one, it needs these bytes.
                unclear = self._table.put(before, entry)
                if slot != before:
                    (self._unclear if unclear else self._free).append(slot)
            else:
                self._free.append(slot)
                self._leaves(tag, key)
            if slot != before:
                self._table.clear(slot)

    def take_unclear(self) -> list[int]:
        """The slots that are free when the commit that begins now is durable."""
        unclear, self._unclear = self._unclear, []
        return unclear

    def committed(self, unclear: list[int], durable: bool) -> None:
        """That commit has ended."""
        (self._free if durable else self._unclear).extend(unclear)

    # -- readers ---------------------------------------------------------------------------------------

    def pin(self, keys: list[bytes]) -> list[int]:
        """The slots of keys, -1 for those that are not there. They stay as they are until ``unpin``."""
        known_keys = [key for key in keys if key in self._here]
        self._use(known_keys)
        if self._victims is not None:
            self._victims.use(known_keys)
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

    def tagged(self, prefix: bytes) -> list[bytes]:
        """The keys that are there, and have a tag with this beginning."""
        entries = self._table.entries
        tags = np.ascontiguousarray(entries["tag"]).view(np.uint8).reshape(len(entries), -1)[:, : len(prefix)]
        slots = np.flatnonzero((tags == np.frombuffer(prefix, np.uint8)).all(axis=1))
        return [key for key in entries["key"][slots].tolist() if key in self._here]

    # -- inside ----------------------------------------------------------------------------------------

    def _use(self, keys: list[bytes]) -> None:
        """These keys are used now, the first of them last."""
        for key in reversed(keys):
            slot = self._here[key]
            self._table.touch(slot)
            members = self._tags.get(self._tag(slot)) if self._tags else None
            if members is not None:
                members.move_to_end(key)

    def _again(self, key: bytes, tag: bytes, same: bool, keep: Collection[bytes]) -> int:
        """A slot for a key whose entry is doubtful, or REFUSED."""
        before = self._here[key]
        slot = before if same else self._slot(keep)
        if slot >= 0:
            entry = self._table.entries[before].tobytes()
            del self._here[key]
            self._pending[key] = _Pending(slot, tag, before, entry)
        return slot

    def _take(self, key: bytes, tag: bytes, limit: int, keep: Collection[bytes]) -> int:
        """A slot for a key, or REFUSED."""
        if limit < 1:
            return REFUSED
        members = self._tags.get(tag)
        while members is not None and len(members) >= limit:
            oldest = (self._here[key] for key in members if key in self._here)
            if not self._evict(next((slot for slot in oldest if self._may_go(slot, keep)), None)):
                return REFUSED
        slot = self._slot(keep)
        if slot >= 0:
            self._pending[key] = _Pending(slot, tag)
            if members is not None:
                members[key] = None
        return slot

    def _slot(self, keep: Collection[bytes]) -> int:
        """A slot that is free now, or REFUSED."""
        if not self._free:
            self._free += [int(slot) for slot in islice(self._unused, 1)]
        if not self._free:
            self._evict(self._victim(keep))
        if not self._free:
            return REFUSED
        slot = self._free.pop()
        self._doubtful[slot] = False
        return slot

    def _victim(self, keep: Collection[bytes]) -> int | None:
        """The slot that is evicted next. None if all are read, written or kept."""
        for last_try in (False, True):
            while self._oldest:
                slot, used_at = self._oldest.pop()
                # What was used since is newer than all that are left, and comes with a later list.
                if used_at == self._table.used[slot] and self._may_go(slot, keep):
                    return slot
            if not last_try:
                chosen = self._victims is not None and not self._others
                self._oldest = self._list_chosen(len(keep)) if chosen else self._list_oldest()
        return None

    def _list_chosen(self, kept: int) -> list[tuple[int, int]]:
        """What the policy has go next, the first one last. Beside those that are read or kept there are some."""
        assert self._victims is not None
        chosen = self._victims.first(_CHOSEN_AT_ONCE + len(self._pins) + kept)
        slots = [self._here[key] for key in reversed(chosen) if key in self._here]
        return list(zip(slots, self._table.used[slots].tolist(), strict=True))

    def _list_oldest(self) -> list[tuple[int, int]]:
        """A part of the blocks, the oldest last. To sort them costs a part of a microsecond for each victim."""
        used_at = self._table.used
        slots = np.array([*self._others.values()], np.int64) if self._others else np.flatnonzero(used_at)
        count = max(_VICTIMS_MIN, len(slots) // 16)
        if len(slots) > count:
            slots = slots[np.argpartition(used_at[slots], count)[:count]]
        slots = slots[np.argsort(used_at[slots])[::-1]]
        return list(zip(slots.tolist(), used_at[slots].tolist(), strict=True))

    def _may_go(self, slot: int, keep: Collection[bytes]) -> bool:
        key = self._key(slot)
        return slot not in self._pins and key not in keep and (key in self._here or key in self._others)

    def _evict(self, slot: int | None) -> bool:
        """Free a slot. Returns whether there is one."""
        if slot is not None:
            key = self._key(slot)
            self._drop(self._here if key in self._here else self._others, key)
            self.evicted += 1
        return slot is not None

    def _drop(self, where: dict[bytes, int], key: bytes) -> None:
        slot = where.pop(key)
        if self._victims is not None and where is self._here:
            self._victims.drop(key)
        self._leaves(self._tag(slot), key)
        self._table.clear(slot)
        self._free_slot(slot)

    def _free_slot(self, slot: int) -> None:
        """Nothing names this slot any more, but it may be read."""
        if slot in self._pins:
            self._left.add(slot)
        else:
            self._free.append(slot)

    def _leaves(self, tag: bytes, key: bytes) -> None:
        members = self._tags.get(tag)
        if members is not None:
            members.pop(key, None)

    def _key(self, slot: int) -> bytes:
        return self._table.entries["key"][slot].tobytes()

    def _tag(self, slot: int) -> bytes:
        return self._table.entries["tag"][slot].tobytes()

    def _watch(self, tag: bytes, limit: int) -> None:
        """Keep the keys of a tag in order, from its first limit on that can be reached."""
        if tag in self._tags or not 0 < limit < len(self._table.entries):
            return
        if len(self._tags) >= self._tags_max:  # Tags without blocks need no order.
            self._tags = {watched: keys for watched, keys in self._tags.items() if keys}
            self._tags_max = max(1024, 2 * len(self._tags))
        entries = self._table.entries
        slots = np.flatnonzero((entries["tag"] == np.void(tag)) & (entries["model"] == np.void(self._model)))
        slots = slots[np.argsort(entries["used"][slots])]
        saved = (key for key in entries["key"][slots].tolist() if key in self._here)
        pending = (key for key, held in self._pending.items() if held.tag == tag)
        self._tags[tag] = OrderedDict.fromkeys(chain(saved, pending))

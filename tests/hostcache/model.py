"""What a host cache means, as plain dictionaries: slow, obvious, and compared with it call by call."""

from __future__ import annotations

from collections import Counter
from itertools import count

from kvpool.errors import ReservationExpired
from kvpool.state.records import DEFAULT_PRIORITY

ABSENT, HERE, PENDING = range(3)


class Entry:
    """A key that has a block. ``listed`` says when it joined its list; None while somebody holds it. ``due``: until
    when it is to be published."""

    def __init__(self, priority: int, ttl: int | None, due: int | None) -> None:
        self.priority, self.ttl, self.due = priority, ttl, due
        self.pending, self.doomed, self.overdue = True, False, False
        self.listed: int | None = None
        self.deadline: tuple[int, int] | None = None


class Model:
    """The same verbs as ``HostCache``. None is a refusal."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.now = capacity, 0
        self.entries: dict[bytes, Entry] = {}
        self.pins: Counter[Entry] = Counter()
        self.expired = 0
        # What a policy has chosen of all that it may. None: LRU.
        self.chosen: list[bytes] | None = None
        self._order = count()

    # -- blocks ----------------------------------------------------------------------------------------

    @property
    def empty(self) -> int:
        """Blocks without content that nobody holds. What is pinned and forgotten still has its block."""
        forgotten = [entry for entry in self.pins if self.pins[entry] and entry not in self.entries.values()]
        return self.capacity - len(self.entries) - len(forgotten)

    def _shelve(self, entry: Entry) -> None:
        entry.listed, entry.deadline = next(self._order), None
        if entry.ttl is not None and entry.priority != DEFAULT_PRIORITY:
            entry.deadline = self.now + entry.ttl, entry.listed

    def _hold(self, entry: Entry) -> None:
        self.pins[entry] += 1
        entry.listed = entry.deadline = None

    def _release(self, entry: Entry) -> None:
        self.pins[entry] -= 1
        if not self.pins[entry] and entry in self.entries.values():
            self._shelve(entry)

    def refresh(self) -> int:
        due = [entry for entry in self.entries.values() if entry.deadline is not None and entry.deadline[0] <= self.now]
        for entry in sorted(due, key=lambda entry: entry.deadline or ()):
            entry.priority, entry.ttl, entry.deadline, entry.listed = DEFAULT_PRIORITY, None, None, next(self._order)
        return len(due)

    # -- deadlines -------------------------------------------------------------------------------------

    @property
    def overdue(self) -> list[bytes]:
        return [key for key, entry in self.entries.items() if entry.overdue]

    def expire(self) -> None:
        """What was not published by now hits nobody any more. Its block stays with its writer."""
        for entry in self.entries.values():
            if entry.pending and not entry.overdue and entry.due is not None and entry.due <= self.now:
                entry.doomed = entry.overdue = True
                self.expired += 1

    # -- verbs -----------------------------------------------------------------------------------------

    def look(self, key: bytes) -> int:
        entry = self.entries.get(key)
        if entry is None or entry.doomed:
            return ABSENT
        return PENDING if entry.pending else HERE

    def reserve(
        self, keys: list[bytes], priority: int, ttl: int | None, deadline: int | None
    ) -> tuple[tuple[bytes, ...], list[bytes]] | None:
        self.expire()
        self.refresh()
        new = [key for key in dict.fromkeys(keys) if key not in self.entries]
        offered = [key for key in keys if self.look(key) == HERE]
        free = self.empty + sum(
            entry.listed is not None and entry.priority <= priority and key not in offered
            for key, entry in self.entries.items()
        )
        if len(new) > free:
            return None
        for key in offered:
            self._hold(self.entries[key])
        evicted = []
        for key in new:
            if not self.empty:
                victims = [(e.priority, e.listed, k) for k, e in self.entries.items() if e.listed is not None]
                victim = min(victims)[2]
                if self.chosen is not None:
                    chosen, lowest = self.chosen.pop(0), self.entries[victim].priority
                    entry = self.entries[chosen]
                    assert entry.listed is not None and entry.priority == lowest, chosen
                    victim = chosen if lowest == DEFAULT_PRIORITY else victim
                del self.entries[victim]
                evicted.append(victim)
            self.entries[key] = Entry(priority, ttl, None if deadline is None else self.now + deadline)
        for key in offered[::-1]:
            self._release(self.entries[key])
        return tuple(new), evicted

    def publish(self, keys: list[bytes]) -> int | None:
        self.expire()
        if any(key in self.overdue for key in keys):
            raise ReservationExpired
        if not all(key in self.entries and self.entries[key].pending for key in keys):
            return None
        done = []
        for key in [key for key in self.entries if key in keys]:
            if self.entries[key].doomed:
                del self.entries[key]
            else:
                self.entries[key].pending = False
                done.append(key)
        for key in done[::-1]:
            self._shelve(self.entries[key])
        return len(done)

    def abort(self, keys: list[bytes]) -> int | None:
        self.expire()
        if not all(key in self.entries and self.entries[key].pending for key in keys):
            return None
        for key in set(keys):
            del self.entries[key]
        return len(set(keys))

    def pin(self, keys: list[bytes]) -> list[Entry] | None:
        if not all(self.look(key) == HERE for key in keys):
            return None
        held = [self.entries[key] for key in keys]
        for entry in held:
            self._hold(entry)
        return held

    def unpin(self, held: list[Entry]) -> None:
        for entry in held[::-1]:
            self._release(entry)

    def touch(self, keys: list[bytes]) -> int:
        here = [self.entries[key] for key in keys[::-1] if self.look(key) == HERE]
        for entry in here:
            if entry.listed is not None:
                self._shelve(entry)
        return len(here)

    def forget(self, keys: list[bytes]) -> int:
        forgotten = 0
        for key in keys:
            if self.look(key) == PENDING:
                self.entries[key].doomed = True
                forgotten += 1
            elif self.look(key) == HERE:
                del self.entries[key]
                forgotten += 1
        return forgotten

    def clear(self) -> None:
        self.forget(list(self.entries))

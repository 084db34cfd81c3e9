"""Which blocks must be there after a crash, by what the recorded program has said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.stores.crash.log import Kind, Record


class Promises:
    """Of a whole log. Blocks have numbers. ``at_first``: those that are promised when it begins.

    The program marks, each with a list of numbers: ``saving`` before a save, ``saved`` for what was acknowledged,
    ``forgetting`` before forgetting. While nothing else is under way it looks: with ``looking`` it begins to ask what
    is there, and ``seen`` is the answer, with ``evicted``: whether the store has evicted anything since the look
    before.

    A block is promised from its acknowledgement on until the program begins to forget it. If the store evicted blocks
    between two looks, then those that the second look does not find, and those that were saved again between them, are
    not promised from the first look on: the moment of their eviction is not known.
    """

    def __init__(self, records: Sequence[Record], at_first: Iterable[int] = ()) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._since = dict.fromkeys(at_first, 0)
        self._last: dict[int, int] = {}
        self._saving: set[int] = set()
        self._looking = self._looked = 0
        self.numbers = set(self._since)
        self.acknowledged: list[int] = []
        """points right after an acknowledgement"""
        for point, record in enumerate(records, 1):
            if record.kind == Kind.MARK:
                self._mark(point, record.mark())
        for number in [*self._since]:
            self._end(number, len(records) + 1)

    def at(self, point: int) -> set[int]:
        """The blocks that must be there if the first ``point`` records happened."""
        return {number for number, spans in self._spans.items() if any(a <= point < b for a, b in spans)}

    def _mark(self, point: int, mark: Mapping[str, Any]) -> None:
        if "saving" in mark:
            self.numbers.update(mark["saving"])
            self._saving.update(mark["saving"])
        elif "saved" in mark:
            self.acknowledged.append(point)
            for number in mark["saved"]:
                self._since.setdefault(number, point)
                self._last[number] = point
        elif "forgetting" in mark:
            for number in mark["forgetting"]:
                self._end(number, point)
        elif "looking" in mark:
            self._looking = point
        elif "seen" in mark:
            self._see(set(mark["seen"]), mark["evicted"])

    def _see(self, seen: set[int], evicted: bool) -> None:
        missing = set(self._since) - seen
        assert evicted or not missing, f"lost without a crash: {sorted(missing)}"
        for number in missing:
            self._end(number, self._looked)
        if evicted:
            for number in self._saving & set(self._since):
                self._end(number, self._looked)
                self._since[number] = self._last[number]
        self._looked, self._saving = self._looking, set()

    def _end(self, number: int, point: int) -> None:
        """A block is promised no more."""
        begin = self._since.pop(number, point)
        if begin < point:
            self._spans.setdefault(number, []).append((begin, point))

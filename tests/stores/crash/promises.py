"""Which blocks must be there after a crash, and which must not, by what the recorded program has said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.stores.crash.log import Kind, Record


class Promises:
    """Promises of a whole log. Blocks have numbers. ``at_first``, ``gone``: those that are promised, or gone, at first.

    The program marks, each with a list of numbers: ``saving`` before a save, ``saved`` for what was acknowledged,
    ``forgetting`` before forgetting, ``forgot`` when the store has confirmed it. It forgets no block while it saves it.
    While nothing else is under way it looks: with ``looking`` it begins to ask what
    is there, and ``seen`` is the answer, with ``evicted``: whether the store has evicted anything since the look
    before.

    A block is promised from its acknowledgement on until the program begins to forget it. If the store evicted blocks
    between two looks, then those that the second look does not find, and those that were saved again or forgotten
    between them, are not promised from the first look on: the moment of their eviction is not known.

    A block that was forgotten is gone from the confirmation on until the program begins to save it again.
    """

    def __init__(self, records: Sequence[Record], at_first: Iterable[int] = (), gone: Iterable[int] = ()) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._gone_spans: dict[int, list[tuple[int, int]]] = {}
        self._since, self._gone_since = dict.fromkeys(at_first, 0), dict.fromkeys(gone, 0)
        self._last: dict[int, int] = {}
        self._saving: set[int] = set()
        self._looking = self._looked = 0
        self.numbers = {*self._since, *self._gone_since}
        self.acknowledged: list[int] = []
        """points right after an acknowledgement"""
        self.lost: list[str] = []
        """what was lost without a crash of the machine, in words"""
        for point, record in enumerate(records, 1):
            if record.kind == Kind.MARK:
                self._mark(point, record.mark())
        for number in [*self._since]:
            self._end(number, len(records) + 1)
        for number in [*self._gone_since]:
            self._comes_back(number, len(records) + 1)

    def at(self, point: int) -> set[int]:
        """The blocks that must be there if the first ``point`` records happened."""
        return _within(self._spans, point)

    def gone(self, point: int) -> set[int]:
        """The blocks that must not be there then."""
        return _within(self._gone_spans, point)

    def acknowledged_with(self, held: Callable[[int], set[int]]) -> list[int]:
        """The acknowledgements at which ``held``, which is ``at`` or ``gone``, has blocks; all if none has."""
        return [point for point in self.acknowledged if held(point)] or self.acknowledged

    def _mark(self, point: int, mark: Mapping[str, Any]) -> None:
        if "saving" in mark:
            self.numbers.update(mark["saving"])
            self._saving.update(mark["saving"])
            for number in mark["saving"]:
                self._comes_back(number, point)
        elif "saved" in mark:
            self.acknowledged.append(point)
            for number in mark["saved"]:
                self._since.setdefault(number, point)
                self._last[number] = point
        elif "forgetting" in mark:
            for number in mark["forgetting"]:
                self._end(number, point)
        elif "forgot" in mark:
            self.acknowledged.append(point)
            for number in mark["forgot"]:
                self._gone_since.setdefault(number, point)
        elif "looking" in mark:
            self._looking = point
        elif "seen" in mark:
            self._see(set(mark["seen"]), mark["evicted"])

    def _see(self, seen: set[int], evicted: bool) -> None:
        missing = set(self._since) - seen
        if not evicted:
            self.lost += [f"block {number} was promised, and the recorded program lost it" for number in missing]
        for number in missing:
            self._end(number, self._looked)
        if evicted:
            for number, spans in self._spans.items():
                self._spans[number] = [(a, min(b, self._looked)) for a, b in spans if a < self._looked]
            for number in self._saving & set(self._since):
                self._end(number, self._looked)
                self._since[number] = self._last[number]
        self._looked, self._saving = self._looking, set()

    def _comes_back(self, number: int, point: int) -> None:
        """A block may be there again."""
        begin = self._gone_since.pop(number, point)
        if begin < point:
            self._gone_spans.setdefault(number, []).append((begin, point))

    def _end(self, number: int, point: int) -> None:
        """A block is promised no more."""
        begin = self._since.pop(number, point)
        if begin < point:
            self._spans.setdefault(number, []).append((begin, point))


def _within(spans: Mapping[int, Sequence[tuple[int, int]]], point: int) -> set[int]:
    return {number for number, intervals in spans.items() if any(a <= point < b for a, b in intervals)}

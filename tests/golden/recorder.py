"""Recorder: the lines that a digest is made of. All knowledge of inner modules of kvpool is in ``record_batches``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvpool import KVCacheManager

DIRECTIONS = ("offload", "onboard", "within")


class Recorder:
    """Lines in the order in which things happened, and how often each kind of them did (``seen``)."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.seen: Counter[str] = Counter()
        self._numbers: dict[bytes, int] = {}

    def line(self, kind: str, *values: Any) -> None:
        self.seen[kind] += 1
        self.lines.append(f"{kind} {[self._plain(value) for value in values]}")

    def numbers(self, keys: Iterable[Any]) -> list[int]:
        """The numbers of keys, by their first appearance."""
        raw = [key if isinstance(key, bytes) else np.asarray(key).tobytes() for key in keys]
        return [self._numbers.setdefault(key, len(self._numbers)) for key in raw]

    def outcome(self, verb: str, call: Callable[[], Any], show: Callable[[Any], Any] = lambda result: result) -> Any:
        """Make a call and note what it returns, or the class of what it raises. Returns None if it raises."""
        try:
            result = call()
        except Exception as error:
            self.line(f"{verb} {type(error).__name__}")
            return None
        self.line(verb, show(result))
        return result

    def events(self, events: Iterable[Any]) -> None:
        """Record the events of a pool, or of a storage manager."""
        for event in events:
            keys = None if event.keys is None else self.numbers(event.keys)
            parent = None if event.parent is None else self.numbers([event.parent])
            self.line(
                " ".join(filter(None, ("event", event.kind, event.tier))),
                event.number,
                keys,
                parent,
                event.tokens,
                event.extra_ids,
                event.salt,
                event.adapter_id,
                event.priority,
                event.group,
                event.blocks,
            )

    def _plain(self, value: Any) -> Any:
        """Return a value as builtins, whose text is the same in every process. The id of a sequence becomes its row
        and the number of its first appearance, since ids differ from pool to pool."""
        if isinstance(value, (np.ndarray, np.generic)):
            return self._plain(value.tolist())
        if isinstance(value, dict):
            return sorted((str(key), self._plain(item)) for key, item in value.items())
        if isinstance(value, (list, tuple)):
            return [self._plain(item) for item in value]
        assert value is None or isinstance(value, (int, str, bytes)), value
        if isinstance(value, int) and value >= 1 << 32:
            return f"sequence {self.numbers([b'%d' % value])[0]} in row {value & 0xFFFFFFFF}"
        return value

    @property
    def digest(self) -> str:
        return hashlib.sha256("\n".join(self.lines).encode()).hexdigest()


def record_batches(cache: KVCacheManager, recorder: Recorder) -> None:
    """Note each batch of moves as it was decided, in the order of tickets, when its moves are enqueued."""
    transfer: Any = cache.core.transfer
    end = transfer._end

    def noted(batch: Any) -> Any:
        copy_ops, shifts = batch.copy_ops.tolist(), batch.token_moves.tolist()
        for *move, direction in copy_ops:
            recorder.line(DIRECTIONS[direction], batch.ticket, move)
        if shifts:
            recorder.line("token moves", batch.ticket, shifts)
        if not copy_ops and not shifts:
            recorder.line("ticket", batch.ticket)
        return end(batch)

    transfer._end = noted

"""StoreFigures: counts what became of the blocks of a store."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.storage.store import CODES
from kvpool.storage.store_requests import KINDS, LOAD, SAVE, RequestKind, StoreRequest


@dataclass(frozen=True)
class StoreStats:
    """Totals since a worker was made, and its state now."""

    name: str
    blocks: dict[tuple[RequestKind, str], int]
    """by kind of request ("find", "load", "save", "forget", "clear") and by code ("absent", "ok", "failed", ...)"""
    nbytes: dict[RequestKind, int]
    """bytes of the blocks that are OK, by kind"""
    seconds: dict[RequestKind, float]
    """time in calls of the store, of all threads, by kind"""
    refused_requests: int
    """requests for which the queue was full"""
    queued_blocks: int
    running_calls: int
    unconfirmed_drops: int
    """forgets and clears that the store has not confirmed"""
    store: dict[str, int]
    """figures of the store itself"""


class StoreFigures:
    """Totals of one worker, which holds its lock."""

    def __init__(self, name: str, block_bytes: int) -> None:
        self.name, self._block_bytes = name, block_bytes
        self._blocks = {(kind, code): 0 for kind in KINDS for code in CODES}
        self._nbytes, self._seconds = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
        self.refused = 0

    def note(self, request: StoreRequest) -> None:
        """A request is done."""
        self.note_blocks(request.kind, request.counts)
        if request.kind in (LOAD, SAVE):
            self._nbytes[request.kind] += request.ok * self._block_bytes

    def note_blocks(self, kind: RequestKind, counts: dict[str, int]) -> None:
        """Count blocks by code."""
        for code, count in counts.items():
            self._blocks[kind, code] += count

    def note_call(self, kind: RequestKind, seconds: float) -> None:
        """A call of the store took so long."""
        self._seconds[kind] += seconds

    def stats(self, waiting: int, running: int, drops: int, store: dict[str, int]) -> StoreStats:
        """A snapshot."""
        blocks, nbytes, seconds = dict(self._blocks), dict(self._nbytes), dict(self._seconds)
        return StoreStats(self.name, blocks, nbytes, seconds, self.refused, waiting, running, drops, store)

"""StoreFigures: counts what became of the blocks of a store."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.storage.store import CODES
from kvpool.storage.store_requests import KINDS, LOAD, SAVE, RequestKind, StoreRequest


@dataclass(frozen=True)
class StoreStats:
    """Totals of a ``StoreWorker``, and its state now.

    Attributes
    ----------
    name : str
        Name of the store.
    blocks : dict of (str, str) to int
        Blocks by kind of request ("find", "load", "save", "forget", "clear") and by code ("absent", "ok", "failed",
        ...).
    nbytes : dict of str to int
        Bytes of the blocks that are OK, by kind.
    seconds : dict of str to float
        Time in calls of the store, of all threads, by kind.
    refused_requests : int
        Requests for which the queue was full.
    queued_blocks : int
        Blocks of requests that wait.
    running_calls : int
        Calls of the store that are in flight.
    unconfirmed_drops : int
        Forgets and clears that the store has not confirmed.
    store : dict of str to int
        Figures of the store itself.
    """

    name: str
    blocks: dict[tuple[RequestKind, str], int]
    nbytes: dict[RequestKind, int]
    seconds: dict[RequestKind, float]
    refused_requests: int
    queued_blocks: int
    running_calls: int
    unconfirmed_drops: int
    store: dict[str, int]


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

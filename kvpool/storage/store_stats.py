"""StoreStats: what became of the blocks of a store."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.storage.store_requests import RequestKind


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

"""Forgotten: what became of content that a pool and its stores were to forget."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kvpool.storage.store_requests import StoreRequest


class Forgotten:
    """The progress of ``StorageManager.forget`` or ``StorageManager.clear`` in the stores.

    A drop is repeated until the store has confirmed it, as long as the storage manager lives. Meanwhile the storage
    manager finds, loads and saves nothing of it there. Nothing of this outlives the storage manager: if it ends before
    a store has confirmed, the store may have the content, and so the next storage manager must forget it again.

    Attributes
    ----------
    blocks : int or None
        Number of contents that the pool has forgotten; None after ``clear``.

    Notes
    -----
    Any thread may use it.
    """

    def __init__(self, blocks: int | None, drops: Mapping[str, StoreRequest]) -> None:
        self.blocks, self._drops = blocks, dict(drops)

    @property
    def stores(self) -> dict[str, int | None]:
        """For each store the number of blocks it has dropped, or None while it has not confirmed all of them."""
        return {name: request.dropped if _is_confirmed(request) else None for name, request in self._drops.items()}

    @property
    def errors(self) -> dict[str, str]:
        """The last error of each store that has not confirmed and raised one."""
        return {
            name: request.error for name, request in self._drops.items() if request.error and not _is_confirmed(request)
        }

    @property
    def done(self) -> bool:
        """Whether all stores have confirmed. What a disk has confirmed does not return after a crash either."""
        return all(map(_is_confirmed, self._drops.values()))

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all stores have confirmed, or until the storage manager is closed.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait. By default as long as it takes.

        Returns
        -------
        bool
            Whether all have confirmed.
        """
        end = None if timeout is None else time.monotonic() + timeout
        for request in self._drops.values():
            request.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self.done

    def __repr__(self) -> str:
        return f"Forgotten(blocks={self.blocks}, stores={self.stores})"


def _is_confirmed(request: StoreRequest) -> bool:
    return request.ok == len(request.codes)

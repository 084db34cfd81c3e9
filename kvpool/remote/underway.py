"""What a server has sent and nobody has released, what waits until there is room for it, and the limits of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.pool.leases import Lease
from kvpool.remote.limits import Limits
from kvpool.remote.server import LetIn, Refused


class Waiting(NamedTuple):
    """An accepted request for blocks of one group of layers. ``keys`` uint64[n, 2], ``owner`` the owner of its
    leases."""

    client: LetIn
    id: int
    group: int
    keys: npt.NDArray[np.uint64]
    owner: str
    nbytes: int


class Sending(NamedTuple):
    """The blocks of one request, which the transport still uses. ``leases`` is empty once nothing is pinned for
    them."""

    client: LetIn
    id: int
    nbytes: int
    leases: list[Lease]
    released: Callable[[], bool]


class UnderWay:
    """The transfers and requests of one server. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: list[Waiting] = []
        self.transfers: list[Sending] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def accept(self, request: Waiting, blocks: int) -> None:
        """Queue a request. Raises Refused if its client exceeds its limits with this request, or with all of them."""
        limits = self._limits
        if blocks > limits.blocks_per_request:
            raise Refused(
                request.id, "limit", f"{blocks} blocks in one request: accepted are up to {limits.blocks_per_request}"
            )
        if limits.bytes_per_client is not None and request.nbytes > limits.bytes_per_client:
            reason = f"{request.nbytes} bytes in one request: accepted are up to {limits.bytes_per_client}"
            raise Refused(request.id, "limit", reason)
        mine = sum(other.client == request.client for other in self._waiting)
        if mine >= limits.requests_per_client:
            reason = f"{mine} requests wait for those before them: accepted are up to {limits.requests_per_client}"
            raise Refused(request.id, "limit", reason)
        if len(self._waiting) >= limits.requests_waiting:
            reason = f"{len(self._waiting)} requests of all clients wait: accepted are up to {limits.requests_waiting}"
            raise Refused(request.id, "limit", reason)
        self._waiting.append(request)

    def take(self) -> Waiting | None:
        """The oldest request for which there is room, or None. A request of a client without transfers is not overtaken
        by others that wait for room."""
        limits, blocked = self._limits, set[LetIn]()
        each, total = limits.bytes_per_client or 0, limits.bytes_in_total or 0
        for place, request in enumerate(self._waiting):
            if request.client in blocked:
                continue
            mine = [transfer.nbytes for transfer in self.transfers if transfer.client == request.client]
            # Clients that read nothing hold what they have. The last share of the total is for clients that have
            # nothing yet.
            kept_free = min(each, total - each) if mine else 0
            if self.nbytes + request.nbytes + kept_free > total:
                if not mine:
                    return None
            elif len(mine) < limits.requests_per_client and sum(mine) + request.nbytes <= each:
                return self._waiting.pop(place)
            blocked.add(request.client)
        return None

"""What a server has sent and nobody has released, what waits until there is room for it, and the limits of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvpool.leases import Lease
from kvpool.remote.limits import Limits


class Refused(Exception):
    """A request gets ``Failed`` for an answer."""

    def __init__(self, id: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.id, self.code = id, code


class Waiting(NamedTuple):
    """A request that has been accepted. ``keys`` are 16 bytes each, ``owner`` the owner of its leases."""

    client: bytes
    id: int
    keys: bytes
    owner: str
    nbytes: int


class Transfer(NamedTuple):
    """Blocks of one request that the transport has not let go of. ``leases`` is empty where nothing is pinned for it any more."""

    client: bytes
    id: int
    nbytes: int
    leases: list[Lease]
    released: Callable[[], bool]


class UnderWay:
    """The transfers and requests of one server. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: list[Waiting] = []
        self.transfers: list[Transfer] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all transfers."""
        return sum(transfer.nbytes for transfer in self.transfers)

    def accept(self, request: Waiting, blocks: int) -> None:
        """Queue a request. Raises Refused where its client asks for more than its limits, now or altogether."""
        limits = self._limits
        if blocks > limits.blocks_per_request:
            raise Refused(request.id, "limit", f"{blocks} blocks in one request: accepted are up to {limits.blocks_per_request}")
        mine = sum(other.client == request.client for other in self._waiting)
        if mine >= limits.requests_per_client:
            reason = f"{mine} requests wait for those before them: accepted are up to {limits.requests_per_client}"
            raise Refused(request.id, "limit", reason)
        self._waiting.append(request)

    def take(self) -> Waiting | None:
        """The oldest request that there is room for, or None. One that waits for other clients is not overtaken."""
        limits, blocked = self._limits, set()
        for place, request in enumerate(self._waiting):
            if request.client in blocked:
                continue
            if limits.bytes_in_total is not None and self.nbytes + request.nbytes > limits.bytes_in_total:
                return None
            mine = [transfer.nbytes for transfer in self.transfers if transfer.client == request.client]
            if len(mine) < limits.requests_per_client and sum(mine) + request.nbytes <= limits.bytes_per_client:
                return self._waiting.pop(place)
            blocked.add(request.client)
        return None

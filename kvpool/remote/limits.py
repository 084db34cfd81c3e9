"""The most that a server does for its clients, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpool.arrays.layout import integer_argument
from kvpool.remote.frames import BLOCKS_MAX


@dataclass(frozen=True)
class Limits:
    """The most that a server does for its clients. ``bytes_in_total`` None is half of the host tier.
    ``bytes_per_client`` None is an eighth of the total, or eight blocks if that is more, but at most half of the total.

    Clients that stop reading must leave room for others. So a client that holds blocks gets more only if another
    ``bytes_per_client`` of the total stays free, for clients that hold none.

    ``requests_per_client`` and the two sums of bytes count what has been sent and not yet released.
    ``requests_waiting`` counts what all clients have requested and not been sent.
    """

    blocks_per_request: int = 64
    requests_per_client: int = 8
    bytes_per_client: int | None = None
    bytes_in_total: int | None = None
    requests_waiting: int = 1024
    connections: int = 256
    """Peers, with or without the password. Others are refused."""

    def __post_init__(self) -> None:
        integer_argument("blocks_per_request", self.blocks_per_request, 1, BLOCKS_MAX)
        integer_argument("requests_per_client", self.requests_per_client, 1, 1 << 16)
        integer_argument("requests_waiting", self.requests_waiting, 1, 1 << 24)
        integer_argument("connections", self.connections, 1, 1 << 16)
        for name in ("bytes_per_client", "bytes_in_total"):
            if getattr(self, name) is not None:
                integer_argument(name, getattr(self, name), 1, 1 << 62)


@dataclass
class ServerStats:
    """What a server has done so far, and what it is sending."""

    requests: int = 0
    """Requests for blocks that were answered with blocks, or that had none."""
    refused: int = 0
    """Requests that were answered with an error, with malformed messages."""
    malformed: int = 0
    dropped: int = 0
    """Answers that could not be sent, because the client has gone or has too many unread."""
    blocks: int = 0
    bytes: int = 0
    questions: int = 0
    """Questions about which blocks are there."""
    missing_blocks: int = 0
    """Requested keys that had no host block."""
    revoked: int = 0
    """Requests whose leases somebody revoked before the blocks were released. The client was told to discard them."""
    transfers: int = 0
    """How many are sent now and not yet released. The next field has their bytes."""
    transfer_bytes: int = 0
    connections_refused: int = 0
    """Connections that were ended at once, because there were ``Limits.connections`` already."""


def fitting(limits: Limits, sizes: Sequence[tuple[int, int]]) -> Limits:
    """Limits under which every accepted request can be served: at least one block of each group of layers, and no more
    in total than given. ``sizes``: (bytes of a block, host blocks) of each group that is served."""
    size, host = max(nbytes for nbytes, _ in sizes), sum(nbytes * blocks for nbytes, blocks in sizes)
    total = max(size, host // 2) if limits.bytes_in_total is None else limits.bytes_in_total
    each = (
        max(size, min(total // 2, max(total // 8, 8 * size)))
        if limits.bytes_per_client is None
        else min(limits.bytes_per_client, total)
    )
    if each < size:
        raise ValueError(f"limits: {each} bytes do not hold one block of {size} bytes")
    most = each // min(nbytes for nbytes, _ in sizes)
    blocks = min(limits.blocks_per_request, most)
    return replace(limits, blocks_per_request=blocks, bytes_per_client=each, bytes_in_total=total)
